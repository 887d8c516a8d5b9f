"""A tensor as pieces of a bounded number of elements: its values, and of a quantized one the parts behind them.

Every tensor is looked at as a matrix [rows, K], leading dims folded into the rows. The pieces of two tensors of one
shape are the same, whatever their recipes. No piece cuts a block (square ones have up to 128 rows), except where blocks
end with each matrix of a stack.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import specs_of
from qtensor.tensor.quantized_tensor import QuantizedTensor

ELEMENTS = 1 << 20  # about so many are decoded at once
WIDTH = 1 << 13  # columns; a multiple of all blocks
HEIGHT = 128  # rows come in so many; a multiple of all square blocks


@dataclass(frozen=True)
class Tile:
    """One piece.

    rows, columns: where it is in the matrix. values: floating [rows, columns], of complex tensors [rows, columns, 2].
    parts: of a quantized tensor, those of this piece; tensor-wide ones whole.
    """

    rows: slice
    columns: slice
    values: Tensor
    parts: dict[str, Tensor]


def tiles(tensor: Tensor) -> Iterator[Tile]:
    """Yield the pieces, row by row; none of an empty tensor."""
    rows, width = matrix_shape(tensor.shape)
    if not rows * width:
        return
    across = min(width, WIDTH)
    # whole square blocks, so that the parts of a piece decode by themselves
    down = max(ELEMENTS // across // HEIGHT, 1) * HEIGHT
    matrix = None if isinstance(tensor, QuantizedTensor) else tensor.reshape(rows, width)
    for top in range(0, rows, down):
        for left in range(0, width, across):
            place = slice(top, min(top + down, rows)), slice(left, min(left + across, width))
            if isinstance(tensor, QuantizedTensor):
                parts = _cut_parts(tensor, *place)
                yield Tile(*place, decoded_parts(parts, tensor.recipe), parts)
            elif matrix is not None:
                yield Tile(*place, _as_float(matrix[place]), {})


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, K) of a shape [.., K]; a number is one row of one."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def decodable(dtype: torch.dtype) -> bool:
    """Return whether torch converts values of this dtype to numbers."""
    try:
        _as_float(torch.empty(0, dtype=dtype, device="cpu"))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def decoded_parts(parts: dict[str, Tensor], recipe: Recipe) -> Tensor:
    """Return the values of parts, fp32."""
    return QuantizedTensor.from_parts(parts, recipe, torch.float32).dequantize()


def _as_float(values: Tensor) -> Tensor:
    """Return values as fp32 if that holds each of them, else as fp64."""
    if values.is_complex():
        values = torch.view_as_real(values)
    narrow = values.is_floating_point() and values.dtype.itemsize <= 4
    return values.to(torch.float32 if narrow else torch.float64)


def _cut_parts(tensor: QuantizedTensor, rows: slice, columns: slice) -> dict[str, Tensor]:
    height = matrix_shape(tensor.shape)[0]
    found = {}
    for spec in specs_of(tensor.recipe):
        part = tensor.parts()[spec.name]
        if spec.per_row:
            part = part.reshape(height, -1)[rows]
            if spec.block:
                part = part[:, slice(*spec.columns(columns.start, columns.stop))]
        found[spec.name] = part
    return found
