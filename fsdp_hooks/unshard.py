"""`unsharded(module)`: one module's parameters are gathered and can be used as plain tensors during a `with` block.

    enter   reshard what a forward left gathered -> unshard the module and the FSDP modules nested in it (unshard is
            not recursive) -> remember every parameter that this replaced
    body    parameters are full tensors; N forwards of `module.forward` cost one all-gather
    exit    find changed parameters -> with writeback, copy this rank's rows into its shards; without, raise (an update
            is never lost quietly) -> shard everything again, also after an exception (which writes nothing back)

"Changed" covers in-place writes, `param.data = ...` and a replaced Parameter. No version counter counts writes through
`param.data`, so digests of the gathered bytes at entry and at exit are compared. Two traps of FSDP2 are handled. After
`.data =` FSDP goes on using its own buffers, so the alias is restored. In a group that keeps its weights after forward,
`reshard()` is silently ignored after an exception has left a forward of that group.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_hooks.all_gather import AllGatherHooks
from fsdp_hooks.kernels.digest import digests
from fsdp_hooks.torch_private import local_of
from fsdp_hooks.versions import count_writes

LOG = logging.getLogger(__name__)

# FSDP modules that some unsharded() holds at this moment; an inner unsharded() leaves them to the outer one.
_held: WeakSet[Any] = WeakSet()


@dataclass
class _Slot:
    """One place where a parameter is registered: its sharded and gathered parameter, and the state at entry."""

    group: FSDPModule
    owner: nn.Module
    name: str
    fqn: str
    sharded: DTensor
    full: Any  # the unsharded parameter
    data: Any  # its data at entry, an alias of FSDP's buffers
    stamp: tuple[int, ...]
    sharded_stamp: tuple[int, ...]
    digest: Tensor  # of the gathered bytes at entry

    def now(self) -> Any:
        """Return the parameter in this place at this moment; None if the body removed it."""
        return getattr(self.owner, self.name, None)

    def written(self) -> bool | None:
        """Return whether the body wrote into the parameter or replaced it; None if only the bytes can tell.

        They cannot if somebody wrote into the shards meanwhile.
        """
        if self.now() is self.sharded:
            return self.lost()
        if _stamp(self.now()) != self.stamp:
            return True
        return None if _stamp(self.sharded) == self.sharded_stamp else False

    def lost(self) -> bool:
        """Return whether the body wrote into the parameter and then sharded it again, which frees the buffers."""
        count = 2 + len(_plain_parts(self.full))
        return self.now() is self.sharded and _stamp(self.full)[:count] != self.stamp[:count]


@contextmanager
def unsharded(module: nn.Module, *, writeback: bool = False) -> Iterator[nn.Module]:
    """Context manager in which `module`'s parameters are gathered, for use as plain tensors; a no-op without FSDP.

    Call it on all ranks. Under tensor parallelism x FSDP the weights stay DTensors on the TP mesh. On exit everything
    is sharded again. Weights that an enclosing `unsharded` holds are left to that one, and follow its `writeback`.

    Args:
        module: an FSDP module, or a module that contains FSDP modules.
        writeback: store what the body changed into the shards. All ranks must have made the same changes.

    Raises:
        RuntimeError: the body changed parameters although writeback is False (nothing was stored), or changed them and
            then sharded them again.
        ValueError: a changed parameter is gone or has another shape than before (nothing was stored).

    Example:
        ```python
        >>> model = fully_shard(nn.Linear(64, 64))
        >>> with torch.no_grad(), unsharded(model, writeback=True) as whole:
        ...     whole.weight.fill_(0.5)
        >>> model.weight.to_local().mean()
        tensor(0.5000, grad_fn=<MeanBackward0>)
        ```
    """
    with hold_gathered(
        module, [child for child in module.modules() if isinstance(child, FSDPModule)], writeback=writeback
    ):
        yield module


@contextmanager
def hold_gathered(module: nn.Module, groups: Iterable[FSDPModule], *, writeback: bool) -> Iterator[None]:
    """Do `unsharded` for some of the FSDP modules in `module` only, such as a root without its layers."""
    groups = [group for group in groups if group not in _held]
    if not groups:
        yield
        return
    slots = _gather(module, groups)
    if LOG.isEnabledFor(logging.DEBUG):
        gathered = {id(slot.full): slot.full for slot in slots}.values()
        size = sum(part.nbytes for param in gathered for part in _plain_parts(param))
        LOG.debug("unsharded: %d parameters of %d FSDP modules, %d bytes", len(gathered), len(groups), size)
    _held.update(groups)
    try:
        yield
        # all ranks compare the same gathered bytes, so that all of them raise or none does
        changed = _changed(slots)
        if changed and not writeback:
            raise RuntimeError(
                f"parameters were changed inside unsharded(writeback=False): {_names(changed)}. Their shards are "
                "untouched; pass writeback=True to store such changes"
            )
        _check_lost(changed)
        _check_shapes(changed)
        for slot in changed:
            _write_back(slot)
        if changed:
            LOG.debug("unsharded: %d parameters were changed, and written back", len(changed))
    finally:
        _held.difference_update(groups)
        _release(groups, slots)


def reshard_all(module: nn.Module) -> None:
    """Shard again what forwards left gathered, such as the root's own weights; no collective.

    The gathered weights of a group that quantizes dense shards would be taken for quantized storage.
    """
    groups: list[FSDPModule] = [child for child in module.modules() if isinstance(child, FSDPModule)]
    groups = [group for group in groups if group not in _held]
    for group in groups:
        group.reshard()
    gathered = [group for group, owner, name, _ in _places(module, groups) if _is_gathered(getattr(owner, name))]
    for group in dict.fromkeys(gathered):
        _insist_on_reshard(group)


def _is_gathered(param: Tensor) -> bool:
    return isinstance(param, AllGatherHooks) and not isinstance(param, DTensor)


def _gather(module: nn.Module, groups: Sequence[FSDPModule]) -> list[_Slot]:
    """Unshard every group, from its shards; return the places where this replaced the parameter."""
    places = list(_places(module, groups))
    # a forward without backward may have left an older gather in place
    for group in groups:
        group.reshard()
    sharded = _standing(places)
    for group in groups:
        group.unshard()
    # A group where neither call changed anything ignored reshard(), and still holds what it gathered earlier.
    full = _standing(places)
    indices: dict[FSDPModule, list[int]] = {}
    for index, place in enumerate(places):
        indices.setdefault(place[0], []).append(index)
    for group in groups:
        own = indices.get(group, [])
        if own and all(full[index] is sharded[index] for index in own):
            _insist_on_reshard(group)
            for index, standing in zip(own, _standing(places[index] for index in own), strict=True):
                sharded[index] = standing
            group.unshard()
    replaced = [
        (place, before, after)
        for place, before, after in zip(places, sharded, _standing(places), strict=True)
        if after is not before
    ]
    return [
        _Slot(*place, before, after, after.data, _stamp(after), _stamp(before), read)
        for (place, before, after), read in zip(replaced, _digests([after for *_, after in replaced]), strict=True)
    ]


def _release(groups: Sequence[FSDPModule], slots: Sequence[_Slot]) -> None:
    """Put FSDP's own parameters, on FSDP's own buffers, back into their places, and reshard every group."""
    for slot in _changed(slots):
        if slot.now() is not slot.sharded:
            setattr(slot.owner, slot.name, slot.full)
            # after `param.data = ...` FSDP goes on with its own buffers, so the alias is restored
            if not isinstance(slot.data, AllGatherHooks | DTensor):
                slot.full.data = slot.data
    for group in groups:
        group.reshard()
    for group in dict.fromkeys(slot.group for slot in slots if slot.now() is slot.full):
        _insist_on_reshard(group)


def _places(module: nn.Module, groups: Sequence[FSDPModule]) -> Iterator[tuple[FSDPModule, nn.Module, str, str]]:
    """Yield (group, owner, name, fqn) of every parameter; a module belongs to the nearest FSDP module above it."""
    nearest: dict[nn.Module, FSDPModule] = {}
    wanted = set(groups)
    for group in (child for child in module.modules() if isinstance(child, FSDPModule)):  # outer ones first
        assert isinstance(group, nn.Module)
        nearest |= dict.fromkeys(group.modules(), group)
    for prefix, owner in module.named_modules():
        if nearest.get(owner) in wanted:
            for name, _ in owner.named_parameters(recurse=False, remove_duplicate=False):
                yield nearest[owner], owner, name, f"{prefix}.{name}".lstrip(".")


def _standing(places: Iterable[tuple[FSDPModule, nn.Module, str, str]]) -> list[Any]:
    return [getattr(owner, name) for _, owner, name, _ in places]


def _insist_on_reshard(group: FSDPModule) -> None:
    """Reshard a group that ignored reshard() since it keeps its weights after forward; that setting is kept."""
    group.set_reshard_after_forward(reshard_after_forward=True, recurse=False)
    group.reshard()
    group.set_reshard_after_forward(reshard_after_forward=False, recurse=False)


def _plain_parts(param: Tensor) -> list[Tensor]:
    local: Any = local_of(param)
    return [*local.parts().values()] if isinstance(local, AllGatherHooks) else [local]


def _stamp(param: Tensor | None) -> tuple[int, ...]:
    """Return identity, version counters and addresses: these differ after any write that torch can see."""
    if param is None:
        return ()
    tensors = _plain_parts(param)
    versions = [0 if tensor.is_inference() else tensor._version for tensor in (param, *tensors)]
    return (id(param), *versions, *(tensor.data_ptr() for tensor in tensors))


def _check_lost(changed: Sequence[_Slot]) -> None:
    lost = [slot for slot in changed if slot.lost()]
    if lost:
        raise RuntimeError(
            f"{_names(lost)} were changed inside unsharded() and then sharded again, so the changes are lost. "
            "state_dict(), .to() and a complete forward do that: take the first two outside, and call "
            "module.forward(...) instead of module(...)"
        )


def _check_shapes(changed: Sequence[_Slot]) -> None:
    for slot in changed:
        now = slot.now()
        if now is None or now.shape != slot.sharded.shape:
            found = "is gone" if now is None else f"has shape {tuple(now.shape)}"
            raise ValueError(
                f"{slot.fqn} {found} after unsharded(writeback=True), expected shape {tuple(slot.sharded.shape)}; "
                "a write-back can not change shapes"
            )


def _changed(slots: Sequence[_Slot]) -> list[_Slot]:
    """Return the slots whose parameters the body wrote into or replaced.

    It compares all gathered bytes, not only this rank's rows, so that all ranks come to the same answer.
    """
    written = {id(slot): slot.written() for slot in slots}
    unclear = [slot for slot in slots if written[id(slot)] is None]
    read = _digests([slot.full for slot in unclear])
    for slot, same in zip(unclear, _same(read, [slot.digest for slot in unclear]), strict=True):
        written[id(slot)] = not same
    return [slot for slot in slots if written[id(slot)]]


def _same(read: Sequence[Tensor], before: Sequence[Tensor]) -> list[bool]:
    """Return whether each digest is what it was; one host sync for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for index, one in enumerate(read):
        by_device.setdefault(one.device, []).append(index)
    same: dict[int, bool] = {}
    for indices in by_device.values():
        found = torch.stack([read[index] for index in indices]) == torch.stack([before[index] for index in indices])
        same |= dict(zip(indices, found.tolist(), strict=True))
    return [same[index] for index in range(len(read))]


def _digests(params: Sequence[Tensor]) -> list[Tensor]:
    """Return int64 [] for each parameter: the digest of the bytes behind it. Those on one device are read together."""
    parts = [_plain_parts(param) for param in params]
    by_device: dict[torch.device, list[int]] = {}
    for index, tensors in enumerate(parts):
        by_device.setdefault(tensors[0].device, []).append(index)
    read: dict[int, Tensor] = {}
    for indices in by_device.values():
        read |= dict(zip(indices, digests([parts[index] for index in indices]).unbind(), strict=True))
    return [read[index] for index in range(len(params))]


@torch.no_grad()
def _write_back(slot: _Slot) -> None:
    """Copy this rank's rows of the changed parameter into its shard."""
    now: Any = local_of(slot.now())
    own: Any = local_of(slot.full)
    if isinstance(own, AllGatherHooks) and now is not own:
        # quantized as a whole, so that all shards agree on a tensor-wide scale
        now = own.copy_(now)  # type: ignore[attr-defined]
    local_of(slot.sharded).copy_(_own_rows(slot, now))
    count_writes([slot.sharded])


def _own_rows(slot: _Slot, full: Tensor) -> Tensor:
    """Return the part of a gathered tensor that this rank's shard holds, an alias."""
    mesh = slot.sharded.device_mesh
    tensor_parallel = slot.full.device_mesh.ndim if isinstance(slot.full, DTensor) else 0
    for dim, placement in enumerate(slot.sharded.placements[: mesh.ndim - tensor_parallel]):
        # FSDP over TP on the same dim is strided: no is_shard()
        along = getattr(placement, "dim", None)
        if along is not None:
            full = full.narrow(along, *_chunk(full.shape[along], mesh.size(dim), mesh.get_local_rank(dim)))
    return full


def _chunk(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the first row and the number of rows of a rank's chunk, cut as torch.chunk cuts."""
    size = -(-rows // ranks)
    start = min(rank * size, rows)
    return start, min(size, rows - start)


def _names(slots: Iterable[_Slot]) -> str:
    return ", ".join(slot.fqn for slot in slots)
