"""Binary floating-point numbers as fractions: no arithmetic of a machine's floats anywhere.

A number is a magnitude (a Fraction, or math.inf for what overflowed) and a sign that is kept apart, so that zeros have
one, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

Magnitude = Fraction | float  # a float only where it is math.inf


def power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def exponent_of(x: Fraction) -> int:
    """floor(log2 x) of x > 0."""
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if power(guess) <= x else guess - 1


@dataclass(frozen=True, kw_only=True)
class Floating:
    """A format of numbers: `mantissa` bits behind the point, `least` the exponent of the least normal number."""

    bits: int
    mantissa: int
    least: int
    largest: Fraction
    nan: int  # its bits; 0 where there is none

    def nearest(self, x: Magnitude) -> Magnitude:
        """x >= 0 rounded to nearest, ties to even; math.inf beyond the largest."""
        if x in (0, math.inf):
            return x
        assert isinstance(x, Fraction)
        step = power(max(exponent_of(x), self.least) - self.mantissa)
        rounded = round(x / step) * step  # Python rounds fractions to whole numbers, ties to even
        return rounded if rounded <= self.largest else math.inf

    def bits_of(self, x: Magnitude, *, negative: bool = False) -> int:
        """Of one of its numbers."""
        sign = int(negative) << (self.bits - 1)
        if x == math.inf:
            return sign | self.bits_of(self.largest) + 1
        assert isinstance(x, Fraction)
        if x == 0:
            return sign
        exponent = max(exponent_of(x), self.least)
        steps = x / power(exponent - self.mantissa)
        assert steps.denominator == 1, f"{x} is none of these numbers"
        return sign | ((exponent - self.least) << self.mantissa) + steps.numerator

    def value_of(self, bits: int) -> Fraction | None:
        """The magnitude behind bits of either sign; None for NaN and infinities."""
        bits &= (1 << (self.bits - 1)) - 1
        exponent, mantissa = bits >> self.mantissa, bits & ((1 << self.mantissa) - 1)
        hidden = (1 << self.mantissa) if exponent else 0
        value = (hidden + mantissa) * power(max(exponent, 1) - 1 + self.least - self.mantissa)
        return value if value <= self.largest else None

    @cached_property
    def magnitudes(self) -> list[Fraction]:
        """All of them, upwards; for small formats."""
        return [value for bits in range(1 << (self.bits - 1)) if (value := self.value_of(bits)) is not None]


FP32 = Floating(bits=32, mantissa=23, least=-126, largest=(2 - power(-23)) * power(127), nan=0x7FC00000)
BF16 = Floating(bits=16, mantissa=7, least=-126, largest=(2 - power(-7)) * power(127), nan=0x7FC0)
E4M3 = Floating(bits=8, mantissa=3, least=-6, largest=Fraction(448), nan=0x7F)
E5M2 = Floating(bits=8, mantissa=2, least=-14, largest=Fraction(57344), nan=0x7F)
E2M1 = Floating(bits=4, mantissa=1, least=0, largest=Fraction(6), nan=0)


def fp32(x: Magnitude) -> Magnitude:
    """What an fp32 operation makes of its exact result."""
    return FP32.nearest(x)


def quotient(a: Fraction, b: Fraction) -> Magnitude:
    return math.inf if b == 0 else fp32(a / b)


def bounded(x: Magnitude, largest: Fraction) -> Fraction:
    """min(x, largest)."""
    return min(x, largest) if isinstance(x, Fraction) else largest
