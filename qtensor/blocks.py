"""Arithmetic shared by the formats: finite amax, square blocks, powers of two by their bits.

Everything here is elementwise or a reduction in fp32, in torch ops that give the same bytes eager and compiled, and of
which inductor makes vector code: a comparison with infinity where isfinite and nan_to_num would become a scalar loop.
Divisions are tensor by tensor: `448.0 / t` is computed by torch as reciprocal(t) * 448 and rounds twice.
"""

import ctypes
import math

import torch
from torch import Tensor

FLT_MAX = torch.finfo(torch.float32).max
MULTIPLES = tuple(0.25 + 3.75 * i / 38 for i in range(38, -1, -1))  # of an amax, tried as scales: 4 down to 1/4


def fp32(value: float) -> float:
    """The fp32 number nearest to a constant; no tensor, which would take its precision from whoever imports first."""
    return ctypes.c_float(value).value


def quotient(numerator: float, denominator: Tensor) -> Tensor:
    """Numerator / denominator rounded once, inf where the denominator is 0 or tiny."""
    if denominator.is_cuda and torch.compiler.is_compiling():
        # Triton's fp32 division is off by an ulp or two; of an fp64 quotient of fp32 numbers the nearest fp32 is exact
        wide = denominator.double()
        return (torch.full_like(wide, numerator) / wide).to(denominator.dtype)
    return torch.full_like(denominator, numerator) / denominator


def finite(x: Tensor) -> Tensor:
    """Where x is neither NaN nor infinite, bool."""
    return x.abs() < math.inf


def finite_magnitude(x: Tensor) -> Tensor:
    """|x|, with 0 in place of NaN and infinities (so that a reduction sees the finite elements only)."""
    magnitude = x.abs()
    return torch.where(magnitude < math.inf, magnitude, 0.0)


def held_broken(whole: Tensor) -> Tensor:
    """[.., blocks, block] of `finite` -> fp32 [.., blocks]: 1 for a block with an element that is not, else 0."""
    return (~whole).to(torch.float32).amax(dim=-1)


def finite_amax(x: Tensor) -> Tensor:
    """Largest finite |x| as fp32 []; 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return finite_magnitude(x).amax()


def row_amax(x: Tensor) -> Tensor:
    """Largest finite |x| of each row, [.., 1]; 0 for rows without elements."""
    if x.shape[-1] == 0:
        return x.new_zeros(*x.shape[:-1], 1)
    return finite_magnitude(x).amax(dim=-1, keepdim=True)


def tile(x: Tensor, block: int) -> Tensor:
    """[.., K] -> [.., K // block, block] (a view where x is contiguous)."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def scatter_blocks(per_row: Tensor, block: int) -> Tensor:
    """Maximum over each group of `block` rows, written back to every row of the group: row amax -> square amax.

    per_row: [.., N, K // block]. The last group may be short (a shard whose rows are no multiple of the block).
    """
    rows = per_row.shape[-2]
    short = -rows % block
    if short:
        per_row = torch.cat([per_row, per_row.new_zeros(*per_row.shape[:-2], short, per_row.shape[-1])], dim=-2)
    groups = per_row.reshape(*per_row.shape[:-2], (rows + short) // block, block, per_row.shape[-1])
    spread = groups.amax(dim=-2, keepdim=True).expand_as(groups).reshape(per_row.shape)
    return spread[..., :rows, :]


def power_of_two_floor(x: Tensor) -> Tensor:
    """|x| with its mantissa bits cleared: the largest power of two <= |x|, for normal fp32 x."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def nearest(scaled: Tensor, largest: float, eps: float, smallest_normal: float) -> Tensor:
    """Each of `scaled` rounded to a number of few bits, ties to even, saturating; fp32, signs of zeros kept.

    A step of the number is the power of two below times `eps`, the same everywhere below `smallest_normal`. Beside
    1.5 * 2^23 steps there are no bits for less than one, so that adding them rounds as the number does, and taking them
    off is exact. Several times faster than converting to float8 and back.
    """
    bounded = scaled.clamp(-largest, largest)
    steps = power_of_two_floor(bounded).clamp_(min=smallest_normal).mul_(eps * 1.5 * 2.0**23)
    return bounded.add_(steps).sub_(steps).copysign_(scaled)


def canonical_nan(x: Tensor) -> Tensor:
    """Every NaN replaced by the default one (0x7FC00000): backends convert the NaN of float8 to different ones."""
    return torch.where(x != x, math.nan, x)  # noqa: PLR0124 - isnan, in vector code
