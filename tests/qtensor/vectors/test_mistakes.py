"""The cases are hard: each common mistake of a kernel makes other bytes somewhere, and so does another rounding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest

from tests.qtensor.vectors import numbers
from tests.qtensor.vectors.files import SCHEMES, cases
from tests.qtensor.vectors.numbers import E4M3, FP32, Floating, Magnitude, fp32, power
from tests.qtensor.vectors.oracle import BOUNDS, MX, NF4, NVFP4, Float8, Int4, Int8, Scale, Scheme, quantize


class AwayFromZero(Floating):
    """Rounds ties up in magnitude."""

    def nearest(self, x: Magnitude) -> Magnitude:
        if not isinstance(x, Fraction) or x == 0:
            return x
        step = power(max(numbers.exponent_of(x), self.least) - self.mantissa)
        return math.floor(x / step + Fraction(1, 2)) * step


class Truncating(Floating):
    """Rounds towards zero."""

    def nearest(self, x: Magnitude) -> Magnitude:
        if not isinstance(x, Fraction) or x == 0:
            return x
        step = power(max(numbers.exponent_of(x), self.least) - self.mantissa)
        return math.floor(x / step) * step


class NoSubnormals(Floating):
    """Elements below the least normal one are zeros."""

    def nearest(self, x: Magnitude) -> Magnitude:
        found = super().nearest(x)
        return found if found >= power(self.least) else Fraction(0)


class Reciprocal(Float8):
    """max * (1 / amax) for max / amax: rounded twice, as torch's `448.0 / t` is."""

    def scale(self, amax: Fraction) -> Scale:
        if amax == 0:
            return super().scale(amax)
        once = numbers.quotient(Fraction(1), amax)
        enc = numbers.bounded(once if once == math.inf else fp32(self.number.largest * once), FP32.largest)
        if self.recipe["power_of_two"]:
            enc = power(numbers.exponent_of(enc))
        dec = numbers.quotient(Fraction(1), enc)
        return Scale(FP32.bits_of(dec), enc, dec)


class AmaxOverMax(Float8):
    """scale = amax / max, elements are divided by it."""

    def scale(self, amax: Fraction) -> Scale:
        if amax == 0:
            return super().scale(amax)
        dec = fp32(amax / self.number.largest)
        enc = numbers.bounded(numbers.quotient(Fraction(1), dec), FP32.largest)
        return Scale(FP32.bits_of(dec), enc, dec)


class Divided(NVFP4):
    """Elements are divided by the product of the scales."""

    def element(self, magnitude: Fraction, negative: bool, scale: Scale) -> tuple[int, Magnitude, bool]:
        if scale.dec == 0:
            return super().element(magnitude, negative, scale)
        quotient = numbers.quotient(magnitude, scale.dec)
        rounded = self.number.nearest(numbers.bounded(quotient, self.number.largest))
        return self.number.bits_of(rounded, negative=negative), fp32(rounded * scale.dec), negative


class NoSubnormalScales(NVFP4):
    """The least normal number bounds the scales of blocks from below, as torchao has it."""

    def scale(self, amax: Fraction) -> Scale:
        found = super().scale(amax)
        return found if E4M3.value_of(found.bits) >= power(-6) else super().scale(power(-6) * 6 / self.enc)


class Logarithm(MX):
    """A code above the exact one by a rounding: amaxes an ulp above a power of two count as that power."""

    def scale(self, amax: Fraction) -> Scale:
        return super().scale(FP32.value_of(max(FP32.bits_of(amax) - 1, 0)))


class Multiplied(Int4):
    """Elements are multiplied by an fp32 reciprocal of the scale."""

    def element(self, magnitude: Fraction, negative: bool, scale: Scale) -> tuple[int, Magnitude, bool]:
        steps = numbers.bounded(fp32(magnitude * numbers.bounded(fp32(1 / scale.enc), FP32.largest)), Fraction(9))
        q = min(max(round(-steps if negative else steps), -8), 7)
        return q + 8, fp32(abs(q) * scale.dec), q < 0


class OverSeven(Int4):
    """amax / 7 for amax / 7.5."""

    def scale(self, amax: Fraction) -> Scale:
        return super().scale(fp32(amax * Fraction(15, 14)))


class Quotients(Int8):
    """Elements are divided by the scale, as compressed-tensors has it."""

    def element(self, magnitude: Fraction, negative: bool, scale: Scale) -> tuple[int, Magnitude, bool]:
        steps = numbers.quotient(magnitude, scale.dec)
        q = min(max(round(-steps if negative else steps), -128), 127)
        return q % 256, fp32(abs(q) * scale.dec), q < 0


class Over127(Int8):
    """amax / 127 for amax / 127.5."""

    def scale(self, amax: Fraction) -> Scale:
        return super().scale(fp32(amax * Fraction(255, 254)))


class Symmetric(Int8):
    """No code is -128."""

    def element(self, magnitude: Fraction, negative: bool, scale: Scale) -> tuple[int, Magnitude, bool]:
        code, value, sign = super().element(magnitude, negative, scale)
        return (129, fp32(127 * scale.dec), sign) if code == 128 else (code, value, sign)


class TiesUp(NF4):
    """A bound belongs to the number above."""

    def place(self, scaled: Fraction) -> int:
        return sum(scaled >= bound for bound in BOUNDS)


class DividedByAmax(NF4):
    """Elements are divided by the scale."""

    def element(self, magnitude: Fraction, negative: bool, scale: Scale) -> tuple[int, Magnitude, bool]:
        by = max(scale.dec, 1 / FP32.largest)
        return super().element(fp32(magnitude / by), negative, Scale(scale.bits, Fraction(1), scale.dec))


class NoLeast(NF4):
    """The reciprocal of an amax is not bounded."""

    def scale(self, amax: Fraction) -> Scale:
        enc = Fraction(1) if amax == 0 else numbers.bounded(numbers.quotient(Fraction(1), amax), FP32.largest)
        return Scale(FP32.bits_of(amax), enc, amax)


SCALES: dict[type[Scheme], tuple[type[Scheme], ...]] = {
    Float8: (Reciprocal, AmaxOverMax),
    NVFP4: (Divided, NoSubnormalScales),
    MX: (Logarithm,),
    Int4: (Multiplied, OverSeven),
    Int8: (Quotients, Over127, Symmetric),
    NF4: (TiesUp, DividedByAmax, NoLeast),
}


def mistakes() -> Iterator[tuple[str, str, Scheme]]:
    """(file, what is wrong, the wrong recipe)"""
    for name, scheme in SCHEMES.items():
        if not isinstance(scheme, Int4 | Int8 | NF4):
            for kind in (AwayFromZero, Truncating, NoSubnormals):
                yield name, kind.__name__, dataclasses.replace(scheme, number=kind(**dataclasses.asdict(scheme.number)))
        for mistake in SCALES[type(scheme)]:
            if not (mistake is Reciprocal and scheme.recipe["power_of_two"]):  # then it rounds to the same power of two
                yield name, mistake.__name__, mistake(**vars_of(scheme))


def vars_of(scheme: Scheme) -> dict[str, object]:
    return {field.name: getattr(scheme, field.name) for field in dataclasses.fields(scheme)}


pytestmark = pytest.mark.full
MISTAKES = {f"{name}-{mistake}": (name, mistake, wrong) for name, mistake, wrong in mistakes()}


@pytest.mark.parametrize(("name", "mistake", "wrong"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_makes_other_bytes(name: str, mistake: str, wrong: Scheme) -> None:
    for case in cases(name).values():
        right, found = (quantize(case.bits, one) for one in (SCHEMES[name], wrong))
        if any(not np.array_equal(right[part], found[part]) for part in right):
            return
    pytest.fail(f"no case of {name} tells {mistake} from the formula")
