"""The formulas of docs/numerics.md, a block after the other, an element after the other.

`Scheme.scale` makes of the amax of a block its stored bits, what elements are multiplied by (or, INT4, divided by), and
what codes are multiplied by; `Scheme.element` makes a code of a magnitude. `quantize` does the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tests.qtensor.vectors.numbers import (
    BF16,
    E2M1,
    E4M3,
    FP32,
    Floating,
    Magnitude,
    bounded,
    exponent_of,
    fp32,
    power,
    quotient,
)

ZERO, ONE = Fraction(0), Fraction(1)
# the digits that QLoRA's paper gives, as the fp32 numbers that they stand for
QUANTILES = [
    -value if text.startswith("-") else value
    for text in (
        *("-1.0", "-0.6961928009986877", "-0.5250730514526367", "-0.39491748809814453"),
        *("-0.28444138169288635", "-0.18477343022823334", "-0.09105003625154495", "0.0"),
        *("0.07958029955625534", "0.16093020141124725", "0.24611230194568634", "0.33791524171829224"),
        *("0.44070982933044434", "0.5626170039176941", "0.7229568362236023", "1.0"),
    )
    if isinstance(value := fp32(abs(Fraction(text))), Fraction)
]
# fp32 sums of neighbours, halved; the signs of both are the same, or one is zero
BOUNDS = [
    (1 if low + high > 0 else -1) * bound / 2
    for low, high in pairwise(QUANTILES)
    if isinstance(bound := fp32(abs(low + high)), Fraction)
]


class Scale(NamedTuple):
    """Of one block: its bits as stored, the factor `enc` (1 / scale) and the value `dec`."""

    bits: int
    enc: Fraction
    dec: Magnitude


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A recipe: blocks of `rows` x `columns` elements (None: all there are), and what `recipe` says of it as JSON."""

    recipe: dict[str, Any]
    number: Floating = E4M3
    rows: int | None = 1
    columns: int | None = None
    stored: type[np.generic] = np.uint32  # bits of a scale
    nan: int | None = None  # the scale of a block that is not finite; None: its elements alone become NaN

    def scale(self, amax: Fraction) -> Scale:
        raise NotImplementedError

    def element(self, magnitude: Fraction, negative: bool, scale: Scale) -> tuple[int, Magnitude, bool]:
        """The code, and magnitude and sign of the value behind it."""
        rounded = self.number.nearest(bounded(fp32(magnitude * scale.enc), self.number.largest))
        assert isinstance(rounded, Fraction)
        return self.number.bits_of(rounded, negative=negative), fp32(rounded * scale.dec), negative

    @property
    def of_nothing(self) -> int:
        """The code of an element that is not finite."""
        return self.number.nan

    @property
    def packed(self) -> bool:
        return self.number.bits == 4


class Float8(Scheme):
    """One fp32 scale a row, a tensor or a block."""

    def scale(self, amax: Fraction) -> Scale:
        enc = ONE if amax == 0 else bounded(quotient(self.number.largest, amax), FP32.largest)
        if self.recipe["power_of_two"]:
            enc = power(exponent_of(enc))
        dec = quotient(ONE, enc)
        return Scale(FP32.bits_of(dec), enc, dec)


class MX(Scheme):
    """One E8M0 scale a block."""

    def scale(self, amax: Fraction) -> Scale:
        code = 0
        if self.recipe["scale_rounding"] == "up":
            v = fp32(amax * fp32(1 / self.number.largest))
            assert isinstance(v, Fraction)
            if v:
                exponent = exponent_of(v)
                code = exponent + 127 + (power(exponent) < v)
        elif amax:
            code = exponent_of(amax) - exponent_of(self.number.largest) + 127
        code = min(max(code, 0), 254)
        return Scale(code, power(127 - code), power(code - 127))


@dataclass(frozen=True, kw_only=True)
class NVFP4(Scheme):
    """One E4M3 scale a block under an fp32 scale of the tensor: `under` sets the latter."""

    number: Floating = E2M1
    enc: Fraction = ONE  # S
    global_scale: Fraction = ONE

    def under(self, amax: Fraction) -> NVFP4:
        enc = ONE if amax == 0 else bounded(quotient(Fraction(2688), amax), FP32.largest)
        dec = quotient(ONE, enc)
        assert isinstance(dec, Fraction)
        return replace(self, enc=enc, global_scale=dec)

    def scale(self, amax: Fraction) -> Scale:
        sixth = fp32(Fraction(1, 6))
        asked = bounded(fp32(amax * fp32(self.enc * sixth)), E4M3.largest)
        own = E4M3.nearest(asked)
        dec = fp32(own * self.global_scale)
        assert isinstance(own, Fraction)
        assert isinstance(dec, Fraction)
        return Scale(E4M3.bits_of(own), bounded(quotient(ONE, dec), FP32.largest), dec)


class Int4(Scheme):
    """One bf16 scale a group; a code is q + 8."""

    def scale(self, amax: Fraction) -> Scale:
        own = BF16.nearest(fp32(amax / Fraction(15, 2)))
        own = ONE if own == 0 else own
        assert isinstance(own, Fraction)
        return Scale(BF16.bits_of(own), own, own)

    def element(self, magnitude: Fraction, negative: bool, scale: Scale) -> tuple[int, Magnitude, bool]:
        """A whole number has one zero."""
        steps = quotient(magnitude, scale.enc)
        assert isinstance(steps, Fraction)
        q = min(max(round(-steps if negative else steps), -8), 7)
        return q + 8, fp32(abs(q) * scale.dec), q < 0

    @property
    def of_nothing(self) -> int:
        return 8

    @property
    def packed(self) -> bool:
        return True


class Int8(Scheme):
    """One fp32 scale a row; NaN marks the row, whose codes are zeros then."""

    def scale(self, amax: Fraction) -> Scale:
        dec = max(fp32(amax * Fraction(2, 255)), power(-126))
        assert isinstance(dec, Fraction)
        enc = quotient(ONE, dec)
        assert isinstance(enc, Fraction)
        return Scale(FP32.bits_of(dec), enc, dec)

    def element(self, magnitude: Fraction, negative: bool, scale: Scale) -> tuple[int, Magnitude, bool]:
        """A whole number has one zero; codes are of two's complement."""
        steps = fp32(magnitude * scale.enc)
        assert isinstance(steps, Fraction)
        q = min(max(round(-steps if negative else steps), -128), 127)
        return q % 256, fp32(abs(q) * scale.dec), q < 0

    @property
    def of_nothing(self) -> int:
        return 0


class NF4(Scheme):
    """One fp32 scale a block, its amax; a code is the place of a number in a table."""

    def scale(self, amax: Fraction) -> Scale:
        least = fp32(Fraction(1, 10**38))
        assert isinstance(least, Fraction)
        enc = quotient(ONE, max(amax, least))
        assert isinstance(enc, Fraction)
        return Scale(FP32.bits_of(amax), enc, amax)

    def element(self, magnitude: Fraction, negative: bool, scale: Scale) -> tuple[int, Magnitude, bool]:
        """On a bound the code is the one below. The table has one zero."""
        scaled = fp32(magnitude * scale.enc)
        assert isinstance(scaled, Fraction)
        code = self.place(-scaled if negative else scaled)
        value = QUANTILES[code]
        return code, fp32(abs(value) * scale.dec), value < 0

    def place(self, scaled: Fraction) -> int:
        return sum(scaled > bound for bound in BOUNDS)

    @property
    def of_nothing(self) -> int:
        return QUANTILES.index(ZERO)

    @property
    def packed(self) -> bool:
        return True


def quantize(x: np.ndarray, scheme: Scheme) -> dict[str, np.ndarray]:
    """Parts and values of fp32 numbers, all as bits: x uint32 [.., N, K], codes uint8, values uint32."""
    *stack, rows, columns = x.shape
    matrices = x.reshape(-1, rows, columns)
    if scheme.rows is None:  # one scale for all: a stack is no other than a matrix of more rows
        matrices = x.reshape(1, -1, columns)
    wide = scheme.columns or columns
    codes, values = np.zeros(matrices.shape, np.uint8), np.zeros(matrices.shape, np.uint32)
    scales = np.zeros((*matrices.shape[:2], -(-columns // wide)), scheme.stored)
    if isinstance(scheme, NVFP4):
        scheme = scheme.under(_amax(matrices))
    for matrix, top, left in _corners(matrices.shape, scheme.rows or matrices.shape[1], wide):
        down, across = slice(top, top + (scheme.rows or matrices.shape[1])), slice(left, left + wide)
        block = matrices[matrix, down, across]
        scale = scheme.scale(_amax(block))
        whole = all(FP32.value_of(int(bits)) is not None for bits in block.flat)
        marked = not whole and scheme.nan is not None
        zeroed = marked and isinstance(scheme, Int8)
        scales[matrix, down, left // wide] = scheme.nan if marked else scale.bits
        for place, bits in np.ndenumerate(block):
            code, value = _coded(int(bits), scheme, scale)
            at = (matrix, top + place[0], left + place[1])
            codes[at], values[at] = 0 if zeroed else code, FP32.nan if marked else value
    if scheme.packed:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    scale_shape = () if scheme.rows is None else (*stack, rows, scales.shape[-1])
    found = {
        "payload": codes.reshape(*stack, rows, -1),
        "scale": scales.flatten()[:1].reshape(()) if scheme.rows is None else scales.reshape(scale_shape),
        "values": values.reshape(x.shape),
    }
    if isinstance(scheme, NVFP4):
        found["global_scale"] = np.array(FP32.bits_of(scheme.global_scale), np.uint32)
    return found


def _coded(bits: int, scheme: Scheme, scale: Scale) -> tuple[int, int]:
    """The code and the bits of the value of one element, in a block that is not marked."""
    magnitude = FP32.value_of(bits)
    if magnitude is None:
        return scheme.of_nothing, FP32.nan
    code, value, negative = scheme.element(magnitude, bool(bits >> 31), scale)
    return code, FP32.bits_of(value, negative=negative)


def _amax(block: np.ndarray) -> Fraction:
    """Over what is finite; 0 where nothing is."""
    return max((value for bits in block.flat if (value := FP32.value_of(int(bits))) is not None), default=ZERO)


def _corners(shape: tuple[int, ...], rows: int, columns: int) -> Iterator[tuple[int, int, int]]:
    for matrix in range(shape[0]):
        for top in range(0, shape[1], rows):
            for left in range(0, shape[2], columns):
                yield matrix, top, left
