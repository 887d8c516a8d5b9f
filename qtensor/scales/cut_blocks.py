"""Square blocks that a shard boundary cuts: their amax is agreed between the ranks that hold a piece of them.

    rows        0 ........ 40 ........ 80 .... 120        three ranks, 40 rows each
    blocks      0 ..... 32 ..... 64 ..... 96 ..... 128    blocks of 32 rows: 1 and 2 are cut, 0 and 3 are not

Part of stage 1 of the story in qtensor/scales/__init__.py. A shard counts its blocks from where they begin in the whole
matrix. The largest magnitudes in the pieces of cut blocks travel with the claims on other scales that shards share:

    [leading dims.., 2, cut blocks along N, blocks along K]      amax; 1 if an element is not finite, else 0

Every rank fills in the place of its own pieces. So the bytes of a shard are those of one process, and only blocks that
are cut cost anything.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from qtensor.numerics import kernels
from qtensor.spec.blocks import BlockFacts
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import row_multiple, tensor_wide


@dataclass(frozen=True)
class CutBlocks:
    """How the shards of one weight [.., N, K] cut its square blocks.

    Attributes:
        block: rows and columns of a block.
        start, rows: this shard's rows within a matrix of the whole weight.
        count: how many rows of blocks are cut, the same on all ranks.
        mine: (number among the cut ones, number among this shard's) of each row of blocks that it has a piece of.
        frame: how many matrices along each leading dim, and blocks along K, the ranks that agree hold together.
        place: which of these are this shard's, as (first, behind the last).
    """

    block: int
    start: int
    rows: int
    count: int
    mine: tuple[tuple[int, int], ...]
    frame: tuple[int, ...]
    place: tuple[tuple[int, int], ...]

    def lay_out(self, grouped: Tensor, fill: float = 0.0) -> Tensor:
        """Return pieces of cut blocks, [.., channels, groups, blocks along K], in their places: fp32 [.., size].

        The places of other ranks get `fill`, which must not exceed any value. The leading dims of the weight stand
        before the channels; dims in front of these stay.
        """
        extra = grouped.shape[: grouped.ndim - 2 - len(self.frame)]
        # places of other ranks hold what no maximum is made of
        frame = grouped.new_full((*extra, *self._frame(grouped.shape[-3])), fill)
        for number, own in self.mine:
            frame[self._at(number)] = grouped[..., own, :]
        return frame.flatten(len(extra))

    def take_over(self, grouped: Tensor, agreed: Tensor) -> Tensor:
        """Return `grouped`, with what was agreed on for cut blocks (in the layout of `lay_out`) in place of its own."""
        frame = agreed.reshape(*agreed.shape[:-1], *self._frame(grouped.shape[-3]))
        for number, own in self.mine:
            grouped[..., own, :] = frame[self._at(number)]
        return grouped

    def _frame(self, channels: int) -> tuple[int, ...]:
        return (*self.frame[:-1], channels, self.count, self.frame[-1])

    def _at(self, number: int) -> tuple[Any, ...]:
        """Return where this shard's own values of a cut row of blocks are."""
        *leading, columns = (slice(*place) for place in self.place)
        return (..., *leading, slice(None), number, columns)

    def size(self, channels: int) -> int:
        """Return how many values are exchanged."""
        return math.prod(self._frame(channels))

    def group_rows(self, per_row: Tensor, fill: float = 0.0) -> Tensor:
        """Return the maximum over the rows of each block that are here: [.., rows, blocks] -> [.., groups, blocks]."""
        before = self.start % self.block if self.rows else 0
        groups = -(-(before + self.rows) // self.block)
        behind = groups * self.block - before - self.rows
        padded = F.pad(per_row, (0, 0, before, behind), value=fill)
        return padded.reshape(*per_row.shape[:-2], groups, self.block, per_row.shape[-1]).amax(dim=-2)

    def spread(self, grouped: Tensor) -> Tensor:
        """Return for each row the value of its block: [.., groups, blocks] -> [.., rows, blocks]."""
        before = self.start % self.block
        every = grouped.unsqueeze(-2).expand(*grouped.shape[:-1], self.block, grouped.shape[-1]).flatten(-3, -2)
        return every[..., before : before + self.rows, :]

    def facts(self, x: Tensor, recipe: Recipe) -> Tensor:
        """Return fp32 [.., 2, groups, blocks along K]: amax and `broken` of each block, as far as it is here."""
        return self.group_rows(torch.stack(kernels.block_facts(x, recipe), dim=-3))

    def claim(self, x: Tensor, recipe: Recipe) -> Tensor:
        """Return fp32 [.., size(2)]: what this shard's values, [.., N, K], say about cut blocks."""
        return self.lay_out(self.facts(x, recipe))

    def decide(self, x: Tensor, recipe: Recipe, agreed: Tensor) -> BlockFacts:
        """Return what was agreed on for cut blocks (fp32 [.., size(2)]), and what the values say of the others."""
        amax, broken = self.spread(self.take_over(self.facts(x, recipe), agreed)).unbind(dim=-3)
        return BlockFacts(amax.contiguous(), broken.contiguous())


def cut_blocks_of(param: Tensor, recipe: Recipe) -> CutBlocks | None:
    """Return how the shards of a parameter cut the square blocks of a recipe; None if no block is cut.

    Raises:
        NotImplementedError: a rank holds several runs of rows.
    """
    block = row_multiple(recipe)
    if block == 1 or not isinstance(param, DTensor) or param.ndim < 2:
        return None
    place = param.device_mesh.get_coordinate()
    if place is None:
        return None
    sizes = tuple(param.device_mesh.shape)
    wide = tensor_wide(recipe) is not None
    return _cut_blocks(tuple(param.shape), sizes, tuple(place), param.placements, block, wide=wide)


@functools.lru_cache(maxsize=4096)
def _cut_blocks(  # noqa: PLR0913 - all that decides it
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    place: tuple[int, ...],
    placements: Sequence[object],
    block: int,
    *,
    wide: bool,
) -> CutBlocks | None:
    row_dim = len(shape) - 2
    cuts = [cuts_along(dim, len(shape), mesh, placements) for dim in range(len(shape))]
    pieces = [
        piece_of(shape[row_dim], [(mesh[axis], where) for axis, where in zip(cuts[row_dim], each, strict=True)])
        for each in itertools.product(*(range(mesh[axis]) for axis in cuts[row_dim]))
    ]
    edges = {start for start, rows in pieces if rows} | {start + rows for start, rows in pieces if rows}
    # an edge between two blocks, or at the end of the matrix, cuts none
    numbers = sorted({edge // block for edge in edges if edge % block and edge != shape[row_dim]})
    if not numbers:
        return None
    # other cuts decide which matrices and columns this rank claims for
    own = [piece_of(shape[dim], [(mesh[axis], place[axis]) for axis in cuts[dim]]) for dim in range(len(shape))]
    start, rows = own[row_dim]
    held = range(start // block, -(-(start + rows) // block)) if rows else range(0)
    # a tensor-wide scale is agreed on over all ranks, which hold other matrices and columns, too
    others = [(shape[dim] if wide else own[dim][1], own[dim][0] * wide, own[dim][1]) for dim in range(row_dim)]
    columns = shape[-1] if wide else own[-1][1]
    others.append((-(-columns // block), own[-1][0] * wide // block, -(-own[-1][1] // block)))
    return CutBlocks(
        block,
        start,
        rows,
        len(numbers),
        tuple((number, one - held.start) for number, one in enumerate(numbers) if one in held),
        tuple(size for size, _, _ in others),
        tuple((first, first + count) for _, first, count in others),
    )


def cuts_along(dim: int, ndim: int, mesh: Sequence[int], placements: Sequence[object]) -> list[int]:
    """Return the mesh dims that cut a tensor dim, in the order they do: strided ones cut what the others left."""
    own = [
        axis
        for axis, placement in enumerate(placements)
        if hasattr(placement, "dim") and placement.dim % ndim == dim and mesh[axis] > 1
    ]
    # FSDP over TP on one dim: TP cuts first, though it stands later in the mesh
    strided = [axis for axis in own if hasattr(placements[axis], "split_factor")]
    for axis in strided:
        factor = getattr(placements[axis], "split_factor", 1)
        if factor != math.prod(mesh[later] for later in own if later > axis):
            raise NotImplementedError(
                f"a weight of square blocks is placed as {tuple(placements)} on a mesh of {tuple(mesh)}: a rank's rows "
                "are several runs; redistribute it to Shard() first"
            )
    return [axis for axis in own if axis not in strided] + strided[::-1]


def piece_of(size: int, cuts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return (start, length) of what cuts of (pieces, own place) leave of `size`, each made as torch.chunk does."""
    start, length = 0, size
    for pieces, where in cuts:
        step = -(-length // pieces)
        first = min(where * step, length)
        start, length = start + first, min(step, length - first)
    return start, length
