"""E4M3 and E5M2, as qtensor/spec/codecs/fp8.py defines them: by the hardware's conversion, or by bits of fp32 numbers.

From compute capability 9.0 on, one instruction makes two codes of two numbers (cvt.rn.satfinite: to nearest, ties to
even, saturating). Older parts get the same codes from integers: before 8.9 they have none, and for 8.9 Triton rounds to
fp16 first, which is not the same. `python -m
tests.gpu_offline.conversions` compares both with the definition for all 2^32 fp32 numbers: none differs.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from qtensor.numerics.triton_kernels.pairs import INF, NAN_BITS, bits_of, nearest, number_of

NAN_CODE = tl.constexpr(0x7F)  # of both


@triton.jit
def code(x: tl.tensor, enc: tl.tensor, E4M3: tl.constexpr) -> tl.tensor:
    """Return the code nearest to x * enc, saturating, uint8; NaN if x is not finite."""
    return converted(x, enc, E4M3) if cuda_capability_geq(9, 0) else counted(x, enc, E4M3)


@triton.jit
def converted(x: tl.tensor, enc: tl.tensor, E4M3: tl.constexpr) -> tl.tensor:
    """Return `code` by the hardware's conversion."""
    if E4M3:
        # 0 times what is not finite is NaN, of which E4M3 has one alone
        code = tl.fma(x, 0.0, x * enc).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        # E5M2 has several, and nobody says which one it will be
        code = tl.where(tl.abs(x) < INF, (x * enc).to(tl.float8e5).to(tl.uint8, bitcast=True), NAN_CODE)
    return code.to(tl.uint8)


@triton.jit
def counted(x: tl.tensor, enc: tl.tensor, E4M3: tl.constexpr) -> tl.tensor:
    """Return `code` by integers.

    With s the power of two below, but at least the smallest normal number 2^-b, steps are s / 2^m, and the code is
    their number + 2^m (log2(s) + b). The sum counts them in its low bits; what bits >> (23 - m) of s lacks to the rest,
    modulo 128, is added as s itself: 7 or 15 times 2^m steps.
    """
    if E4M3:
        power, total = nearest(tl.minimum(tl.abs(x * enc), 448.0), 0.015625, 1048583.0)
        magnitude = bits_of(total) + (bits_of(power) >> 20)
    else:
        power, total = nearest(tl.minimum(tl.abs(x * enc), 57344.0), 6.103515625e-05, 2097167.0)
        magnitude = bits_of(total) + (bits_of(power) >> 21)
    signed = (magnitude & 0x7F) | ((bits_of(x) >> 24) & -0x80)
    return tl.where(tl.abs(x) < INF, signed, NAN_CODE).to(tl.uint8)


@triton.jit
def value(code: tl.tensor, E4M3: tl.constexpr) -> tl.tensor:
    """Return the fp32 values of codes, uint8."""
    if E4M3:
        return e4m3_value(code)
    # E5M2 is the upper byte of fp16
    return (code.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e4m3(x: tl.tensor) -> tl.tensor:
    """Return (code, value) of the E4M3 number nearest to x, 0 <= x <= 448."""
    if cuda_capability_geq(9, 0):
        element = x.to(tl.float8e4nv)
        code, value = element.to(tl.uint8, bitcast=True).to(tl.int32), element.to(tl.float32)
    else:
        # with s the power of two below, but at least 2^-6, steps are s / 8; the code is their number + 8 (log2(s) + 6)
        power, total = nearest(x, 0.015625, 1048576.0)
        code = bits_of(total) + (bits_of(power) >> 20) - 968
        value = tl.fma(power, -1048576.0, total)
    return code, value


@triton.jit
def e4m3_value(code: tl.tensor) -> tl.tensor:
    """Return the fp32 values of E4M3 codes, uint8: an fp32 number of the same bits is 2^-120 times as large.

    The bits of a byte with its sign in front are in place after one shift, but for those between sign and magnitude.
    """
    bits = (code.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
    value = number_of(bits) * 1.329227995784916e36
    return number_of(tl.where(tl.abs(value) > 448.0, NAN_BITS, bits_of(value)))
