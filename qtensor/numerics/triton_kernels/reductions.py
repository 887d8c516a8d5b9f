"""The largest finite magnitude of all values or of each row, in one pass over them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.numerics.triton_kernels.launching import ENCODED, launch, tile_of
from qtensor.numerics.triton_kernels.pairs import bits_of, finite


def amax(x: Tensor) -> Tensor:
    """Return the largest finite magnitude of bf16, fp16 or fp32 values [elements], fp32 []."""
    found = torch.zeros((), dtype=torch.int32, device=x.device)
    tile = tile_of(ENCODED, 1)
    launch(_amax, -(-x.numel() // tile), *(x, found, x.numel()), TILE=tile)
    return found.view(torch.float32)


def row_amax(x: Tensor) -> Tensor:
    """Return that of each row of bf16, fp16 or fp32 values [rows, K], fp32 [rows, 1]."""
    found = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    launch(_row_amax, x.shape[0], *(x, found, x.shape[1]), TILE=tile_of(ENCODED // 2, 1))
    return found


@triton.jit
def _amax(x: tl.tensor, found: tl.tensor, elements: tl.tensor, TILE: tl.constexpr) -> None:
    first, at = tl.program_id(0).to(tl.int64) * TILE, tl.arange(0, TILE)
    there = at < tl.minimum(elements - first, TILE).to(tl.int32)
    values = tl.load(x + (first + at), mask=there, other=0.0).to(tl.float32)
    # numbers without a sign are in the order of their bits, and a maximum does not depend on who comes first
    tl.atomic_max(found + 0, bits_of(tl.max(tl.abs(finite(values)), axis=0)), sem="relaxed")


@triton.jit
def _row_amax(x: tl.tensor, found: tl.tensor, length: tl.tensor, TILE: tl.constexpr) -> None:
    first, at = tl.program_id(0).to(tl.int64) * length, tl.arange(0, TILE)
    amax = tl.zeros([TILE], dtype=tl.float32)
    for start in range(0, length, TILE):
        values = tl.load(x + (first + start + at), mask=at < length - start, other=0.0).to(tl.float32)
        amax = tl.maximum(amax, tl.abs(finite(values)))
    tl.store(found + tl.program_id(0), tl.max(amax, axis=0))
