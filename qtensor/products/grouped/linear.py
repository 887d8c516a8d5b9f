"""Grouped tokens [T, K] by stacked experts [E, N, K] under a recipe with activations="dynamic".

    forward    y[t]  = product(x[t], w[e])               e the group of token t; Q(x) @ Q(w[e]).T, see ../dynamic.py
    backward   dx[t] = dy[t] @ dequantize(w[e])          or by ../gradients.py if the recipe says so, and then dw takes
               dw[e] = dy[group].T @ x[group]            columns quantized along the tokens of the group

Each is what a loop over experts with F.linear computes, bit for bit on a CPU: tokens do not know of each other, nor do
groups. Rows behind the last end are zeros, in y and in dx.
"""

from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.torch_private import is_tracing, without_torch_function
from qtensor.products.dynamic import quantize_rows
from qtensor.products.emulation import as_autocast
from qtensor.products.gradients import contraction_multiple, kinds_of
from qtensor.products.grouped.layout import places
from qtensor.products.grouped.multiply import FORWARD, PLAIN, TURNED, Told, columns, held_names, multiply_turned, rows
from qtensor.products.grouped.operands import encode_gradient_rows, encode_group_columns, turn_stack
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import describe, specs_of
from qtensor.tensor.contents import parts_per_row
from qtensor.tensor.quantized_tensor import QuantizedTensor


class GroupedLinear(torch.autograd.Function):
    """The products of grouped tokens around a quantized stack [E, N, K], which arrives transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turned: QuantizedTensor, ends: Tensor) -> Tensor:
        """Return the output [T, N] from x [T, K], the stack seen as [E, K, N] and the ends of groups."""
        of_x, of_weight = ctx.needs_input_grad[:2]
        with without_torch_function():
            ctx.recipe, ctx.looks, ctx.weight_dtype = turned.recipe, turned.shape, turned.dtype
        ctx.save_for_backward(x if of_weight else None, turned if of_x else None, ends)
        ctx.x_dtype = x.dtype
        return grouped_product(x, turned, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of x and of the transposed stack from that of the output, [T, N]."""
        (grad,) = grads
        x, turned, ends = ctx.saved_tensors
        # create_graph=True: a graph behind this one must raise, where it would be silently cut off
        if torch.is_grad_enabled() and not is_tracing():
            dx, dw = _DifferentiatedOnce.apply(grad, x, turned, ends, (ctx.looks, ctx.recipe))  # type: ignore[no-untyped-call]
        else:
            dx, dw = _gradients(grad, x, turned, ends, ctx.recipe)
        dx = dx if dx is None or dx.dtype == ctx.x_dtype else dx.to(ctx.x_dtype)
        dw = dw if dw is None or dw.dtype == ctx.weight_dtype else dw.to(ctx.weight_dtype)
        return dx, dw if dw is None else dw.transpose(-2, -1), None


class _DifferentiatedOnce(torch.autograd.Function):
    """`_gradients` if a graph of the backward is asked for (create_graph=True): an error behind it."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - what backward has
        ctx: Any,
        grad: Tensor,
        x: Tensor | None,
        turned: QuantizedTensor | None,
        ends: Tensor,
        looks: tuple[torch.Size, Recipe],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x and of a stack of these looks."""
        ctx.looks = looks
        return _gradients(grad, x, turned, ends, looks[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Raises: second derivatives are those of F.linear alone."""
        raise NotImplementedError(
            f"the second derivative of grouped products with {describe(*ctx.looks)} is not defined; loop over the "
            "experts with F.linear where a loss contains gradients"
        )


def grouped_product(x: Tensor, turned: QuantizedTensor, ends: Tensor) -> Tensor:
    """Compute Q(x) @ Q(w[e]).T of each group; not differentiable.

    Args:
        x: dense [T, K], bf16, fp16 or fp32.
        turned: the stack [E, N, K], seen as [E, K, N]; also a gathered one whose shards have different scales.
        ends: [E] int32.

    Returns:
        [T, N] in x.dtype, rounded once; zeros in rows behind the last end.
    """
    with torch.no_grad(), without_torch_function():
        recipe = turned.recipe
        x = as_autocast(x)
        parts = quantize_rows(x, recipe)
        ordered = [parts[name] for name in _names(recipe.of_rows)]
        return rows(ordered, _held(turned), ends, Told(recipe, FORWARD), x.dtype)


def _gradients(
    grad: Tensor, x: Tensor | None, turned: QuantizedTensor | None, ends: Tensor, recipe: Recipe
) -> tuple[Tensor | None, Tensor | None]:
    """Return dx [T, K], if the stack is given, and dw [E, N, K], if x is, both in the dtype of grad."""
    dx = dw = None
    with torch.no_grad(), without_torch_function():
        if x is not None and x.dtype != grad.dtype:
            x = x.to(grad.dtype)
        if recipe.gradients is None:
            if turned is not None:
                dx = rows([grad], _held(turned), ends, Told(recipe, PLAIN), grad.dtype)
            if x is not None:
                dw = columns([grad], [x], ends, Told(recipe, PLAIN), grad.dtype)
            return dx, dw
        if turned is not None:
            dx = _quantized_input_gradient(grad, turned, ends)
        if x is not None:
            dw = _quantized_weight_gradient(grad, x, ends, recipe)
    return dx, dw


def _quantized_input_gradient(grad: Tensor, turned: QuantizedTensor, ends: Tensor) -> Tensor:
    recipe = turned.recipe
    kinds, held = kinds_of(recipe), _held(turned)
    named = dict(zip(held_names(recipe), held, strict=True))
    a = encode_gradient_rows(grad, named, ends, kinds)
    kept = None if is_tracing() else turned._turned
    if kept is None:
        return rows([a[name] for name in _names(kinds.gradient)], held, ends, Told(recipe, TURNED), grad.dtype)
    # a gathered stack: once until FSDP2 reshards it
    made = kept.keep([turned, *turned.parts().values()], lambda: turn_stack(named, kinds))
    return multiply_turned(a, made, ends, recipe, grad.dtype)


def _quantized_weight_gradient(grad: Tensor, x: Tensor, ends: Tensor, recipe: Recipe) -> Tensor:
    kinds, experts = kinds_of(recipe), ends.shape[0]
    at = places(ends, x.shape[0], contraction_multiple(kinds.other))
    a = encode_group_columns(grad, at, experts, kinds.gradient)
    b = encode_group_columns(x, at, experts, kinds.other)
    operands = [a[name] for name in _names(kinds.gradient)], [b[name] for name in _names(kinds.other)]
    return columns(*operands, at.ends, Told(recipe, TURNED), grad.dtype)


def _names(recipe: Recipe) -> list[str]:
    return [spec.name for spec in specs_of(recipe)]


def _held(turned: QuantizedTensor) -> list[Tensor]:
    """Return the gathered parts of a stack that is seen transposed, each [E, N, ..], or [] if it is one for all."""
    parts, lens = parts_per_row(turned), turned._lens
    experts, _, rows_ = turned.shape
    held = [parts[name] for name in held_names(turned.recipe)]
    # rows that a view has put together into matrices; its parts are still those of the rows
    if lens.described is not None and tuple(lens.described) != (experts, rows_, turned.shape[1]):
        return [part.reshape(experts, rows_, part.shape[-1]) if part.ndim else part for part in held]
    return held
