"""NVFP4: what qtensor/nvfp4.py defines, for row blocks, in one pass over memory under an amax that is known.

E4M3 scales are made of the bits of fp32 numbers: steps of 2^-3 of the power of two below, but at least of 2^-9.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.triton_kernels import e2m1
from qtensor.triton_kernels.launching import DECODED, ELEMENTS, ENCODED, launch, tile_of, tiles, words
from qtensor.triton_kernels.pairs import (
    FLT_MAX,
    INF,
    NAN,
    amax_of,
    bits_of,
    blocks_at,
    byte_of,
    finite,
    halves,
    joined,
    nearest,
    number_of,
    pairs_at,
)

BLOCK = 16
PAIRS = tl.constexpr(BLOCK // 2)
LARGEST = tl.constexpr(2688.0)  # 448 * 6
SIXTH = tl.constexpr(0.1666666716337204)  # fp32(1 / 6)


def encode(x: Tensor, amax: Tensor | None, *, square: bool) -> dict[str, Tensor]:
    """The parts of bf16, fp16 or fp32 values [.., blocks, 16] under an amax, fp32 [] or [rows, 1]."""
    assert amax is not None
    columns, size = x.shape[-2], BLOCK if square else 1
    rows, tile = x.numel() // (columns * BLOCK), tile_of(ENCODED, BLOCK)
    parts = {
        "payload": torch.empty(rows, columns * BLOCK // 2, dtype=torch.uint8, device=x.device),
        "scale": torch.empty(rows, columns, dtype=torch.uint8, device=x.device),
        "global_scale": torch.empty(amax.shape, dtype=torch.float32, device=x.device),
    }
    launch(
        _encode,
        tiles(rows, columns, size, tile),
        *(words(x), amax.to(x.device).contiguous(), *parts.values(), columns, rows * columns),
        ELEMENT=ELEMENTS[x.dtype],
        BY_ROW=amax.ndim > 0,
        SQUARE=size,
        TILE=tile,
    )
    return {**parts, "scale": parts["scale"].view(torch.float8_e4m3fn)}


def decode(payload: Tensor, scale: Tensor, global_scale: Tensor, *, dtype: torch.dtype, square: bool) -> Tensor:
    """The values [rows, K] of a payload [rows, blocks, 8]; global scales are fp32 [] or [rows, 1].

    Square blocks are stored as row blocks are.
    """
    rows, columns = scale.shape
    values, wide = (
        torch.empty(rows, columns * BLOCK, dtype=dtype, device=payload.device),
        global_scale.to(payload.device),
    )
    tile = tile_of(DECODED, BLOCK)
    launch(
        _decode,
        tiles(rows, columns, 1, tile),
        *(payload, scale.view(torch.uint8), wide.contiguous(), values, columns, rows * columns),
        ELEMENT=ELEMENTS[dtype],
        BY_ROW=wide.ndim > 0,
        TILE=tile,
    )
    return values


@triton.jit
def _encode(
    x: tl.tensor,
    amax: tl.tensor,
    payload: tl.tensor,
    scale: tl.tensor,
    global_scale: tl.tensor,
    columns: tl.tensor,
    blocks: tl.tensor,
    ELEMENT: tl.constexpr,
    BY_ROW: tl.constexpr,
    SQUARE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    first, at, there = blocks_at(blocks, columns, SQUARE, TILE)
    pairs, known = pairs_at(at, PAIRS), there[:, None]
    low, high = halves(tl.load(x + (first * PAIRS + pairs), mask=known, other=0), ELEMENT)
    whole_low, whole_high = finite(low), finite(high)

    if BY_ROW:
        block = first.to(tl.int32) + at
        row = block // columns
        enc, dec = global_scales(tl.load(amax + row, mask=there, other=0.0))
        tl.store(global_scale + row, dec, mask=there & (block == row * columns))
    else:
        enc, dec = global_scales(tl.load(amax))
        if tl.program_id(0) == 0:
            tl.store(global_scale, dec)

    code, rounded = e4m3(tl.minimum(amax_of(whole_low, whole_high, SQUARE) * (enc * SIXTH), 448.0))
    code = tl.where(amax_of(low, high, SQUARE) < INF, code, 0x7F)
    tl.store(scale + (first + at), code.to(tl.uint8), mask=there)

    enc = tl.minimum(tl.math.div_rn(1.0, rounded * dec), FLT_MAX)[:, None]
    byte = byte_of(e2m1.code(whole_low, enc), e2m1.code(whole_high, enc))
    tl.store(payload + (first * PAIRS + pairs), byte, mask=known)


@triton.jit
def _decode(
    payload: tl.tensor,
    scale: tl.tensor,
    global_scale: tl.tensor,
    values: tl.tensor,
    columns: tl.tensor,
    blocks: tl.tensor,
    ELEMENT: tl.constexpr,
    BY_ROW: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    first, at, there = blocks_at(blocks, columns, 1, TILE)
    pairs, known = pairs_at(at, PAIRS), there[:, None]
    byte = tl.load(payload + (first * PAIRS + pairs), mask=known, other=0).to(tl.int32)
    dec = e4m3_value(tl.load(scale + (first + at), mask=there, other=0).to(tl.int32))
    if BY_ROW:
        dec *= tl.load(global_scale + (first.to(tl.int32) + at) // columns, mask=there, other=0.0)
    else:
        dec *= tl.load(global_scale)
    dec = dec[:, None]
    both = joined(e2m1.value(byte) * dec, e2m1.value(byte >> 4) * dec, ELEMENT, TILE, PAIRS)
    tl.store(values + (first * (2 * PAIRS) + pairs_at(at, 2 * PAIRS)), both, mask=known)


@triton.jit
def global_scales(amax: tl.tensor) -> tl.tensor:
    """(S, 1 / S) for amaxes of tensors or rows."""
    enc = tl.where(amax == 0.0, 1.0, tl.minimum(tl.math.div_rn(LARGEST, amax), FLT_MAX))
    return enc, tl.math.div_rn(1.0, enc)


@triton.jit
def e4m3(x: tl.tensor) -> tl.tensor:
    """(code, value) of the E4M3 number nearest to x, 0 <= x <= 448.

    With s the power of two below, but at least 2^-6, steps are s / 8, and the code is their number + 8 (log2(s) + 6).
    """
    power, total = nearest(x, 0.015625, 1048576.0)
    return bits_of(total) + (bits_of(power) >> 20) - 968, tl.fma(power, -1048576.0, total)


@triton.jit
def e4m3_value(code: tl.tensor) -> tl.tensor:
    """The fp32 values of E4M3 codes, int32: an fp32 number of the same bits is 2^-120 times as large."""
    value = number_of(((code & 0x7F) << 20) | ((code & 0x80) << 24)) * 1.329227995784916e36
    return tl.where((code & 0x7F) == 0x7F, NAN, value)
