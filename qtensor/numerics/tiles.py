"""Dense values and parts as kernels take them: rows, tiles of blocks, and pieces of rows for one call each."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fsdp_hooks.kernels.compiled import Kernel
from qtensor.spec.format import PartSpec
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import block_multiple, specs_of

CHUNK = {"cpu": 2**18}  # elements; in fp32 a few such temporaries stay in the cache of a core
CHUNK_ELSEWHERE = 2**26  # enough to keep a GPU busy


def chunk_of(device: torch.device) -> int:
    """Return how many elements eager code takes at a time."""
    return CHUNK.get(device.type, CHUNK_ELSEWHERE)


def rows_of(x: Tensor) -> Tensor:
    """Return [.., N, K] as [rows, K], contiguous and aligned to 8-byte words."""
    # a weight's parts are that already
    if x.ndim != 2 or x.requires_grad or not x.is_contiguous():
        x = x.detach().reshape(-1, x.shape[-1]).contiguous()
    # kernels read words of 8 bytes
    offset = x.storage_offset()
    return x.clone() if offset and offset * x.itemsize % 8 else x


def part_rows(part: Tensor, spec: PartSpec, shape: Sequence[int]) -> Tensor:
    """Return a part of a tensor of `shape`: [rows, ..]; a tensor-wide one: [], or [rows, 1] if per entry of a dim."""
    if spec.per_row:
        return rows_of(part)
    return part if part.ndim == 0 else part.expand(*shape[:-1], 1).reshape(-1, 1)


def own_rows(argument: Tensor | None, piece: slice) -> Tensor | None:
    """Return what belongs to a piece of the rows: those rows of an argument with rows, or all of a tensor-wide one."""
    return argument if argument is None or argument.ndim < 2 else argument[piece]


def cut_into_tiles(x: Tensor, block: int, group: int = 1) -> Tensor:
    """Cut [rows, K] into [rows, blocks, block]; for square blocks into [groups, group, blocks, block].

    Rows fewer than a group form one group. Rows whose last block holds fewer elements stay [rows, K].
    """
    rows, columns = x.shape
    if columns % block:
        return x
    tiles = (rows, columns) if block == 1 else (rows, columns // block, block)
    if group > 1:
        tiles = (-(-rows // group), min(group, rows), *tiles[1:])
    return x.view(tiles)


def join_tiles(x: Tensor, block: int) -> Tensor:
    """Undo `cut_into_tiles`, for traced code."""
    if x.ndim == 2:
        return x
    # a branch on one number makes the block a constant of the compiled code
    if x.shape[-1] != block:
        raise AssertionError(f"tiles of {x.shape[-1]}, expected {block}")
    return x.flatten(-2).flatten(0, -2)


def pieces_of(flat: Tensor, group: int, kernel: Kernel) -> Iterator[slice]:
    """Yield slices of rows for one call each: all rows if the kernel is compiled, chunks if it is eager; at least one.

    Groups of so many rows (square blocks) are not split; rows left over behind the last whole one come as a slice of
    their own.
    """
    rows = flat.shape[0]
    if not rows:
        yield slice(0, 0)
        return
    whole = rows - rows % group
    size = rows if kernel.compiles(flat) else chunk_of(flat.device) // flat.shape[1]
    size = max(size // group, 1) * group
    for start in range(0, whole, size):
        yield slice(start, min(start + size, whole))
    if whole < rows:
        yield slice(whole, rows)


def packed_block(recipe: Recipe) -> int:
    """Return how many elements of the payload part share one block scale; 1 without blocks."""
    return block_multiple(recipe) // specs_of(recipe)[0].block
