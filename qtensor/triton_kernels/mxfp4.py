"""MXFP4: what qtensor/mxfp4.py defines, in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.triton_kernels import e2m1
from qtensor.triton_kernels.launching import DECODED, ELEMENTS, ENCODED, launch, tile_of, tiles, words
from qtensor.triton_kernels.pairs import (
    INF,
    NAN,
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

BLOCK = 32
PAIRS = tl.constexpr(BLOCK // 2)
SIXTH = tl.constexpr(0.1666666716337204)  # fp32(1 / 6)
NAN_CODE = tl.constexpr(255)
SMALLEST_BITS = tl.constexpr(0x00400000)  # 2^-127


def encode(x: Tensor, amax: None, *, scale_rounding: str) -> dict[str, Tensor]:
    """The parts of bf16, fp16 or fp32 values [rows, blocks, 32]; no two blocks share an amax."""
    rows, columns, tile = x.shape[0], x.shape[1], tile_of(ENCODED, BLOCK)
    parts = {
        "payload": torch.empty(rows, columns * BLOCK // 2, dtype=torch.uint8, device=x.device),
        "scale": torch.empty(rows, columns, dtype=torch.uint8, device=x.device),
    }
    launch(
        _encode,
        tiles(rows, columns, 1, tile),
        *(words(x), *parts.values(), columns, rows * columns),
        ELEMENT=ELEMENTS[x.dtype],
        UP=scale_rounding == "up",
        TILE=tile,
    )
    return parts


def decode(payload: Tensor, scale: Tensor, *, dtype: torch.dtype, scale_rounding: str) -> Tensor:
    """The values [rows, K] of a payload [rows, blocks, 16]."""
    rows, columns = scale.shape
    values, tile = torch.empty(rows, columns * BLOCK, dtype=dtype, device=payload.device), tile_of(DECODED, BLOCK)
    launch(
        _decode,
        tiles(rows, columns, 1, tile),
        *(payload, scale, values, columns, rows * columns),
        ELEMENT=ELEMENTS[dtype],
        TILE=tile,
    )
    return values


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
    whole_low, whole_high = finite(low), finite(high)

    amax = amax_of(whole_low, whole_high, 1)
    code = code_up(amax * SIXTH) if UP else tl.maximum((bits_of(amax) >> 23) - 2, 0)
    marked = tl.where(amax_of(low, high, 1) < INF, code, NAN_CODE)
    tl.store(scale + (first + at), marked.to(tl.uint8), mask=there)

    enc = power_of_two(254 - code)[:, None]
    byte = byte_of(e2m1.code(whole_low, enc), e2m1.code(whole_high, enc))
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
    dec = tl.where(code == NAN_CODE, NAN, power_of_two(code))[:, None]
    both = joined(e2m1.value(byte) * dec, e2m1.value(byte >> 4) * dec, ELEMENT, TILE, PAIRS)
    tl.store(values + (first * (2 * PAIRS) + pairs_at(at, 2 * PAIRS)), both, mask=known)


@triton.jit
def code_up(scale: tl.tensor) -> tl.tensor:
    """The E8M0 code, int32, of scales >= 0 rounded up to a power of two; see qtensor/codecs/e8m0.py."""
    bits = bits_of(scale)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 254) & (bits > SMALLEST_BITS)
    return exponent + up.to(tl.int32)


@triton.jit
def power_of_two(code: tl.tensor) -> tl.tensor:
    """2^(code - 127) for int32 codes 0..254."""
    return number_of(tl.where(code == 0, SMALLEST_BITS, code << 23))
