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

from fsdp_hooks.ranks.across_ranks import on_all
from fsdp_hooks.torch_private import hook_tables
from layerwise.stages.caller import caller
from layerwise.stages.cuts import cuts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

HOOKS = "torch.distributed.tensor."  # the modules whose functions parallelize_module registers


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, modules are called without the hooks of parallelize_module; afterwards these are back in their places."""
    taken: list[tuple[Any, dict[int, Callable[..., Any]]]] = []
    try:
        for module in model.modules():
            for name, table in hook_tables(module).items():
                # These tables hold flags by the keys of hooks; a flag without its hook does nothing,
                # so it may stay.
                own = {} if "_with_kwargs" in name or "_always_called" in name else dict(table)
                if any(map(_parallelizes, own.values())):
                    taken.append((table, own))
                    for key in [key for key, hook in own.items() if _parallelizes(hook)]:
                        del table[key]
        yield
    finally:
        for table, own in taken:
            # Hooks run in the order of their table, so it is made anew: the old ones in their places,
            # without those removed meanwhile, and behind them those registered meanwhile.
            later = {key: hook for key, hook in table.items() if key not in own}
            kept = {key: hook for key, hook in own.items() if key in table or _parallelizes(hook)}
            table.clear()
            table.update(kept | later)


def _parallelizes(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(HOOKS)


def is_tensor_parallel(model: nn.Module) -> bool:
    """Return whether ranks cut weights, not only share experts out, beside FSDP; the same answer on all ranks."""
    return any(cut.tensor for cut in cuts(model))


def peers(model: nn.Module) -> tuple[int, ...]:
    """Return the global ranks that cut weights with this one beside FSDP, itself among them; () if none do.

    A mesh dim over which FSDP does not shard, and which cuts some weight, is one of tensor parallelism; not if it cuts
    between experts alone.
    """
    dims: dict[DeviceMesh, set[int]] = {}  # of each mesh all that cut some weight
    for cut in cuts(model):
        dims.setdefault(cut.param.device_mesh, set()).update(cut.tensor)
    found: set[int] = set()
    for mesh, own in dims.items():
        place = mesh.get_coordinate()
        # A rank has no place on a mesh that it is not part of, such as another group's experts.
        if own and place is not None:
            index = tuple(slice(None) if number in own else at for number, at in enumerate(place))
            found |= {*mesh.mesh[index].flatten().tolist()}
    return tuple(sorted(found)) if len(found) > 1 else ()


def shares(own: Sequence[int], batches: Sequence[int], group: dist.ProcessGroup | None) -> range:
    """Choose this rank's batches, so that its group runs each batch once. Call it on all ranks alike.

    Args:
        own: `peers` of this rank.
        batches: a hash of each batch of this rank.
        group: all ranks of the calibration.

    Raises:
        ValueError: on all ranks, if ranks of one group have different batches; names two of them.
    """
    if group is None:
        return range(len(batches))
    here = dist.get_rank()
    everyone = on_all(group, lambda: (here, tuple(own), tuple(batches)))
    held = {rank: theirs for rank, _, theirs in everyone}
    # Every rank looks at every group, so all raise the same.
    for rank, together, theirs in everyone:
        first = together[0] if together else rank
        if theirs != held[first]:
            raise ValueError(
                f"{caller()}: ranks {', '.join(map(str, together))} cut weights between them (tensor parallelism), so "
                f"they must get the same batches: rank {rank} has {_difference(theirs, held[first])} of rank {first}. "
                "Give every rank of such a group the batches of its first one, in one order"
            )
    return range(own.index(here), len(batches), len(own)) if own else range(len(batches))


def _difference(theirs: Sequence[int], first: Sequence[int]) -> str:
    if len(theirs) != len(first):
        return f"{len(theirs)} batches in the place of the {len(first)}"
    place = next(place for place, pair in enumerate(zip(theirs, first, strict=True)) if pair[0] != pair[1])
    return f"another batch {place} than that"
