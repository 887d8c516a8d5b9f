"""The recipes every promise of qtensor is tested with, and what is known about each format apart from its code.

Everything here is derived from the formats' definitions, not from the implementation: half steps, saturation, parts.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from qtensor import Float8CurrentScaling, Float8DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling, QuantizedTensor

RECIPES: dict[str, Any] = {
    "float8_row": Float8CurrentScaling(),
    "float8_row_e5m2": Float8CurrentScaling(element="e5m2"),
    "float8_tensor": Float8CurrentScaling(granularity="tensor"),
    "float8_tensor_power_of_two": Float8CurrentScaling(granularity="tensor", power_of_two=True),
    "mxfp8_row": MXFP8BlockScaling(),
    "mxfp8_row_e5m2": MXFP8BlockScaling(element="e5m2"),
    "mxfp8_row_floor": MXFP8BlockScaling(scale_rounding="floor"),
    "mxfp8_square": MXFP8BlockScaling(blocks="square"),
    "nvfp4_row": NVFP4BlockScaling(),
    "nvfp4_square": NVFP4BlockScaling(blocks="square"),
}
TENSOR_WIDE = [name for name in RECIPES if name.startswith(("float8_tensor", "nvfp4"))]

# A history makes bytes depend on earlier writes; it is otherwise a tensor like any other.
DELAYED = {"float8_delayed": Float8DelayedScaling(amax_history_len=4)}

all_recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
every_recipe = pytest.mark.parametrize(
    "recipe", (RECIPES | DELAYED).values(), ids=(RECIPES | DELAYED).keys()
)  # the delayed one, too
tensor_wide_recipes = pytest.mark.parametrize("recipe", [RECIPES[name] for name in TENSOR_WIDE], ids=TENSOR_WIDE)
per_row_recipes = pytest.mark.parametrize(
    "recipe",
    [recipe for name, recipe in RECIPES.items() if name not in TENSOR_WIDE],
    ids=[n for n in RECIPES if n not in TENSOR_WIDE],
)


@dataclass(frozen=True)
class Element:
    """A low-precision number: relative half step of its normals, half step of its subnormals, largest value."""

    relative: float
    subnormal: float
    largest: float


# m mantissa bits: relative 2^-(m+1), subnormal step 2^(1 - bias - m)
E4M3 = Element(2.0**-4, 2.0**-10, 448.0)
E5M2 = Element(2.0**-3, 2.0**-17, 57344.0)
E2M1 = Element(2.0**-2, 0.25, 6.0)
FP32_SLACK = 1 + 2.0**-20  # at most five fp32 roundings of 2^-24 each lie between x and its decoded value


def element_of(recipe: Any) -> Element:
    """The element of a recipe."""
    if isinstance(recipe, NVFP4BlockScaling):
        return E2M1
    return E4M3 if recipe.element == "e4m3" else E5M2


def block_of(recipe: Any) -> int:
    """What K must be a multiple of."""
    return {Float8CurrentScaling: 1, Float8DelayedScaling: 1, MXFP8BlockScaling: 32, NVFP4BlockScaling: 16}[
        type(recipe)
    ]


def row_multiple(recipe: Any) -> int:
    """What the boundary of a shard must be a multiple of for its bytes to be the slice's."""
    return block_of(recipe) if getattr(recipe, "blocks", "row") == "square" else 1


def unit(q: QuantizedTensor) -> Tensor:
    """fp64, of the logical shape: what one unit of each element is worth."""
    scale = q.scale.double()
    if isinstance(q.recipe, MXFP8BlockScaling):
        scale = torch.exp2(scale - 127)
    if isinstance(q.recipe, NVFP4BlockScaling):
        scale = scale * q.global_scale.double()
    repeat = 1 if isinstance(q.recipe, Float8CurrentScaling | Float8DelayedScaling) else block_of(q.recipe)
    return (scale.repeat_interleave(repeat, -1) if repeat > 1 else scale).expand(q.shape)


def error_bound(x: Tensor, q: QuantizedTensor) -> Tensor:
    """Largest |x - decoded| that rounding x / unit to nearest can give: half a step, or what saturation cuts off.

    |round(y) - y| <= max(relative |y|, subnormal) for |y| <= largest and |y| - largest beyond, times the unit.
    """
    element, one, magnitude = element_of(q.recipe), unit(q), x.double().abs()
    rounding = torch.maximum(magnitude * element.relative, one * element.subnormal)
    return torch.maximum(rounding, magnitude - one * element.largest) * FP32_SLACK


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
