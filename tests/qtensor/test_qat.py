"""Training through quantization: dense weights whose layers compute with the quantized ones, straight through.

    forward    y  = x @ Q(w).T, or Q(x) @ Q(w).T with activations="dynamic"
    backward   dw = dy.T @ x, whatever Q made of w: rounded to zero, saturated or untouched
               dx = dy @ Q(w)

What is expected is written in plain torch operations on dequantized values.
"""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtensor import MXFP4BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize, quantized_model_init
from qtensor.products.dynamic import quantize_rows
from qtensor.spec.registry import format_of
from tests.qtensor.recipes_under_test import all_recipes, same_bytes, weight

both_activations = pytest.mark.parametrize("activations", [None, "dynamic"])
both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def layer_of(value: Tensor, recipe: Any) -> nn.Linear:
    """A linear layer with dense storage of these values [N, K]."""
    with quantized_model_init(recipe, storage="high_precision"):
        layer = nn.Linear(value.shape[1], value.shape[0], bias=False, dtype=value.dtype)
    with torch.no_grad():
        layer.weight.copy_(value)
    return layer


def tokens(dtype: torch.dtype, columns: int = 96) -> Tensor:
    return torch.randn(5, columns, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()


def seed_of(y: Tensor) -> Tensor:
    """A gradient for an output."""
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(y.dtype)


@all_recipes
@both_activations
@both_dtypes
def test_the_forward_is_that_of_the_quantized_weight(recipe: Any, activations: str | None, dtype: torch.dtype) -> None:
    recipe, value, x = dataclasses.replace(recipe, activations=activations), weight(dtype=dtype), tokens(dtype)
    q = quantize(value, recipe)
    if activations is None:
        expected = F.linear(x.detach(), q.dequantize())
    else:
        rounded = format_of(recipe).decode(quantize_rows(x.detach(), recipe), recipe.of_rows)  # fp32 [5, K]
        expected = F.linear(rounded, q.dequantize(torch.float32)).to(dtype)
        assert not torch.equal(expected, F.linear(x.detach(), q.dequantize())), "inputs are not quantized"
    assert same_bytes(layer_of(value, recipe)(x), expected)
    assert not torch.equal(expected, F.linear(x.detach(), value)), "weights are not quantized"


@all_recipes
@both_activations
@both_dtypes
def test_the_gradient_is_the_straight_through_one(recipe: Any, activations: str | None, dtype: torch.dtype) -> None:
    recipe, value, x = dataclasses.replace(recipe, activations=activations), weight(dtype=dtype), tokens(dtype)
    layer = layer_of(value, recipe)
    y = layer(x)
    dy = seed_of(y)
    y.backward(dy)
    assert type(layer.weight.grad) is Tensor
    assert same_bytes(layer.weight.grad, dy.T @ x.detach())
    assert same_bytes(x.grad, dy @ quantize(value, recipe).dequantize(dtype))


@pytest.mark.parametrize(
    "recipe",
    [NVFP4BlockScaling(), MXFP4BlockScaling(scale_rounding="floor"), MXFP8BlockScaling(scale_rounding="floor")],
    ids=repr,
)
def test_no_weight_is_masked(recipe: Any) -> None:
    """Those that are rounded to zero, or cut off at the largest element, get the gradient of the others."""
    value = weight(dtype=torch.float32)
    value[:, ::32] = 1.99  # of a block of "floor" whose largest element stands for 1.5 or 1.75: it saturates
    value[:, 1::32] = 1e-7
    q = quantize(value, recipe).dequantize()
    cut_off, lost = (value == 1.99) & (q < 1.99 * 0.9), (q == 0) & (value != 0)
    assert cut_off.any() or recipe == NVFP4BlockScaling()  # whose scales never saturate an element by so much
    assert lost.any()
    layer, x = layer_of(value, recipe), tokens(torch.float32)
    y = layer(x)
    dy = seed_of(y)
    y.backward(dy)
    full = dy.T @ x.detach()
    for kind in (cut_off, lost):
        assert same_bytes(layer.weight.grad[kind], full[kind])
        assert layer.weight.grad[kind].ne(0).all()


def test_updates_below_half_a_step_add_up_in_the_dense_weight() -> None:
    """And are lost where the weight itself is quantized: an ordinary optimizer's step is rounded back every time."""
    value = torch.full((16, 16), 4.0)
    value[:, 0] = 6.0
    x = torch.ones(1, 16)
    x[0, 0] = 0.0  # no gradient for the largest elements, and so one scale
    dense, quantized = layer_of(value, NVFP4BlockScaling()), nn.Linear(16, 16, bias=False)
    quantized.weight = nn.Parameter(quantize(value, NVFP4BlockScaling()))
    moved = []
    for layer in (dense, quantized):
        optimizer, start = torch.optim.SGD(layer.parameters(), lr=0.1875), layer(x).detach()
        for _ in range(3):  # the gradient is 1, so 4 becomes 3.8125, 3.625, 3.4375; below 3.5 it is rounded to 3
            optimizer.zero_grad()
            layer(x).sum().backward()
            optimizer.step()
            moved.append(not torch.equal(layer(x), start))
    assert moved == [False, False, True, False, False, False]
    assert torch.equal(dense.weight.dense[:, 1:], torch.full((16, 15), 3.4375))
