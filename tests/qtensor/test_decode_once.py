"""decode_once: the bytes of two decodes, from one, and dense weights kept only where backward takes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from qtensor import MXFP8BlockScaling, QuantizedTensor, decode_once, quantize
from qtensor.numerics import kernels
from tests.qtensor.recipes_under_test import every_main_recipe, same_bytes, weight


def inputs(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()


def passed(w: nn.Parameter, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The output and both gradients."""
    w.grad = x.grad = None
    y = F.linear(x, w, bias)
    y.square().sum().backward()
    return y.detach(), x.grad, w.grad


class Decodes:
    """Counts how often weights are decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, decode = 0, kernels.decode

        def counted(*args: Any) -> Tensor:
            self.count += 1
            return decode(*args)

        monkeypatch.setattr(kernels, "decode", counted)

    def of(self, call: Callable[[], Any]) -> int:
        before = self.count
        call()
        return self.count - before


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Decodes:
    return Decodes(monkeypatch)


@every_main_recipe
@pytest.mark.parametrize("shape", [(4, 96), (2, 3, 96), (96,)])
def test_a_weight_decoded_once_gives_the_same_bytes(decodes: Decodes, recipe: Any, shape: Any) -> None:
    w, x = nn.Parameter(quantize(weight(), recipe)), inputs(*shape)
    wanted = passed(w, x)
    assert decodes.of(lambda: passed(w, x)) == 2
    with decode_once():
        assert decodes.of(lambda: passed(w, x)) == 1
        found = passed(w, x)
    for a, b in zip(found, wanted, strict=True):
        assert same_bytes(a, b)
    assert decodes.of(lambda: passed(w, x)) == 2
    assert not decode_once.on


def test_decode_once_ends_where_its_outermost_block_does() -> None:
    with contextlib.suppress(ZeroDivisionError), decode_once():
        with decode_once():
            pass
        assert decode_once.on
        1 / 0  # noqa: B018
    assert not decode_once.on


def test_decode_once_ends_with_the_last_of_blocks_that_overlap() -> None:
    """In whatever order they end, as those of two threads do."""
    one, other = decode_once(), decode_once()
    for first, last in ((one, other), (one, one)):
        one.__enter__()
        (other if last is other else one).__enter__()
        first.__exit__()
        assert decode_once.on
        last.__exit__()
        assert not decode_once.on


def test_dense_weights_are_kept_only_where_backward_takes_them(decodes: Decodes) -> None:
    """Not where the input wants no gradient, autocast changes the dtype, or rounding products are used."""
    w = nn.Parameter(quantize(weight(dtype=torch.float32), MXFP8BlockScaling()))
    dynamic = nn.Parameter(quantize(weight(), MXFP8BlockScaling(activations="dynamic")))

    def kept(call: Callable[[], Tensor]) -> bool:
        saved: list[Tensor] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
        with decode_once(), hooks:
            y = call()
        y.float().square().sum().backward()
        return any(t.shape == w.shape and not isinstance(t, QuantizedTensor) for t in saved)

    x = inputs(4, 96, dtype=torch.float32)
    assert kept(lambda: F.linear(x, w))
    assert not kept(lambda: F.linear(x.detach(), w))
    assert not kept(lambda: F.linear(inputs(4, 96), dynamic))
    with torch.autocast("cpu", torch.bfloat16):
        assert not kept(lambda: F.linear(x, w))


def test_a_weight_that_is_written_before_backward_is_refused_though_it_was_decoded() -> None:
    """As a plain one: its gradient would be that of other values."""
    w, x = nn.Parameter(quantize(weight(), MXFP8BlockScaling())), inputs(4, 96)
    with decode_once():
        y = F.linear(x, w)
        with torch.no_grad():
            w.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_checkpointed_block_decodes_once_more_for_its_backward(decodes: Decodes) -> None:
    w, x = nn.Parameter(quantize(weight(), MXFP8BlockScaling())), inputs(4, 96)
    wanted = passed(w, x)
    w.grad = x.grad = None
    with decode_once():
        assert decodes.of(lambda: checkpoint(F.linear, x, w, use_reentrant=False).square().sum().backward()) == 2
    assert same_bytes(x.grad, wanted[1])
    assert same_bytes(w.grad, wanted[2])


@pytest.mark.parametrize("first", [True, False])
def test_a_checkpointed_block_is_run_again_as_it_was_run(*, first: bool) -> None:
    """All weights here have one shape: with one tensor more in one run, the dense one would take its place."""
    square = weight(rows=96)
    frozen, behind = quantize(square, MXFP8BlockScaling()), square + 1.0

    def block(x: Tensor) -> Tensor:
        return F.linear(F.linear(x, frozen), behind)

    def once(where: bool) -> Any:
        return decode_once() if where else contextlib.nullcontext()

    x = inputs(4, 96)
    with once(first):
        loss = checkpoint(block, x, use_reentrant=False).square().sum()
    with once(not first), pytest.raises(CheckpointError, match="different metadata"):
        loss.backward()
    with once(first):
        loss = checkpoint(block, x, use_reentrant=False, determinism_check="none").square().sum()
    with once(not first):
        loss.backward()
    (wanted,) = torch.autograd.grad(block(x).square().sum(), x)
    assert same_bytes(x.grad, wanted)


def test_second_derivatives_reach_a_weight_that_was_decoded_once() -> None:
    q = quantize(weight(dtype=torch.float32), MXFP8BlockScaling())

    def penalty(w: nn.Parameter) -> Tensor:
        x = inputs(4, 96, dtype=torch.float32)
        (of_x,) = torch.autograd.grad(F.linear(x, w).square().sum(), x, create_graph=True)
        of_x.square().sum().backward()
        assert w.grad is not None
        return w.grad

    wanted = penalty(nn.Parameter(q.detach()))
    with decode_once():
        assert same_bytes(penalty(nn.Parameter(q.detach())), wanted)
