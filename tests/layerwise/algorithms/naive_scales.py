"""The errors of all scales, as the definitions have them: every candidate, one after the other, in numpy.

Rounding is that of the formats in fp32, by ml_dtypes; errors are summed in fp64.
"""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from tests.recipes import BF16, E8M0, FP8, FP32, facts

F32 = np.float32
FLT_MAX = np.finfo(F32).max
MULTIPLES = np.linspace(0.25, 4, 39)

Array = Any


def block_shape(x: Array, recipe: Any) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    known = facts(recipe)
    if known.block > 1:
        return known.rows, known.block
    return (x.shape[0] if known.tensor_wide else 1), x.shape[1]


def blocks_of(x: Array, recipe: Any, columns: int | None = None) -> Array:
    """[N, K] -> [groups, rows, blocks, columns], 0 where the last blocks are smaller."""
    rows, own = block_shape(x, recipe)
    columns = columns or own
    padded = np.pad(x, ((0, -x.shape[0] % rows), (0, -x.shape[1] % columns)))
    return padded.reshape(-1, rows, padded.shape[1] // columns, columns)


def amaxes(x: Array, recipe: Any) -> Array:
    return np.abs(blocks_of(x, recipe)).max(axis=(1, 3))


def float8_scale(amax: Array, recipe: Any) -> Array:
    enc = np.where(amax == 0, F32(1), np.minimum(F32(facts(recipe).element.largest) / amax, FLT_MAX)).astype(F32)
    if recipe.power_of_two:
        enc = np.ldexp(F32(0.5), np.frexp(enc)[1]).astype(F32)
    return enc


def fp32_grid(amax: Array, recipe: Any) -> tuple[Array, Array]:
    """(enc, dec)."""
    element = facts(recipe).element
    if element.table:
        return F32(1) / np.maximum(amax, F32(1e-38)), amax
    if element.uniform:
        dec = np.maximum(amax / F32(127.5), F32(2.0**-126))
        return F32(1) / dec, dec
    enc = float8_scale(amax, recipe)
    return enc, F32(1) / enc


def mxfp8_code(amax: Array, recipe: Any) -> Array:
    element = facts(recipe).element
    if recipe.scale_rounding == "up":
        mantissa, exponent = np.frexp(amax.astype(F32) * F32(1 / element.largest))
        exponent = exponent - (mantissa == 0.5)
    else:
        exponent = np.frexp(amax.astype(F32))[1] - 1 - element.exponent
    return np.where(amax == 0, 0, np.clip(exponent + 127, 0, 254))


def int4_scale(amax: Array) -> Array:
    scale = (amax / F32(7.5)).astype(BF16).astype(F32)
    return np.where(scale == 0, F32(1), scale)


def global_scale(x: Array, recipe: Any) -> tuple[Array, Array]:
    """(enc, dec)."""
    amax = np.abs(x).max()
    # of a choice between two scales the larger one must be a number, too
    most = F32(2688) if recipe.scale_choice is None else F32(1536)
    enc = F32(1) if amax == 0 else np.minimum(most / amax, FLT_MAX)
    return enc, F32(1) / enc


def own_scale(x: Array, recipe: Any) -> tuple[Array, Array]:
    """(enc, dec) of Max, one for each block."""
    amax = amaxes(x, recipe)
    if facts(recipe).scale is FP32:
        return fp32_grid(amax, recipe)
    if facts(recipe).scale is E8M0:
        code = mxfp8_code(amax, recipe)
        return np.ldexp(F32(1), 127 - code), np.ldexp(F32(1), code - 127)
    if facts(recipe).scale is BF16:
        return 1 / int4_scale(amax).astype(np.float64), int4_scale(amax)
    global_enc, global_dec = global_scale(x, recipe)
    six = amax * (global_enc * F32(1 / 6))
    own = nvfp4_grid(e4m3(six), global_dec)
    if recipe.scale_choice is None:
        return own
    four = nvfp4_grid(e4m3(six * F32(1.5)), global_dec)
    better = changed(x, recipe, *four) < changed(x, recipe, *own)
    return np.where(better, four[0], own[0]), np.where(better, four[1], own[1])


def changed(x: Array, recipe: Any, enc: Array, dec: Array) -> Array:
    """fp64, of each block: what the choice between two scales compares, from fp32 differences of exact products."""
    enc, dec = (np.repeat(each, 16, axis=1)[:, : x.shape[1]] for each in (enc, dec))
    found = facts(recipe).element.nearest(x * enc).astype(np.float64) * dec.astype(np.float64) - x
    return blocks_of(found.astype(F32).astype(np.float64) ** 2, recipe).sum(axis=(1, 3))


def e4m3(scale: Array) -> Array:
    return np.clip(scale, 0, 448).astype(ml_dtypes.float8_e4m3fn).astype(F32)


def nvfp4_grid(scale: Array, g: Array) -> tuple[Array, Array]:
    dec = (scale * g).astype(F32)
    return np.minimum(F32(1) / dec, FLT_MAX).astype(F32), dec


def candidate_scales(x: Array, recipe: Any) -> Iterator[tuple[Array, Array]]:
    """(enc, dec) of every candidate of the definition, one for each block."""
    amax = amaxes(x, recipe)
    if facts(recipe).scale is FP8:
        for code in range(1, 127):
            scale = np.uint8(code).view(ml_dtypes.float8_e4m3fn).astype(F32)
            yield nvfp4_grid(np.full_like(amax, scale), global_scale(x, recipe)[1])
        return
    for multiple in MULTIPLES:
        if facts(recipe).scale is FP32:
            yield fp32_grid(amax * F32(multiple), recipe)
        elif facts(recipe).scale is BF16:
            scale = int4_scale(amax * F32(multiple))
            yield 1 / scale.astype(np.float64), scale
        else:
            code = mxfp8_code(amax * F32(multiple), recipe)
            yield np.ldexp(F32(1), 127 - code), np.ldexp(F32(1), code - 127)


def errors(x: Array, recipe: Any, enc: Array, dec: Array, hessian: Array | None = None) -> Array:
    """fp64, of each block, as one scale each of `enc`, `dec` gives."""
    rows, columns = block_shape(x, recipe)
    enc, dec = (
        np.repeat(np.repeat(each, rows, axis=0), columns, axis=1)[: x.shape[0], : x.shape[1]] for each in (enc, dec)
    )
    element = facts(recipe).element
    decoded = element.nearest(x / dec if facts(recipe).scale is BF16 else x * enc) * dec
    error = decoded.astype(np.float64) - x.astype(np.float64)
    if hessian is None:
        return blocks_of(error**2, recipe).sum(axis=(1, 3))
    padded = np.pad(error, ((0, 0), (0, -x.shape[1] % 16))).reshape(x.shape[0], -1, 16)
    terms = np.einsum("nbi,bij,nbj->nb", padded, hessian.astype(np.float64), padded)
    rows_terms = np.pad(terms, ((0, -x.shape[0] % rows), (0, 0)))  # [rows, K / 16]
    starts = np.arange(0, x.shape[1], columns) // 16
    return np.add.reduceat(rows_terms.reshape(-1, rows, terms.shape[1]).sum(axis=1), starts, axis=1)
