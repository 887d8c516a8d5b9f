"""States that tests of deltas share: quantized tensors of every recipe and dense ones, two versions of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qtensor import quantize
from tests.dcp_adapters.cases import values
from tests.recipes import TABLE

DENSE = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
ROWS, COLUMNS = 256, 256  # whole blocks of every recipe


def nudged(seed: int, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> Tensor:
    """Weights after `seed` small steps."""
    step = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    return values(shape, 0, torch.float32) + 1e-3 * seed * step


def every_recipe(seed: int) -> dict[str, Any]:
    """One weight under each recipe of the shared table."""
    return {f"{facts.name}.weight": quantize(nudged(seed), facts.recipe) for facts in TABLE}


def every_dtype(seed: int) -> dict[str, Any]:
    """One dense tensor of each dtype, an empty one and some without dims."""
    state = {f"dense.{dtype}": (nudged(seed, (33, 5)) * 40).abs().clamp(max=250).to(dtype) for dtype in DENSE}
    state["dense.torch.bool"][seed] = False
    return state | {
        "empty": torch.zeros(0, 4),
        "no dims": torch.tensor(1.0 + seed),
        "count": torch.tensor(seed),
        "same": values((7,), 3),
    }


def state(seed: int) -> dict[str, Any]:
    """All of it."""
    return every_recipe(seed) | every_dtype(seed)


def copied(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors of their own."""
    return {name: tensor.clone() for name, tensor in tensors.items()}
