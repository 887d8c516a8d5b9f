"""F.linear with a quantized weight: plain output, plain gradients.

    forward    y  = x  @ dequantize(w).T + b         # [T, K] @ [K, N] -> [T, N]
               y  = product(x, w) + b                # activations="dynamic": Q(x) @ Q(w).T, see dynamic.py
    backward   dx = dy @ dequantize(w)               # [T, N] @ [N, K] -> [T, K]
               dw = dy.T @ x                         # [N, T] @ [T, K] -> [N, K], a plain tensor in w.dtype

Gradients pass straight through the rounding of a quantized input, and dw is computed from the input before rounding.
The backward products above are those of all recipes without `gradients`; with it, both are products of quantized
operands, see gradients.py.

Backward saves the quantized weight if the gradient of x is wanted, and x if that of the weight is; a dense weight
exists only during one product, or up to backward if `decode_once` says so. The weight reaches this function through
__torch_function__, before autograd takes F.linear apart.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_hooks.torch_private import is_tracing, without_torch_function
from qtensor.products.decode_once import decode_once
from qtensor.products.dynamic import product
from qtensor.products.emulation import as_autocast
from qtensor.products.gradients import gradients
from qtensor.products.late_decode import multiply_decoded
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import describe
from qtensor.tensor.contents import decode
from qtensor.tensor.quantized_tensor import TORCH_FUNCTIONS, QuantizedTensor


class QuantizedLinear(torch.autograd.Function):
    """The three products of a linear layer around a quantized weight [N, K]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
        """Return the output [.., N] from x [.., K], weight [N, K] and bias [N] or None."""
        # a frozen weight under adapters needs no gradient, and then x need not be kept for it
        of_x, of_weight = ctx.needs_input_grad[:2]
        # each read of an attribute would go through __torch_function__
        with without_torch_function():
            ctx.recipe, ctx.shape, ctx.weight_dtype = weight.recipe, weight.shape, weight.dtype
            dense = decode(weight) if ctx.recipe.activations is None else None
        y = _forward(x, weight, bias, dense)
        kept = None if dense is None or not of_x or is_tracing() else _keep_dense(dense, y)
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None, kept)
        ctx.x_dtype = x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of x, weight and bias from that of the output, [.., N]."""
        (grad,) = grads
        # x and the weight if the other's gradient is wanted
        x, weight, dense = ctx.saved_tensors
        if ctx.recipe.gradients is None:
            dx, dw = _dense_gradients(grad, x, weight, dense)
        # create_graph=True: a rounded gradient has no derivative, so a second backward must raise
        elif torch.is_grad_enabled() and not is_tracing():
            dx, dw = _DifferentiatedOnce.apply(grad, x, weight, (ctx.shape, ctx.recipe))
        else:
            dx, dw = _quantized_gradients(grad, x, weight, ctx.recipe)
        dx = dx if dx is None or dx.dtype == ctx.x_dtype else dx.to(ctx.x_dtype)
        dw = dw if dw is None or dw.dtype == ctx.weight_dtype else dw.to(ctx.weight_dtype)
        db = None
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            db = (grad.flatten(0, -2).sum(0) if grad.ndim > 1 else grad).to(ctx.bias_dtype)
        return dx, dw, db


class _DifferentiatedOnce(torch.autograd.Function):
    """`_quantized_gradients` if a graph of the backward is asked for (create_graph=True): an error behind it."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, x: Tensor | None, weight: QuantizedTensor | None, looks: tuple[torch.Size, Recipe]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x and of a weight of this shape and recipe."""
        ctx.looks = looks
        return _quantized_gradients(grad, x, weight, looks[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Raises: rounding has no derivative, and nothing says what should pass straight through it here."""
        raise NotImplementedError(
            f"the second derivative of F.linear with {describe(*ctx.looks)}: its backward rounds gradients; leave "
            "gradients=None where a loss contains gradients"
        )


def _dense_gradients(
    grad: Tensor, x: Tensor | None, weight: QuantizedTensor | None, dense: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x, if the weight is given, and of the weight, if x is; `dense`: see `_keep_dense`."""
    dx = dw = None
    if weight is not None:
        # a loss may contain dx, and so the weight once more
        if torch.is_grad_enabled() and not is_tracing():
            dx = _InputGradient.apply(grad, weight)
        elif dense is not None and dense.numel() and dense.dtype == grad.dtype:  # which hooks on gradients may change
            dx = grad @ dense
        else:
            dx = _input_gradient(grad, weight)
    if x is not None:
        if grad.ndim == 1:
            dw = torch.outer(grad, x)
        else:
            dw = _rows(grad).T @ _rows(x if x.dtype == grad.dtype else x.to(grad.dtype))
    return dx, dw


class _InputGradient(torch.autograd.Function):
    """dx = dy @ dequantize(w) as a function of both, straight through the rounding of w, for further derivatives."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, weight: QuantizedTensor) -> Tensor:
        """Return the input's gradient [.., K] from that of the output, [.., N], and the weight [N, K]."""
        ctx.save_for_backward(grad, weight)
        return _input_gradient(grad, weight)

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of dy and of the weight from that of dx, [.., K]."""
        (found,) = outer
        grad, weight = ctx.saved_tensors
        of_grad, of_weight = ctx.needs_input_grad
        return (
            _LinearOutput.apply(found, weight) if of_grad else None,
            _rows(grad).T @ _rows(found) if of_weight else None,
        )


class _LinearOutput(torch.autograd.Function):
    """y = x @ dequantize(w).T likewise; each of the two is made of the other's derivatives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor) -> Tensor:
        """Return the output [.., N] from x [.., K] and the weight [N, K]."""
        ctx.save_for_backward(x, weight)
        return F.linear(x, decode(weight, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x and of the weight from that of y, [.., N]."""
        (grad,) = grads
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        return (
            _InputGradient.apply(grad, weight) if of_x else None,
            _rows(grad).T @ _rows(x) if of_weight else None,
        )


def _rows(x: Tensor) -> Tensor:
    """Return [.., channels] as [tokens, channels]."""
    if x.ndim == 2:
        return x
    return x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)


def _input_gradient(grad: Tensor, weight: QuantizedTensor) -> Tensor:
    with without_torch_function():
        if is_tracing():
            return multiply_decoded("matmul", [grad], 1, weight, grad.dtype)
        return torch.matmul(grad, decode(weight, grad.dtype))


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Return dx [.., K] of y = F.linear(x, weight) from dy [.., N], not differentiable, as its backward computes it.

    Args:
        grad: dy.
        weight: [N, K], quantized or plain.
    """
    if not isinstance(weight, QuantizedTensor):
        return grad @ weight.to(grad.dtype)
    if weight.recipe.gradients is None:
        return _input_gradient(grad, weight)
    dx, _ = _quantized_gradients(grad, None, weight, weight.recipe)
    assert dx is not None
    return dx


def _quantized_gradients(
    grad: Tensor, x: Tensor | None, weight: QuantizedTensor | None, recipe: Recipe
) -> tuple[Tensor | None, Tensor | None]:
    """Return the same by gradients.py, for a weight of this recipe."""
    with without_torch_function():
        dx, dw = gradients(_rows(grad), None if x is None else _rows(x).to(grad.dtype), weight, recipe)
        if dx is not None and weight is not None:
            dx = dx.reshape(*grad.shape[:-1], weight.shape[-1])
    return dx, dw


def _forward(x: Tensor, weight: QuantizedTensor, bias: Tensor | None, dense: Tensor | None = None) -> Tensor:
    if weight.recipe.activations is None:
        return F.linear(x, decode(weight) if dense is None else dense, bias)
    # autocast does not see this product: it is no op of torch that autocast knows
    y = product(as_autocast(x), weight)
    return y if bias is None else y + bias.to(y.dtype)


def _keep_dense(dense: Tensor, y: Tensor) -> Tensor:
    """Return the dense weight if `decode_once` keeps it for backward, and otherwise a tensor without elements.

    Activation checkpointing puts what is saved when a forward runs again in the places of what was saved before. One
    tensor more would move all behind it by a place, and torch sees this only if shapes, dtypes or devices differ.
    """
    return dense if decode_once.on and dense.dtype == y.dtype else y.new_empty(0)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 (torch's own argument name)
    """Compute `torch.nn.functional.linear` if an argument is quantized; raise TypeError if input or bias is."""
    if isinstance(input, QuantizedTensor):
        raise _misplaced("input", input)
    if isinstance(bias, QuantizedTensor):
        raise _misplaced("bias", bias)
    # nothing is kept without gradients, and a node of autograd would cost more than a small product
    if not torch.is_grad_enabled():
        return _forward(input, weight, bias)  # type: ignore[arg-type] # only the weight is left to be quantized
    return QuantizedLinear.apply(input, weight, bias)  # type: ignore[no-any-return]


def _misplaced(name: str, value: QuantizedTensor) -> TypeError:
    return TypeError(f"F.linear: the {name} is {describe(value.shape, value.recipe)}; call .dequantize() on it")


TORCH_FUNCTIONS[F.linear] = linear
