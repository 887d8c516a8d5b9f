"""Load a dense state dict into a quantized model: the bytes of quantize-then-shard, whatever the sharding.

    load_state_dict  ->  hook of the outermost module  ->  amax of every dense shard, one all-reduce for all
                                                       ->  quantized entries in their place  ->  torch copies or assigns

Without the hook each shard would choose a scale of its own, and `assign=True` would put dense parameters in place of
the quantized ones. A local tensor does not know the mesh it is part of; the hook sees the parameters, which are
DTensors, and sees all of them at once, so that the agreement is one collective. Every module around quantized weights
has the hook, so that any of them can be loaded alone. Hooks of inner modules find their entries quantized already, and
have nothing to do.

Loading is a collective if entries belong to weights whose shards share scales: all ranks must load the same names,
in any order, and dense entries for the same of them. Entries that are quantized with the parameter's recipe pass
through untouched; a rank that has no others takes part all the same, so that none waits for it. (A module without a
hook, built around the model later, leaves the exchange to the modules in it. These take part if they have dense
entries, since they cannot tell that no module around them has done it.)
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_hooks.ranks.scale_partners import pool
from fsdp_hooks.scale_sync import groups_sharing, label_of, max_over_groups, partners_of, tell_groups
from fsdp_hooks.torch_private import dtensor_around, local_of
from fsdp_hooks.wrappers import CHECKPOINTED
from qtensor.scales.agreement import claim_of, encode_agreed
from qtensor.scales.cut_blocks import CutBlocks, cut_blocks_of
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.registry import check_values
from qtensor.tensor.contents import INITIAL_VALUE, initial_value
from qtensor.tensor.quantized_tensor import QuantizedTensor

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _DenseEntry:
    """One parameter and its entry of the state dict.

    local: the parameter's local tensor, a QuantizedTensor or a HighPrecisionWeight.
    dense: this rank's part of the dense entry; None if no entry has to be quantized.
    """

    key: str
    param: Tensor
    local: Any
    dense: Tensor | None

    def claim(self, device: torch.device) -> Tensor:
        """Return what `dense` says about scales that shards share, fp32, flat; empty, on `device`, if it is None."""
        if self.dense is None:
            return torch.zeros(0, dtype=torch.float32, device=device)
        return claim_of(self.dense, self.local.recipe, self.cut)

    @property
    def cut(self) -> CutBlocks | None:
        """The square blocks that shards of the parameter cut."""
        return cut_blocks_of(self.param, self.local.recipe)


def watch_loads(modules: Iterable[nn.Module]) -> None:
    """Put the hook on each of `modules` that contains a weight of ours, quantized or HighPrecisionWeight."""
    for module in modules:
        if any(isinstance(param, QuantizedTensor | HighPrecisionWeight) for param in module.parameters()):
            module.register_load_state_dict_pre_hook(quantize_dense_entries)


@torch.no_grad()
def quantize_dense_entries(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace dense entries of quantized parameters; a load_state_dict pre-hook (torch hands it a copy of the dict)."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            # a forward without backward leaves weights gathered; torch's own hook runs later
            child.reshard()
    # the same order on all ranks
    weights = sorted(_weights(module, state_dict, prefix), key=lambda weight: weight[0])
    shared = {key: groups for key, param, _ in weights if (groups := groups_sharing(param)) or partners_of(param)}
    own = [weight for weight in weights if weight[0] in shared]
    # inner modules have their turn after the outermost one: what it has seen to is not dense any more
    takes_part = any(key in state_dict and (not prefix or _is_dense(state_dict[key], local)) for key, _, local in own)
    device = _device(state_dict[key] for key, _, _ in own if key in state_dict)
    try:
        _refuse_layouts(module, state_dict, prefix, [key for key, _, _ in weights])
        entries = [_DenseEntry(*weight, _dense_part(*weight, state_dict)) for weight in weights]
        claims = [entry.claim(device) for entry in entries if entry.key in shared]
    except Exception:
        # an entry that is wrong on this rank alone would leave the others in the agreement
        if takes_part:
            labels = [(label_of(key, param),) for key, param, _ in own]
            tell_groups(labels, [shared[key] for key, _, _ in own], device)
        raise
    agreed = _agree(entries, claims, shared) if takes_part else {}
    dense = [entry for entry in entries if entry.dense is not None]
    for entry in dense:
        state_dict[entry.key] = _like(entry.param, _quantize(entry, agreed.get(entry.key)))
    if dense:
        LOG.debug("load_state_dict: %d dense values were quantized, the first for %s", len(dense), dense[0].key)


def _refuse_layouts(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, keys: Iterable[str]) -> None:
    """Raise if a state dict has tensors in a weight's place, as files of engines have: torch may pass over them.

    These are called <weight>_packed, <weight>_scale and the like, and the module has no tensors of such names.
    """
    missing = [key for key in keys if key not in state_dict]
    if not missing:
        return
    named = (module.named_parameters, module.named_buffers)
    own = {name for names in named for name, _ in names(prefix=prefix.rstrip("."), remove_duplicate=False)}
    for key in missing:
        found = next((name for name in state_dict if name.startswith(f"{key}_") and name not in own), None)
        if found is not None:
            raise ValueError(
                f"{key}: the state dict has {found} in its place, a part of the weight in a layout of engines; nothing "
                "has been loaded: read such a directory by dcp_adapters.import_hf"
            )


def _weights(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Tensor, Any]]:
    """Yield (key in the state dict, parameter, local tensor) of every QuantizedTensor and HighPrecisionWeight."""
    for fqn, param in module.named_parameters(prefix=prefix.rstrip("."), remove_duplicate=False):
        local = local_of(param)
        if isinstance(local, QuantizedTensor | HighPrecisionWeight):
            # activation checkpointing's wrapper removes its own step from the keys, and that of torch.compile does not
            yield fqn if fqn in state_dict else fqn.replace(f"{CHECKPOINTED}.", ""), param, local


def _device(values: Iterable[Any]) -> torch.device:
    """Return where entries are; parameters that they replace may be on the meta device."""
    found = (local_of(value).device for value in values if isinstance(value, Tensor) and not value.is_meta)
    return next(found, torch.device("cpu"))


def _agree(
    entries: list[_DenseEntry], claims: list[Tensor], shared: Mapping[str, list[dist.ProcessGroup]]
) -> dict[str, Tensor]:
    """Return the amaxes over all ranks, by key. Ranks must load the same entries, dense ones for the same keys."""
    own = [entry for entry in entries if entry.key in shared]
    kinds = ["not dense in the state dict" if entry.dense is None else "dense in the state dict" for entry in own]
    labels = [(f"{label_of(entry.key, entry.param)}, {kind}",) for entry, kind in zip(own, kinds, strict=True)]
    groups = [shared[entry.key] for entry in own]
    maxima, _collectives = max_over_groups("load_state_dict", labels, claims, groups)
    # those that share one scale, as far as they are loaded together
    partners = [entry.local._partners if entry.dense is not None else None for entry in own]
    keys = [one and one.within(entry.key) for entry, one in zip(own, partners, strict=True)]
    maxima = pool(keys, [1] * len(own), maxima)
    return {entry.key: maximum for entry, maximum in zip(own, maxima, strict=True)}


def _dense_part(key: str, param: Tensor, local: Any, state_dict: Mapping[str, Any]) -> Tensor | None:
    """Return this rank's part of an entry that has to be quantized; None for one that torch handles as it is.

    Raises:
        TypeError: the entry holds codes, not values.
        ValueError: the entry is on another mesh than the parameter, or cut in another way.
    """
    value = _place(key, state_dict.get(key), param)
    if value is None:
        return None
    part = _values(local_of(value), local)
    if part is not None:
        check_values(part, key)
    if part is None or not part.is_floating_point():
        return None
    if part.numel() != local.numel():
        raise ValueError(
            f"{key}: this rank's part of the state dict's entry has shape {tuple(part.shape)}, its shard "
            f"{tuple(local.shape)}; cut the entry as the parameter is cut (distribute_tensor)"
        )
    part = part.reshape(local.shape)  # an empty part may have lost its columns
    # claim what will be stored
    return part.to(local.dtype) if isinstance(local, HighPrecisionWeight) else part


def _place(key: str, value: Any, param: Tensor) -> Tensor | None:
    """Return the entry, placed like the parameter; None if it has another shape or kind, which torch reports."""
    fits = isinstance(value, Tensor) and value.shape == param.shape and not value.is_meta
    if not fits or isinstance(value, DTensor) != isinstance(param, DTensor):
        return None
    if isinstance(value, DTensor) and isinstance(param, DTensor):
        if value.device_mesh != param.device_mesh:
            raise ValueError(
                f"{key}: the state dict holds a DTensor on {value.device_mesh}, the parameter is on "
                f"{param.device_mesh}; distribute it on the parameter's mesh"
            )
        if value.placements != param.placements:
            own = local_of(value)
            if isinstance(own, HighPrecisionWeight):  # its values are wanted, not what a gather would quantize
                value = dtensor_around(own.dense.detach(), value.device_mesh, value.placements, value.shape)
            value = value.redistribute(param.device_mesh, param.placements)
    return value  # type: ignore[no-any-return]


def _values(part: Tensor, local: Any) -> Tensor | None:
    """Return the dense values of an entry's local tensor; None if it is of the parameter's kind already."""
    if not _is_dense(part, local):
        return None
    if isinstance(part, HighPrecisionWeight):
        return part.dense
    return part.dequantize(torch.float32) if isinstance(part, QuantizedTensor) else part


def _is_dense(value: Any, local: Any) -> bool:
    """Return whether an entry is a tensor of another kind than the parameter, so that its values must be quantized."""
    part = local_of(value) if isinstance(value, Tensor) else value
    # with the parameter's own agreement: an outer module's hook put it there
    if isinstance(part, HighPrecisionWeight):
        return not (isinstance(local, HighPrecisionWeight) and part.agreement is local.agreement)
    if isinstance(part, QuantizedTensor):
        return not (isinstance(local, QuantizedTensor) and part.recipe.stored == local.recipe.stored)
    return isinstance(part, Tensor)


def _quantize(entry: _DenseEntry, agreed: Tensor | None) -> Tensor:
    """Return the local tensor that replaces the dense one."""
    dense, local = entry.dense, entry.local
    assert dense is not None
    if isinstance(local, HighPrecisionWeight):
        if agreed is not None:
            local.agreement.claims, local.agreement.cut = torch.stack([agreed, entry.claim(dense.device)]), entry.cut
        return local._like(dense, agreement=local.agreement)
    parts = encode_agreed(dense, local.recipe, entry.cut, agreed)
    if initial_value(local) is not None:
        parts[INITIAL_VALUE] = dense.to(local.dtype, copy=True)
    return local._like(parts)  # type: ignore[no-any-return]


def _like(param: Tensor, local: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return local
    return dtensor_around(local, param.device_mesh, param.placements, param.shape)
