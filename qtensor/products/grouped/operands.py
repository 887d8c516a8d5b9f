"""What grouped products multiply, quantized as the dense ones have it (see ../dynamic.py and ../gradients.py).

    tokens          every row by itself: all groups at once
    a stack         as it is stored, or for dx turned along N, matrix by matrix
    columns         for dw: channels along the tokens of a group, in groups of whole blocks (layout.py)

A scale of a whole row becomes one a channel and group, [E, C]; scales of blocks stay where they are, [C, W // block],
since no block spans two groups.
"""

import functools

import torch
from torch import Tensor

from fsdp_hooks.kernels.compiled import Kernel
from fsdp_hooks.torch_private import is_tracing
from qtensor.numerics import kernels, transposing
from qtensor.products.dynamic import Parts
from qtensor.products.gradients import Kinds, contraction_multiple
from qtensor.products.grouped.layout import Places, owners, spread
from qtensor.spec import registry as formats
from qtensor.spec.blocks import finite_magnitude
from qtensor.spec.codecs.rounding import is_armed
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import format_of, specs_of


def turn_stack(parts: Parts, kinds: Kinds) -> dict[str, Tensor]:
    """Return the operand of a stack [E, N, K] in dx: parts of each matrix turned, [E, K, N padded]."""
    multiple = contraction_multiple(kinds.other)
    exact = format_of(kinds.weight).turned(parts, kinds.weight, multiple)
    if exact is not None:
        return exact[0]
    values = kernels.decode(parts, kinds.weight, torch.float32)
    return kernels.encode_rows(transposing.padded(values.transpose(-2, -1), multiple), kinds.other)


def encode_gradient_rows(grad: Tensor, parts: Parts, ends: Tensor, kinds: Kinds) -> dict[str, Tensor]:
    """Return the parts of the gradient [T, N] in dx, each row times the factors of its group's matrix."""
    factors = format_of(kinds.weight).column_factors(parts, kinds.weight)
    if factors is not None and factors.ndim > 2:  # [E, 1, N] -> [T, N]
        owner = owners(ends, grad.shape[0]).clamp(max=factors.shape[0] - 1)
        factors = factors.squeeze(1).index_select(0, owner)
    return transposing.encode_scaled(grad, factors, kinds.gradient, contraction_multiple(kinds.other))


def encode_group_columns(x: Tensor, at: Places, experts: int, recipe: Recipe) -> dict[str, Tensor]:
    """Return the parts of the columns of x [T, C], those of each group by themselves: payload [C, W]."""
    placed = spread(x, at)
    if not scales_groups(recipe):
        return transposing.encode_columns(placed, recipe)
    amax = _group_amaxes(placed, at, experts)
    kernel = _codes_kernel(recipe.stored, x.dtype)
    run = kernel.eager if is_tracing() or is_armed() else kernel
    codes = run(placed, at.owner.clamp(max=experts - 1), amax)
    # the scale that each amax gives, whatever it is the scale of
    scale = formats.encode(torch.zeros_like(amax).unsqueeze(-1), recipe, amax.unsqueeze(-1))["scale"].squeeze(-1)
    return {"payload": transposing.turned(codes), "scale": scale}


def scales_groups(recipe: Recipe) -> bool:
    """Return whether a scale belongs to a whole row, so that columns of a group have one."""
    return any(not spec.block for spec in specs_of(recipe))


def _group_amaxes(placed: Tensor, at: Places, experts: int) -> Tensor:
    """Return the largest finite magnitude of each channel in each group, fp32 [E, C]."""
    magnitude = finite_magnitude(placed.to(torch.float32))
    # all that lies behind the last group goes into one more
    index = at.owner.unsqueeze(1).expand_as(magnitude)
    found = magnitude.new_zeros((experts + 1, placed.shape[1]))
    return found.scatter_reduce(0, index, magnitude, "amax")[:experts]


@functools.cache
def _codes_kernel(recipe: Recipe, dtype: torch.dtype) -> Kernel:
    def encode(x: Tensor, owner: Tensor, amax: Tensor) -> Tensor:
        # each element is a row of its own here, under the amax of its channel and group
        values = x.to(torch.float32).unsqueeze(-1)
        parts = formats.encode(values, recipe, amax.index_select(0, owner).unsqueeze(-1))
        return parts["payload"].squeeze(-1)

    return Kernel(encode, f"encode_columns_of_groups_{type(recipe).__name__}_{dtype}".replace(".", "_"))
