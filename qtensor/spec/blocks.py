"""Arithmetic shared by the formats: finite amax, square blocks, powers of two by their bits.

Everything here is elementwise or a reduction in fp32. The torch ops used give the same bytes eager and compiled, and
inductor makes vector code of them: a comparison with infinity, for instance, since isfinite and nan_to_num would become
scalar loops. Divisions are tensor by tensor: torch computes `448.0 / t` as reciprocal(t) * 448, which rounds twice.
"""

import ctypes
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

FLT_MAX = torch.finfo(torch.float32).max


class BlockFacts(NamedTuple):
    """What is known of the block behind each scale, fp32 [.., N, ceil(K / block)] each, for every row of x [.., N, K].

    amax: its largest finite magnitude.
    broken: 1 where it has an element that is not finite, else 0.
    """

    amax: Tensor
    broken: Tensor


def fp32(value: float) -> float:
    """The fp32 number nearest to a constant, made without a tensor, whose dtype would depend on torch's defaults."""
    return ctypes.c_float(value).value


def quotient(numerator: float, denominator: Tensor) -> Tensor:
    """`numerator / denominator`, rounded once; inf where the denominator is 0 or tiny."""
    if denominator.is_cuda and torch.compiler.is_compiling():
        # Triton's fp32 division is off by an ulp or two; an fp64 quotient of fp32 numbers rounds to the right fp32
        wide = denominator.double()
        return (torch.full_like(wide, numerator) / wide).to(denominator.dtype)
    return torch.full_like(denominator, numerator) / denominator


def encoding_scale(largest: float, amax: Tensor) -> Tensor:
    """The factor that brings an amax to `largest`: largest / amax, at most FLT_MAX; 1 where the amax is 0."""
    return torch.where(amax == 0, torch.ones_like(amax), quotient(largest, amax)).clamp(max=FLT_MAX)


def finite(x: Tensor) -> Tensor:
    """Where x is neither NaN nor infinite, bool."""
    return x.abs() < math.inf


def finite_magnitude(x: Tensor) -> Tensor:
    """|x|, with 0 in place of NaN and infinities (so that a reduction sees the finite elements only)."""
    magnitude = x.abs()
    return torch.where(magnitude < math.inf, magnitude, 0.0)


def finite_amax(x: Tensor) -> Tensor:
    """Largest finite |x| as fp32 []; 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return finite_magnitude(x).amax()


def row_amax(x: Tensor, *, marked: bool = False) -> Tensor:
    """Largest finite |x| of each row, [.., 1]; 0 for rows without elements.

    `marked`: infinity for rows that hold an element that is not finite.
    """
    if x.shape[-1] == 0:
        return x.new_zeros(*x.shape[:-1], 1)
    if marked:
        amax = x.abs().amax(dim=-1, keepdim=True)  # NaN where there is one
        return torch.where(amax < math.inf, amax, math.inf)
    return finite_magnitude(x).amax(dim=-1, keepdim=True)


def tile(x: Tensor, block: int) -> Tensor:
    """[.., K] -> [.., ceil(K / block), block]: a view where x is contiguous and K a multiple, else 0 behind K."""
    short = -x.shape[-1] % block
    if short:
        x = torch.nn.functional.pad(x, (0, short))
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def untile(tiles: Tensor, columns: int) -> Tensor:
    """The inverse of `tile`: [.., blocks, block] -> [.., columns]."""
    flat = tiles.flatten(-2)
    return flat if flat.shape[-1] == columns else flat[..., :columns].contiguous()


def scatter_blocks(per_row: Tensor, block: int, fill: float = 0.0) -> Tensor:
    """Maximum over each group of `block` rows, written back to every row of the group: row amax -> square amax.

    per_row: [.., N, blocks]. The last group may be short (a shard whose rows are no multiple of the block); `fill` must
    be no larger than the values.
    """
    rows = per_row.shape[-2]
    short = -rows % block
    if short:
        per_row = torch.cat([per_row, per_row.new_full((*per_row.shape[:-2], short, per_row.shape[-1]), fill)], dim=-2)
    groups = per_row.reshape(*per_row.shape[:-2], (rows + short) // block, block, per_row.shape[-1])
    spread = groups.amax(dim=-2, keepdim=True).expand_as(groups).reshape(per_row.shape)
    return spread[..., :rows, :]


def block_amax(x: Tensor, block: int, *, square: bool) -> Tensor:
    """[.., ceil(K / block)]: largest finite |x| of each block, repeated in each row of a square block."""
    amax = finite_magnitude(tile(x, block)).amax(dim=-1)
    return scatter_blocks(amax, block) if square else amax


def broken_blocks(whole: Tensor, block: int, *, square: bool) -> Tensor:
    """[.., blocks, block] of `finite` -> fp32 [.., blocks]: 1 where some element of the block is not finite, else 0."""
    broken = (~whole).to(torch.float32).amax(dim=-1)
    return scatter_blocks(broken, block) if square else broken


def marks(blocks: BlockFacts | None) -> dict[str, Tensor]:
    """What a quantizer holds besides scales, so that `marked_blocks` can tell."""
    return {} if blocks is None else {"broken": blocks.broken}


def marked_blocks(quantizer: Mapping[str, Tensor], whole: Tensor, block: int, *, square: bool) -> Tensor:
    """`broken_blocks`, or what the quantizer says of them where it was made from facts."""
    return quantizer["broken"] if "broken" in quantizer else broken_blocks(whole, block, square=square)


def canonical_nan(x: Tensor) -> Tensor:
    """Replace every NaN by the default one (0x7FC00000): backends convert the NaN of float8 to different ones."""
    return torch.where(x != x, math.nan, x)  # noqa: PLR0124 - isnan, in vector code
