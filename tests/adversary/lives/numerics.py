"""Quantizing and decoding in numpy, from the definitions of the formats: no line of it is the library's.

`encode(x, facts)` and `decode(parts, facts)` take and give fp32 arrays [.., N, K] and parts by name, in the shapes and
dtypes (of numpy and ml_dtypes) that are stored. `advance` is a step of delayed scaling. tests/adversary/lives/
test_numerics.py holds them against the golden bytes.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tests.recipes import BF16, E2M1, E8M0, FP8, FP32, INT4, INT8, Facts

Array = Any
Parts = dict[str, Array]
FLT_MAX = np.finfo(FP32).max


def encode(x: Array, facts: Facts) -> Parts:
    """The parts of fp32 values."""
    with np.errstate(all="ignore"):
        if facts.element is INT8:
            return _int8(x, facts)
        if facts.element.table:
            return _nf4(x, facts)
        if facts.scale is FP32:
            enc = _float8_enc(_amax(x, facts), facts)
            history = {"amax_history": _begun(_amax(x, facts), facts)} if facts.history else {}
            return _float8(x, enc, facts) | history
        if facts.scale is E8M0:
            return _mx(x, facts)
        return _nvfp4(x, facts) if facts.scale is FP8 else _int4(x, facts)


def advance(x: Array, facts: Facts, before: Parts) -> Parts:
    """The parts that a step of delayed scaling writes: scaled by the history before it, in which it is put in front."""
    with np.errstate(all="ignore"):
        history, recipe = before["amax_history"], facts.recipe
        amax = history.max() if recipe.amax_compute == "max" else history[0]
        enc = FP32(facts.element.largest * 2.0**-recipe.margin) / amax
        enc = np.minimum(enc, FLT_MAX) if np.isfinite(amax) and amax > 0 else FP32(1) / before["scale"]
        rolled = np.concatenate([_amax(x, facts).reshape(1), history[:-1]])
        return _float8(x, np.asarray(enc, FP32), facts) | {"amax_history": rolled}


def decode(parts: Parts, facts: Facts) -> Array:
    """The fp32 values."""
    with np.errstate(all="ignore"):
        payload = parts["payload"]
        if facts.element.bits == 4:
            codes = np.stack([payload & 15, payload >> 4], -1).reshape(*payload.shape[:-1], -1)
            values = facts.element.values(codes).astype(FP32)
        else:
            values = payload.astype(FP32)
        scale = parts["scale"]
        factor = scale.astype(FP32) if facts.scale is not E8M0 else scale.view(E8M0).astype(FP32)
        if "global_scale" in parts:
            factor = factor * parts["global_scale"]
        return values * (_spread(factor, facts.block, values.shape[-1]) if facts.block > 1 else factor)


# -- what blocks have in common ----------------------------------------------------------------------------------------


def _spread(per_block: Array, block: int, columns: int) -> Array:
    return np.repeat(per_block, block, -1)[..., :columns]


def _over_blocks(x: Array, facts: Facts) -> Array:
    """The largest of each block, [.., N, blocks], the same in all rows of a square one; [] or [.., 1] where all share.

    x holds no negative numbers.
    """
    if facts.tensor_wide == "scale":
        return np.asarray(x.max(initial=0), FP32)
    if facts.block == 1:
        return x.max(-1, keepdims=True, initial=0)
    short = -x.shape[-1] % facts.block
    tiles = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)])
    largest = tiles.reshape(*x.shape[:-1], -1, facts.block).max(-1, initial=0)
    if facts.square and largest.size:
        starts = np.arange(0, x.shape[-2], facts.block)
        groups = np.maximum.reduceat(largest, starts, axis=-2)
        largest = np.repeat(groups, facts.block, -2)[..., : x.shape[-2], :]
    return largest


def _amax(x: Array, facts: Facts) -> Array:
    """Of the finite elements."""
    return _over_blocks(np.where(np.isfinite(x), np.abs(x), FP32(0)), facts)


def _broken(x: Array, facts: Facts) -> Array:
    """Which blocks hold something that is not finite."""
    return _over_blocks((~np.isfinite(x)).astype(FP32), facts) > 0


def _packed(codes: Array) -> Array:
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


# -- formats -----------------------------------------------------------------------------------------------------------


def _float8_enc(amax: Array, facts: Facts) -> Array:
    recipe, largest = facts.recipe, facts.element.largest
    if facts.history:
        largest *= 2.0**-recipe.margin
    enc = np.where(amax == 0, FP32(1), np.minimum(FP32(largest) / amax, FLT_MAX)).astype(FP32)
    if getattr(recipe, "power_of_two", False):
        enc = (enc.view(np.uint32) & np.uint32(0xFF800000)).view(FP32)
    return enc


def _begun(amax: Array, facts: Facts) -> Array:
    history = np.zeros(facts.recipe.amax_history_len, FP32)
    history[0] = amax
    return history


def _float8(x: Array, enc: Array, facts: Facts) -> Parts:
    factor = _spread(enc, facts.block, x.shape[-1]) if facts.block > 1 else enc
    payload = facts.element.nearest(x * factor).astype(facts.element.dtype)
    payload.view(np.uint8)[~np.isfinite(x)] = 0x7F
    return {"payload": payload, "scale": np.asarray(FP32(1) / enc, FP32)}


def _mx(x: Array, facts: Facts) -> Parts:
    amax, element = _amax(x, facts), facts.element
    if facts.recipe.scale_rounding == "up":
        bits = (amax * (FP32(1) / FP32(element.largest))).view(np.uint32).astype(np.int64)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        code = exponent + ((mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000)))
    else:
        code = np.maximum((amax.view(np.uint32).astype(np.int64) >> 23) - element.exponent, 0)
    enc = np.ldexp(FP32(1), (127 - code).astype(np.int32)).astype(FP32)
    scale = np.where(_broken(x, facts), 255, code).astype(np.uint8)
    scaled = x * _spread(enc, facts.block, x.shape[-1])
    if element is E2M1:
        return {"payload": _e2m1(scaled, x), "scale": scale}
    payload = element.nearest(scaled).astype(element.dtype)
    payload.view(np.uint8)[~np.isfinite(x)] = 0x7F
    return {"payload": payload, "scale": scale}


def _nvfp4(x: Array, facts: Facts) -> Parts:
    finite = np.where(np.isfinite(x), np.abs(x), FP32(0))
    choice = facts.recipe.scale_choice == "4over6"
    whole = FP32(finite.max(initial=0))
    enc = FP32(1) if whole == 0 else min(FP32(1536 if choice else 2688) / whole, FLT_MAX)
    wide = FP32(1) / enc
    amax = _over_blocks(finite, facts)
    block = np.minimum(amax * (enc * (FP32(1) / FP32(6))), FLT_MAX)
    scale = np.clip(block, FP32(0), FP32(448)).astype(FP8)
    if choice:
        four = np.clip(block * FP32(1.5), FP32(0), FP32(448)).astype(FP8)
        less = _changed(x, four, wide, facts) < _changed(x, scale, wide, facts)
        scale = np.where(less, four, scale)
    factor = np.minimum(FP32(1) / (scale.astype(FP32) * wide), FLT_MAX)
    payload = _e2m1(x * _spread(factor, facts.block, x.shape[-1]), x)
    scale.view(np.uint8)[_broken(x, facts)] = 0x7F
    return {"payload": payload, "scale": scale, "global_scale": np.asarray(wide, FP32)}


def _changed(x: Array, scale: Array, wide: Array, facts: Facts) -> Array:
    """The sum of squares of what rounding under block scales changes in each block; sums are taken in halves."""
    dec = scale.astype(FP32) * wide
    factor = _spread(np.minimum(FP32(1) / dec, FLT_MAX), facts.block, x.shape[-1])
    off = E2M1.nearest(x * factor) * _spread(dec.astype(np.float64), facts.block, x.shape[-1]) - x.astype(np.float64)
    squares = np.square(off.astype(FP32).astype(np.float64)).reshape(*scale.shape, facts.block)
    while squares.shape[-1] > 1:
        squares = squares[..., : squares.shape[-1] // 2] + squares[..., squares.shape[-1] // 2 :]
    return squares[..., 0]


def _int4(x: Array, facts: Facts) -> Parts:
    amax = _amax(x, facts).astype(np.float64)
    largest = float(ml_dtypes.finfo(BF16).max)
    scale = np.minimum((amax / 7.5).astype(FP32), FP32(largest)).astype(BF16)
    scale = np.where(scale == 0, BF16(1), scale).astype(BF16)
    scaled = x / _spread(scale.astype(FP32), facts.block, x.shape[-1])
    codes = (INT4.nearest(np.where(np.isfinite(x), scaled, FP32(0))) + 8).astype(np.uint8)
    scale.view(np.uint16)[_broken(x, facts)] = 0x7FC0
    return {"payload": _packed(codes), "scale": scale}


def _int8(x: Array, facts: Facts) -> Parts:
    scale = np.maximum((_amax(x, facts).astype(np.float64) / 127.5).astype(FP32), FP32(2.0**-126))
    broken = _broken(x, facts)
    scaled = np.where(broken, FP32(0), x) * (FP32(1) / scale)
    payload = INT8.nearest(scaled).astype(np.int8)
    return {"payload": payload, "scale": np.where(broken, FP32(np.nan), scale).astype(FP32)}


def _nf4(x: Array, facts: Facts) -> Parts:
    scale = _amax(x, facts)
    scaled = x * _spread(FP32(1) / np.maximum(scale, FP32(1e-38)), facts.block, x.shape[-1])
    numbers = facts.element.nearest(np.where(np.isfinite(x), scaled, FP32(0)))
    codes = np.searchsorted(np.array(facts.element.table, FP32), numbers).astype(np.uint8)
    return {"payload": _packed(codes), "scale": np.where(_broken(x, facts), FP32(np.nan), scale).astype(FP32)}


def _e2m1(scaled: Array, x: Array) -> Array:
    elements = np.where(np.isfinite(x), E2M1.nearest(scaled), FP32(0)).astype(E2M1.dtype)
    return _packed(elements.view(np.uint8) & 15)
