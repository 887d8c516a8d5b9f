"""What the kept checkpoints hold.

Every byte is counted up, not computed: no torch can make others of it, and a wrong offset shows. Nothing here follows
the tables that other tests share, for the archives cannot be written again by a torch that is no longer at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qtensor import (
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
)

ROWS, COLUMNS = 10, 64
RECIPES = {
    "row": Float8CurrentScaling(),
    "tensor": Float8CurrentScaling(granularity="tensor"),
    "delayed": Float8DelayedScaling(amax_history_len=4),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}

Place = Callable[[Tensor], Tensor]  # puts a whole tensor where a state wants it


def whole(tensor: Tensor) -> Tensor:
    """Leaves a tensor as it is."""
    return tensor


def counted(shape: tuple[int, ...], dtype: torch.dtype, start: int) -> Tensor:
    """A tensor whose bytes count up."""
    count = torch.Size(shape).numel() * dtype.itemsize
    numbers = (torch.arange(count, dtype=torch.int64, device="cpu") * 7 + start) % 120 + 1  # no NaN in any format
    return numbers.to(torch.uint8).view(dtype).reshape(shape)


def weight(recipe: Any, start: int) -> QuantizedTensor:
    """A quantized tensor whose parts' bytes count up, but for those that a shard cannot differ in."""
    zeros = quantize(torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16, device="cpu"), recipe)
    parts = {
        name: counted(tuple(part.shape), part.dtype, start + at)
        for at, (name, part) in enumerate(zeros.parts().items())
    }
    return QuantizedTensor.from_parts(parts, recipe, torch.bfloat16)


def dense(start: int) -> dict[str, Any]:
    """Tensors and other values that any state dict holds."""
    return {
        "bias": counted((ROWS,), torch.float32, start),
        "steps": counted((), torch.int64, start),
        "masters": [counted((ROWS, 3), torch.bfloat16, start + 1), {"lr": 0.5 + start}],
    }


def state(start: int = 1, place: Place = whole) -> dict[str, Any]:
    """A state dict with a weight of every recipe."""
    weights = {name: place(weight(recipe, start + at)) for at, (name, recipe) in enumerate(RECIPES.items())}
    values = dense(start)
    return {"weights": weights, **values, "bias": place(values["bias"])}
