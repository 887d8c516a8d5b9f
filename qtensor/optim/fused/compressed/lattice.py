"""Lattices of fp32 numbers in Triton: qtensor/states/lattice.py, operation by operation.

`floor` is the exponent from which on a lattice has `BITS` of mantissa; draws are int32, see draws.py.
"""

import triton
import triton.language as tl

from qtensor.numerics.triton_kernels.pairs import INF, bits_of, number_of
from qtensor.optim.fused.compressed.draws import shifted
from qtensor.states import lattice as _lattice

LEAST = tl.constexpr(_lattice.LEAST)
ONE = tl.constexpr(1)


@triton.jit
def by_mantissa(x: tl.tensor, BITS: tl.constexpr, draws: tl.tensor) -> tl.tensor:
    """Return fp32 rounded to BITS of mantissa; what is not finite stays."""
    LOW: tl.constexpr = 23 - BITS
    MOST: tl.constexpr = 0x7F800000 - (ONE << LOW)
    raw = bits_of(x)
    magnitude = tl.minimum(((raw & 0x7FFFFFFF) + shifted(draws, 32 - LOW)) & -(ONE << LOW), MOST)
    return tl.where(tl.abs(x) < INF, number_of(magnitude | (raw & -0x80000000)), x)


@triton.jit
def below(magnitude: tl.tensor, BITS: tl.constexpr, floor: tl.tensor, draws: tl.tensor) -> tl.tensor:
    """Return magnitudes rounded to multiples of 2^(floor - BITS); anything for those from 2^floor on."""
    steps = scaled(magnitude, -(floor - BITS))
    whole = tl.floor(steps)
    chance = (shifted(draws, 8) | 1).to(tl.float32) * 5.9604644775390625e-08
    up = tl.where(bits_of(chance - (steps - whole)) < 0, 1.0, 0.0)
    return scaled(whole + up, floor - BITS)


@triton.jit
def count(x: tl.tensor, BITS: tl.constexpr, floor: tl.tensor) -> tl.tensor:
    """Return the number of each x, int32, negative for negative ones."""
    magnitude = tl.abs(x)
    raw = bits_of(magnitude) + (ONE << (22 - BITS))
    above = ((raw - ((floor + 127) << 23)) >> (23 - BITS)) + (ONE << BITS)
    linear = tl.minimum(tl.floor(scaled(magnitude, -(floor - BITS)) + 0.5), 1073741824.0).to(tl.int32)
    sign = bits_of(x) >> 31
    return (tl.where(is_below(magnitude, floor), linear, above) ^ sign) - sign


@triton.jit
def value(number: tl.tensor, BITS: tl.constexpr, floor: tl.tensor) -> tl.tensor:
    """Return the fp32 of each number; 0 is +0."""
    FIRST: tl.constexpr = ONE << BITS
    sign = number >> 31
    magnitude = (number ^ sign) - sign
    raw = ((magnitude - FIRST) << (23 - BITS)) + ((floor + 127) << 23)
    linear = bits_of(scaled(magnitude.to(tl.float32), floor - BITS))
    return number_of(tl.where(magnitude < FIRST, linear, raw) | (sign & -0x80000000))


@triton.jit
def is_below(magnitude: tl.tensor, floor: tl.tensor) -> tl.tensor:
    """Return whether magnitudes are below 2^floor."""
    return bits_of(magnitude) < ((floor + 127) << 23)


@triton.jit
def signed(magnitude: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Return magnitudes with the signs of `like`; 0 is +0."""
    raw = bits_of(magnitude)
    return number_of(tl.where(raw == 0, 0, raw | (bits_of(like) & -0x80000000)))


@triton.jit
def scaled(x: tl.tensor, exponent: tl.tensor) -> tl.tensor:
    """Return x * 2^exponent, in two steps."""
    half = exponent >> 1
    return x * power(half) * power(exponent - half)


@triton.jit
def power(exponent: tl.tensor) -> tl.tensor:
    """Return 2^exponent, from -126 to 127."""
    return number_of((exponent + 127) << 23)
