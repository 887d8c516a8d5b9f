"""E8M0: a scale 2^(code - 127), one byte. Code 0 means 2^-127; 255 is NaN and marks a block that is not finite.

Two rules make the code of a block with elements up to `largest`:

    up      exponent of amax / largest, rounded UP to a power of two: no element saturates (torchao's RCEIL)
    floor   floor(log2 amax) - floor(log2 largest), code at least 0: the OCP specification's; elements may saturate
"""

import math

import torch
from torch import Tensor

NAN_CODE = 255
SMALLEST_BITS = 0x00400000  # 2^-127, the one scale that is subnormal in fp32


def code_up(scale: Tensor) -> Tensor:
    """The code (int32) of fp32 scales rounded up to a power of two; 0 for 0."""
    bits = scale.view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= SMALLEST_BITS))
    return exponent + up.to(torch.int32)


def code_floor(amax: Tensor, exponent: int) -> Tensor:
    """The code (int32) of floor(log2 amax) - exponent, at least 0."""
    return (((amax.view(torch.int32) >> 23) & 0xFF) - exponent).clamp(min=0)


def power_of_two(code: Tensor) -> Tensor:
    """2^(code - 127) for int32 codes 0..254, built from its bits."""
    return torch.where(code == 0, SMALLEST_BITS, code << 23).view(torch.float32)


def grid(scale: Tensor) -> tuple[Tensor, Tensor]:
    """(1 / value, value), fp32, for stored codes that are not NaN."""
    code = scale.to(torch.int32)
    return power_of_two(254 - code), power_of_two(code)


def decode(scale: Tensor) -> Tensor:
    """The values of stored codes, fp32."""
    code = scale.to(torch.int32)
    return torch.where(code == NAN_CODE, math.nan, power_of_two(code))


def marked(scale: Tensor, broken: Tensor) -> Tensor:
    """Stored codes with NaN where a block is `broken` (fp32, not 0)."""
    return torch.where(broken > 0, NAN_CODE, scale.to(torch.int32)).to(torch.uint8)


def asked(scale: Tensor, largest: Tensor, least: float) -> Tensor:
    """Where stored codes can be what a rule makes, given the largest element under each of them, fp32; bool.

    `least` is what the rule brings an amax to at least: half of the largest element, or ("floor") its power of two.
    Only the smallest code, 0, is given to smaller values, too; what a block that is not finite held, nobody knows.
    """
    return (largest >= least) | (scale == 0) | (scale == NAN_CODE)
