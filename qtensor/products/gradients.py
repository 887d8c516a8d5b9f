"""The two products of backward under a recipe with `gradients`: operands in low precision, multiplied as in forward.

    dx = Q(dy) @ w       [T, N] @ [N, K] -> [T, K]      both operands in blocks along N
    dw = Q(dy.T) @ Q(x)  [N, T] @ [T, K] -> [N, K]      both operands in blocks along T

Backward keeps what it keeps otherwise: x and the quantized weight. All operands are derived from these when a product
needs them, and die with it. What they are made from:

    dy in dx    the gradient, every row (token) quantized by itself along N
    dy in dw    the gradient again (not the rounded one), every column quantized by itself along T
    x in dw     the input before rounding, in the dtype of dy; every column quantized by itself along T
    w in dx     Float8: the elements of forward, transposed, which rounds nothing. The scale of row n becomes a factor
                of column n of dy, in fp32, before dy is quantized: sum_n dy[t, n] s[n] q[n, k]
                MXFP8: the decoded weight, quantized anew in 1x32 blocks along N. No value of square blocks changes, for
                each new scale is a power of two that is no larger than the old one. Of row blocks, small values beside
                large ones of their column lose digits, a second time

Scales of MXFP8 are rounded up here whatever the recipe says, as "floor" would clamp finite gradients.

These are the sources that TransformerEngine takes, but for two: its MXFP8 quantizes the weight along N from a
high-precision copy, which is not kept here, and its Float8 has one scale a tensor, where dw is made of the bytes of
forward. Dims that are no multiple of what blocks and kernels need (32 for MXFP8, 16 for Float8) are padded with zeros,
which are in no amax and add nothing.

A value that is not finite makes its element or block NaN, and so every sum that takes it: a loss scaler sees it. No
amax is taken over tokens of other ranks, so no collective is needed; dw depends on which tokens a rank has.

A compiled graph sees one operation a product, for the reasons in late_decode.py.
"""

import dataclasses
import functools
import json
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_hooks.torch_private import constant_in_graphs, is_tracing
from qtensor.numerics import kernels
from qtensor.products.dynamic import Parts, quantize_rows, scaled_mm_support, without_autocast
from qtensor.products.emulation import tell_of_emulation
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import column_multiple, format_of, registered, specs_of
from qtensor.tensor.contents import parts_per_row

if TYPE_CHECKING:
    from qtensor.tensor.quantized_tensor import QuantizedTensor


class Kinds(NamedTuple):
    """What operands are quantized to.

    Attributes:
        gradient: the recipe of rows for gradients.
        other: that of rows for inputs and weights.
        weight: the weight's own, without how to compute.
    """

    gradient: Recipe
    other: Recipe
    weight: Recipe


class SeenWeight(NamedTuple):
    """How a weight sees its parts.

    Attributes:
        shape: the weight's own, [N, K].
        view: whether the parts describe another shape.
        transposed: whether that is [K, N].
    """

    shape: tuple[int, int]
    view: bool
    transposed: bool


def input_gradient(grad: Tensor, weight: "QuantizedTensor") -> Tensor:
    """Return the gradient of the input, [T, N] -> [T, K] in grad.dtype; not differentiable.

    Args:
        grad: dense [T, N], bf16, fp16 or fp32.
        weight: [N, K], also a gathered one whose shards have different tensor-wide scales, or a transposed view.
    """
    parts, lens, recipe = parts_per_row(weight), weight._lens, weight.recipe
    seen = SeenWeight((weight.shape[0], weight.shape[1]), lens.described is not None, lens.transposed)
    # in a graph one opaque operation, for the reasons in late_decode.py
    if not _in_a_graph():
        return _input_gradient(grad, parts, kinds_of(recipe), seen)
    held, how = [parts[spec.name] for spec in specs_of(recipe) if spec.gathered], [seen.view, seen.transposed]
    return torch.ops.qtensor.quantized_input_gradient(grad, held, _text(recipe), list(seen.shape), how)  # type: ignore[no-any-return]


def weight_gradient(grad: Tensor, x: Tensor, recipe: Recipe) -> Tensor:
    """Return the gradient of a weight of this recipe, [T, N], [T, K] -> [N, K]; not differentiable."""
    if not _in_a_graph():
        return _weight_gradient(grad, x, kinds_of(recipe))
    return torch.ops.qtensor.quantized_weight_gradient(grad, x, _text(recipe))  # type: ignore[no-any-return]


@functools.cache
def kinds_of(recipe: Recipe) -> Kinds:
    """Return what the operands are quantized to under a recipe with `gradients`."""
    return Kinds(recipe.of_gradients, recipe.of_backward, recipe.stored)


def turn_weight(parts: Parts, kinds: Kinds, seen: SeenWeight) -> tuple[Parts, Tensor | None]:
    """Return the weight's operand in dx: parts of w.T [K, N] under `kinds.other`, and factors of grad's columns.

    Factors are fp32 [1, N] or [1, 1]; None if there are none. A view of another shape is quantized anew from its
    decoded values, whatever the format.
    """
    multiple = contraction_multiple(kinds.other)
    exact = None if seen.view else format_of(kinds.weight).turned(parts, kinds.weight)
    if exact is not None:
        made, factors = exact
        return {**made, "payload": _pad(made["payload"], multiple)}, factors
    # blocks of forward run along K, and dx sums along N: they are quantized anew
    values = kernels.decode(parts, kinds.weight, torch.float32)
    values = values.view(seen.shape[::-1] if seen.transposed else seen.shape)
    return quantize_rows(_pad(values if seen.transposed else values.t(), multiple), kinds.other), None


def contraction_multiple(recipe: Recipe) -> int:
    """Return what T and N are padded to: whole blocks, and what the hardware's kernels take."""
    route = registered(recipe).route
    return math.lcm(column_multiple(recipe), 1 if route is None else route.columns)


@torch.no_grad()
def _input_gradient(grad: Tensor, parts: Parts, kinds: Kinds, seen: SeenWeight) -> Tensor:
    w, factors = turn_weight(parts, kinds, seen)
    # the scale of row n of w is a factor of column n of dy
    dy = grad if factors is None else grad.to(torch.float32) * factors
    return _multiply(quantize_rows(_pad(dy, contraction_multiple(kinds.other)), kinds.gradient), w, kinds, grad)


@torch.no_grad()
def _weight_gradient(grad: Tensor, x: Tensor, kinds: Kinds) -> Tensor:
    multiple = contraction_multiple(kinds.other)
    dy = quantize_rows(_pad(grad.t(), multiple), kinds.gradient)  # [N, T]
    return _multiply(dy, quantize_rows(_pad(x.t(), multiple), kinds.other), kinds, grad)


def _multiply(a: Parts, b: Parts, kinds: Kinds, like: Tensor) -> Tensor:
    """Multiply gradients a [M, C] and what b [L, C] holds of the other operand: [M, L] in the dtype of `like`."""
    rows, columns = b["payload"].shape
    supported, reason = scaled_mm_support(like.device, kinds.other, like.dtype, rows, columns)
    route = registered(kinds.other).route
    if supported and route is not None:
        return route.multiply(a, b, like.dtype)
    tell_of_emulation(like.device, type(kinds.other).__name__, reason)
    return emulate(a, b, kinds, like.dtype)


def emulate(a: Parts, b: Parts, kinds: Kinds, dtype: torch.dtype) -> Tensor:
    """Return the product in fp32 of the decoded operands, rounded once to `dtype`."""
    values = kernels.decode(a, kinds.gradient, torch.float32)
    with without_autocast(values.device):
        return F.linear(values, kernels.decode(b, kinds.other, torch.float32)).to(dtype)


def _pad(x: Tensor, multiple: int) -> Tensor:
    """Return x, contiguous, with zeros behind each row up to a multiple; one-byte elements have the code 0 for 0."""
    short = -x.shape[-1] % multiple
    if not short:
        return x.contiguous()
    return F.pad(x.view(torch.uint8), (0, short)).view(x.dtype) if x.itemsize == 1 else F.pad(x, (0, short))


# -- in a compiled graph -----------------------------------------------------------------------------------------------


def _in_a_graph() -> bool:
    return is_tracing() and not torch.compiler.is_exporting()


@constant_in_graphs
@functools.cache
def _text(recipe: Recipe) -> str:
    """Return a text that another process understands, too: it may find this graph, compiled, in a cache on disk."""
    return json.dumps([recipe.to_json(), recipe.gradients])


@functools.cache
def _kinds(text: str) -> Kinds:
    record, element = json.loads(text)
    return kinds_of(dataclasses.replace(Recipe.from_json(record), activations="dynamic", gradients=element))


@torch.library.custom_op("qtensor::quantized_input_gradient", mutates_args=())
def _input_gradient_op(grad: Tensor, parts: list[Tensor], recipe: str, shape: list[int], seen: list[bool]) -> Tensor:
    """Compute `input_gradient`, given what the weight consists of and how it sees its parts: [view, transposed]."""
    told = _kinds(recipe)
    names = [spec.name for spec in specs_of(told.weight) if spec.gathered]
    view, transposed = seen
    named = dict(zip(names, parts, strict=True))
    return _input_gradient(grad, named, told, SeenWeight((shape[0], shape[1]), view, transposed))


@_input_gradient_op.register_fake
def _(grad: Tensor, parts: list[Tensor], recipe: str, shape: list[int], seen: list[bool]) -> Tensor:
    return grad.new_empty((grad.shape[0], shape[1]))


@torch.library.custom_op("qtensor::quantized_weight_gradient", mutates_args=())
def _weight_gradient_op(grad: Tensor, x: Tensor, recipe: str) -> Tensor:
    """Compute `weight_gradient`, given the recipe in words."""
    return _weight_gradient(grad, x, _kinds(recipe))


@_weight_gradient_op.register_fake
def _(grad: Tensor, x: Tensor, recipe: str) -> Tensor:
    return grad.new_empty((grad.shape[1], x.shape[1]))
