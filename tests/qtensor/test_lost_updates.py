"""Updates that rounding takes back are told of once; and the ways to average and to train that lose none."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from qtensor import (
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    QuantizedTensor,
    quantize,
    quantized_model_init,
    stochastic_rounding,
)
from qtensor.ops import lost_updates
from tests.docs.pages import page
from tests.qtensor.recipes_under_test import every_main_recipe, main_recipes, same_parts, weight

MXFP8 = MXFP8BlockScaling()


@pytest.fixture(autouse=True)
def _nobody_was_told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lost_updates, "_writes", Counter())
    monkeypatch.setattr(lost_updates, "_told", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert not lost_updates._due


def text_of(op: str, q: QuantizedTensor) -> str:
    return re.escape(
        f"{op} on a quantized weight of shape {tuple(q.shape)} ({q.recipe}): rounding to nearest lost the update, "
        "since nearly all of it is smaller than half a step; many such updates move the weight nowhere. Train with "
        "MasterWeightOptimizer, write inside qtensor.stochastic_rounding(generator), or average "
        ".dequantize(torch.float32) into plain tensors (this is said once a recipe)"
    )


def pair(recipe: Any) -> tuple[QuantizedTensor, QuantizedTensor]:
    return quantize(weight(128, 128), recipe), quantize(weight(128, 128, seed=1), recipe)


@every_main_recipe
def test_an_average_that_stands_still_is_told_of_once(recipe: Any) -> None:
    average, w = pair(recipe)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(20):
            average.mul_(0.999).add_(w, alpha=0.001)
    assert len(told) == 1
    assert told[0].filename == __file__
    assert re.fullmatch(text_of(str(told[0].message).split()[0], average), str(told[0].message))


@main_recipes
def test_an_average_without_bias_in_fp32_or_in_dense_storage_follows(recipe: Any) -> None:
    average, w = pair(recipe)
    shadow, start = average.dequantize(torch.float32), average.dequantize(torch.float32)
    for step in range(100):
        with stochastic_rounding(torch.Generator().manual_seed(step)):
            average.mul_(0.98).add_(w, alpha=0.02)
        shadow.mul_(0.98).add_(w.dequantize(torch.float32), alpha=0.02)
    way = w.dequantize(torch.float32) - start
    gone = float((shadow - start).mul(way).sum() / way.square().sum())
    assert gone == pytest.approx(1 - 0.98**100, abs=1e-4)  # fp32 rounds 400 times: 400 * 2^-24
    assert float((average.dequantize(torch.float32) - start).mul(way).sum() / way.square().sum()) > 0.5
    with quantized_model_init(recipe, storage="high_precision"):
        model = nn.Linear(128, 128, bias=False, dtype=torch.float32)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    ema.update_parameters(model)
    before = ema.module.weight.detach().dense.clone()
    with torch.no_grad():
        model.weight.copy_(w.dequantize(torch.float32))
    ema.update_parameters(model)
    assert torch.equal(ema.module.weight.detach().dense, torch.lerp(before, w.dequantize(torch.float32), 1 - 0.98))


SMALL: dict[str, Callable[[QuantizedTensor, Tensor], Any]] = {
    "add_": lambda q, x: q.add_(x, alpha=1e-6),
    "sub_": lambda q, x: q.sub_(x * 1e-6),
    "mul_": lambda q, x: q.mul_(1 - 1e-6),
    "div_": lambda q, x: q.div_(1 + 1e-6),
    "lerp_": lambda q, x: q.lerp_(q.dequantize() * (1 - 2.0**-7), 0.5),
    "addcmul_": lambda q, x: q.addcmul_(x, x, value=1e-8),
    "addcdiv_": lambda q, x: q.addcdiv_(x, torch.ones_like(x), value=1e-6),
    "_foreach_add_": lambda q, x: torch._foreach_add_([x.clone(), q], [x, x], alpha=1e-6),
    "_foreach_mul_": lambda q, x: torch._foreach_mul_([x.clone(), q], [2.0, 1 - 1e-6]),
    "_foreach_addcmul_": lambda q, x: torch._foreach_addcmul_([x.clone(), q], [x, x], [x, x], torch.tensor([1, 1e-8])),
    "_foreach_addcdiv_": lambda q, x: torch._foreach_addcdiv_([x.clone(), q], [x, x], [x + 9, x + 9], [1.0, 1e-6]),
    "_foreach_lerp_": lambda q, x: torch._foreach_lerp_([x.clone(), q], [x, q.dequantize() * (1 - 2.0**-7)], 0.5),
}


@pytest.mark.parametrize("op", SMALL)
def test_every_update_in_place_is_looked_at(op: str) -> None:
    q, x = quantize(weight(64, 64, torch.float32), MXFP8), weight(64, 64, torch.float32, seed=1)
    with pytest.warns(UserWarning, match=f"^{text_of(op, q)}$"):
        SMALL[op](q, x)


def test_what_arrives_changes_nothing_or_is_no_update_is_silent() -> None:
    q, x = quantize(weight(64, 64), MXFP8), weight(64, 64, seed=1)
    before = q.clone()
    q.add_(x, alpha=0.0)
    q.add_(torch.zeros_like(x))
    q.mul_(1.0)
    q.clamp_(-1e9, 1e9)
    assert torch.equal(q.dequantize(), before.dequantize())
    q.copy_(q.dequantize(torch.float32) + 1e-9)  # what holds the values elsewhere writes them so
    q.add_(x)
    q.mul_(2.0)
    empty = q[:0]
    empty.mul_(0.999)
    with stochastic_rounding(torch.Generator().manual_seed(0)):
        q.mul_(0.999)
    with quantized_model_init(MXFP8, preserve_high_precision_init_val=True):
        model = nn.Linear(64, 64, dtype=torch.float32)
    with torch.no_grad():
        model.weight.mul_(0.999)  # goes on from the preserved value


def test_the_1st_2nd_4th_write_is_looked_at_and_none_after_the_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []

    def decoded(*args: Any) -> Tensor:
        looks.append(args)
        return args[0].dequantize(torch.float32)

    monkeypatch.setattr(lost_updates, "decode", decoded)
    q = quantize(weight(64, 64), MXFP8)
    counts = []
    for _ in range(9):
        q.add_(1.0)
        counts.append(len(looks) // 2)  # before and after
    assert counts == [1, 2, 2, 3, 3, 3, 3, 4, 4]
    with pytest.warns(UserWarning, match="lost the update"):
        q.mul_(0.999)
    looks.clear()
    for _ in range(9):
        q.mul_(0.999).add_(1e-6)
    assert not looks


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_whose_steps_are_lost_is_told_of_and_masters_are_the_way_out(kind: Any, foreach: bool) -> None:
    with quantized_model_init(MXFP8):
        model = nn.Linear(64, 64, dtype=torch.bfloat16)
    mastered = copy.deepcopy(model)
    optimizers = (
        kind(model.parameters(), lr=1e-6, foreach=foreach),
        MasterWeightOptimizer(kind, mastered.parameters(), lr=1e-6),
    )
    for each in (model, mastered):
        for param in each.parameters():
            param.grad = weight(*param.shape) if param.ndim == 2 else torch.ones_like(param)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(5):
            optimizers[0].step()
    assert len(told) == 1
    masters = optimizers[1].state
    optimizers[1].step()
    before = masters[mastered.weight]["master_weight"].clone()
    optimizers[1].step()
    assert not torch.equal(masters[mastered.weight]["master_weight"], before)


def test_an_average_over_masters_follows_them() -> None:
    """The code of docs/guide.md."""
    code = next(block.text for block in page("guide.md").python if block.text.startswith("averages = {}"))
    with quantized_model_init(MXFP8):
        model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=1e-3)
    names: dict[str, Any] = {"torch": torch, "optimizer": optimizer}
    exec(code, names)
    expected = None
    for step in range(5):
        model.weight.grad = weight(64, 64, seed=step)
        optimizer.step()
        names["follow"]()
        master = optimizer.state[model.weight]["master_weight"]
        expected = master.clone() if expected is None else torch.lerp(expected, master, 1 - 0.999)
    assert torch.equal(names["averages"][model.weight], expected)
    with torch.no_grad():
        model.weight.copy_(names["averages"][model.weight])
    assert same_parts(model.weight.detach(), quantize(expected, MXFP8))


def test_moments_of_ordinary_optimizers_have_the_dtype_of_the_weight_and_those_of_masters_fp32() -> None:
    with quantized_model_init(MXFP8):
        model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    model.weight.grad = weight(64, 64)
    plain = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    mastered = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
    plain.step()
    mastered.step()
    assert plain.state[model.weight]["exp_avg_sq"].dtype == torch.bfloat16
    assert mastered.state[model.weight]["exp_avg_sq"].dtype == torch.float32


def test_a_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found waits until it has arrived, and is told of at a later write."""
    q = quantize(weight(64, 64), MXFP8)
    arrived = [False, False, True]
    ready = type("Ready", (), {"query": lambda _: arrived.pop(0)})()
    due = lost_updates._Due(torch.tensor(True), ready, "mul_ of one on its way: lost the update", MXFP8)
    monkeypatch.setattr(lost_updates, "_due", [due])
    write = functools.partial(q.add_, 1.0)
    write()
    write()
    with pytest.warns(UserWarning, match="one on its way"):
        write()
