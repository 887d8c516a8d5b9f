"""The backward products of a recipe with `gradients`, in numpy: one element, one row, one block at a time.

It shares no code with the product. Elements are found in a table of all values, scales by the definitions in
docs/numerics.md; only the last product of fp32 matrices is torch's, so that its sums are taken in the same order.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtensor import Float8CurrentScaling, Float8DelayedScaling, MXFP8BlockScaling, QuantizedTensor

FLT_MAX = np.float32(np.finfo(np.float32).max)
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}

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


def _positive(element: str) -> np.ndarray[Any, Any]:
    """All finite values from 0 up; their places are their codes, so an even code is an even mantissa."""
    mantissa, bias = (3, 7) if element == "e4m3" else (2, 15)
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


def rows(x: Tensor, recipe: Any, element: str) -> Tensor:
    """fp32 [M, C padded]: the decoded values of x [M, C] with every row quantized by itself, as `recipe` says."""
    block = 32 if isinstance(recipe, MXFP8BlockScaling) else 16
    values = x.detach().float().numpy()
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % block)))
    if isinstance(recipe, MXFP8BlockScaling):
        made = [mxfp8(row, element) for row in values]
    else:
        power = getattr(recipe, "power_of_two", False)
        made = [float8(row, element, power_of_two=power) for row in values]
    return torch.from_numpy(np.stack(made)) if made else torch.from_numpy(values)


def elements(q: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """fp32: the elements [N, K] and the scale of each row [N, 1], of a Float8 weight."""
    return q.payload.float(), q.scale.reshape(-1, 1).expand(q.shape[0], 1)


def expected_input_gradient(grad: Tensor, w: QuantizedTensor) -> Tensor:
    """[T, K] in grad.dtype."""
    recipe: Any = w.recipe
    if isinstance(recipe, MXFP8BlockScaling):
        dy = rows(grad, recipe, recipe.gradients)
        turned = rows(w.detach().dequantize(torch.float32).T, recipe, recipe.element)
    else:
        payload, scale = elements(w.detach())
        dy = rows(grad.float() * scale.reshape(1, -1), recipe, recipe.gradients)
        turned = torch.from_numpy(np.pad(payload.T.numpy(), ((0, 0), (0, -payload.shape[0] % 16))))
    return torch.matmul(dy, turned.T).to(grad.dtype)


def expected_weight_gradient(grad: Tensor, x: Tensor, recipe: Any) -> Tensor:
    """[N, K] in grad.dtype; x in the dtype of grad."""
    assert x.dtype == grad.dtype
    return torch.matmul(rows(grad.T, recipe, recipe.gradients), rows(x.T, recipe, recipe.element).T).to(grad.dtype)
