"""A product with a weight that is decoded inside it: one operation of a compiled graph, which hides the dense weight.

A compiled block is one graph of its forward and its backward. Both decode the same parts, so the compiler decodes once,
in forward, and saves the dense weight for backward: for every layer at once, which is what quantized storage is to
avoid. Here backward's products (and those of tensor parallelism, which come without a direction) decode inside an
operation that takes a gradient as its operand: it cannot run early, and nothing of it can be shared.

Eager code, torch.export (whose programs must run without this package) and activation checkpointing have no such graph.
"""

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fsdp_hooks.torch_private import constant_in_graphs, is_tracing
from qtensor.numerics import kernels
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import specs_of
from qtensor.tensor.contents import decode, parts_per_row

if TYPE_CHECKING:
    from qtensor.tensor.quantized_tensor import QuantizedTensor

aten = torch.ops.aten
_CALLS = {
    "matmul": torch.matmul,
    **{name: getattr(aten, name).default for name in ("mm", "addmm", "bmm", "mv")},
    **({"_grouped_mm": aten._grouped_mm.default} if hasattr(aten, "_grouped_mm") else {}),  # noqa: SLF001 - its name
}


class How(NamedTuple):
    """What an operation is told in words."""

    call: str  # one of _CALLS
    place: int  # of the weight among the operands
    recipe: Recipe
    transposed: bool


def multiply_decoded(
    call: str, operands: Sequence[Any], place: int, weight: "QuantizedTensor", dtype: torch.dtype | None = None
) -> Tensor:
    """Return the product `call` of plain operands and, at `place` among them, of the values of a weight in `dtype`."""
    dtype = weight.dtype if dtype is None else dtype
    how = How(call, place, weight.recipe, weight._lens.transposed)
    # an exported program must run without this package, so it gets plain ops
    if not is_tracing() or torch.compiler.is_exporting():
        return _call(how, operands, decode(weight, dtype))
    parts = parts_per_row(weight)
    held = [parts[spec.name] for spec in specs_of(weight.recipe)]
    shape = list(weight.shape[:-2] + weight.shape[:-3:-1] if how.transposed else weight.shape)
    return torch.ops.qtensor.multiply_decoded(list(operands), held, _text(*how), dtype, shape)  # type: ignore[no-any-return]


def _call(how: How, operands: Sequence[Any], values: Tensor) -> Tensor:
    return _CALLS[how.call](*operands[: how.place], values, *operands[how.place :])  # type: ignore[no-any-return]


@constant_in_graphs
@functools.cache
def _text(call: str, place: int, recipe: Recipe, transposed: bool) -> str:  # noqa: FBT001 - fields of How
    """Return a text that another process understands, too: it may find this graph, compiled, in a cache on disk."""
    return json.dumps([call, place, recipe.to_json(), transposed])


@functools.cache
def _how(text: str) -> How:
    call, place, recipe, transposed = json.loads(text)
    return How(call, place, Recipe.from_json(recipe), transposed)


@torch.library.custom_op("qtensor::multiply_decoded", mutates_args=())
def _multiply_decoded(
    operands: list[Tensor], parts: list[Tensor], how: str, dtype: torch.dtype, shape: list[int]
) -> Tensor:
    """Compute `multiply_decoded`, given the parts of the weight and the shape that they describe."""
    told = _how(how)
    named = {spec.name: part for spec, part in zip(specs_of(told.recipe), parts, strict=True)}
    values = kernels.decode(named, told.recipe, dtype).view(shape)
    return _call(told, operands, values.transpose(-2, -1) if told.transposed else values)


@_multiply_decoded.register_fake
def _(operands: list[Tensor], parts: list[Tensor], how: str, dtype: torch.dtype, shape: list[int]) -> Tensor:
    told = _how(how)
    values = parts[0].new_empty(shape, dtype=dtype)
    return _call(told, operands, values.transpose(-2, -1) if told.transposed else values)
