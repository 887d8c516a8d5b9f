"""Float8 in blocks: what qtensor/formats/float8_blocks.py defines, in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.numerics.triton_kernels import fp8
from qtensor.numerics.triton_kernels.float8 import encode_own
from qtensor.numerics.triton_kernels.launching import Parts, decode_blocks
from qtensor.numerics.triton_kernels.pairs import blocks_at, pairs_at, rounded

BLOCK = 128
LANES = tl.constexpr(BLOCK)


def encode(
    x: Tensor, amax: None, *, element: torch.dtype, square: bool, power_of_two: bool, out: Parts = None
) -> dict[str, Tensor]:
    """Return the parts of bf16, fp16 or fp32 values [.., blocks, 128]; no two blocks share an amax."""
    return encode_own(x, element=element, power_of_two=power_of_two, square=BLOCK if square else 1, out=out)


def decode(
    payload: Tensor, scale: Tensor, *, dtype: torch.dtype, element: torch.dtype, square: bool, power_of_two: bool
) -> Tensor:
    """Return the values [rows, K] of a payload [rows, blocks, 128]."""
    return decode_blocks(_decode, payload, scale, dtype=dtype, block=BLOCK, E4M3=element == torch.float8_e4m3fn)


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
    dec = tl.load(scale + (first + at), mask=there, other=0.0)[:, None]
    tl.store(values + (first * LANES + lanes), rounded(fp8.value(code, E4M3) * dec, ELEMENT), mask=known)
