"""Masters: the fp32 value behind a low-precision parameter, and whether the parameter still holds what it wrote.

Others than the optimizer can write a parameter: a checkpoint is loaded after the optimizer was built, or a weight is
copied in by hand. Its master is stale then, and the next step would silently undo that write. So the optimizer keeps a
digest of the bytes it wrote; if a parameter's bytes have changed since, its master starts anew from them. Only the
bytes can tell: version counters miss writes through aliases, such as those of a state dict, and FSDP moves uneven
shards to new storage without writing them.

    note     behind a write, or where a master starts anew:   bytes -> digests, in a table on the device
    look     as a step begins:                                bytes -> digests -> compared with the table, on the device
    changed  before the step moves a master:                  the host reads the answer, and waits for it

A step moves masters in place, so it has to know of a write before its first kernel does: once a master has moved, and
its moments with it, nothing can make it start anew. Until then the host has other work, so `look` comes first.
"""

import logging
import operator
from collections.abc import Iterable, Sequence

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


class LastWrites:
    """Digests of what parameters held when they were noted; each has a row in one table on their device."""

    def __init__(self, records: dict[Tensor, Tensor] | None = None) -> None:
        self._rows = {param: row for row, param in enumerate(records or ())}
        # int64 [parameters, 2], see digests_of
        self._table = torch.stack(list(records.values())) if records else None

    def __contains__(self, param: Tensor) -> bool:
        """Return whether a parameter was noted."""
        return param in self._rows

    def records(self) -> dict[Tensor, Tensor]:
        """Return the digests of each parameter, int64 [2], in memory of its own: what pickles and copies hold."""
        return {} if self._table is None else {param: self._table[row].clone() for param, row in self._rows.items()}

    def note(self, params: Sequence[Tensor]) -> None:
        """Take note of what these parameters hold now."""
        if not params:
            return
        table = digests_of(params)
        # as in nearly every step: all of them, in the same order
        if len(params) == len(self._rows) and all(map(operator.is_, params, self._rows)):
            self._table = table
            return
        self.forget(params)
        if self._table is not None:
            table = torch.cat([table, self._table.to(table.device)])
        self._table, self._rows = table, {param: row for row, param in enumerate([*params, *self._rows])}

    def forget(self, params: Iterable[Tensor]) -> None:
        """Take no change of these parameters for a write of others, until they are noted again."""
        gone = set(params)
        kept = {param: row for param, row in self._rows.items() if param not in gone}
        if not kept:
            self._table = None
        elif self._table is not None and len(kept) < len(self._rows):
            rows = torch.tensor(list(kept.values()), dtype=torch.int64, device="cpu")
            self._table = self._table.index_select(0, rows.to(self._table.device, non_blocking=True))
        self._rows = {param: row for row, param in enumerate(kept)}

    def look(self) -> Tensor | None:
        """Return bool [parameters, 2]: whether bytes and preserved initial value are as noted; the host goes on."""
        if self._table is None:
            return None
        found = digests_of(list(self._rows))
        return found == self._table.to(found.device)

    def changed(self, same: Tensor | None) -> list[Tensor]:
        """Return the parameters whose bytes are not as noted, given what `look` returned; one host sync.

        Where such a write left the preserved initial value as it was (a write into the parts), that value is forgotten,
        since it belongs to other bytes.
        """
        if same is None:
            return []
        changed = []
        for param, (bytes_kept, init_kept) in zip(self._rows, same.tolist(), strict=True):
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


@torch.no_grad()
def digests_of(params: Sequence[Tensor]) -> Tensor:
    """Return int64 [parameters, 2]: digests of each one's bytes here, and of its preserved initial value (0: none)."""
    shards = locals_of(params)
    with without_torch_function():
        groups: list[list[Tensor]] = []
        for shard, own in zip(shards, _bytes_of_each(shards), strict=True):
            init = shard._preserved.value if isinstance(shard, QuantizedTensor) else None
            groups += (own, [] if init is None else [init])
        return digests(groups).view(-1, 2)


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


def gradient_of(param: Tensor) -> Tensor:
    """Return a parameter's gradient as its shard's; a collective if it is placed otherwise."""
    grad = param.grad
    assert grad is not None
    if isinstance(param, DTensor) and isinstance(grad, DTensor):
        if (grad.device_mesh, grad.placements) != (param.device_mesh, param.placements):
            grad = grad.redistribute(param.device_mesh, param.placements)
        grad = local_of(grad)
    return grad


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
