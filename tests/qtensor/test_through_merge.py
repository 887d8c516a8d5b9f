"""linear_through_merge in one process: the bytes that merge_ writes, straight-through gradients, and what is kept.

What is expected is written in plain torch operations on the weight that `merge_` leaves.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtensor import (
    Float8CurrentScaling,
    Int4GroupScaling,
    LowRankUpdate,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    linear_through_merge,
    merge_,
    quantize,
)
from qtensor.merging.low_rank import UpdateSum
from qtensor.merging.merged_parts import merged_weight
from qtensor.scales.high_precision import HighPrecisionWeight
from tests.qtensor.recipes_under_test import all_recipes, every_recipe, main_recipes, same_bytes, same_parts, weight

BF16, FP32 = torch.bfloat16, torch.float32


def factors(dtype: torch.dtype = FP32, *, seed: int = 1, scaling: float = 0.5) -> LowRankUpdate:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(3, 96, generator=generator), torch.randn(64, 3, generator=generator) / 4
    return LowRankUpdate(a=a.to(dtype).requires_grad_(), b=b.to(dtype).requires_grad_(), scaling=scaling)


def tokens(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, 96, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()


def written(value: Any, *updates: LowRankUpdate) -> Any:
    """The weight that merge_ writes."""
    after = value.detach().clone()
    merge_([("w", after)], {"w": updates[0] if len(updates) == 1 else UpdateSum(updates)})
    return after


def merged_of(value: Tensor, *updates: LowRankUpdate) -> Any:
    """The weight that a forward computes with."""
    return merged_weight(value, [one for each in updates for one in (each.a, each.b)], [u.scaling for u in updates])


@every_recipe
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_merged_weight_has_the_bytes_that_merge_writes(recipe: Any, dtype: torch.dtype) -> None:
    value, update = quantize(weight(), recipe), factors(dtype)
    expected = written(value, update)
    assert same_parts(merged_of(value, update), expected)
    assert not same_parts(expected, value)
    x, bias = tokens(BF16, 2, 5), torch.linspace(-1, 1, 64).bfloat16()
    for b in (None, bias):
        y = linear_through_merge(x, value, b, update)
        assert same_bytes(y.detach(), F.linear(x.detach(), expected.dequantize(), b))
        with torch.no_grad():
            assert same_bytes(linear_through_merge(x, value, b, update), y.detach())
    assert not torch.equal(linear_through_merge(x, value, None, update), F.linear(x, value))


@main_recipes
def test_several_updates_are_added_in_their_order(recipe: Any) -> None:
    value, updates = quantize(weight(), recipe), [factors(BF16), factors(FP32, seed=7, scaling=-2.0)]
    assert same_parts(merged_of(value, *updates), written(value, *updates))
    x = tokens(BF16, 5)
    expected = F.linear(x.detach(), written(value, *updates).dequantize())
    assert same_bytes(linear_through_merge(x, value, None, updates).detach(), expected)


def test_an_update_of_zeros_keeps_the_bytes() -> None:
    """They would not stay otherwise: no value reaches the 7.5 that a scale of INT4 groups is made from."""
    value, update = quantize(weight(), Int4GroupScaling()), factors()
    with torch.no_grad():
        update.b.zero_()
    assert same_parts(merged_of(value, update), value)
    assert not same_parts(quantize(value.dequantize(FP32), value.recipe), value)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_dense_weight_is_rounded_to_its_dtype_as_merge_rounds_it(dtype: torch.dtype) -> None:
    value, update = weight(dtype=dtype), factors()
    expected = written(value, update)
    assert same_bytes(merged_of(value, update), expected)
    x = tokens(dtype, 5)
    assert same_bytes(linear_through_merge(x, value, None, update).detach(), F.linear(x.detach(), expected))


# -- gradients ---------------------------------------------------------------------------------------------------------


def whole_numbers(*shape: int, seed: int) -> Tensor:
    """Values in -2 .. 2: sums of a few hundred products of three are exact in fp32, in any order."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def test_a_sum_of_updates_is_that_of_their_products() -> None:
    """Forwards and merge_ add by the same code, so neither sees whether it is right."""
    pairs = [(whole_numbers(r, 96, seed=r), whole_numbers(64, r, seed=9 + r)) for r in (2, 3, 5)]
    each = tuple(LowRankUpdate(a=a, b=b, scaling=2.0**n) for n, (a, b) in enumerate(pairs))
    expected = sum(2.0**n * (b @ a) for n, (a, b) in enumerate(pairs))
    rows, columns = slice(3, 50), slice(32, 64)
    assert torch.equal(UpdateSum(each)((rows, columns)), expected[rows, columns])


@all_recipes
@pytest.mark.parametrize("keep", ["nothing", "merged"])
def test_gradients_pass_straight_through_the_rounding(recipe: Any, keep: Any) -> None:
    """To both factors as to those of y = x @ (W + s b a).T; to the input from the rounded weight."""
    value = quantize(weight(dtype=FP32), recipe)
    a, b, x = (whole_numbers(*shape, seed=n).requires_grad_() for n, shape in enumerate(((3, 96), (64, 3), (2, 5, 96))))
    bias, dy = torch.zeros(64, requires_grad=True), whole_numbers(2, 5, 64, seed=3)
    update = LowRankUpdate(a=a, b=b, scaling=0.5)
    linear_through_merge(x, value, bias, update, keep=keep).backward(dy)
    full = dy.flatten(0, 1).T @ x.detach().flatten(0, 1)  # [N, K], of the merged weight
    assert torch.equal(b.grad, 0.5 * full @ a.detach().T)
    assert torch.equal(a.grad, 0.5 * b.detach().T @ full)
    assert torch.equal(bias.grad, dy.sum((0, 1)))
    assert same_bytes(x.grad, dy @ written(value, update).dequantize())


@pytest.mark.parametrize(
    "recipe",
    [NVFP4BlockScaling(), MXFP4BlockScaling(scale_rounding="floor"), MXFP8BlockScaling(scale_rounding="floor")],
)
def test_no_element_is_masked(recipe: Any) -> None:
    """Those that are rounded to zero, or cut off at the largest number of the format, count like the others."""
    dense = weight(64, 96, FP32)
    dense[:, ::32] = 1.99  # of a block of "floor" whose largest element stands for 1.5 or 1.75: it saturates
    value = quantize(dense, recipe)
    update = LowRankUpdate(a=torch.full((1, 96), 1e-3).requires_grad_(), b=torch.ones(64, 1).requires_grad_())
    lost = merged_of(value, update).dequantize() == value.dequantize()
    assert lost.float().mean() > 0.5
    x, dy = whole_numbers(5, 96, seed=1), whole_numbers(5, 64, seed=2)
    linear_through_merge(x, value, None, update).backward(dy)
    assert torch.equal(update.a.grad, (dy.sum(1, keepdim=True).T @ x))


@pytest.mark.parametrize(
    "recipe",
    [
        MXFP8BlockScaling(activations="dynamic"),
        NVFP4BlockScaling(activations="dynamic"),
        Float8CurrentScaling(activations="dynamic", gradients="e4m3"),
        MXFP8BlockScaling(blocks="square", activations="dynamic", gradients="e4m3"),
    ],
    ids=repr,
)
def test_products_of_quantized_inputs_and_gradients_are_those_of_the_merged_weight(recipe: Any) -> None:
    value, update = quantize(weight(64, 96), recipe), factors()
    ours, theirs = tokens(BF16, 5), tokens(BF16, 5)
    y = linear_through_merge(ours, value, None, update)
    expected = F.linear(theirs, written(value, update))
    dy = torch.randn(5, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    y.backward(dy)
    expected.backward(dy)
    assert same_bytes(y.detach(), expected.detach())
    assert same_bytes(ours.grad, theirs.grad)
    assert not torch.equal(y, linear_through_merge(ours, quantize(weight(64, 96), plain(recipe)), None, update))


def plain(recipe: Any) -> Any:
    return dataclasses.replace(
        recipe, activations=None, **({"gradients": None} if hasattr(recipe, "gradients") else {})
    )


def test_what_needs_no_gradient_gets_none() -> None:
    value, update = quantize(weight(), MXFP8BlockScaling()), factors()
    frozen = LowRankUpdate(a=update.a.detach(), b=update.b, scaling=0.5)
    linear_through_merge(tokens(BF16, 5).detach(), value, None, frozen).sum().backward()
    assert update.b.grad is not None
    assert frozen.a.grad is None
    nothing = LowRankUpdate(a=update.a.detach(), b=update.b.detach())
    assert not linear_through_merge(tokens(BF16, 5).detach(), value, None, nothing).requires_grad
    y = linear_through_merge(tokens(BF16, 96)[0], value, None, factors())  # one token without a dim of tokens
    assert y.shape == (64,)
    y.sum().backward()


def test_a_second_derivative_is_an_error() -> None:
    update = factors()
    y = linear_through_merge(tokens(BF16, 5), quantize(weight(), MXFP8BlockScaling()), None, update)
    (grad,) = torch.autograd.grad(y.float().square().sum(), update.b, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


# -- what is kept ------------------------------------------------------------------------------------------------------


def _with_saved(call: Any, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output, and what autograd saved for backward."""
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        return call(x), saved


@pytest.mark.parametrize("keep", ["nothing", "merged"])
def test_backward_keeps_no_weight_but_the_base_and_the_merged_bytes_if_asked(keep: Any) -> None:
    value, update, x = quantize(weight(), NVFP4BlockScaling()), factors(), tokens(BF16, 5)
    _, saved = _with_saved(lambda x: linear_through_merge(x, value, None, update, keep=keep), x)
    assert len(saved) == 4
    matrices = [one for one in saved if one.shape == value.shape]
    assert len(matrices) == 1
    (kept,) = matrices
    assert isinstance(kept, QuantizedTensor)
    same = {part.data_ptr() for part in kept.parts().values()} == {part.data_ptr() for part in value.parts().values()}
    assert same == (keep == "nothing")
    assert {one.shape for one in saved if one is not kept} == {x.shape, update.a.shape, update.b.shape}


class Own(nn.Module):
    """An adapter written by hand."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(quantize(weight(), recipe), requires_grad=False)
        update = factors(BF16)
        self.a, self.b = nn.Parameter(update.a.detach()), nn.Parameter(update.b.detach())

    def forward(self, x: Tensor) -> Tensor:
        return linear_through_merge(x, self.weight, None, LowRankUpdate(a=self.a, b=self.b, scaling=0.5)).relu()


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        (NVFP4BlockScaling(), "aot_eager_decomp_partition"),
        pytest.param(Float8CurrentScaling(), "inductor", marks=pytest.mark.full),
    ],
)
def test_compiled_code_merges_to_the_same_bits_and_keeps_no_matrix(recipe: Any, backend: str) -> None:
    eager, torch_compiled = Own(recipe), Own(recipe)
    compiled = torch.compile(torch_compiled, backend=backend, fullgraph=True)
    found = []
    for module, call in ((eager, eager), (torch_compiled, compiled)):
        x = tokens(BF16, 5)
        y, saved = _with_saved(call, x)
        y.sum().backward()
        found.append((y.detach(), x.grad, module.a.grad, module.b.grad))
        there = {part.untyped_storage().data_ptr() for part in module.weight.parts().values()}
        plain = [one for one in saved if type(one) is Tensor and one.untyped_storage().data_ptr() not in there]
        assert all(one.numel() < 64 * 96 // 2 for one in plain)  # the payload of NVFP4 has half as many bytes
        assert saved
    assert all(map(torch.equal, *found))


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, Any, Any]] = {
    "a shape": (
        lambda: quantize(weight(64, 64), MXFP8BlockScaling()),
        ValueError,
        r"an update has shape \(64, 96\), the weight \(64, 64\)",
    ),
    "a weight that is trained": (
        lambda: nn.Parameter(quantize(weight(), MXFP8BlockScaling())),
        TypeError,
        r"is trained itself.*requires_grad_\(False\)",
    ),
    "dense storage": (
        lambda: HighPrecisionWeight(weight(), MXFP8BlockScaling()),
        TypeError,
        "is stored dense.*build the base with quantized storage",
    ),
    "a view": (lambda: quantize(weight(96, 64), MXFP8BlockScaling()).t(), TypeError, "is a view"),
    "integers": (lambda: torch.zeros(64, 96, dtype=torch.int64), TypeError, "holds torch.int64; expected bf16"),
    "a stack": (lambda: quantize(weight()[None], MXFP8BlockScaling()), TypeError, r"no matrix \[N, K\]: \(1, 64, 96\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_forward_can_merge_into_is_refused(case: str) -> None:
    make, kind, text = REFUSED[case]
    with pytest.raises(kind, match=f"linear_through_merge: .*{text}"):
        linear_through_merge(tokens(BF16, 5), make(), None, factors())


def test_what_is_not_known_is_refused() -> None:
    value = quantize(weight(), MXFP8BlockScaling())
    with pytest.raises(ValueError, match="no update is given"):
        linear_through_merge(tokens(BF16, 5), value, None, [])
    with pytest.raises(ValueError, match='keep=True is not known; expected "nothing" or "merged"'):
        linear_through_merge(tokens(BF16, 5), value, None, factors(), keep=True)  # type: ignore[arg-type]
