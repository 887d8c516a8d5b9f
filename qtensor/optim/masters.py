"""Masters: the fp32 value behind a low-precision parameter, and whether the parameter still holds what it wrote.

Others than the optimizer can write a parameter: a checkpoint is loaded after the optimizer was built, or a weight is
copied in by hand. Its master is stale then, and the next step would silently undo that write. So the optimizer keeps a
digest of the bytes it wrote; if a parameter's bytes have changed since, its master starts anew from them. Only the
bytes can tell: version counters miss writes through aliases, such as those of a state dict, and FSDP moves uneven
shards to new storage without writing them.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp_hooks.kernels.digest import digests
from fsdp_hooks.torch_private import foreach_copy, local_of, locals_of, without_torch_function
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.registry import specs_of
from qtensor.tensor.contents import preserve, values_of
from qtensor.tensor.quantized_tensor import QuantizedTensor

LOG = logging.getLogger(__name__)

BY_ROW = frozenset({"cpu"})  # where copying row by row is quick, if no view of each row is made for it
LISTED = {Tensor, nn.Parameter, HighPrecisionWeight}  # classes that are copied by the list


def check_trainable(kind: type[torch.optim.Optimizer], params: Iterable[object]) -> None:
    """Raise if an optimizer of this kind cannot step masters of these parameters; torch refuses non-tensors itself.

    Raises:
        ValueError: a parameter is on the meta device.
        NotImplementedError: torch.optim.Adafactor and a sharded parameter; no torch version so far can step these.
    """
    tensors = [param for param in params if isinstance(param, Tensor)]
    if any(param.is_meta for param in tensors):
        raise ValueError(
            "MasterWeightOptimizer: parameters are on the meta device; call to_empty() and load or initialise them "
            "first"
        )
    if kind is torch.optim.Adafactor and any(
        isinstance(param, DTensor) and any(type(placement) is not Replicate for placement in param.placements)
        for param in tensors
    ):
        raise NotImplementedError(
            "MasterWeightOptimizer: torch.optim.Adafactor can not step sharded parameters (DTensors), with or without "
            "masters: torch raises an error about aten.pow_ in the middle of its step; use another optimizer, such as "
            "torch.optim.AdamW"
        )


def outside_writes(records: Mapping[Tensor, Tensor]) -> list[Tensor]:
    """Return the parameters whose bytes no longer match their recorded digests; one host sync for all of them.

    Where such a write left the preserved initial value as it was (a write into the parts), that value is forgotten,
    since it belongs to other bytes.
    """
    if not records:
        return []
    same = (_table(records) == torch.stack(list(records.values()))).tolist()  # [params, 2]
    changed = []
    for param, (bytes_kept, init_kept) in zip(records, same, strict=True):
        if bytes_kept:
            continue
        shard = local_of(param)
        # whoever wrote into the parts alone left an initial value behind that is not theirs
        if init_kept and isinstance(shard, QuantizedTensor):
            preserve(shard, None)
        changed.append(param)
    if changed:
        LOG.info("%d parameters were written by others since the last step; their masters start anew", len(changed))
    return changed


def digests_of(params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Return for each parameter int64 [2]: digests of its bytes here, and of its preserved initial value (0: none)."""
    return dict(zip(params, _table(params).unbind(), strict=True)) if params else {}


@torch.no_grad()
def _table(params: Iterable[Tensor]) -> Tensor:
    """Return the digests of `digests_of` as one tensor, int64 [params, 2]."""
    shards = locals_of(params)
    inits = {
        number: value
        for number, shard in enumerate(shards)
        if isinstance(shard, QuantizedTensor) and (value := shard._preserved.value) is not None
    }
    with without_torch_function():
        found = digests([*_bytes_of_each(shards), *([value] for value in inits.values())])
    of_bytes, none = found[: len(shards)], found.new_zeros(())
    of_inits = dict(zip(inits, found[len(shards) :].unbind(), strict=True))
    # stacked, since an index that is a list would be copied to the device, and waited for
    column = torch.stack([of_inits.get(number, none) for number in range(len(shards))]) if inits else of_bytes * 0
    return torch.stack([of_bytes, column], dim=1)


def bytes_of(shard: Tensor) -> list[Tensor]:
    """Return the tensors whose bytes a parameter's local tensor holds."""
    if isinstance(shard, QuantizedTensor):
        return list(shard.parts().values())
    return [shard.dense if isinstance(shard, HighPrecisionWeight) else shard]


def _bytes_of_each(shards: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return `bytes_of` each; many have one recipe, whose parts take longer to look up than to read."""
    names: dict[int, list[str]] = {}
    found = []
    for shard in shards:
        if not isinstance(shard, QuantizedTensor):
            found.append(bytes_of(shard))
            continue
        own = names.get(id(shard.recipe))
        if own is None:
            own = names[id(shard.recipe)] = [spec.name for spec in specs_of(shard.recipe)]
        found.append([getattr(shard, name) for name in own])
    return found


def master_of(param: Tensor) -> Tensor:
    """Return the fp32 master of a parameter: itself if it stores fp32, else a new tensor filled by `refill`."""
    # a second fp32 copy would cost memory, and could only differ by mistake
    if not isinstance(local_of(param), QuantizedTensor) and param.dtype == torch.float32:
        return param
    with torch.no_grad():
        master = torch.zeros_like(param, dtype=torch.float32).detach()
        refill(master, param)
    return master


@torch.no_grad()
def refill(master: Tensor, param: Tensor) -> None:
    """Set a master to its parameter's preserved initial value, or else to its (dequantized) value."""
    local, target = local_of(param), local_of(master)
    if isinstance(local, QuantizedTensor):
        target.copy_(values_of(local, torch.float32))
        # no -0.0: adding an update of 0 would turn it into +0.0, which has another code
        target.add_(0.0)
    else:
        target.copy_(local)  # bit for bit: a step that adds nothing writes it back


def copy_many(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Do target.copy_(source) for many tensors, by one call for each pair of dtypes: a GPU is slow to begin each."""
    alike: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for target, source in pairs:
        # a class of another library may know no lists
        if not {type(target), type(source)} <= LISTED:
            target.copy_(source)
            continue
        alike.setdefault((target.dtype, source.dtype), []).append((target, source))
    for some in alike.values():
        foreach_copy([target for target, _ in some], [source for _, source in some])


def copy_rows(targets: Sequence[Tensor], source: Tensor) -> None:
    """Do target.copy_(row) for each row of `source` [n, ..], all of one shape and dtype."""
    if source.device.type in BY_ROW:
        torch.unbind_copy(source, out=list(targets))
    elif source.itemsize == 1:  # as bytes: some devices copy no lists of float8
        rows = source.view(torch.uint8).unbind()
        foreach_copy([target.view(torch.uint8) for target in targets], list(rows))
    else:
        foreach_copy(list(targets), list(source.unbind()))
