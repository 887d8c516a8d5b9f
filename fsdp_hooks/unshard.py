"""`unsharded(module)`: the parameters of one module gathered and plain to use, for as long as a `with` block lasts.

    enter   remember every sharded parameter -> unshard the module and the FSDP modules nested in it (unshard is not recursive)
    body    parameters are full tensors; N forwards of `module.forward` cost one all-gather
    exit    changed parameters -> with writeback, this rank's rows go into its shards; without, an error (an update is never lost
            quietly) -> everything is sharded again, also after an exception (which writes nothing back)

"Changed" covers in-place writes, `param.data = ...` and a replaced Parameter. Two traps of FSDP2 are handled: after `.data =` FSDP goes on
using its own buffers, so the alias is restored; and `reshard()` is silently ignored in a group whose forward was left by an exception.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_hooks.all_gather import AllGatherHooks

__all__ = ["shard_rows", "unsharded"]


@dataclass
class _Slot:
    """One place a parameter is registered at, and what stood there."""

    owner: nn.Module
    name: str
    fqn: str
    sharded: DTensor
    full: Any = None  # the unsharded parameter
    data: Any = None  # its data at entry, an alias of FSDP's buffers
    stamp: tuple[int, ...] = ()


@contextmanager
def unsharded(module: nn.Module, *, writeback: bool = False) -> Iterator[nn.Module]:
    """Context manager in which `module`'s parameters are gathered and plain to use. A no-op for a module without FSDP.

    Call it on all ranks. Under tensor parallelism x FSDP the weights stay DTensors on the TP mesh. On exit everything is sharded again.

    Args:
        module: an FSDP module, or a module that contains FSDP modules.
        writeback: store what the body changed into the shards. All ranks must have made the same changes.

    Raises:
        RuntimeError: parameters were changed although writeback is False (nothing was stored), or FSDP refuses to reshard.
        ValueError: a changed parameter has another shape than before.
    """
    groups = [child for child in module.modules() if isinstance(child, FSDPModule)]
    if not groups:
        yield module
        return
    _reshard(groups)
    slots = [
        _Slot(owner, name, f"{prefix}.{name}".lstrip("."), param)
        for prefix, owner in module.named_modules(remove_duplicate=True)
        for name, param in owner._parameters.items()
        if isinstance(param, DTensor)
    ]
    for group in groups:
        group.unshard()
    for slot in slots:
        slot.full = slot.owner._parameters[slot.name]
        slot.data, slot.stamp = slot.full.data, _stamp(slot.full)
    finished = False
    try:
        yield module
        finished = True
    finally:
        changed = [slot for slot in slots if _changed(slot)]
        if finished and writeback:
            _check_shapes(changed)
            for slot in changed:
                _write_back(slot)
        for slot in changed:
            _restore(slot)
        _reshard(groups)
    if changed and not writeback:
        names = ", ".join(slot.fqn for slot in changed)
        raise RuntimeError(
            f"parameters were changed inside unsharded(writeback=False): {names}. Their shards are untouched; pass writeback=True to "
            "store such changes"
        )


def shard_rows(rows: int, mesh: DeviceMesh, dims: range, placements: tuple[Any, ...]) -> tuple[int, int]:
    """First and one-past-last row that this rank holds, of `rows` cut over the mesh dims `dims` as torch.chunk cuts."""
    start, end = 0, rows
    for dim in dims:
        if placements[dim].is_shard():
            size = -(-(end - start) // mesh.size(dim))
            rank = mesh.get_local_rank(dim)
            start, end = min(start + rank * size, end), min(start + (rank + 1) * size, end)
    return start, end


def _stamp(param: Tensor) -> tuple[int, ...]:
    """Identity, version counters and addresses: differs after any write that torch can see."""
    local: Any = param.to_local() if isinstance(param, DTensor) else param
    tensors = [*local.parts().values()] if isinstance(local, AllGatherHooks) else [local]
    versions = [0 if tensor.is_inference() else tensor._version for tensor in (param, *tensors)]
    return (id(param), *versions, *(tensor.data_ptr() for tensor in tensors))


def _changed(slot: _Slot) -> bool:
    return _stamp(slot.owner._parameters[slot.name]) != slot.stamp  # type: ignore[arg-type]


def _check_shapes(changed: list[_Slot]) -> None:
    for slot in changed:
        now = slot.owner._parameters[slot.name]
        if now is None or now.shape != slot.sharded.shape:
            found = None if now is None else tuple(now.shape)
            raise ValueError(
                f"{slot.fqn} has shape {found} after unsharded(writeback=True), expected {tuple(slot.sharded.shape)}; a write-back "
                "can not change shapes"
            )


@torch.no_grad()
def _write_back(slot: _Slot) -> None:
    """Copy this rank's rows of the changed parameter into its shard."""
    now: Any = slot.owner._parameters[slot.name]
    full = now.to_local() if isinstance(now, DTensor) else now
    mesh, tensor_parallel = slot.sharded.device_mesh, slot.full.device_mesh.ndim if isinstance(slot.full, DTensor) else 0
    start, end = shard_rows(full.shape[0], mesh, range(mesh.ndim - tensor_parallel), slot.sharded.placements)
    slot.sharded.to_local().copy_(full[start:end])


def _restore(slot: _Slot) -> None:
    """Put FSDP's own parameter, over FSDP's own buffers, back into its place."""
    slot.owner._parameters[slot.name] = slot.full
    if not isinstance(slot.data, AllGatherHooks) and not isinstance(slot.data, DTensor):
        slot.full.data = slot.data


def _reshard(groups: list[FSDPModule]) -> None:
    """Reshard all groups, and make sure that they are: after an exception in a forward, reshard() may do nothing."""
    for group in groups:
        group.reshard()
        if not _is_sharded(group) and hasattr(group, "reset_iter_state"):
            group.reset_iter_state()
    stuck = [type(group).__name__ for group in groups if not _is_sharded(group)]
    if stuck:
        raise RuntimeError(
            f"FSDP does not reshard {', '.join(stuck)}: a forward of it was left by an exception or is still running; finish "
            "the forward (or build the model anew) before unsharded()"
        )


def _is_sharded(group: FSDPModule) -> bool:
    assert isinstance(group, nn.Module)
    own = [
        param
        for child in group.modules()
        if child is group or not isinstance(child, FSDPModule)
        for param in child._parameters.values()
        if param is not None
    ]
    return all(isinstance(param, DTensor) for param in own) or not own
