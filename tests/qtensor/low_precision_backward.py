"""The backward products of a recipe with `gradients`, in numpy: one element, one row, one block at a time.

It shares no code with the product. Elements are found in a table of all values, scales by the definitions in
docs/numerics.md; only the last product of fp32 matrices is torch's, so that its sums are taken in the same order.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtensor import (
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
)

FLT_MAX = np.float32(np.finfo(np.float32).max)
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}

FLOAT8 = {
    "float8_row": Float8CurrentScaling(activations="dynamic", gradients="e5m2"),
    "float8_row_e4m3": Float8CurrentScaling(activations="dynamic", gradients="e4m3"),
    "float8_row_power_of_two": Float8CurrentScaling(power_of_two=True, activations="dynamic", gradients="e4m3"),
    "float8_tensor": Float8CurrentScaling(granularity="tensor", activations="dynamic", gradients="e5m2"),
    "float8_all_e5m2": Float8CurrentScaling(element="e5m2", activations="dynamic", gradients="e5m2"),
    "float8_delayed": Float8DelayedScaling(amax_history_len=4, activations="dynamic", gradients="e5m2"),
}
MXFP8 = {
    "mxfp8_row": MXFP8BlockScaling(activations="dynamic", gradients="e4m3"),
    "mxfp8_square": MXFP8BlockScaling(blocks="square", activations="dynamic", gradients="e4m3"),
    "mxfp8_floor": MXFP8BlockScaling(scale_rounding="floor", activations="dynamic", gradients="e4m3"),
    "mxfp8_e5m2": MXFP8BlockScaling(element="e5m2", activations="dynamic", gradients="e4m3"),
}
NVFP4 = {
    "nvfp4_square": NVFP4BlockScaling(blocks="square", activations="dynamic", gradients="nvfp4"),
    "nvfp4_row": NVFP4BlockScaling(activations="dynamic", gradients="nvfp4"),
    "nvfp4_nearest": NVFP4BlockScaling(blocks="square", activations="dynamic", gradients="nvfp4-nearest"),
    "nvfp4_unrotated": NVFP4BlockScaling(activations="dynamic", gradients="nvfp4-unrotated"),
    "nvfp4_4over6": NVFP4BlockScaling(scale_choice="4over6", activations="dynamic", gradients="nvfp4"),
}
WORD = np.uint64(0xFFFFFFFF)
# What TransformerEngine's get_wgrad_sign_vector returns.
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)


def _positive(element: str) -> np.ndarray[Any, Any]:
    """All finite values from 0 up; their places are their codes, so an even code is an even mantissa."""
    mantissa, bias = {"e4m3": (3, 7), "e5m2": (2, 15), "e2m1": (1, 1)}[element]
    values = []
    for code in range(256):
        exponent, fraction = code >> mantissa, (code & (2**mantissa - 1)) / 2**mantissa
        values.append(2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)
        if values[-1] == LARGEST[element]:
            return np.array(values)
    raise AssertionError(element)


VALUES = {element: _positive(element) for element in LARGEST}


def nearest(x: np.ndarray[Any, Any], element: str) -> np.ndarray[Any, Any]:
    """The nearest values of the element, ties to the even code, saturating; NaN for what is not finite."""
    values, size = VALUES[element], np.minimum(np.abs(np.nan_to_num(x)).astype(np.float64), LARGEST[element])
    above = np.searchsorted(values, size)
    below = np.where(values[above] == size, above, above - 1)
    down, up = size - values[below], values[above] - size
    code = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    return np.where(np.isfinite(x), np.copysign(values[code], x), np.nan)


def float8(row: np.ndarray[Any, Any], element: str, *, power_of_two: bool) -> np.ndarray[Any, Any]:
    """Decoded values of one row under one scale."""
    finite = np.abs(row[np.isfinite(row)])
    amax = finite.max() if finite.size else np.float32(0)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        enc = np.float32(1) if amax == 0 else min(np.float32(LARGEST[element]) / amax, FLT_MAX)
        if power_of_two:
            enc = np.float32(2.0 ** math.floor(math.log2(enc)))
        scale = np.float32(1) / enc
        return nearest(row * enc, element).astype(np.float32) * scale  # type: ignore[no-any-return]


def mxfp8(row: np.ndarray[Any, Any], element: str) -> np.ndarray[Any, Any]:
    """Decoded values of one row of whole blocks, whose scales are rounded up."""
    out = []
    for block in row.reshape(-1, 32):
        finite = np.abs(block[np.isfinite(block)])
        amax = finite.max() if finite.size else np.float32(0)
        wanted = float(amax * np.float32(1 / LARGEST[element]))
        exponent = max(math.ceil(math.log2(wanted)), -127) if wanted else -127
        whole = bool(np.isfinite(block).all())
        scaled = np.ldexp(block.astype(np.float64), -exponent) if whole else np.full(32, np.nan)
        out.append(np.ldexp(nearest(scaled, element), exponent))
    return np.concatenate(out).astype(np.float32) if out else row


def mixed(word: Any) -> Any:
    """lowbias32, as its author writes it in C, of words in uint64."""
    word = word ^ word >> np.uint64(16)
    word = word * np.uint64(0x7FEB352D) & WORD
    word = word ^ word >> np.uint64(15)
    word = word * np.uint64(0x846CA68B) & WORD
    return word ^ word >> np.uint64(16)


def draws(row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The number between 0 and 1 that each element of a row is rounded with."""
    words = row.view(np.uint32).astype(np.uint64)
    places = np.arange(len(words), dtype=np.uint64) * np.uint64(0x9E3779B9) & WORD
    key = mixed(mixed(words ^ places)[words != 0].sum(dtype=np.uint64) & WORD)
    return (mixed(key ^ places) // np.uint64(512) * np.uint64(2) + np.uint64(1)) / 2.0**24  # type: ignore[no-any-return]


def drawn(scaled: np.ndarray[Any, Any], chances: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Each number between -6 and 6 as one of its two neighbours, the one further from 0 by its chance."""
    values, size = VALUES["e2m1"], np.abs(scaled).astype(np.float64)
    below = np.searchsorted(values, size, side="right") - 1
    above = np.minimum(below + 1, len(values) - 1)
    up = size - values[below] > chances * (values[above] - values[below])
    return np.copysign(np.where(up, values[above], values[below]), scaled)


def nvfp4(row: np.ndarray[Any, Any], recipe: Any, *, of_gradient: bool) -> np.ndarray[Any, Any]:
    """Decoded values of one row of whole blocks under its own global scale."""
    choice = recipe.scale_choice is not None and not of_gradient
    chances = draws(row) if of_gradient and recipe.gradients in ("nvfp4", "nvfp4-unrotated") else None
    finite = np.abs(row[np.isfinite(row)])
    amax = finite.max() if finite.size else np.float32(0)
    out: list[np.ndarray[Any, Any]] = []
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        enc = np.float32(1) if amax == 0 else min(np.float32((256 if choice else 448) * 6) / amax, FLT_MAX)
        wide = np.float32(1) / enc
        for start in range(0, len(row), 16):
            block = row[start : start + 16]
            whole = bool(np.isfinite(block).all())
            six = np.abs(np.where(np.isfinite(block), block, np.float32(0))).max() * (enc * np.float32(1 / 6))
            tried = []
            for wanted in (six, six * np.float32(1.5)) if choice else (six,):
                scale = np.float32(nearest(np.array([min(wanted, FLT_MAX)], np.float32), "e4m3")[0])
                dec = scale * wide
                scaled = block * min(np.float32(1) / dec, FLT_MAX)
                changed = (nearest(scaled, "e2m1") * float(dec) - block).astype(np.float32).astype(np.float64)
                tried.append((_in_halves(changed * changed), dec, scaled))
            _, dec, scaled = tried[1] if choice and whole and tried[1][0] < tried[0][0] else tried[0]
            if chances is None or not whole:
                elements = nearest(scaled, "e2m1")
            else:
                elements = drawn(np.clip(scaled, -6, 6), chances[start : start + 16])
            out.append(elements.astype(np.float32) * dec if whole else np.full(16, np.nan, np.float32))
    return np.concatenate(out) if out else row


def _in_halves(numbers: np.ndarray[Any, Any]) -> Any:
    """Their sum: the first half and the second are added, then again."""
    while numbers.size > 1:
        numbers = numbers[: numbers.size // 2] + numbers[numbers.size // 2 :]
    return numbers[0]


def rotated(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Every 16 numbers of each row times signs and Hadamard matrix / 4: numbers 1, 2, 4 and 8 apart, in fp32."""
    tiles = values.reshape(len(values), -1, 16) * SIGNS
    for apart in (1, 2, 4, 8):
        first = [place for place in range(16) if not place & apart]
        second = [place | apart for place in first]
        total, difference = tiles[..., first] + tiles[..., second], tiles[..., first] - tiles[..., second]
        tiles[..., first], tiles[..., second] = total, difference
    return (tiles * np.float32(0.25)).reshape(values.shape)


def element_of(recipe: Any) -> str:
    """What `rows` is told of weights and inputs."""
    return "" if isinstance(recipe, NVFP4BlockScaling) else recipe.element  # type: ignore[no-any-return]


def rows(x: Tensor, recipe: Any, element: str, *, tokens: bool = False) -> Tensor:
    """fp32 [M, C padded]: the decoded values of x [M, C] with every row quantized by itself, as `recipe` says.

    NVFP4: `element` names gradients, or is "" for others; `tokens`: rows go along tokens, which that product may
    rotate.
    """
    block = 16 if isinstance(recipe, Float8CurrentScaling | Float8DelayedScaling) else 32
    values = x.detach().float().numpy()
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % block)))
    if isinstance(recipe, MXFP8BlockScaling):
        made = [mxfp8(row, element) for row in values]
    elif isinstance(recipe, NVFP4BlockScaling):
        if tokens and recipe.gradients != "nvfp4-unrotated":
            values = rotated(values)
        made = [nvfp4(row, recipe, of_gradient=bool(element)) for row in values]
    else:
        power = getattr(recipe, "power_of_two", False)
        made = [float8(row, element, power_of_two=power) for row in values]
    return torch.from_numpy(np.stack(made)) if made else torch.from_numpy(values)


def elements(q: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """fp32: the elements [N, K] and the scale of each row [N, 1], of a Float8 weight."""
    return q.payload.float(), q.scale.reshape(-1, 1).expand(q.shape[0], 1)


def expected_input_gradient(grad: Tensor, w: QuantizedTensor) -> Tensor:
    """[T, K] in grad.dtype."""
    dy, turned = input_operands(grad, w)
    return torch.matmul(dy, turned.T).to(grad.dtype)


def input_operands(grad: Tensor, w: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Decoded, fp32: [T, N padded] and [K, N padded]."""
    recipe: Any = w.recipe
    if isinstance(recipe, MXFP8BlockScaling):
        dy = rows(grad, recipe, recipe.gradients)
        turned = rows(w.detach().dequantize(torch.float32).T, recipe, recipe.element)
    elif isinstance(recipe, NVFP4BlockScaling) and recipe.blocks == "row":
        dy = rows(grad, recipe, recipe.gradients)
        turned = rows(w.detach().dequantize(torch.float32).T, recipe, "")
    elif isinstance(recipe, NVFP4BlockScaling):
        global_scale = w.detach().global_scale.float().numpy()
        dy = rows(torch.from_numpy(grad.detach().float().numpy() * global_scale), recipe, recipe.gradients)
        parts = {**w.detach().parts(), "global_scale": torch.ones(())}
        values = QuantizedTensor.from_parts(parts, recipe.stored, torch.float32).dequantize()
        turned = torch.from_numpy(np.pad(values.T.numpy(), ((0, 0), (0, -values.shape[0] % 32))))
    else:
        payload, scale = elements(w.detach())
        dy = rows(grad.float() * scale.reshape(1, -1), recipe, recipe.gradients)
        turned = torch.from_numpy(np.pad(payload.T.numpy(), ((0, 0), (0, -payload.shape[0] % 16))))
    return dy, turned


def expected_weight_gradient(grad: Tensor, x: Tensor, recipe: Any) -> Tensor:
    """[N, K] in grad.dtype; x in the dtype of grad."""
    assert x.dtype == grad.dtype
    dy, inputs = weight_operands(grad, x, recipe)
    return torch.matmul(dy, inputs.T).to(grad.dtype)


def weight_operands(grad: Tensor, x: Tensor, recipe: Any) -> tuple[Tensor, Tensor]:
    """Decoded, fp32: [N, T padded] and [K, T padded]."""
    dy = rows(grad.T, recipe, recipe.gradients, tokens=True)
    return dy, rows(x.T, recipe, element_of(recipe), tokens=True)
