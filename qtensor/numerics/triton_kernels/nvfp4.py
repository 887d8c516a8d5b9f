"""NVFP4: what qtensor/formats/nvfp4.py defines, for row blocks, in one pass over memory under an amax that is known."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.numerics.triton_kernels import e2m1, fp8
from qtensor.numerics.triton_kernels.launching import (
    PACKED,
    WARPS,
    Parts,
    decode_blocks,
    encode_blocks,
    launch,
    made,
    tile_of,
)
from qtensor.numerics.triton_kernels.pairs import (
    FLT_MAX,
    INF,
    amax_of,
    blocks_at,
    blocks_of,
    halves,
    joined,
    number_amax_of,
    pairs_at,
    place,
    whole,
)
from qtensor.numerics.triton_kernels.reductions import amax_of_parts

BLOCK = 16
PAIRS = tl.constexpr(BLOCK // 2)
ROWS = WARPS * 32  # of a program that has no blocks
LARGEST = tl.constexpr(2688.0)  # 448 * 6
SIXTH = tl.constexpr(0.1666666716337204)  # fp32(1 / 6)


def encode(x: Tensor, amax: Tensor, *, square: bool, out: Parts = None) -> dict[str, Tensor]:
    """Return the parts of bf16, fp16 or fp32 values [.., blocks, 16] under an amax.

    It is fp32 [], [rows, 1] or, in parts of it, [parts].
    """
    wide = amax.to(x.device).contiguous()
    by_row = wide.ndim == 2
    if by_row:
        out = None  # not half of them, if the second launch fails
    global_scale = made(out, "global_scale", wide.shape if by_row else (), torch.float32, x.device)
    if by_row:
        amax, wide = wide, torch.empty_like(wide)
        launch(_global_scales, triton.cdiv(wide.numel(), ROWS), *(amax, wide, global_scale, wide.numel()), ROWS=ROWS)
    parts = encode_blocks(
        _encode,
        x,
        wide,
        global_scale,
        payload=torch.uint8,
        scale=torch.float8_e4m3fn,
        tile=tile_of(PACKED, BLOCK),
        square=BLOCK if square else 1,
        out=out,
        BY_ROW=by_row,
        IN_PARTS=wide.ndim == 1,
        SQUARE=BLOCK if square else 1,
    )
    return {**parts, "global_scale": global_scale}


def decode(payload: Tensor, scale: Tensor, global_scale: Tensor, *, dtype: torch.dtype, square: bool) -> Tensor:
    """Return the values [rows, K] of a payload [rows, blocks, 8]; global scales are fp32 [] or [rows, 1]."""
    wide = global_scale.to(payload.device).contiguous()
    return decode_blocks(_decode, payload, scale, wide, dtype=dtype, block=BLOCK, BY_ROW=wide.ndim > 0)


@triton.jit
def _encode(
    x: tl.tensor,
    payload: tl.tensor,
    scale: tl.tensor,
    wide: tl.tensor,
    global_scale: tl.tensor,
    columns: tl.tensor,
    blocks: tl.tensor,
    ELEMENT: tl.constexpr,
    BY_ROW: tl.constexpr,
    IN_PARTS: tl.constexpr,
    SQUARE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Encode a tile. `wide` is the amax of all values or, by row, S, whose inverse is in `global_scale` already."""
    first, at, there = blocks_of(place(IN_PARTS), blocks, columns, SQUARE, TILE)
    pairs, known = pairs_at(at, PAIRS), there[:, None]
    low, high = halves(tl.load(x + (first * PAIRS + pairs), mask=known, other=0), ELEMENT)
    whole_low, whole_high = whole(low), whole(high)

    if BY_ROW:
        row = (first.to(tl.int32) + at) // columns
        enc = tl.load(wide + row, mask=there, other=1.0)
        dec = tl.load(global_scale + row, mask=there, other=1.0)
    else:
        enc, dec = global_scales(amax_of_parts(wide) if IN_PARTS else tl.load(wide))
        if tl.program_id(0) == 0:
            tl.store(global_scale, dec)

    code, rounded = fp8.e4m3(tl.minimum(number_amax_of(whole_low, whole_high, SQUARE) * (enc * SIXTH), 448.0))
    code = tl.where(amax_of(whole_low, whole_high, SQUARE) < INF, code, fp8.NAN_CODE)
    tl.store(scale + (first + at), code.to(tl.uint8), mask=there)

    enc = tl.minimum(tl.math.div_rn(1.0, rounded * dec), FLT_MAX)[:, None]
    byte = e2m1.byte(whole_low, whole_high, enc)
    tl.store(payload + (first * PAIRS + pairs), byte, mask=known)


@triton.jit
def _decode(
    payload: tl.tensor,
    scale: tl.tensor,
    values: tl.tensor,
    global_scale: tl.tensor,
    columns: tl.tensor,
    blocks: tl.tensor,
    ELEMENT: tl.constexpr,
    BY_ROW: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    first, at, there = blocks_at(blocks, columns, 1, TILE)
    pairs, known = pairs_at(at, PAIRS), there[:, None]
    byte = tl.load(payload + (first * PAIRS + pairs), mask=known, other=0).to(tl.int32)
    dec = fp8.e4m3_value(tl.load(scale + (first + at), mask=there, other=0))
    if BY_ROW:
        dec *= tl.load(global_scale + (first.to(tl.int32) + at) // columns, mask=there, other=0.0)
    else:
        dec *= tl.load(global_scale)
    dec = dec[:, None]
    both = joined(e2m1.value(byte) * dec, e2m1.value(byte >> 4) * dec, ELEMENT, TILE, PAIRS)
    tl.store(values + (first * (2 * PAIRS) + pairs_at(at, 2 * PAIRS)), both, mask=known)


@triton.jit
def _global_scales(
    amax: tl.tensor, enc: tl.tensor, global_scale: tl.tensor, rows: tl.tensor, ROWS: tl.constexpr
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wide, dec = global_scales(tl.load(amax + row, mask=row < rows, other=0.0))
    tl.store(enc + row, wide, mask=row < rows)
    tl.store(global_scale + row, dec, mask=row < rows)


@triton.jit
def global_scales(amax: tl.tensor) -> tl.tensor:
    """Return (S, 1 / S) for amaxes of tensors or rows."""
    enc = tl.where(amax == 0.0, 1.0, tl.minimum(tl.math.div_rn(LARGEST, amax), FLT_MAX))
    return enc, tl.math.div_rn(1.0, enc)
