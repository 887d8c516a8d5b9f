"""The recipes every promise of qtensor is tested with, what rounding to them may cost, and how bytes are compared.

What an error may be is derived from the formats' definitions, not from the implementation: half steps, saturation.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from qtensor import QuantizedTensor
from tests.recipes import MAIN, WITH_HISTORY, facts, recipes

RECIPES = recipes(lambda each: not each.history)
DELAYED = WITH_HISTORY
WIDE = recipes(lambda each: each.tensor_wide is not None and not each.history)
PER_ROW = recipes(lambda each: each.tensor_wide is None)
FP32_SLACK = 1 + 2.0**-20  # at most five fp32 roundings of 2^-24 each lie between x and its decoded value


def _parametrized(chosen: dict[str, object]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("recipe", chosen.values(), ids=chosen.keys())


all_recipes = _parametrized(RECIPES)
every_recipe = _parametrized(RECIPES | DELAYED)  # the delayed one, too
# One form of each format, where the element and the rounding of scales cannot matter: in layers and optimizers.
main_recipes = _parametrized(MAIN)
every_main_recipe = _parametrized(MAIN | DELAYED)
tensor_wide_recipes = _parametrized(WIDE)
per_row_recipes = _parametrized(PER_ROW)


def unit(q: QuantizedTensor) -> Tensor:
    """fp64, of the logical shape: what one unit of each element is worth."""
    known = facts(q.recipe)
    stored = raw(q.scale).numpy().view(known.scale).astype(np.float64)
    scale = torch.from_numpy(stored).reshape(q.scale.shape)
    if "global_scale" in known.parts:
        scale = scale * q.global_scale.double()
    each = scale.repeat_interleave(known.block, -1)[..., : q.shape[-1]] if known.block > 1 else scale
    return each.expand(q.shape)


def error_bound(x: Tensor, q: QuantizedTensor) -> Tensor:
    """Largest |x - decoded| that rounding x / unit to nearest can give: half a step, or what saturation cuts off.

    |round(y) - y| <= max(relative |y|, subnormal) for |y| <= largest and |y| - largest beyond, times the unit. The
    roundings in fp32 are of y, and so of many half steps where elements have as many bits as INT8.
    """
    element, one, magnitude = facts(q.recipe).element, unit(q), x.double().abs()
    rounding = torch.maximum(magnitude * element.relative, one * element.subnormal)
    return torch.maximum(rounding, magnitude - one * element.largest) + magnitude * (FP32_SLACK - 1)


def raw(x: Tensor) -> Tensor:
    """The bytes of a plain tensor, flat."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Same shape, dtype and bytes (NaN bits, signs of zeros)."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a), raw(b))


def same_parts(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Same recipe and the same bytes in all parts."""
    theirs = b.parts()
    return a.recipe == b.recipe and all(same_bytes(part, theirs[name]) for name, part in a.parts().items())


def weight(rows: int = 64, columns: int = 96, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0) -> Tensor:
    """Values like a trained weight's: normal with a few large ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return (x * torch.where(torch.rand(rows, columns, generator=generator) > 0.99, 8.0, 0.05)).to(dtype)
