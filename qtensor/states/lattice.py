"""A lattice of fp32 numbers: `bits` of mantissa for magnitudes from 2^E on, equal distances below.

    magnitude >= 2^E    the fp32 numbers whose last 23 - bits bits are 0
    magnitude <  2^E    multiples of 2^(E - bits), so that 0 is reached in equal steps

It is what a float of `bits` bits of mantissa holds whose least normal number is 2^E. The numbers of one sign are
counted from 0: `count` is that number, `value` the way back. A lattice with a greater E has no number that one with a
smaller E lacks, so rounding on the finer one first is harmless.

All of it is exact in fp32 and int32: the same bytes eager, compiled and on every device. Choices are made by masks (-1
or 0, int32), not by torch.where: inductor stores what a long chain has come to, and has no vector code for storing
bool.
"""

import torch
from torch import Tensor

ENOUGH = 2**16  # more than any number that compiled code takes as a constant
NEARLY = 1 << 10  # fp32 numbers before a power of two
LEAST = -126  # exponent of the least normal number in fp32: a lattice ends with fp32's own distances


def constant(number: int) -> int:
    """Return a number of at most 16 bits as a constant of compiled code, to which a captured number may be a symbol.

    Shifts by a symbol are no vector code, and inductor clamps to one in fp32.
    """
    low, high = -ENOUGH, ENOUGH
    # each comparison is a guard; between the last two there is one number
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if number >= middle else (low, middle)
    if number != low:
        raise AssertionError(number)
    return low


def floor_of(unit: Tensor, least: int) -> Tensor:
    """Return the lattice's E, int32, for fp32 units (positive; anything for others).

    A unit that is nearly the next power of two counts as that: where elements are equally far apart, half a step of
    theirs, unit / 2^exponent * 2^14, must leave room for what rounding adds to it.
    """
    # a subnormal number shows no exponent
    raised = ((unit * 2.0**64).view(torch.int32) + NEARLY >> 23 & 0xFF) - 127 - 64
    plain = (unit.view(torch.int32) + NEARLY >> 23 & 0xFF) - 127
    return (torch.where(plain > LEAST - 1, plain, raised) + least).clamp(LEAST, 127)


def by_mantissa(x: Tensor, bits: int, draws: Tensor) -> Tensor:
    """Return finite fp32 rounded to `bits` of mantissa; `draws`: int32, see draws.py (HALF: to the nearest)."""
    low = 23 - bits
    raw = x.view(torch.int32)
    noise = (draws >> (32 - low)) & ((1 << low) - 1)
    magnitude = ((raw & 0x7FFFFFFF) + noise) & -(1 << low)
    # the largest finite number of the lattice, not infinity
    magnitude = magnitude.clamp(max=0x7F7FFFFF & -(1 << low))
    rounded = (magnitude | (raw & -0x80000000)).view(torch.float32)
    return torch.where(x.abs() < torch.inf, rounded, x)


def below(magnitude: Tensor, bits: int, floor: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Return magnitudes rounded to multiples of 2^(floor - bits), and what the other neighbour would have been.

    Only magnitudes below 2^floor are what is asked for; greater ones give anything.
    """
    steps = _scaled(magnitude, bits - floor)
    whole = steps.floor()
    # odd: never 0, so what is nothing beside a step is never rounded up to one; the mean is exact up to 2^-24
    chance = ((draws >> 8) & 0xFFFFFF | 1).to(torch.float32) * 2.0**-24
    # exact: both are multiples of the same power of two
    up = negative(chance - (steps - whole)).to(torch.float32)
    back = floor - bits
    return _scaled(whole - up, back), _scaled(whole + (1.0 + up), back)


def count(x: Tensor, bits: int, floor: Tensor) -> Tensor:
    """Return the number of each x on the lattice, int32, negative for negative ones; to the nearest if it is none."""
    magnitude = x.abs()
    raw = magnitude.view(torch.int32) + (1 << (22 - bits))
    above = ((raw - ((floor + 127) << 23)) >> (23 - bits)) + (1 << bits)
    linear = (_scaled(magnitude, bits - floor) + 0.5).floor().clamp(max=2.0**30).to(torch.int32)
    sign = negative(x)
    return (choose(is_below(magnitude, floor), linear, above) ^ sign) - sign


def value(number: Tensor, bits: int, floor: Tensor) -> Tensor:
    """Return the fp32 of each number; 0 is +0."""
    sign = number >> 31
    magnitude = (number ^ sign) - sign
    first = 1 << bits
    raw = ((magnitude - first) << (23 - bits)) + ((floor + 127) << 23)
    linear = _scaled(magnitude.to(torch.float32), floor - bits).view(torch.int32)
    return (choose((magnitude - first) >> 31, linear, raw) | (sign & -0x80000000)).view(torch.float32)


def is_below(magnitude: Tensor, floor: Tensor) -> Tensor:
    """Return the mask of magnitudes below 2^floor."""
    return (magnitude.view(torch.int32) - ((floor + 127) << 23)) >> 31


def negative(x: Tensor) -> Tensor:
    """Return the mask of fp32 with a sign."""
    return x.view(torch.int32) >> 31


def choose(mask: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return, int32, `first` where the mask is -1, `second` where it is 0."""
    return second ^ ((first ^ second) & mask)


def signed(magnitude: Tensor, like: Tensor) -> Tensor:
    """Return magnitudes with the signs of `like`; 0 is +0."""
    raw = magnitude.view(torch.int32)
    return (raw | (like.view(torch.int32) & (-raw >> 31) & -0x80000000)).view(torch.float32)


def _scaled(x: Tensor, exponent: Tensor) -> Tensor:
    """Return x * 2^exponent, for exponents from -252 to 252."""
    half = exponent >> 1
    return x * _power(half) * _power(exponent - half)


def _power(exponent: Tensor) -> Tensor:
    """Return 2^exponent, from -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32)
