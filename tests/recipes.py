"""The recipes that tests share, one line each, and what is known of them apart from their code.

A new format is a line in `TABLE`: every suite takes its recipes from here, by what they are and not by their names.
What is said of a recipe follows from the definition of its format, never from the implementation. Golden files, stored
layouts and the archives of tests/torch_versions spell their recipes out instead: they must not change with a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    Int4GroupScaling,
    Int8RowScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NF4BlockScaling,
    NVFP4BlockScaling,
)


@dataclass(frozen=True)
class Element:
    """A low-precision number. With m mantissa bits: relative 2^-(m+1), subnormal half a step of 2^(1 - bias - m).

    The whole numbers of a uniform grid are all subnormal in this sense; they have one zero, and one more below it. So
    are numbers of a table, which are as they are listed, from -largest on: half the widest gap.
    """

    dtype: Any  # of ml_dtypes
    bits: int
    relative: float  # half step of the normals, relative to the power of two below them
    subnormal: float  # half step of the subnormals
    largest: float
    table: tuple[float, ...] = ()

    @property
    def floating(self) -> bool:
        """Whether the elements are floating-point numbers: they have signs of zeros, steps that grow and a dtype."""
        return not self.uniform and not self.table

    @property
    def exponent(self) -> int:
        """Of the power of two below the largest value."""
        return math.frexp(self.largest)[1] - 1

    @property
    def uniform(self) -> bool:
        """Whether the elements are whole numbers; those of less than a byte are stored with an offset."""
        return self.relative == 0 and not self.table

    @property
    def least(self) -> float:
        """The most negative value."""
        return -self.largest - 1 if self.uniform else -self.largest

    def values(self, codes: Any) -> Any:
        """fp64 values of codes, uint8, one an entry."""
        if self.table:
            return np.array(self.table)[codes]
        if self.uniform and self.bits < 8:
            return codes.astype(np.float64) + self.least
        return codes.view(self.dtype).astype(np.float64)

    def nearest(self, scaled: Any) -> Any:
        """The elements nearest to fp32 numbers, fp32; ties to even (of a table: down), saturating."""
        if self.table:
            numbers = np.array(self.table, np.float32)
            return numbers[np.searchsorted((numbers[1:] + numbers[:-1]) / np.float32(2), scaled)]
        if self.uniform:
            return np.clip(np.rint(scaled), np.float32(self.least), np.float32(self.largest)) + np.float32(0)
        return np.clip(scaled, np.float32(self.least), np.float32(self.largest)).astype(self.dtype).astype(np.float32)


E4M3 = Element(ml_dtypes.float8_e4m3fn, 8, 2.0**-4, 2.0**-10, 448.0)
E5M2 = Element(ml_dtypes.float8_e5m2, 8, 2.0**-3, 2.0**-17, 57344.0)
E2M1 = Element(ml_dtypes.float4_e2m1fn, 4, 2.0**-2, 0.25, 6.0)
INT4 = Element(ml_dtypes.int4, 4, 0.0, 0.5, 7.0)
INT8 = Element(np.int8, 8, 0.0, 0.5, 127.0)
# The sixteen numbers of QLoRA's paper (Dettmers et al. 2023, appendix E), to the digits that fp32 tells apart.
QUANTILES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
NF4 = Element(np.uint8, 4, 0.0, (QUANTILES[1] - QUANTILES[0]) / 2, 1.0, QUANTILES)
FP32, E8M0, FP8 = np.float32, ml_dtypes.float8_e8m0fnu, ml_dtypes.float8_e4m3fn  # what a scale is stored as
BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True)
class Facts:
    """What is known of a recipe.

    Attributes:
        name: what tests call it.
        recipe: the recipe.
        element: of the payload.
        scale: the dtype, of numpy or ml_dtypes, that scales are stored in.
        block: how many columns share a scale, and what K must be a multiple of; 1 where a whole row does.
        square: whether as many rows share it, too.
        ragged: whether the last block of a row or column may be smaller, so that any N and K fit.
        tensor_wide: the part that all elements share, None where there is none.
        main: whether the suites that take long run it: the plain form of each format.
        parts: the parts after the payload and the scale.
        excess: how far past the largest element a value divided by its scale may lie.
        storages: what quantized_model_init can store it as.
    """

    name: str
    recipe: Any
    element: Element
    scale: Any
    block: int = 1
    square: bool = False
    ragged: bool = False
    tensor_wide: str | None = None
    main: bool = False
    parts: tuple[str, ...] = ()
    excess: float = 1.0
    storages: tuple[str, ...] = ("quantized", "high_precision")

    @property
    def rows(self) -> int:
        """How many rows share a scale, and so what a cut between shards must be a multiple of."""
        return self.block if self.square else 1

    @property
    def history(self) -> bool:
        """Whether the bytes depend on earlier writes; it is otherwise a recipe like any other."""
        return "amax_history" in self.parts

    @property
    def remainders(self) -> bool:
        """Whether masters beside it can be remainders: its scales are decided by amaxes alone, those of the values."""
        return not self.history and getattr(self.recipe, "scale_choice", None) is None

    def stored_bytes(self, rows: int, columns: int) -> int:
        """Of a whole tensor: its elements and scales, 4 for a global scale, 4 a step of history."""
        wide = self.tensor_wide == "scale"
        scales = 1 if wide else rows * (-(-columns // self.block) if self.block > 1 else 1)
        others = {"global_scale": 4, "amax_history": 4 * getattr(self.recipe, "amax_history_len", 0)}
        payload = rows * columns * self.element.bits // 8
        return payload + scales * np.dtype(self.scale).itemsize + sum(others[part] for part in self.parts)


# "floor" lets the mantissa run to 2 (512 of 448, 65536 of 57344: 8/7; 8 of 6).
FLOOR = MXFP8BlockScaling(scale_rounding="floor")
# An NVFP4 scale is rounded to E4M3: 2^-4.
NVFP4 = {"tensor_wide": "global_scale", "parts": ("global_scale",), "excess": 1 + 2.0**-4, "main": True}
FOUR_OVER_SIX = NVFP4BlockScaling(scale_choice="4over6")
DELAYED = {"tensor_wide": "scale", "parts": ("amax_history",), "storages": ("quantized",)}
# INT4 scales are amax / 7.5, rounded to bf16: 2^-9, and so at most 1 + 2^-8 too small.
INT4_EXCESS = 7.5 / 7 * (1 + 2.0**-8)
POWER_OF_TWO = Float8CurrentScaling(granularity="tensor", power_of_two=True)

F8B = {"block": 128, "ragged": True}

TABLE = (
    Facts("float8_row", Float8CurrentScaling(), E4M3, FP32, main=True),
    Facts("float8_row_e5m2", Float8CurrentScaling(element="e5m2"), E5M2, FP32),
    Facts("float8_tensor", Float8CurrentScaling(granularity="tensor"), E4M3, FP32, tensor_wide="scale", main=True),
    Facts("float8_tensor_power_of_two", POWER_OF_TWO, E4M3, FP32, tensor_wide="scale"),
    Facts("float8_delayed", Float8DelayedScaling(amax_history_len=4), E4M3, FP32, **DELAYED),
    Facts("float8_block_square", Float8BlockScaling(), E4M3, FP32, square=True, main=True, **F8B),
    Facts("float8_block_row", Float8BlockScaling(blocks="row"), E4M3, FP32, **F8B),
    Facts("float8_block_square_pow2", Float8BlockScaling(power_of_two=True), E4M3, FP32, square=True, **F8B),
    Facts("mxfp8", MXFP8BlockScaling(), E4M3, E8M0, block=32, main=True),
    Facts("mxfp8_e5m2", MXFP8BlockScaling(element="e5m2"), E5M2, E8M0, block=32),
    Facts("mxfp8_floor", FLOOR, E4M3, E8M0, block=32, excess=8 / 7),
    Facts("mxfp8_square", MXFP8BlockScaling(blocks="square"), E4M3, E8M0, block=32, square=True, main=True),
    Facts("mxfp4", MXFP4BlockScaling(), E2M1, E8M0, block=32, main=True),
    Facts("mxfp4_floor", MXFP4BlockScaling(scale_rounding="floor"), E2M1, E8M0, block=32, excess=8 / 6),
    Facts("int4_32", Int4GroupScaling(), INT4, BF16, block=32, excess=INT4_EXCESS, main=True),
    Facts("int4_128", Int4GroupScaling(group=128), INT4, BF16, block=128, excess=INT4_EXCESS),
    Facts("int8_row", Int8RowScaling(), INT8, FP32, excess=127.5 / 127, main=True),
    Facts("nf4_32", NF4BlockScaling(block=32), NF4, FP32, block=32, main=True),
    Facts("nf4", NF4BlockScaling(), NF4, FP32, block=64),
    Facts("nvfp4", NVFP4BlockScaling(), E2M1, FP8, block=16, **NVFP4),
    Facts("nvfp4_square", NVFP4BlockScaling(blocks="square"), E2M1, FP8, block=16, square=True, **NVFP4),
    Facts("nvfp4_4over6", FOUR_OVER_SIX, E2M1, FP8, block=16, **{**NVFP4, "main": False}),
)
_FACTS = {each.recipe: each for each in TABLE}


def facts(recipe: Any) -> Facts:
    """What is known of a recipe of the table, whatever its layer's inputs are quantized as."""
    return _FACTS[recipe.stored]


def recipes(wanted: Callable[[Facts], bool]) -> dict[str, Any]:
    """Name -> recipe of those of the table that are wanted and fit K = 64 and 96, on which the suites run."""
    return {each.name: each.recipe for each in TABLE if wanted(each) and _fits(each)}


def _fits(each: Facts) -> bool:
    return each.ragged or 32 % each.block == 0


# One form of each format a granularity, in the order in which suites number their weights.
ROW = recipes(lambda each: each.main and not each.square)
SQUARE = recipes(lambda each: each.main and each.square)
MAIN = ROW | SQUARE
TENSOR_WIDE = recipes(lambda each: each.main and each.tensor_wide is not None)


def _trait(name: str) -> int:
    known = facts(MAIN[name])
    return (known.tensor_wide is not None, known.square, known.element.bits < 8, True).index(True)


# MAIN dealt out in three hands, each with a tensor-wide, a square and a packed recipe: a suite that runs every recipe
# in one variation runs a hand in each other, and so meets all that the code distinguishes in all of them.
_BY_TRAIT = sorted(MAIN, key=_trait)
HANDS = tuple({name: MAIN[name] for name in _BY_TRAIT[start::3]} for start in range(3))
# These stand for all of MAIN in `make test` where each costs a training, a save or a world of ranks: scales of rows,
# square blocks, packed elements under a scale for all. `make test-all` runs the others (tests/sampling.py).
STAND_INS = {name: MAIN[name] for name in ("float8_row", "mxfp8_square", "nvfp4")}
WIDER_BLOCKS = {each.name: each.recipe for each in TABLE if not _fits(each)}  # for larger K
WITH_HISTORY = recipes(lambda each: each.history)
