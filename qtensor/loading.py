"""A dense state dict into a quantized model: the bytes of quantize-then-shard, whatever the sharding.

    load_state_dict  ->  hook on the root  ->  amax of every dense shard, one all-reduce for the whole model
                                           ->  dense entries replaced by quantized ones  ->  torch copies, or assigns

Without it each shard would choose a scale of its own, and `assign=True` would put dense parameters in place of the
quantized ones. A local tensor never learns the mesh it is part of; the hook sees the parameters, which are DTensors,
and all of them at once, so that the agreement is one collective. It runs on every rank that finds dense entries for
weights with shared scales in its state dict; all ranks must load the same names.

Entries that are quantized with the parameter's recipe pass through untouched.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_hooks.all_gather import Arrangement
from fsdp_hooks.scale_sync import groups_sharing, local_of, max_over_groups
from fsdp_hooks.torch_private import dtensor_around
from qtensor.formats import format_of
from qtensor.high_precision import HighPrecisionWeight
from qtensor.tensor import QuantizedTensor

__all__ = ["quantize_dense_entries"]


@dataclass(frozen=True)
class _Entry:
    """One parameter with its dense entry of the state dict; `dense` is this rank's part of it, None without an entry.

    local: the parameter's local tensor, a QuantizedTensor or a HighPrecisionWeight.
    """

    key: str
    param: Tensor
    local: Any
    dense: Tensor | None

    def claim(self, device: torch.device) -> Tensor:
        """fp32, flat: the amaxes of this rank's part, 0 where it has none."""
        if self.dense is None:
            shape = self.local.shape[:-1] if self.local.tensor_wide() is None else ()
            return torch.zeros(shape, device=device).reshape(-1)
        amax = format_of(self.local.recipe).shared_amax(self.dense.float(), self.local.recipe)
        assert amax is not None
        return amax.reshape(-1)


@torch.no_grad()
def quantize_dense_entries(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace dense entries of quantized parameters; a load_state_dict pre-hook (torch hands it a copy of the dict)."""
    entries = list(_entries(module, state_dict, prefix))
    groups = [groups_sharing(entry.param) for entry in entries]
    shared = [index for index, own in enumerate(groups) if own]
    agreed: dict[int, Tensor] = {}
    found = [dense for index in shared if (dense := entries[index].dense) is not None]
    if found:
        claims = [entries[index].claim(found[0].device) for index in shared]
        maxima, _collectives = max_over_groups(claims, [groups[index] for index in shared])
        agreed = dict(zip(shared, maxima, strict=True))
    for index, entry in enumerate(entries):
        if entry.dense is not None:
            state_dict[entry.key] = _like(entry.param, _quantized(entry, agreed.get(index)))


def _entries(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> Iterator[_Entry]:
    for fqn, param in module.named_parameters(prefix=prefix.rstrip("."), remove_duplicate=False):
        local = local_of(param)
        if isinstance(local, QuantizedTensor | HighPrecisionWeight):
            # activation checkpointing's wrapper takes its own name out of the keys
            key = fqn if fqn in state_dict else fqn.replace("_checkpoint_wrapped_module.", "")
            yield _Entry(key, param, local, _dense_part(state_dict.get(key), param, local))


def _dense_part(value: Any, param: Tensor, local: Any) -> Tensor | None:
    """This rank's part of an entry that has to be quantized; None for one that torch handles as it is."""
    if not isinstance(value, Tensor) or value.shape != param.shape or value.is_meta:
        return None
    if isinstance(param, DTensor):
        if not isinstance(value, DTensor) or value.device_mesh != param.device_mesh:
            return None
        if value.placements != param.placements:
            value = value.redistribute(param.device_mesh, param.placements)
    elif isinstance(value, DTensor):
        return None
    part = local_of(value)
    if isinstance(part, HighPrecisionWeight):
        part = part.dense
    if isinstance(part, QuantizedTensor):
        fits = isinstance(local, QuantizedTensor) and part.recipe.stored == local.recipe.stored
        return None if fits else part.dequantize(torch.float32)
    if not part.is_floating_point() or part.shape != local.shape:
        return None
    return part.to(local.dtype) if isinstance(local, HighPrecisionWeight) else part  # what will be stored, is claimed


def _quantized(entry: _Entry, agreed: Tensor | None) -> Tensor:
    """The local tensor that takes the place of the dense one."""
    dense, local = entry.dense, entry.local
    assert dense is not None
    if isinstance(local, HighPrecisionWeight):
        if agreed is not None:
            local.agreement.amaxes = torch.stack([agreed, entry.claim(dense.device)])
        return HighPrecisionWeight(dense, local.recipe, agreement=local.agreement)
    fmt, values = format_of(local.recipe), dense.float()
    amax = fmt.shared_amax(values, local.recipe)
    if agreed is not None and amax is not None:
        amax = agreed.view_as(amax)
    parts = fmt.encode(values, local.recipe, amax)
    init = dense.to(local.dtype, copy=True) if local.init_value is not None else None
    q: Tensor = local.with_parts(parts, arrangement=Arrangement(), init_value=init)
    return q


def _like(param: Tensor, local: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return local
    return dtensor_around(local, param.device_mesh, param.placements, param.shape)
