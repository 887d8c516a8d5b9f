"""MXFP4: what qtensor/formats/mxfp4.py defines, in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.numerics.triton_kernels import e2m1, e8m0
from qtensor.numerics.triton_kernels.launching import PACKED, Parts, decode_blocks, encode_blocks, tile_of
from qtensor.numerics.triton_kernels.pairs import (
    INF,
    amax_of,
    blocks_at,
    halves,
    joined,
    number_amax_of,
    pairs_at,
    whole,
)

BLOCK = 32
PAIRS = tl.constexpr(BLOCK // 2)
SIXTH = tl.constexpr(0.1666666716337204)  # fp32(1 / 6)


def encode(x: Tensor, amax: None, *, scale_rounding: str, out: Parts = None) -> dict[str, Tensor]:
    """Return the parts of bf16, fp16 or fp32 values [rows, blocks, 32]; no two blocks share an amax."""
    return encode_blocks(
        _encode,
        x,
        payload=torch.uint8,
        scale=torch.uint8,
        tile=tile_of(PACKED, BLOCK),
        UP=scale_rounding == "up",
        out=out,
    )


def decode(payload: Tensor, scale: Tensor, *, dtype: torch.dtype, scale_rounding: str) -> Tensor:
    """Return the values [rows, K] of a payload [rows, blocks, 16]."""
    return decode_blocks(_decode, payload, scale, dtype=dtype, block=BLOCK)


@triton.jit
def _encode(
    x: tl.tensor,
    payload: tl.tensor,
    scale: tl.tensor,
    columns: tl.tensor,
    blocks: tl.tensor,
    ELEMENT: tl.constexpr,
    UP: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    first, at, there = blocks_at(blocks, columns, 1, TILE)
    pairs, known = pairs_at(at, PAIRS), there[:, None]
    low, high = halves(tl.load(x + (first * PAIRS + pairs), mask=known, other=0), ELEMENT)
    whole_low, whole_high = whole(low), whole(high)

    amax = number_amax_of(whole_low, whole_high, 1)
    code = e8m0.code_up(amax * SIXTH) if UP else e8m0.code_floor(amax, 2)
    marked = tl.where(amax_of(whole_low, whole_high, 1) < INF, code, e8m0.NAN_CODE)
    tl.store(scale + (first + at), marked.to(tl.uint8), mask=there)

    enc = e8m0.power_of_two(254 - code)[:, None]
    byte = e2m1.byte(whole_low, whole_high, enc)
    tl.store(payload + (first * PAIRS + pairs), byte, mask=known)


@triton.jit
def _decode(
    payload: tl.tensor,
    scale: tl.tensor,
    values: tl.tensor,
    columns: tl.tensor,
    blocks: tl.tensor,
    ELEMENT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    first, at, there = blocks_at(blocks, columns, 1, TILE)
    pairs, known = pairs_at(at, PAIRS), there[:, None]
    byte = tl.load(payload + (first * PAIRS + pairs), mask=known, other=0).to(tl.int32)
    code = tl.load(scale + (first + at), mask=there, other=0).to(tl.int32)
    dec = e8m0.value(code)[:, None]
    both = joined(e2m1.value(byte) * dec, e2m1.value(byte >> 4) * dec, ELEMENT, TILE, PAIRS)
    tl.store(values + (first * (2 * PAIRS) + pairs_at(at, 2 * PAIRS)), both, mask=known)
