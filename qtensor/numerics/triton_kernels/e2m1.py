"""E2M1, as qtensor/spec/codecs/e2m1.py defines it, by fp32 numbers whose bits are codes."""

import triton
import triton.language as tl

from qtensor.numerics.triton_kernels.pairs import bits_of, nearest, number_of

LARGEST = tl.constexpr(6.0)


@triton.jit
def code(x: tl.tensor, enc: tl.tensor) -> tl.tensor:
    """Return the code nearest to x * enc, saturating, in the low nibble of int32; x is finite.

    With s the power of two below, but at least 1, steps are s / 2, and the code is their number + 2 log2(s). The sum
    counts them in its low bits; bits >> 22 of s is 2 log2(s) + 254, to which 2 are missing modulo 8: they are added as
    s itself, two steps.
    """
    power, total = nearest(tl.minimum(tl.abs(x * enc), LARGEST), 1.0, 4194305.0)
    magnitude = bits_of(total) + (bits_of(power) >> 22)
    return (magnitude & 7) | ((bits_of(x) >> 28) & -8)


@triton.jit
def value(code: tl.tensor) -> tl.tensor:
    """Return the fp32 value of the code in the low nibble of int32.

    Its bits are those of an fp32 number with another exponent, 0.5 being a denormal one: 2^-126 times the value.
    """
    return number_of(((code & 7) << 22) | ((code & 8) << 28)) * 8.507059173023462e37
