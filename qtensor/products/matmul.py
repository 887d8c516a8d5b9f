"""Products that do not arrive as F.linear: tensor parallelism, looped experts and bmm send them to the op table.

    DTensor takes F.linear apart before its local tensors see it:   t(w), then mm(x, t(w)) or addmm(bias, x, t(w))

A transposed weight is a view of the same parts (`transposed` in its lens). An operand of a product is dequantized
inside that product, so that autograd saves the quantized bytes and no dense weight outlives the product. This is exact:
the dequantized values of a transposed view are the transposed dequantized values.
"""

from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.torch_private import without_torch_function
from qtensor.ops.table import implements
from qtensor.products.dynamic import product
from qtensor.products.late_decode import multiply_decoded
from qtensor.spec.registry import describe
from qtensor.tensor.quantized_tensor import TORCH_FUNCTIONS, QuantizedTensor, dequantize_all

__all__: list[str] = []

aten = torch.ops.aten


@implements(aten.t.default)
def t(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Transpose [N, K] -> [K, N], the same parts; transposing twice gives the weight back."""
    return _transpose(args[0])


@implements(aten.transpose.int)
def transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Transpose [.., N, K] -> [.., K, N]; other dims cannot be exchanged."""
    q, ndim = args[0], args[0].ndim
    first, second = (dim % ndim for dim in args[1:3])
    # an op must return a new tensor
    if first == second:
        return q.detach()
    if {first, second} != {ndim - 1, ndim - 2}:
        raise NotImplementedError(
            f"transposing dims {args[1]} and {args[2]} of {describe(q.shape, q.recipe)}: only the last two are defined"
        )
    return _transpose(q)


def _transpose(q: QuantizedTensor) -> QuantizedTensor:
    lens = q._lens
    if q.ndim < 2 or (lens.described is not None and not lens.transposed):
        raise NotImplementedError(f"transposing {describe(q.shape, q.recipe)}: only a weight [.., N, K] is defined")
    other = lens.seen_as(None) if lens.transposed else lens.seen_as(tuple(q.shape), transposed=True)
    return q._alias(other, torch.Size((*q.shape[:-2], q.shape[-1], q.shape[-2])))


def matrix_transpose(q: QuantizedTensor) -> Any:
    """Compute `q.mT`, by the method: dynamo reads a property with which a graph ends anew, and comes here again."""
    with without_torch_function():
        return q.transpose(-2, -1)


TORCH_FUNCTIONS[torch.Tensor.mT.__get__] = matrix_transpose  # type: ignore[attr-defined] # a property to mypy


@implements(aten.mm.default)
def mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Compute [T, K] @ t(w) as a linear layer does if activations="dynamic", else a product of dequantized values."""
    x, weight = args
    if isinstance(weight, QuantizedTensor) and weight._lens.transposed and weight.recipe.activations is not None:
        _refuse_gradients(func, weight)
        return product(x, _transpose(weight))
    return _decode_inside(func, args, kwargs)


@implements(aten.addmm.default)
def addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Compute `bias + x @ t(w)`, see `mm`."""
    bias, x, weight = args
    if isinstance(weight, QuantizedTensor) and weight._lens.transposed and weight.recipe.activations is not None:
        # the product has no place for factors, and torch's linear layers ask for none
        if kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1:
            raise NotImplementedError(f"addmm with beta or alpha of {describe(weight.shape, weight.recipe)}")
        _refuse_gradients(func, weight)
        y: Tensor = product(x, _transpose(weight)) + bias
        return y
    return _decode_inside(func, args, kwargs)


def _refuse_gradients(func: Any, weight: QuantizedTensor) -> None:
    """Raise if autograd would go on to a dense backward under a recipe that asks for another one."""
    if weight.recipe.gradients is not None and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{func} with {describe(weight.shape, weight.recipe)}: gradients={weight.recipe.gradients!r} is defined "
            "for F.linear, and neither for tensor parallelism nor for products of a transposed weight; leave "
            "gradients=None, or compute under torch.no_grad()"
        )


def _decode_inside(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Multiply decoded values; if one operand is quantized and only tensors are given, see late_decode."""
    # one weight among plain tensors is what compiled graphs meet, and what late_decode knows
    places = [place for place, arg in enumerate(args) if isinstance(arg, QuantizedTensor)]
    if len(places) != 1 or kwargs or not all(isinstance(arg, Tensor) for arg in args):
        return func(*dequantize_all(args), **kwargs)  # type: ignore[no-any-return]
    (place,) = places
    _refuse_gradients(func, args[place])
    name = func.__name__.removesuffix(".default")
    return multiply_decoded(name, [*args[:place], *args[place + 1 :]], place, args[place])


@implements(aten.baddbmm.default)
def baddbmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Compute `q + alpha * a @ b` of a stack of weights: dense, as peft adds an adapter to experts in a forward.

    The gradient of the sum passes straight through to the weight, and to both factors as for a dense stack.
    """
    for operand in args:
        if isinstance(operand, QuantizedTensor):
            _refuse_dense_products(func, operand)
    return func(*dequantize_all(args), **dequantize_all(kwargs))  # type: ignore[no-any-return]


@implements(aten.mv.default)
def multiply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Multiply with the dequantized values of a stack of weights [E, N, K] (see grouped/calls.py), or with a vector."""
    for operand in args:
        if isinstance(operand, QuantizedTensor):
            _refuse_dense_products(func, operand)
    return _decode_inside(func, args, kwargs)


def _refuse_dense_products(func: Any, operand: QuantizedTensor) -> None:
    """Raise if a recipe asks for products of quantized inputs, which are not defined here."""
    if operand.recipe.activations is not None:
        raise NotImplementedError(
            f'{func} with {describe(operand.shape, operand.recipe)}: activations="dynamic" is defined for linear '
            "layers; loop over them, or call .dequantize()"
        )
