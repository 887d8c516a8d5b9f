"""What is quantized. Blocks are lists of fp32 bits, made of fractions; a recipe says how they are laid in a matrix.

ties         the middle between each two neighbours of the element, of both signs, and an ulp beside it, under the
             scale 1 (recipes that only cut blocks in another way, and INT8: some of them); INT4, INT8, NF4,
             NVFP4: and under scales that are no powers of two
turns        amaxes an ulp beside what the element can hold, and beside a power of two; NVFP4: beside the middles
             between scales of blocks
limits       amaxes at the ends of fp32, and where a scale reaches its own end
zeros        blocks of zeros of both signs between others
all_zero     nothing else
non_finite   NaN of both signs and infinities among finite numbers, and alone
typical      bf16 numbers of very different size; blocks that are cut, where the recipe cuts any
stack        two matrices of them: no square reaches from one to the other
squares      of formats whose squares have to be whole: a few of the above
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import cycle, pairwise
from typing import NamedTuple

import numpy as np

from tests.qtensor.vectors.numbers import BF16, E4M3, FP32, power
from tests.qtensor.vectors.oracle import BOUNDS, NF4, NVFP4, Int4, Int8, Scheme

NAN, MINUS_NAN, INFINITE, MINUS = 0x7FC00001, 0xFFA00000, 0x7F800000, 0x80000000
Block = list[int]


class Case(NamedTuple):
    """fp32 bits [.., N, K], stored as bf16 where it is `narrow`; in one sentence what it is for."""

    bits: np.ndarray
    narrow: bool = False


def cases_of(scheme: Scheme, *, every_tie: bool) -> dict[str, Case]:
    """The cases of a recipe."""
    found: dict[str, Case] = {}
    cases = _blocks(scheme, every_tie=every_tie)
    for name, blocks in [("squares", _squares(scheme))] if _large(scheme) else cases:
        if scheme.rows is None:  # a scale for all: a case for each block
            found |= {f"{name}_{index}": Case(np.array([block], np.uint32)) for index, block in enumerate(blocks)}
        else:
            found[name] = Case(_laid(blocks, scheme))
    if isinstance(scheme, NVFP4):
        found |= {f"limits_{index}": Case(_laid([block], scheme)) for index, block in enumerate(_limits(scheme))}
    if not _large(scheme):
        found["all_zero"] = Case(_laid([[0, MINUS, 0]], scheme))
    found["typical"] = Case(_numbers(_typical_shape(scheme), seed=1), narrow=True)
    if scheme.rows != 1 and not _whole_blocks(scheme):
        found["stack"] = Case(_numbers((2, 3, 5), seed=2), narrow=True)
    return found


def _blocks(scheme: Scheme, *, every_tie: bool) -> Iterator[tuple[str, list[Block]]]:
    """The cases that are made of blocks."""
    ties = _ties(scheme)
    ties = ties if every_tie else [*ties[:12], *ties[12::18]]
    pins = [_bits(_pin(scheme))]
    wide = min(scheme.columns or 64, 64)
    chunks = [[*pins, *ties[at : at + wide - 1]] for at in range(0, len(ties), wide - 1)]
    first = [[_bits(Fraction(2688))]] if isinstance(scheme, NVFP4) else []  # makes the global scale 1
    if scheme.rows is None:
        chunks = [[*pins, *ties]]
    chunks += [_ties_under(scale, scheme) for scale in _uneven(scheme)]
    yield "ties", first + chunks
    yield "turns", first + [_around(amax, 8) for amax in _turns(scheme)]
    if not isinstance(scheme, NVFP4):
        yield "limits", _limits(scheme)
    some = _around(_bits(Fraction(5, 3)), 6)
    yield "zeros", [[0, MINUS, 0, MINUS], [0, *some, MINUS]]
    strange = [[*some[:2], bits, *some[2:]] for bits in (NAN, MINUS_NAN, INFINITE, MINUS | INFINITE)]
    alone = [NAN, INFINITE, MINUS_NAN, MINUS | INFINITE]
    yield "non_finite", [alone, some, strange[-1]] if _few(scheme) else [*strange, some, alone, [INFINITE, 0, MINUS]]


def _squares(scheme: Scheme) -> list[Block]:
    """Few of them: the elements and scales are those of the recipe in rows."""
    some = _around(_bits(Fraction(5, 3)), 7)
    first = [[_bits(Fraction(2688))]] if isinstance(scheme, NVFP4) else []
    ties = [_bits(_pin(scheme)), *_ties(scheme)]
    uneven = [_ties_under(scale, scheme) for scale in _uneven(scheme)]
    return [*first, ties, *uneven, _around(_turns(scheme)[2], 8), [*some, NAN]]


def _ties(scheme: Scheme) -> Block:
    """Under the scale 1."""
    found = []
    for middle, sign in zip(_middles(scheme), cycle((0, MINUS)), strict=False):
        bits = _bits(middle)
        found += [bits | sign, bits | (sign ^ MINUS), (bits - 1) | sign]
        found += [(bits + 1) | (sign ^ MINUS)] if middle < _pin(scheme) else []
    return found


def _middles(scheme: Scheme) -> list[Fraction]:
    """Between neighbours of the element, upwards."""
    if isinstance(scheme, Int4):
        return [Fraction(2 * n + 1, 2) for n in range(8)]
    if isinstance(scheme, Int8):  # those of few bits, and the largest: a product is rounded more often beside them
        return [Fraction(2 * n + 1, 2) for n in (*range(10), *range(30, 128, 8), 125, 126)]
    if isinstance(scheme, NF4):
        return sorted({abs(bound) for bound in BOUNDS})
    codes = scheme.number.magnitudes
    return [(low + high) / 2 for low, high in pairwise(codes)]


def _uneven(scheme: Scheme) -> list[Fraction]:
    """Scales that a format of four bits can have and no power of two is: quotients and products differ there."""
    few = slice(None, None, 3 if _few(scheme) else 1)
    if isinstance(scheme, Int4):
        return [Fraction(n, 128) for n in (129, 171, 213, 255)][few]
    if isinstance(scheme, Int8 | NF4):
        return [Fraction(n, 2**23) for n in (2**23 + 1, 11184811, 13421773, 2**24 - 1)][few]
    return [Fraction(n, 8) for n in range(9, 16)][few] if isinstance(scheme, NVFP4) else []


def _ties_under(scale: Fraction, scheme: Scheme) -> Block:
    """The amax of a scale, and the middles between neighbours under it."""
    middles = [_bits(middle * scale) | sign for middle in _middles(scheme) for sign in (0, MINUS)]
    return [_bits(_pin(scheme) * scale), *middles]


def _pin(scheme: Scheme) -> Fraction:
    """The amax whose scale is 1."""
    if isinstance(scheme, Int4 | Int8):
        return Fraction(15, 2) if isinstance(scheme, Int4) else Fraction(255, 2)
    return Fraction(1) if isinstance(scheme, NF4) else scheme.number.largest


def _turns(scheme: Scheme) -> list[int]:
    """Amaxes, as bits."""
    if isinstance(scheme, NVFP4):
        codes = E4M3.magnitudes
        middles = [(codes[at] + codes[at + 1]) * 3 for at in ((0, 61) if _few(scheme) else (0, 1, 7, 60, 61, 125))]
        return [_bits(middle) + ulps for middle in middles for ulps in (-1, 0, 1)]
    anchors = [_pin(scheme) * power(k) for k in ((-3,) if _few(scheme) else (-60, -3, 90))]
    anchors += [power(k) for k in ((-2,) if _few(scheme) else (-2, 80))]
    return [_bits(anchor) + ulps for anchor in anchors for ulps in (-1, 0, 1)]


def _limits(scheme: Scheme) -> list[Block]:
    """Blocks under amaxes at both ends."""
    pin = _pin(scheme)
    ends = [_bits(FP32.largest), _bits(BF16.largest), 1, 3, 0x007FFFFF, 0x00800000]
    if isinstance(scheme, NVFP4):
        ends += [_bits(2688 / FP32.largest) + ulps for ulps in (-1, 1)]
    elif isinstance(scheme, Int4):
        ends += [_bits(pin * power(-134)) + ulps for ulps in (-1, 0, 2, 8)]  # half of the least bf16
        ends += [_bits(pin * power(-133))]
    elif isinstance(scheme, Int8):
        ends += [_bits(pin * power(-126)) + ulps for ulps in (-1, 0, 1)]  # the least scale
    elif isinstance(scheme, NF4):
        least = _bits(Fraction(1, 10**38))  # that is divided by
        ends += [least - 1, _bits(Fraction(1, 2 * 10**38)), least, least + 1]
    elif scheme.stored is np.uint8:
        ends += [_bits(pin * power(-127)) + ulps for ulps in (-1, 0, 1)]  # code 0
        ends += [_bits(pin * power(-126)) + ulps for ulps in (0, 1)]
    else:
        ends += [_bits(pin / FP32.largest) + ulps for ulps in (-1, 0, 1)]  # the factor reaches FLT_MAX
    ends = ends if not _few(scheme) else [ends[0], ends[2], ends[7]]
    return [_around(amax, 8) for amax in ends]


def _around(amax: int, size: int) -> Block:
    """A block of an amax: itself, its negative, and parts of it of both signs."""
    value = FP32.value_of(amax)
    assert value is not None
    parts = [_bits(value * Fraction(n, size + 3)) | (MINUS if n % 3 else 0) for n in range(size - 2)]
    return [amax, amax | MINUS, *parts]


def _bits(x: Fraction) -> int:
    """Of the fp32 number nearest to x."""
    return FP32.bits_of(FP32.nearest(x))


def _whole_blocks(scheme: Scheme) -> bool:
    """Whether the recipe takes no blocks that are cut."""
    return scheme.nan is not None and scheme.columns is not None


def _few(scheme: Scheme) -> bool:
    """Whether blocks are so large, or a scale so seldom, that less has to do."""
    return scheme.rows is None or (_whole_blocks(scheme) and (scheme.columns or 0) * scheme.rows > 32)


def _large(scheme: Scheme) -> bool:
    """Whether blocks are squares that have to be whole."""
    return _whole_blocks(scheme) and scheme.rows != 1


def _laid(blocks: Sequence[Block], scheme: Scheme) -> np.ndarray:
    """Each block under a scale of its own, the rest zeros; what is square is filled with the block over and over."""
    if not _whole_blocks(scheme):  # rows and blocks that are cut: as short as the longest
        longest = max(map(len, blocks))
        matrix = np.zeros((len(blocks), longest), np.uint32)
        for row, block in zip(matrix, blocks, strict=True):
            row[: len(block)] = block
        return matrix if scheme.rows in (None, 1) else matrix[:, None]  # a square each
    assert scheme.rows is not None
    assert scheme.columns is not None
    if scheme.rows == 1:
        matrix = np.zeros((len(blocks), scheme.columns), np.uint32)
        for row, block in zip(matrix, blocks, strict=True):
            row[: len(block)] = block
        return matrix
    squares = [np.resize(np.array(block, np.uint32), (scheme.rows, scheme.columns)) for block in blocks]
    return np.concatenate(squares, axis=1)


def _typical_shape(scheme: Scheme) -> tuple[int, int]:
    """As small as shows how blocks lie, and are cut."""
    assert not _whole_blocks(scheme) or (scheme.rows and scheme.columns)
    if _whole_blocks(scheme):
        if scheme.rows == 1:
            return 1 if _few(scheme) else 2, 2 * scheme.columns
        return (2 if scheme.columns < 32 else 1) * scheme.rows, scheme.columns
    if scheme.columns is None:
        return 3, 37
    return (2, 131) if scheme.rows == 1 else (131, 3)


def _numbers(shape: tuple[int, ...], *, seed: int) -> np.ndarray:
    """bf16 numbers between 2^-12 and 2^3, the small ones more often, as fp32 bits."""
    size = int(np.prod(shape))
    state, found = seed, []
    for _ in range(size):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        drawn = state >> 40  # 24 bits
        exponent = 127 + 2 - (drawn & 7) - ((drawn >> 3) & 7) * (drawn >> 6 & 1)
        found.append((drawn >> 23) << 31 | exponent << 23 | ((drawn >> 7) & 0x7F) << 16)
    return np.array(found, np.uint32).reshape(shape)
