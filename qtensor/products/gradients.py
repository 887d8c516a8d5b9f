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
                NVFP4: of square blocks the elements and scales of forward, transposed; global scales become factors, as
                those of Float8. Row blocks are quantized anew along N, in 1x16 blocks

Scales of MXFP8 are rounded up here whatever the recipe says, as "floor" would clamp finite gradients.

These are the sources that TransformerEngine takes, but for two: its MXFP8 quantizes the weight along N from a
high-precision copy, which is not kept here, and its Float8 has one scale a tensor, where dw is made of the bytes of
forward. Dims that are no multiple of what blocks and kernels need (32 for MXFP8 and NVFP4, 16 for Float8) are padded
with zeros, which are in no amax and add nothing. NVFP4 rotates and draws operands: backward_operands.py.

A value that is not finite makes its element or block NaN, and so every sum that takes it: a loss scaler sees it. No
amax is taken over tokens of other ranks, so no collective is needed; dw depends on which tokens a rank has.

On a GPU the gradient is read twice for all four operands that are made of it: once for the largest magnitudes of rows
and columns, once for the codes (qtensor/numerics/transposing.py).

In a compiled graph all of this is plain operations, so that the compiler makes the codes where it makes the values: in
one pass with the derivative of an activation function, say. Only what is made of the weight is hidden in an operation
that takes the gradient as well, for the reasons in late_decode.py.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_hooks.torch_private import constant_in_graphs, is_tracing
from qtensor.numerics import kernels, transposing
from qtensor.products import in_bf16
from qtensor.products.backward_operands import encode_columns, encode_rows
from qtensor.products.dynamic import Parts, quantize_rows, scaled_mm_support
from qtensor.products.emulation import tell_of_emulation, without_autocast
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import column_multiple, format_of, logical_shape, registered, specs_of
from qtensor.tensor.contents import parts_per_row

if TYPE_CHECKING:
    from qtensor.tensor.quantized_tensor import QuantizedTensor


class Kinds(NamedTuple):
    """What operands are quantized to.

    Attributes:
        gradient: the recipe of rows for gradients.
        other: that of rows for inputs and weights.
        weight: the weight's own, without how to compute.
        rotated: whether both operands of dw are rotated along tokens.
        drawn: whether gradients are rounded stochastically.
    """

    gradient: Recipe
    other: Recipe
    weight: Recipe
    rotated: bool
    drawn: bool


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


def gradients(
    grad: Tensor, x: Tensor | None, weight: "QuantizedTensor | None", recipe: Recipe
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the input and of the weight; not differentiable.

    Args:
        grad: of the output, dense [T, N], bf16, fp16 or fp32.
        x: the input [T, K] in the dtype of grad; None if the gradient of the weight is not wanted.
        weight: [N, K], also a gathered one whose shards have different tensor-wide scales, or a transposed view; None
            if the gradient of the input is not wanted.
        recipe: of the weight.

    Returns:
        dx: [T, K] in grad.dtype, or None.
        dw: [N, K] in grad.dtype, or None.
    """
    kinds, dx, dw = kinds_of(recipe), None, None
    multiple = contraction_multiple(kinds.other)
    with torch.no_grad():
        other = None if weight is None else _other_operand(weight, kinds)
        rows, columns = _operands(grad, other, kinds, multiple, wants_columns=x is not None)
        if other is not None and rows is not None:
            dx = other.multiply(rows, kinds, grad)
        if x is not None and columns is not None:
            inputs = encode_columns(x, kinds.other, multiple, rotated=kinds.rotated, drawn=False)
            dw = _multiply(columns, inputs, kinds, grad)
    return dx, dw


def _operands(
    grad: Tensor, other: "_Turned | _TurnedLate | None", kinds: Kinds, multiple: int, *, wants_columns: bool
) -> tuple[Parts | None, Parts | None]:
    """Return what is made of the gradient: rows for the product with the other operand, columns for that with x."""
    alike = not kinds.rotated and not kinds.drawn
    if other is not None and wants_columns and alike:
        return transposing.encode_both(grad, other.factors, kinds.gradient, multiple)
    rows = columns = None
    if other is not None:
        rows = encode_rows(grad, other.factors, kinds.gradient, multiple, drawn=kinds.drawn)
    if other is None or wants_columns:
        columns = encode_columns(grad, kinds.gradient, multiple, rotated=kinds.rotated, drawn=kinds.drawn)
    return rows, columns


class _Turned(NamedTuple):
    """The weight in dx: what `turn_weight` returns."""

    parts: Parts
    factors: Tensor | None

    def multiply(self, rows: Parts, kinds: Kinds, like: Tensor) -> Tensor:
        """Return dx from the gradient's rows, [T, K]."""
        return _multiply(rows, self.parts, kinds, like)


def _other_operand(weight: "QuantizedTensor", kinds: Kinds) -> "_Turned | _TurnedLate":
    parts, lens = parts_per_row(weight), weight._lens
    seen = SeenWeight((weight.shape[0], weight.shape[1]), lens.described is not None, lens.transposed)
    kept = None if is_tracing() or seen.view else weight._turned
    if not _in_a_graph() and kept is None:
        return _Turned(*turn_weight(parts, kinds, seen))
    factors = None if seen.view else format_of(kinds.weight).column_factors(parts, kinds.weight)
    if kept is not None:
        of = [weight, *weight.parts().values()]
        return _Turned(kept.keep(of, lambda: turn_weight(parts, kinds, seen)[0]), factors)
    held = [parts[spec.name] for spec in specs_of(weight.recipe) if spec.gathered]
    return _TurnedLate(held, _text(weight.recipe), seen, factors)


@functools.cache
def kinds_of(recipe: Recipe) -> Kinds:
    """Return what the operands are quantized to under a recipe with `gradients`."""
    return Kinds(recipe.of_gradients, recipe.of_backward, recipe.stored, recipe.rotates_tokens, recipe.draws_gradients)


def turn_weight(parts: Parts, kinds: Kinds, seen: SeenWeight) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return the weight's operand in dx: parts of w.T [K, N] under `kinds.other`, and factors of grad's columns.

    Factors are fp32 [1, N] or [1, 1]; None if there are none. A view of another shape is quantized anew from its
    decoded values, whatever the format.
    """
    multiple = contraction_multiple(kinds.other)
    exact = None if seen.view else format_of(kinds.weight).turned(parts, kinds.weight, multiple)
    if exact is not None:
        return exact
    # blocks of forward run along K, and dx sums along N: they are quantized anew
    values = kernels.decode(parts, kinds.weight, torch.float32)
    values = values.view(seen.shape[::-1] if seen.transposed else seen.shape)
    if seen.transposed:
        return quantize_rows(transposing.padded(values, multiple), kinds.other), None
    return transposing.encode_columns(values, kinds.other, multiple), None


def contraction_multiple(recipe: Recipe) -> int:
    """Return what T and N are padded to: whole blocks, and what the hardware's kernels take."""
    route = registered(recipe).route
    return math.lcm(column_multiple(recipe), 1 if route is None else route.columns)


def _multiply(a: Parts, b: Parts, kinds: Kinds, like: Tensor) -> Tensor:
    """Multiply gradients a [M, C] and what b [L, C] holds of the other operand: [M, L] in the dtype of `like`."""
    supported, reason = _support(logical_shape(b["payload"], kinds.other), kinds, like)
    route = registered(kinds.other).route
    if supported and route is not None:
        return route.multiply(a, b, like.dtype, kinds.other)
    if in_bf16.holds(like.device, kinds.other, like.dtype):
        return in_bf16.multiply(a, kinds.gradient, b, kinds.other, like.dtype)
    tell_of_emulation(like.device, type(kinds.other).__name__, reason)
    return emulate(a, b, kinds, like.dtype)


def _support(shape: Sequence[int], kinds: Kinds, like: Tensor) -> tuple[bool, str]:
    """Return what `scaled_mm_support` says of an operand [L, C]."""
    columns = shape[1]
    # it has been padded, and is no number in a graph for any number of tokens
    if is_tracing() and columns != 0:
        columns = contraction_multiple(kinds.other)
    return scaled_mm_support(like.device, kinds.other, like.dtype, shape[0], columns)


def emulate(a: Parts, b: Parts, kinds: Kinds, dtype: torch.dtype) -> Tensor:
    """Return the product in fp32 of the decoded operands, rounded once to `dtype`."""
    values = kernels.decode(a, kinds.gradient, torch.float32)
    with without_autocast(values.device):
        return F.linear(values, kernels.decode(b, kinds.other, torch.float32)).to(dtype)


# -- in a compiled graph -----------------------------------------------------------------------------------------------


def _in_a_graph() -> bool:
    return is_tracing() and not torch.compiler.is_exporting()


class _TurnedLate(NamedTuple):
    """The weight in dx, turned by an operation that waits for the gradient.

    Attributes:
        held: what the weight consists of.
        recipe: in words.
        seen: how the weight sees its parts.
        factors: of the gradient's columns.
    """

    held: list[Tensor]
    recipe: str
    seen: SeenWeight
    factors: Tensor | None

    def multiply(self, rows: Parts, kinds: Kinds, like: Tensor) -> Tensor:
        """Return dx from the gradient's rows, [T, K]: a product that the compiler sees where the hardware has it."""
        told = self.held, self.recipe, list(self.seen.shape), [self.seen.view, self.seen.transposed]
        route = registered(kinds.other).route
        supported, _ = _support((self.seen.shape[1], self.seen.shape[0]), kinds, like)
        if not supported or route is None:
            return torch.ops.qtensor.multiply_turned(list(rows.values()), *told, like.dtype)  # type: ignore[no-any-return]
        made = torch.ops.qtensor.turned_weight(like, *told)
        names = (spec.name for spec in specs_of(kinds.other))
        return route.multiply(rows, dict(zip(names, made, strict=True)), like.dtype, kinds.other)


@constant_in_graphs
@functools.cache
def _text(recipe: Recipe) -> str:
    """Return a text that another process understands, too: it may find this graph, compiled, in a cache on disk."""
    return json.dumps([recipe.to_json(), recipe.gradients])


@functools.cache
def _kinds(text: str) -> Kinds:
    record, element = json.loads(text)
    return kinds_of(dataclasses.replace(Recipe.from_json(record), activations="dynamic", gradients=element))


def _turn_held(held: list[Tensor], kinds: Kinds, shape: list[int], seen: list[bool]) -> Parts:
    names = [spec.name for spec in specs_of(kinds.weight) if spec.gathered]
    view, transposed = seen
    parts = dict(zip(names, held, strict=True))
    made, _ = turn_weight(parts, kinds, SeenWeight((shape[0], shape[1]), view, transposed))
    return made


@torch.library.custom_op("qtensor::turned_weight", mutates_args=())
def _turned_weight(after: Tensor, held: list[Tensor], recipe: str, shape: list[int], seen: list[bool]) -> list[Tensor]:
    """Return the parts of the weight's operand in dx, given what it consists of and how it sees that.

    `after` is the gradient, and not read: so this cannot run in forward, to be kept until backward. (It has another
    use: inductor stores what such an operation takes, in the gradient's own dtype, and does not compute it again for
    each kernel that quantizes it.)
    """
    told = _kinds(recipe)
    made = _turn_held(held, told, shape, seen)
    return [made[spec.name] for spec in specs_of(told.other)]


@_turned_weight.register_fake
def _(after: Tensor, held: list[Tensor], recipe: str, shape: list[int], seen: list[bool]) -> list[Tensor]:
    told = _kinds(recipe)
    made = _turn_held(held, told, shape, seen)
    return [torch.empty_like(made[spec.name]) for spec in specs_of(told.other)]


@torch.library.custom_op("qtensor::multiply_turned", mutates_args=())
def _multiply_turned(  # noqa: PLR0913, PLR0917 - an operation takes tensors, numbers and texts
    rows: list[Tensor], held: list[Tensor], recipe: str, shape: list[int], seen: list[bool], dtype: torch.dtype
) -> Tensor:
    """Return dx of the gradient's rows, ordered as their specs, where no product of the hardware multiplies them."""
    told = _kinds(recipe)
    named = {spec.name: part for spec, part in zip(specs_of(told.gradient), rows, strict=True)}
    like = torch.empty(0, dtype=dtype, device=rows[0].device)
    return _multiply(named, _turn_held(held, told, shape, seen), told, like)


@_multiply_turned.register_fake
def _(  # noqa: PLR0913, PLR0917 - those of the operation
    rows: list[Tensor], held: list[Tensor], recipe: str, shape: list[int], seen: list[bool], dtype: torch.dtype
) -> Tensor:
    return rows[0].new_empty((rows[0].shape[0], shape[1]), dtype=dtype)
