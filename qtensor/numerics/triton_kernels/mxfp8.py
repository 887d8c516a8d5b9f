"""MXFP8: what qtensor/formats/mxfp8.py defines, for row and square blocks, in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.numerics.triton_kernels import e8m0, fp8
from qtensor.numerics.triton_kernels.launching import ENCODED, WARPS, Parts, decode_blocks, encode_blocks, tile_of
from qtensor.numerics.triton_kernels.pairs import INF, blocks_at, largest, largest_number, pairs_at, rounded, whole

BLOCK = 32
LANES = tl.constexpr(BLOCK)
ROW_WARPS = (
    2  # of a program that has rows' blocks, which no other warp waits for: the fastest of those tried on an H200
)
E4M3_RECIPROCAL = tl.constexpr(0.0022321429569274187)  # fp32(1 / 448)
E5M2_RECIPROCAL = tl.constexpr(1.743861685099546e-05)  # fp32(1 / 57344)


def encode(
    x: Tensor, amax: None, *, element: torch.dtype, square: bool, scale_rounding: str, out: Parts = None
) -> dict[str, Tensor]:
    """Return the parts of bf16, fp16 or fp32 values [.., blocks, 32]; no two blocks share an amax."""
    size = BLOCK if square else 1
    return encode_blocks(
        _encode,
        x,
        payload=element,
        scale=torch.uint8,
        tile=tile_of(ENCODED, BLOCK) if square else tile_of(ENCODED, BLOCK) * ROW_WARPS // WARPS,
        square=size,
        num_warps=WARPS if square else ROW_WARPS,
        E4M3=element == torch.float8_e4m3fn,
        UP=scale_rounding == "up",
        SQUARE=size,
        out=out,
    )


def decode(
    payload: Tensor, scale: Tensor, *, dtype: torch.dtype, element: torch.dtype, square: bool, scale_rounding: str
) -> Tensor:
    """Return the values [rows, K] of a payload [rows, blocks, 32]."""
    return decode_blocks(_decode, payload, scale, dtype=dtype, block=BLOCK, E4M3=element == torch.float8_e4m3fn)


@triton.jit
def _encode(
    x: tl.tensor,
    payload: tl.tensor,
    scale: tl.tensor,
    columns: tl.tensor,
    blocks: tl.tensor,
    E4M3: tl.constexpr,
    UP: tl.constexpr,
    SQUARE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    first, at, there = blocks_at(blocks, columns, SQUARE, TILE)
    lanes, known = pairs_at(at, LANES), there[:, None]
    values = tl.load(x + (first * LANES + lanes), mask=known, other=0.0).to(tl.float32)

    amax = largest_number(tl.abs(whole(values)), SQUARE)
    if UP:
        code = e8m0.code_up(amax * (E4M3_RECIPROCAL if E4M3 else E5M2_RECIPROCAL))
    else:
        code = e8m0.code_floor(amax, 8 if E4M3 else 15)
    marked = tl.where(largest(tl.abs(values), SQUARE) < INF, code, e8m0.NAN_CODE)
    tl.store(scale + (first + at), marked.to(tl.uint8), mask=there)

    byte = fp8.code(values, e8m0.power_of_two(254 - code)[:, None], E4M3)
    tl.store(payload + (first * LANES + lanes), byte, mask=known)


@triton.jit
def _decode(
    payload: tl.tensor,
    scale: tl.tensor,
    values: tl.tensor,
    columns: tl.tensor,
    blocks: tl.tensor,
    ELEMENT: tl.constexpr,
    E4M3: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    first, at, there = blocks_at(blocks, columns, 1, TILE)
    lanes, known = pairs_at(at, LANES), there[:, None]
    code = tl.load(payload + (first * LANES + lanes), mask=known, other=0)
    dec = e8m0.value(tl.load(scale + (first + at), mask=there, other=0).to(tl.int32))[:, None]
    tl.store(values + (first * LANES + lanes), rounded(fp8.value(code, E4M3) * dec, ELEMENT), mask=known)
