"""INT4: what qtensor/formats/int4.py defines, in one pass over memory and without a division for each element.

Elements are quotients x / S rounded twice, to fp32 and to whole numbers. Rounding to fp32 decides nothing: a half h
takes 5 bits and S takes 8, so an x that is not h S differs from it by 2^-24 of itself or more, and x / S from h by more
than half a step of fp32 there. So any quotient will do that is h where x is h S, and on the right side of h elsewhere:

    y = x r + (x - (x r) S) r,  r = 1 / S rounded

which is x / S to 2^-46 before it is rounded. Where S is tiny both are taken times 2^64, so that r is finite and
nothing is lost to denormal numbers; a normal x below 2^-102 is far from half of an S that is not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.numerics.triton_kernels.launching import PACKED, Parts, decode_blocks, encode_blocks, tile_of
from qtensor.numerics.triton_kernels.pairs import (
    INF,
    amax_of,
    bits_of,
    blocks_at,
    byte_of,
    finite,
    halves,
    joined,
    number_of,
    pairs_at,
)

ONE_BITS = tl.constexpr(0x3F80)  # of bf16
NAN_CODE = tl.constexpr(0x7FC0)
TINY = tl.constexpr(2.0**-60)
LARGER = tl.constexpr(2.0**64)
WHOLE = tl.constexpr(1.5 * 2.0**23 + 8.0)  # added to q, the sum has q + 8 in its last bits


def encode(x: Tensor, amax: None, *, group: int, out: Parts = None) -> dict[str, Tensor]:
    """Return the parts of bf16, fp16 or fp32 values [rows, blocks, group]; no two groups share an amax.

    Tiles are half of other formats', since quotients take twice the registers.
    """
    return encode_blocks(
        _encode,
        x,
        payload=torch.uint8,
        scale=torch.bfloat16,
        tile=tile_of(PACKED // 2, group),
        PAIRS=group // 2,
        out=out,
    )


def decode(payload: Tensor, scale: Tensor, *, dtype: torch.dtype, group: int) -> Tensor:
    """Return the values [rows, K] of a payload [rows, blocks, group // 2]."""
    return decode_blocks(_decode, payload, scale, dtype=dtype, block=group, PAIRS=group // 2)


@triton.jit
def _encode(
    x: tl.tensor,
    payload: tl.tensor,
    scale: tl.tensor,
    columns: tl.tensor,
    blocks: tl.tensor,
    ELEMENT: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    first, at, there = blocks_at(blocks, columns, 1, TILE)
    pairs, known = pairs_at(at, PAIRS), there[:, None]
    low, high = halves(tl.load(x + (first * PAIRS + pairs), mask=known, other=0), ELEMENT)
    whole_low, whole_high = finite(low), finite(high)

    bits = bits_of(tl.math.div_rn(amax_of(whole_low, whole_high, 1), 7.5))
    code = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    code = tl.where(code == 0, ONE_BITS, code)
    marked = tl.where(amax_of(low, high, 1) < INF, code, NAN_CODE)
    tl.store(scale + (first + at), marked.to(tl.int16), mask=there)

    dec = number_of(code << 16)
    factor = tl.where(dec < TINY, LARGER, 1.0)
    dec = dec * factor
    enc, dec, factor = tl.math.div_rn(1.0, dec)[:, None], dec[:, None], factor[:, None]
    byte = byte_of(number(whole_low * factor, enc, dec), number(whole_high * factor, enc, dec))
    tl.store(payload + (first * PAIRS + pairs), byte, mask=known)


@triton.jit
def _decode(
    payload: tl.tensor,
    scale: tl.tensor,
    values: tl.tensor,
    columns: tl.tensor,
    blocks: tl.tensor,
    ELEMENT: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    first, at, there = blocks_at(blocks, columns, 1, TILE)
    pairs, known = pairs_at(at, PAIRS), there[:, None]
    byte = tl.load(payload + (first * PAIRS + pairs), mask=known, other=0).to(tl.int32)
    dec = number_of(tl.load(scale + (first + at), mask=there, other=0).to(tl.int32) << 16)[:, None]
    both = joined(value(byte) * dec, value(byte >> 4) * dec, ELEMENT, TILE, PAIRS)
    tl.store(values + (first * (2 * PAIRS) + pairs_at(at, 2 * PAIRS)), both, mask=known)


@triton.jit
def number(x: tl.tensor, enc: tl.tensor, dec: tl.tensor) -> tl.tensor:
    """Return the code of x / dec, saturating, in the low nibble of int32; enc = 1 / dec."""
    y = x * enc
    y = tl.fma(tl.fma(y, 0.0 - dec, x), enc, y)
    return bits_of(tl.minimum(tl.maximum(y, -8.0), 7.0) + WHOLE)


@triton.jit
def value(code: tl.tensor) -> tl.tensor:
    """Return the fp32 value of the code in the low nibble of int32: the last bits of 2^23 + code, less 2^23 + 8."""
    return number_of((code & 0xF) | 0x4B000000) - 8388616.0
