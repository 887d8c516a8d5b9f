"""Tensor parallelism, seen from a calibration: which ranks cut weights between them, and the hooks that this needs.

Layers are gathered whole, and each rank runs some of the batches by itself, as under FSDP. So the hooks by which
`parallelize_module` turns inputs into DTensors, and outputs back, are taken away for that time. The ranks of a group of
tensor parallelism get the same batches, as they do in training, and share them: rank i of n runs every n-th.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from fsdp_hooks.across_ranks import on_all
from fsdp_hooks.torch_private import hook_tables

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

HOOKS = "torch.distributed.tensor."  # the modules whose functions parallelize_module registers


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, modules are called without the hooks of parallelize_module; afterwards these are in their old places."""
    taken: list[tuple[Any, dict[int, Callable[..., Any]]]] = []
    try:
        for module in model.modules():
            for name, table in hook_tables(module).items():
                own = {} if "_with_kwargs" in name or "_always_called" in name else dict(table)
                if any(map(_parallelizes, own.values())):
                    taken.append((table, own))
                    for key in [key for key, hook in own.items() if _parallelizes(hook)]:
                        del table[key]
        yield
    finally:
        for table, own in taken:
            later = {key: hook for key, hook in table.items() if key not in own}
            kept = {key: hook for key, hook in own.items() if key in table or _parallelizes(hook)}
            table.clear()
            table.update(kept | later)


def _parallelizes(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(HOOKS)


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether ranks cut weights between them beside FSDP; the same on all ranks."""
    return any(dims for _, _, dims in _cut(model))


def check_experts(model: nn.Module) -> None:
    """Raise ValueError where each rank has other experts: a forward sends tokens to them, and ranks here run alone."""
    for name, param, dims in _cut(model):
        if param.ndim > 2 and any(getattr(param.placements[number], "dim", None) == 0 for number in dims):
            raise ValueError(
                f"calibrate: {name} {tuple(param.shape)} is placed {param.placements}: its experts are shared out over "
                "ranks (expert parallelism), which is not supported: the forward would wait for ranks with fewer "
                "batches; shard the experts with fully_shard"
            )


def peers(model: nn.Module) -> tuple[int, ...]:
    """The global ranks that cut weights between them beside FSDP, this one among them; () where none do.

    A mesh dim over which FSDP does not shard, and which cuts some weight, is one of tensor parallelism.
    """
    cut: dict[DeviceMesh, set[int]] = {}  # of each mesh all dims that cut some weight
    for _, param, own in _cut(model):
        cut.setdefault(param.device_mesh, set()).update(own)
    found: set[int] = set()
    for mesh, dims in cut.items():
        place = mesh.get_coordinate()
        if dims and place is not None:
            index = tuple(slice(None) if number in dims else at for number, at in enumerate(place))
            found |= {*mesh.mesh[index].flatten().tolist()}
    return tuple(sorted(found)) if len(found) > 1 else ()


def _cut(model: nn.Module) -> Iterator[tuple[str, DTensor, list[int]]]:
    """Name and DTensor of every such parameter at rest, with the mesh dims beside FSDP's that cut it."""
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    wrapped = {id(param) for group in groups for param in group.parameters()}
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            yield name, param, _dims_beside_fsdp(param, fsdp=id(param) in wrapped)


def _dims_beside_fsdp(param: DTensor, *, fsdp: bool) -> list[int]:
    """The mesh dims that cut a parameter at rest, without those of FSDP.

    FSDP comes first in a mesh, with one dim, or with two where the first is replicated (HSDP).
    """
    placements: Sequence[Any] = param.placements
    hybrid = len(placements) > 1 and isinstance(placements[0], Replicate)
    first = (2 if hybrid else 1) if fsdp else 0
    return [number for number in range(first, len(placements)) if hasattr(placements[number], "dim")]


def shares(own: Sequence[int], batches: Sequence[int], group: dist.ProcessGroup | None) -> range:
    """Which of this rank's batches it runs, so that each batch of its group is run once. Call it on all ranks alike.

    Args:
        own: `peers` of this rank.
        batches: a hash of each batch of this rank.
        group: all ranks of the calibration.

    Raises:
        ValueError: on all ranks, where ranks of one group have different batches; names two of them.
    """
    if group is None:
        return range(len(batches))
    here = dist.get_rank()
    everyone = on_all(group, lambda: (here, tuple(own), tuple(batches)))
    held = {rank: theirs for rank, _, theirs in everyone}
    for rank, together, theirs in everyone:
        first = together[0] if together else rank
        if theirs != held[first]:
            raise ValueError(
                f"calibrate: ranks {', '.join(map(str, together))} cut weights between them (tensor parallelism), so "
                f"they must get the same batches: rank {rank} has {_difference(theirs, held[first])} of rank {first}. "
                "Give every rank of such a group the batches of its first one, in one order"
            )
    return range(own.index(here), len(batches), len(own)) if own else range(len(batches))


def _difference(theirs: Sequence[int], first: Sequence[int]) -> str:
    if len(theirs) != len(first):
        return f"{len(theirs)} batches in the place of the {len(first)}"
    place = next(place for place, pair in enumerate(zip(theirs, first, strict=True)) if pair[0] != pair[1])
    return f"another batch {place} than that"
