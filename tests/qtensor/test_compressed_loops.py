"""Compressed states in training loops as users write them: what a loop does around a step changes no byte of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import lr_scheduler

from qtensor import (
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantize_,
    quantized_model_init,
    share_scales,
)
from qtensor.optim.compressed.masters import expand_master
from tests.optimizer_states import assert_same_model, assert_same_state, bytes_of, copied, get, put
from tests.qtensor.test_compressed_states import (
    SMALL,
    Model,
    assert_bytes_say_masters,
    gradients,
    optimizer_of,
    state_of,
    train,
)


class Pair:
    """Two models that begin alike, and their optimizers."""

    def __init__(self, make: Callable[[], Any] = Model, **options: Any) -> None:
        self.models = [make() for _ in range(2)]
        self.optimizers = [optimizer_of(model, **options) for model in self.models]

    def __iter__(self) -> Any:
        return iter(zip(self.models, self.optimizers, strict=True))

    def assert_same(self, what: str) -> None:
        (model, optimizer), (other, its) = self
        assert_same_model(model, bytes_of(other), what)
        assert_same_state(state_of(optimizer)["state"], state_of(its)["state"], what)
        assert_bytes_say_masters(model, optimizer, what)


def test_clipped_gradients_are_what_steps() -> None:
    pair = Pair()
    (model, optimizer), (other, its) = pair
    for step in range(3):
        gradients(model, step)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm > 1
        for param, same in zip(model.parameters(), other.parameters(), strict=True):
            same.grad = param.grad.clone()
        optimizer.step()
        its.step()
    pair.assert_same("clipped")


def test_a_step_that_a_scaler_skips_leaves_no_trace() -> None:
    pair = Pair()
    (model, optimizer), (other, its) = pair
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for step in range(5):
        gradients(model, step)
        for param in model.parameters():
            param.grad = scaler.scale(torch.ones(())) * param.grad  # a power of two
        if step == 2:
            model.b.grad[0, 0] = float("inf")
            before, states = bytes_of(model), state_of(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            assert_same_model(model, before, "skipped")
            assert_same_state(state_of(optimizer), states, "skipped")
        else:
            train(other, its, step)
    assert optimizer.param_groups[0]["states_step"] == 4
    pair.assert_same("scaled")


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),  # moves betas, too
    "one after the other": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_set_what_the_next_step_takes(name: str) -> None:
    pair = Pair()
    (model, optimizer), (other, its) = pair
    scheduler = SCHEDULERS[name](optimizer)
    rates = set()
    for step in range(4):
        its.param_groups[0].update({key: optimizer.param_groups[0][key] for key in ("lr", "betas")})
        rates.add(optimizer.param_groups[0]["lr"])
        train(model, optimizer, step)
        train(other, its, step)
        scheduler.step()
    assert len(rates) == 4
    pair.assert_same(name)


def test_a_rate_in_a_tensor_may_be_given_and_changed() -> None:
    pair = Pair(lr=torch.tensor(0.01), foreach=False)
    pair.optimizers[0].param_groups[0]["lr"] = torch.tensor(1.0)
    pair.optimizers[0].param_groups[0]["lr"].fill_(0.01)
    for step in range(2):
        for model, optimizer in pair:
            train(model, optimizer, step)
    pair.assert_same("a rate in a tensor")


def test_gradients_that_are_kept_as_zeros_add_up_as_new_ones() -> None:
    pair = Pair()
    for step in range(3):
        for number, (model, optimizer) in enumerate(pair):
            held = [param.grad for param in model.parameters()]
            gradients(model, step)
            for param, own in zip(model.parameters(), held, strict=True):
                if own is not None:
                    param.grad = own.add_(param.grad)
            optimizer.step()
            optimizer.zero_grad(set_to_none=number == 1)
    assert all(param.grad is not None and not param.grad.any() for param in pair.models[0].parameters())
    pair.assert_same("zeros")


def test_gradients_add_up_over_steps_that_are_left_out() -> None:
    """Accumulated over three batches: the draws are those of the steps, not of the batches."""
    pair = Pair()
    (model, optimizer), (other, its) = pair
    for step in range(2):
        sums: dict[int, Tensor] = {}
        for batch in range(3):
            gradients(other, 10 * step + batch)
            for number, (param, same) in enumerate(zip(model.parameters(), other.parameters(), strict=True)):
                param.grad = same.grad.clone() if param.grad is None else param.grad.add_(same.grad)
                sums[number] = same.grad if number not in sums else sums[number] + same.grad
        for number, same in enumerate(other.parameters()):
            same.grad = sums[number].clone()
        optimizer.step()
        optimizer.zero_grad()
        its.step()
    pair.assert_same("accumulated")


def test_a_weight_that_is_frozen_for_some_steps_goes_on_from_where_it_was() -> None:
    pair = Pair()
    (model, optimizer), (other, its) = pair
    for step in range(5):
        model.a.weight.requires_grad_(step not in (1, 2))
        gradients(model, step)
        gradients(other, step)
        if step in (1, 2):
            other.a.weight.grad = None  # and this one has none
        optimizer.step()
        its.step()
    pair.assert_same("frozen and trained on")


def test_a_weight_that_begins_frozen_is_trained_once_it_is_not() -> None:
    model = Model()
    model.a.weight.requires_grad_(False)
    optimizer = optimizer_of(model)
    before = bytes_of(model)["a.weight.payload"]
    train(model, optimizer, 0)
    assert torch.equal(bytes_of(model)["a.weight.payload"], before)
    assert not optimizer.state.get(model.a.weight)
    model.a.weight.requires_grad_(True)
    for step in (1, 2):
        train(model, optimizer, step)
    assert not torch.equal(bytes_of(model)["a.weight.payload"], before)
    assert_bytes_say_masters(model, optimizer, "unfrozen")


def test_the_order_and_the_groups_of_parameters_make_no_difference() -> None:
    """With names."""
    models = [Model() for _ in range(3)]
    named = [list(model.named_parameters()) for model in models]
    groups: list[Any] = [named[0], named[1][::-1], [{"params": [pair]} for pair in named[2]]]
    optimizers = [MasterWeightOptimizer(torch.optim.AdamW, group, lr=0.01, **SMALL) for group in groups]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, step)
    for other in models[1:]:
        assert_same_model(other, bytes_of(models[0]), "another order")
    again = Model()
    again.load_state_dict(models[0].state_dict())
    its = MasterWeightOptimizer(torch.optim.AdamW, list(again.named_parameters())[::-1], lr=0.01, **SMALL)
    put("nested", again, its, get("nested", models[0], optimizers[0]))
    train(again, its, 3)
    train(models[0], optimizers[0], 3)
    assert_same_model(again, bytes_of(models[0]), "resumed in another order")


def test_a_group_that_is_added_later_is_saved_and_resumed_with_its_own_count() -> None:
    def built(*, later: bool) -> tuple[Model, MasterWeightOptimizer]:
        model = Model()
        named = list(model.named_parameters())
        optimizer = MasterWeightOptimizer(torch.optim.AdamW, named[:2], lr=0.01, **SMALL)
        if later:
            for step in range(2):
                train(model, optimizer, step)
        optimizer.add_param_group({"params": named[2:]})
        return model, optimizer

    model, optimizer = built(later=True)
    for step in range(2, 4):
        train(model, optimizer, step)
    assert [group["states_step"] for group in optimizer.param_groups] == [4, 2]
    again, its = built(later=False)
    again.load_state_dict(model.state_dict())
    put("nested", again, its, get("nested", model, optimizer))
    for net, each in ((model, optimizer), (again, its)):
        train(net, each, 4)
    assert_same_model(again, bytes_of(model), "resumed")
    assert_same_state(state_of(its), state_of(optimizer), "resumed")


class _Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_parametrized_weights_are_trained_as_what_they_are_made_of() -> None:
    layers = [nn.Linear(64, 32, dtype=torch.bfloat16) for _ in range(2)]
    nn.utils.parametrize.register_parametrization(layers[0], "weight", _Doubled())
    nn.utils.parametrizations.weight_norm(layers[1])
    for layer in layers:
        optimizer = optimizer_of(layer)
        before = {name: param.detach().clone() for name, param in layer.named_parameters()}
        for step in range(2):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            layer(x).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, param in layer.named_parameters():
            assert not torch.equal(param, before[name]), name
            master = expand_master(param, optimizer.state[param]["master_remainder"])
            assert torch.equal(master.to(torch.bfloat16), param), name


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    with quantized_model_init(MXFP8BlockScaling()):
        return nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16), nn.Linear(64, 32, dtype=torch.bfloat16))


def _checkpointed(model: nn.Sequential) -> nn.Sequential:
    model[0] = checkpoint_wrapper(model[0])
    return model


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "torch.compile": lambda model: torch.compile(model, backend="aot_eager"),
    "activation checkpoints": _checkpointed,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_around_a_model_changes_no_byte_of_its_training(name: str) -> None:
    """Its parameters have other names then, by which draws are counted."""
    plain, inner = _layers(), _layers()
    wrapped = WRAPPERS[name](inner)
    optimizers = [optimizer_of(model) for model in (plain, wrapped)]
    names = [[own for own, _ in model.named_parameters()] for model in (plain, wrapped)]
    assert names[0] != names[1]
    for step in range(3):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        for model, optimizer in zip((plain, wrapped), optimizers, strict=True):
            model(x).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found, expected = (list(bytes_of(model).values()) for model in (inner, plain))
    assert all(torch.equal(own, other) for own, other in zip(found, expected, strict=True))
    assert_same_state(state_of(optimizers[1])["state"], state_of(optimizers[0])["state"], name)


def test_a_weight_whose_scale_others_move_keeps_its_moments_without_a_gradient() -> None:
    model = nn.Sequential(*(nn.Linear(64, 32, bias=False, dtype=torch.bfloat16) for _ in range(2)))
    quantize_(model, NVFP4BlockScaling())
    share_scales(model, [("0", "1")])
    optimizer = optimizer_of(model)
    train(model, optimizer, 0)
    states = copied(dict(optimizer.state[model[1].weight]))
    gradients(model, 1)
    model[1].weight.grad = None
    optimizer.step()
    after = optimizer.state[model[1].weight]
    for name in ("step", "exp_avg", "exp_avg_sq_root"):
        assert_same_state({name: after[name]}, {name: states[name]}, name)
    train(model, optimizer, 2)
    assert optimizer.state[model[1].weight]["step"] == 2


def test_a_closure_and_hooks_of_the_step_are_called_once() -> None:
    pair = Pair()
    (model, optimizer), (other, its) = pair
    calls: list[str] = []

    def closure() -> float:
        calls.append("closure")
        gradients(model, 0)
        return 3.0

    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    assert optimizer.step(closure) == 3.0
    assert calls == ["closure", "step"]
    gradients(other, 0)
    its.step()
    pair.assert_same("a closure")


def test_a_copy_that_is_trained_leaves_the_original_alone() -> None:
    model = Model()
    optimizer = optimizer_of(model)
    train(model, optimizer, 0)
    before, states = bytes_of(model), state_of(optimizer)
    twin, its = copy.deepcopy((model, optimizer))
    its.add_param_group({"params": [("more", nn.Parameter(torch.ones(2, 32, dtype=torch.bfloat16)))]})
    train(twin, its, 1)
    assert_same_model(model, before, "the original")
    assert_same_state(state_of(optimizer), states, "the original")
