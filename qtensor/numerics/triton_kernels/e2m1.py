"""E2M1, as qtensor/spec/codecs/e2m1.py defines it: by the hardware's conversion, or by fp32 sums whose bits are codes.

From compute capability 10.0 on, one instruction makes two codes of two numbers (cvt.rn.satfinite.e2m1x2: to nearest,
ties to even, saturating; the largest of NaN). Elsewhere codes come from sums and products: GPUs have half as many units
for integers, comparisons and conversions as for these, and a code by integers needs more of them than memory leaves
time for.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from qtensor.numerics.triton_kernels.pairs import bits_of, number_of

ONES = tl.constexpr(2.0**23)  # from here on, fp32 numbers are whole: added to one, a sum is rounded to whole numbers
SIXTEENS = tl.constexpr(-15.0 * 2.0**23)  # 16 times a number behind ONES, plus this, is behind ONES again


@triton.jit
def code(x: tl.tensor, enc: tl.tensor) -> tl.tensor:
    """Return the code nearest to x * enc, saturating, in the low nibble of int32; 0 of NaN, x is not infinite."""
    return bits_of(counted(x, enc, ONES)) & 7 | (bits_of(x) >> 28) & 8


@triton.jit
def byte(low: tl.tensor, high: tl.tensor, enc: tl.tensor) -> tl.tensor:
    """Return the byte of two codes, uint8; as `code`, of low * enc in its low nibble."""
    return converted(low * enc, high * enc) if cuda_capability_geq(10, 0) else summed(low, high, enc)


@triton.jit
def converted(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Return the bytes of numbers by the hardware's conversion, four at a time; 0 of NaN."""
    low, high = tl.where(low == low, low, 0.0), tl.where(high == high, high, 0.0)  # noqa: PLR0124 - not NaN
    return tl.inline_asm_elementwise(
        """{
            .reg .b8 a, b, c, d;
            cvt.rn.satfinite.e2m1x2.f32 a, $5, $1;
            cvt.rn.satfinite.e2m1x2.f32 b, $6, $2;
            cvt.rn.satfinite.e2m1x2.f32 c, $7, $3;
            cvt.rn.satfinite.e2m1x2.f32 d, $8, $4;
            mov.b32 $0, {a, b, c, d};
        }""",
        "=r,f,f,f,f,f,f,f,f",
        [low, high],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def summed(low: tl.tensor, high: tl.tensor, enc: tl.tensor) -> tl.tensor:
    """Return `byte` by sums."""
    both = counted(low, enc, tl.fma(counted(high, enc, ONES), 16.0, SIXTEENS))
    return (bits_of(both) | (bits_of(low) >> 28) & 8 | (bits_of(high) >> 24) & 0x80).to(tl.uint8)


@triton.jit
def counted(x: tl.tensor, enc: tl.tensor, count: tl.tensor) -> tl.tensor:
    """Return count, an even number behind ONES, plus the magnitude of the code nearest to x * enc; none of NaN.

    Up to 2, codes count halves; from there to 4 ones, and twos beyond. Each range is 0 below and 1 above, so that of
    the three sums only the last one that is not whole is rounded, and every sum before it is even: ties go to the even
    code.
    """
    scaled = tl.abs(x * enc)
    count = tl.fma(between_0_and_1(scaled * 0.5), 4.0, count)
    count = tl.fma(between_0_and_1(tl.fma(scaled, 0.5, -1.0)), 2.0, count)
    return between_0_and_1(tl.fma(scaled, 0.5, -2.0)) + count


@triton.jit
def between_0_and_1(x: tl.tensor) -> tl.tensor:
    """Return x, at least 0 and at most 1; 0 for NaN. The operation that makes x does it, too, for nothing."""
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def value(code: tl.tensor) -> tl.tensor:
    """Return the fp32 value of the code in the low nibble of int32.

    Its bits are those of an fp32 number with another exponent, 0.5 being a denormal one: 2^-126 times the value.
    """
    return number_of(((code & 7) << 22) | ((code & 8) << 28)) * 8.507059173023462e37
