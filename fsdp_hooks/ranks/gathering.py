"""Whole tensors out of their shards, many in one collective, without unsharding anything.

    row of rank r     the bytes of its shards, one after the other; each shard has room for the longest of its tensor,
                      so that all ranks have it at the same place
    one collective    all rows to all ranks, or to one rank: the others then receive nothing
    whole tensor      the pieces of all rows, joined along the dim that was cut

FSDP's own unshard would do as much work and more: it casts (mixed precision), all ranks receive everything, the module
must be sharded again however the reader ends, and forwards must stay away meanwhile. Here the shards are only read. The
bytes are those at rest, uneven shards included, and an abandoned gather leaves nothing behind.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from fsdp_hooks.lazy_bits import resolve
from fsdp_hooks.ranks.across_ranks import device_of
from fsdp_hooks.torch_private import local_of

# torch 2.13 renamed it.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
ALIGNED = 16  # bytes; each shard begins at a multiple, so that its bytes can be viewed as any dtype


@dataclass(frozen=True)
class ShardCut:
    """How a tensor is cut: along `dim`, over the ranks of `group`, as torch.chunk cuts."""

    group: dist.ProcessGroup
    dim: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group."""
        return tuple(dist.get_process_group_ranks(self.group))


def cut_of(tensor: Tensor) -> ShardCut | None:
    """Return how shards of this kind are joined; None for a tensor that is not cut along one dim alone."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is None:
        return None
    cuts = [(number, place) for number, place in enumerate(tensor.placements) if not place.is_replicate()]
    number, place = cuts[0] if len(cuts) == 1 else (0, None)
    # a shard of strides is another cut
    if not isinstance(place, Shard) or type(place) is not Shard:
        return None
    mesh = tensor.device_mesh
    expected = _piece(tensor.shape, place.dim, mesh.size(number), mesh.get_local_rank(number))
    return ShardCut(mesh.get_group(number), place.dim) if tuple(local_of(tensor).shape) == expected else None


@dataclass(frozen=True)
class _PlaceInBuffer:
    """Where the shards of a tensor are in every row, and what they are shards of."""

    offset: int
    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype


class Gathering:
    """Tensors on their way to where they are kept; made by all ranks alike, for the same tensors in the same order.

    Args:
        tensors: DTensors with plain shards, at least one, all cut over the same ranks (`ShardCut.ranks`). None of them
            may be written until `wait`.
        to: the global rank that keeps them; None: all of the group.

    Attributes:
        kept: whether this rank keeps them.
    """

    def __init__(self, tensors: Mapping[Any, Tensor], to: int | None) -> None:
        first = cut_of(next(iter(tensors.values())))
        assert first is not None
        self.kept = to is None or to == dist.get_rank()
        self._ranks = len(first.ranks)
        self._places: dict[Hashable, _PlaceInBuffer] = {}
        self._rows: Tensor | None = None
        self._work: Any = None
        self._own: Tensor | None = None
        size = 0
        for key, tensor in tensors.items():
            cut = cut_of(tensor)
            assert cut is not None and cut.ranks == first.ranks  # noqa: PT018 - one condition
            self._places[key] = _PlaceInBuffer(size, tuple(tensor.shape), cut.dim, tensor.dtype)
            # rank 0 has the longest piece, and all ranks send rows of that size
            longest = math.prod(_piece(tensor.shape, cut.dim, self._ranks, 0)) * tensor.dtype.itemsize
            size += -(-longest // ALIGNED) * ALIGNED
        if to is None or to in first.ranks:
            self._begin([local_of(tensor) for tensor in tensors.values()], size, first.group, to)

    @torch.no_grad()
    def _begin(self, shards: list[Tensor], size: int, group: dist.ProcessGroup, to: int | None) -> None:
        device = _device(shards[0], group)
        if self.kept:
            self._rows = torch.empty(self._ranks, size, dtype=torch.uint8, device=device)
            # sent from where it is wanted
            own = self._rows[dist.get_group_rank(group, dist.get_rank())]
        else:
            own = torch.empty(size, dtype=torch.uint8, device=device)
        for place, shard in zip(self._places.values(), shards, strict=True):
            flat = resolve(shard.detach()).contiguous().view(-1).view(torch.uint8)
            own[place.offset : place.offset + flat.numel()].copy_(flat)
        self._own = own
        if to is None:
            assert self._rows is not None
            self._work = _all_gather(self._rows.view(-1), own, group=group, async_op=True)
        else:
            rows = None if self._rows is None else list(self._rows.unbind(0))
            self._work = dist.gather(own, rows, dst=to, group=group, async_op=True)

    def wait(self) -> None:
        """Wait until it is done; shards may be written from then on."""
        if self._work is not None:
            self._work.wait()
        self._work = self._own = None

    def whole(self, key: Hashable) -> Tensor:
        """Return a whole tensor, on a rank that keeps them, in memory of its own; after `wait`."""
        assert self._work is None
        assert self._rows is not None
        place = self._places[key]
        itemsize, pieces = place.dtype.itemsize, []
        for rank in range(self._ranks):
            shape = _piece(place.shape, place.dim, self._ranks, rank)
            nbytes = math.prod(shape) * itemsize
            if nbytes:  # as bytes, since not every op knows every dtype
                held = self._rows[rank, place.offset : place.offset + nbytes]
                pieces.append(held.view(*shape[:-1], shape[-1] * itemsize))
        if not pieces:
            return torch.empty(place.shape, dtype=place.dtype, device=self._rows.device)
        return torch.cat(pieces, dim=place.dim).view(place.dtype)

    def free(self) -> None:
        """Drop what was gathered; waits for it first."""
        self.wait()
        self._rows = None


def _piece(shape: torch.Size | tuple[int, ...], dim: int, ranks: int, rank: int) -> tuple[int, ...]:
    """Return the shape of a rank's piece, cut as torch.chunk cuts."""
    size = -(-shape[dim] // ranks)
    start = min(rank * size, shape[dim])
    return (*shape[:dim], min(size, shape[dim] - start), *shape[dim + 1 :])


def _device(shard: Tensor, group: dist.ProcessGroup) -> torch.device:
    """Return where the group can send these from: where they are, if it can; shards may be offloaded to the host."""
    kinds = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    return shard.device if shard.device.type in kinds else device_of(group)
