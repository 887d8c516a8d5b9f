"""The largest finite magnitude of all values or of each row, in one pass over them.

Of all values each program finds a part: of tiles that lie far apart, so that all programs come to the last values
together, which the cache still has when the next kernel begins with these. Whoever needs the amax takes the largest of
the parts; nothing has to be zero before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.numerics.triton_kernels.launching import ENCODED, WARPS, launch, tile_of
from qtensor.numerics.triton_kernels.pairs import larger_number, whole

PROGRAMS = 512  # as many as a GPU runs at once, or nearly; a power of two
PROGRAMS_WARPS = 8
PARTS = tl.constexpr(PROGRAMS)


def amax(x: Tensor) -> Tensor:
    """Return the largest finite magnitude of bf16, fp16 or fp32 values [elements], fp32 []."""
    found = torch.empty((), dtype=torch.float32, device=x.device)
    launch(_amax, 1, amax_parts(x), found)
    return found


def amax_parts(x: Tensor) -> Tensor:
    """Return fp32 [PROGRAMS], of which the largest is the amax of bf16, fp16 or fp32 values of any shape."""
    found = torch.empty(PROGRAMS, dtype=torch.float32, device=x.device)
    tile = tile_of(ENCODED, 1) * PROGRAMS_WARPS // WARPS
    launch(_amax_parts, PROGRAMS, *(x, found, x.numel()), TILE=tile, num_warps=PROGRAMS_WARPS)
    return found


def row_amax(x: Tensor) -> Tensor:
    """Return that of each row of bf16, fp16 or fp32 values [rows, K], fp32 [rows, 1]."""
    found = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    launch(_row_amax, x.shape[0], *(x, found, x.shape[1]), TILE=tile_of(ENCODED, 1))
    return found


@triton.jit
def amax_of_parts(parts: tl.tensor) -> tl.tensor:
    """Return the amax of what `amax_parts` found, fp32 []."""
    return tl.max(tl.load(parts + tl.arange(0, PARTS)), axis=0)


@triton.jit
def _amax(parts: tl.tensor, found: tl.tensor) -> None:
    tl.store(found + 0, amax_of_parts(parts))


@triton.jit
def _amax_parts(x: tl.tensor, found: tl.tensor, elements: tl.tensor, TILE: tl.constexpr) -> None:
    at = tl.arange(0, TILE)
    amax = tl.zeros([TILE], dtype=tl.float32)
    for first in range(tl.program_id(0).to(tl.int64) * TILE, elements, tl.num_programs(0) * TILE):
        there = at < tl.minimum(elements - first, TILE).to(tl.int32)
        values = tl.load(x + (first + at), mask=there, other=0.0).to(tl.float32)
        amax = larger_number(amax, tl.abs(whole(values)))
    tl.store(found + tl.program_id(0), tl.max(amax, axis=0))


@triton.jit
def _row_amax(x: tl.tensor, found: tl.tensor, length: tl.tensor, TILE: tl.constexpr) -> None:
    first, at = tl.program_id(0).to(tl.int64) * length, tl.arange(0, TILE)
    amax = tl.zeros([TILE], dtype=tl.float32)
    for start in range(0, length, TILE):
        values = tl.load(x + (first + start + at), mask=at < length - start, other=0.0).to(tl.float32)
        amax = larger_number(amax, tl.abs(whole(values)))
    tl.store(found + tl.program_id(0), tl.max(amax, axis=0))
