"""Rounds full weights, and puts their values in place, both without a second dense copy.

Kernels round a weight in one pass, or in chunks of rows; values are decoded a few rows at a time.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor

from layerwise.algorithms.solvers.arithmetic import full_precision
from qtensor.numerics.kernels import encode_under
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import row_multiple, specs_of
from qtensor.tensor.quantized_tensor import QuantizedTensor

# Elements at a time, unless a row, or a row of square blocks, has more. On the CPU the temporaries of a piece are used
# again for the next one; those of 2^24 elements would be fresh pages of the system, at three times the time.
PIECE = {"cpu": 2**20}
PIECE_ELSEWHERE = 2**24

Parts = dict[str, Tensor]


def round_weight(weight: Tensor, recipe: Recipe, quantizer: Mapping[str, Tensor]) -> Parts:
    """Return the parts of a weight [N, K] under a quantizer, as `Format.encode_with` makes them of fp32 values."""
    with full_precision(weight.device):
        found = encode_under(weight.detach(), recipe, quantizer)
    return {spec.name: found[spec.name].contiguous() for spec in specs_of(recipe)}


def put_values(weight: QuantizedTensor, into: Tensor) -> None:
    """Write what a weight [N, K] or [E, N, K] decodes to into a dense tensor of its shape; experts one at a time."""
    if into.ndim == 2:
        for rows in _pieces(into, weight.recipe):
            into[rows].copy_(weight[rows].dequantize())
    else:
        for expert in range(len(into)):
            into[expert : expert + 1].copy_(weight[expert : expert + 1].dequantize())


def _pieces(weight: Tensor, recipe: Recipe) -> Iterator[slice]:
    """Yield ranges of rows of [N, K], whole blocks each."""
    rows, columns = weight.shape
    unit, piece = row_multiple(recipe), PIECE.get(weight.device.type, PIECE_ELSEWHERE)
    step = max(piece // max(columns, 1) // unit, 1) * unit
    for start in range(0, max(rows, 1), step):
        yield slice(start, start + step)
