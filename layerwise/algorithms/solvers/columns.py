"""How single columns of a group's weights are rounded, for GPTQ (whose loop is in gptq.py) and descent.

Columns are rows of W^T, [K, rows], so that a column is contiguous. The rows are those of all linears of the group, one
below the other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerwise.algorithms.algorithm import Group
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import block_multiple, format_of


@dataclass(frozen=True, eq=False)
class ColumnRounding:
    """How all rows of a group are rounded; row s of both, [scales, rows], is for `span` columns from s * span on."""

    enc: Tensor
    dec: Tensor
    span: int
    snap: Callable[[Tensor, Recipe], Tensor]
    recipe: Recipe

    def __call__(self, values: Tensor, column: int) -> Tensor:
        """Return what the values of one column [rows] are stored as."""
        scale = column // self.span
        return self.snap(values * self.enc[scale], self.recipe).mul_(self.dec[scale])


def rounding_of(group: Group, recipe: Recipe, quantizers: Sequence[Mapping[str, Tensor]]) -> ColumnRounding:
    """Return the rounding of a group whose linears have these quantizers."""
    fmt = format_of(recipe)
    both: tuple[list[Tensor], list[Tensor]] = ([], [])
    for linear, quantizer in zip(group.linears, quantizers, strict=True):
        for scales, found in zip(both, fmt.grid(recipe, quantizer), strict=True):
            # A tensor-wide scale, too, is spread to all rows: the linears of a group lie below each
            # other, each with its own.
            rows = found.reshape(1, 1) if found.ndim == 0 else found  # [1 or N, scales]
            scales.append(rows.expand(linear.weight.shape[0], -1))
    enc, dec = (torch.cat(scales).t().contiguous() for scales in both)
    span = block_multiple(recipe) if len(enc) > 1 else group.linears[0].weight.shape[1]
    return ColumnRounding(enc, dec, span, fmt.snap, recipe)


def columns_of(group: Group) -> Tensor:
    """Return fp32 [K, rows], new."""
    return torch.cat([linear.weight.float() for linear in group.linears]).t().contiguous()


def per_linear(columns: Tensor, group: Group) -> list[Tensor]:
    """Cut [K, rows] into the [N, K] of each linear."""
    return [part.contiguous() for part in columns.t().split([len(linear.weight) for linear in group.linears])]
