"""Launches: one program for each tile of blocks, on the device and the stream of the tensors."""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

ELEMENTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
WARPS = 4
ENCODED, DECODED = 64, 16  # elements of a thread; more have fewer instructions each, until registers run out
MOST_BLOCKS = 2**31 - 2**16  # which a number of 32 bits counts, with those of the last program
MOST_IN_A_TILE = 2**31 // 8  # blocks from the first to the last one of a tile, whose pairs such a number counts


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Run so many programs of a kernel; its first argument is a tensor."""
    with torch.cuda.device(args[0].device):
        # contracted products and sums would round once where the definition rounds twice
        kernel[(programs,)](*args, **constants, num_warps=WARPS, enable_fp_fusion=False)


def tiles(rows: int, columns: int, square: int, tile: int) -> int:
    """How many programs have a tile of `tile` blocks each, of rows of `columns` blocks; `square`: see `blocks_at`.

    Raises:
        OverflowError: more blocks than the kernels count, at all or in `square` rows.
    """
    if rows * columns > MOST_BLOCKS:
        raise OverflowError(f"{rows * columns} blocks, of which kernels written by hand count at most {MOST_BLOCKS}")
    if square > 1 and square * columns > MOST_IN_A_TILE:
        raise OverflowError(
            f"square blocks of {square} rows of {columns} blocks each, together more than the {MOST_IN_A_TILE} that "
            "kernels written by hand count in a tile"
        )
    if square == 1:
        return -(-rows * columns // tile)
    return -(-rows // square) * -(-columns // (tile // square))


def tile_of(elements: int, block: int) -> int:
    """How many blocks a program takes whose threads take so many elements each."""
    return elements * WARPS * 32 // block


def words(x: Tensor) -> Tensor:
    """Contiguous values as integers that hold two of them each."""
    return x.view(torch.int64 if x.dtype == torch.float32 else torch.int32)
