"""E8M0 as scales of blocks, as qtensor/spec/codecs/e8m0.py defines them: int32 codes 0..254 and their powers of two."""

import triton
import triton.language as tl

from qtensor.numerics.triton_kernels.pairs import NAN_BITS, bits_of, number_of

NAN_CODE = tl.constexpr(255)
SMALLEST_BITS = tl.constexpr(0x00400000)  # 2^-127


@triton.jit
def code_up(scale: tl.tensor) -> tl.tensor:
    """Return the code of scales >= 0 rounded up to a power of two."""
    bits = bits_of(scale)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 254) & (bits > SMALLEST_BITS)
    return exponent + up.to(tl.int32)


@triton.jit
def code_floor(amax: tl.tensor, EXPONENT: tl.constexpr) -> tl.tensor:
    """Return the code of floor(log2 amax) - EXPONENT, at least 0; amax >= 0."""
    return tl.maximum((bits_of(amax) >> 23) - EXPONENT, 0)


@triton.jit
def power_of_two(code: tl.tensor) -> tl.tensor:
    """Return 2^(code - 127)."""
    return number_of(power_bits(code))


@triton.jit
def power_bits(code: tl.tensor) -> tl.tensor:
    """Return the bits of 2^(code - 127)."""
    return tl.where(code == 0, SMALLEST_BITS, code << 23)


@triton.jit
def value(code: tl.tensor) -> tl.tensor:
    """Return 2^(code - 127), or NaN for its code."""
    return number_of(tl.where(code == NAN_CODE, NAN_BITS, power_bits(code)))
