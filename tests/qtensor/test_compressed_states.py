"""Compressed states in one process: masters as remainders, moments in 8 or 16 bits, under torch's optimizers."""

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    high_precision_init_val,
    quantize,
    quantized_model_init,
)
from qtensor.optim import inner_step
from qtensor.optim.compressed.entries import expand
from qtensor.optim.compressed.masters import expand_master
from tests.optimizer_states import FORMS, assert_same_model, assert_same_state, bytes_of, copied, get, put
from tests.qtensor.recipes_under_test import same_bytes, same_parts, weight
from tests.recipes import recipes
from tests.sampling import pairwise, sampled


class Lion(torch.optim.Optimizer):
    """An optimizer from elsewhere, which says of itself that each element steps alone (Chen et al., 2302.06675)."""

    elementwise = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    moment = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                    param.sub_(moment.lerp(param.grad, 0.1).sign(), alpha=group["lr"])
                    moment.lerp_(param.grad, 0.01)


MXFP8 = MXFP8BlockScaling()
RECIPES = recipes(lambda each: each.remainders)
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),  # whose buffer does not exist before a step
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.5}),  # a state before its first step
    "adadelta": (torch.optim.Adadelta, {"lr": 0.1}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "lion": (Lion, {"lr": 0.001}),
}
MOMENTS = ("float8", "bfloat16", "fp32")
ROUNDING = ("stochastic", "nearest")
SMALL: dict[str, Any] = {"masters": "remainder", "moments": "float8"}
RECIPES_HERE = {"mxfp8": MXFP8, "nvfp4": NVFP4BlockScaling(), "float8": Float8CurrentScaling()}


class Model(nn.Module):
    """Parameters of every kind: quantized, bf16 (with a -0.0), and fp32; rows of whole blocks, and others."""

    def __init__(self, recipe: Any = MXFP8) -> None:
        super().__init__()
        self.a = nn.Linear(96, 64, dtype=torch.bfloat16)
        self.a.weight = nn.Parameter(quantize(weight(64, 96), recipe))
        self.a.bias = nn.Parameter(torch.linspace(-1, 1, 64, dtype=torch.bfloat16).index_fill(0, torch.tensor(5), -0.0))
        self.b = nn.Parameter(weight(6, 64, seed=1))
        self.odd = nn.Parameter(weight(4, 20, seed=2))
        self.scale = nn.Parameter(torch.ones(3, 32))


def gradients(model: nn.Module, step: int, *, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = (scale * torch.randn(param.shape, generator=generator)).to(param.dtype)


def train(model: nn.Module, optimizer: Any, step: int) -> None:
    gradients(model, step)
    optimizer.step()
    optimizer.zero_grad()


def optimizer_of(model: nn.Module, name: str = "adamw", **options: Any) -> MasterWeightOptimizer:
    kind, own = KINDS[name]
    return MasterWeightOptimizer(kind, model.named_parameters(), **(SMALL | own | options))


def joined(optimizer: MasterWeightOptimizer, param: Tensor) -> Tensor:
    """The master that the bytes and the remainder of a parameter say."""
    remainder = optimizer.state[param]["master_remainder"]
    assert remainder.dtype == torch.float16  # which collectives can move; they are int16
    return expand_master(param, remainder)


def assert_bytes_say_masters(model: nn.Module, optimizer: MasterWeightOptimizer, what: str) -> None:
    for name, param in model.named_parameters():
        if "master_remainder" not in optimizer.state[param]:
            assert param.dtype == torch.float32, f"{what}: {name}"
            continue
        master = joined(optimizer, param)
        if isinstance(param, QuantizedTensor):
            assert same_parts(quantize(master, param.recipe), param.detach()), f"{what}: {name}"
        else:
            assert same_bytes(master.to(torch.bfloat16), param.detach()), f"{what}: {name}"


def trained() -> tuple[Model, MasterWeightOptimizer]:
    model = Model()
    optimizer = optimizer_of(model)
    for step in range(2):
        train(model, optimizer, step)
    return model, optimizer


def state_of(optimizer: MasterWeightOptimizer) -> Any:
    return copied(optimizer.state_dict())


# -- what a step leaves ------------------------------------------------------------------------------------------------


@sampled("recipe", RECIPES, ["mxfp8", "nvfp4", "float8_tensor", "int4_32", "mxfp8_square"])
def test_after_every_step_the_bytes_are_those_of_the_master_that_is_kept(recipe: str) -> None:
    model = Model(RECIPES[recipe])
    optimizer = optimizer_of(model)
    for step in range(4):
        train(model, optimizer, step)
        assert_bytes_say_masters(model, optimizer, f"{recipe}, step {step}")


CASES = [(name, moments, ROUNDING[number % 2]) for number, (name, moments) in enumerate(pairwise(KINDS, MOMENTS))]


@pytest.mark.parametrize(("name", "moments", "rounding"), CASES)
def test_every_optimizer_steps_near_its_own_masters_in_fp32(name: str, moments: str, rounding: str) -> None:
    """Of small steps; with moments in fp32 and rounding to the nearest, it is half a distance of a master a step."""
    model, twin = Model(), Model()
    optimizer = optimizer_of(model, name, moments=moments, rounding=rounding)
    kind, options = KINDS[name]
    exact = MasterWeightOptimizer(kind, twin.named_parameters(), **options)
    first = [param.detach().dequantize(torch.float32) if param is model.a.weight else param.detach().float().clone()
             for param in model.parameters()]  # fmt: skip
    for step in range(5):
        for net, its in ((model, optimizer), (twin, exact)):
            gradients(net, step, scale=1e-2)
            its.step()
        assert_bytes_say_masters(model, optimizer, f"step {step}")
    for (label, param), other, start in zip(model.named_parameters(), twin.parameters(), first, strict=True):
        own = param.detach() if param.dtype == torch.float32 else joined(optimizer, param)
        expected = exact.state[other].get("master_weight", other.detach())
        assert own.isfinite().all(), label
        moved, off = (expected - start).abs().sum(), (own - expected).abs().sum()
        assert moved > 0, label
        assert off <= (2e-2 if moments == "fp32" else 0.25) * moved, f"{label}: {off / moved}"


def kept(value: Tensor) -> Any:
    return (value.recipe, type(value)) if isinstance(value, QuantizedTensor) else value.dtype


def test_moments_are_kept_as_asked_and_others_in_fp32() -> None:
    model = Model()
    optimizer = optimizer_of(model, "adam")
    train(model, optimizer, 0)
    eight = (MXFP8, type(model.a.weight.detach()))
    for param, moment in ((model.a.weight, eight), (model.b, eight), (model.scale, eight), (model.odd, torch.float32)):
        own = {name: kept(value) for name, value in optimizer.state[param].items()}
        second = "exp_avg_sq_root" if moment == eight else "exp_avg_sq"
        expected = {"step": torch.float32, "exp_avg": moment, second: moment, "max_exp_avg_sq": torch.float32}
        if param is not model.scale:
            expected |= {"master_remainder": torch.float16, "master_recipe": torch.int64}
        assert own == expected
    half = optimizer_of(Model(), "rmsprop", moments="bfloat16", centered=False)
    other = nn.ParameterList(half.param_groups[0]["params"])
    train(other, half, 0)
    for param in other:
        assert half.state[param]["square_avg"].dtype == half.state[param]["momentum_buffer"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", KINDS)
def test_a_step_with_a_rate_of_0_moves_no_byte_of_fresh_weights(name: str) -> None:
    """Nor does the one that torch makes to create states."""
    for recipe in RECIPES_HERE.values():
        model = Model(recipe)
        before = bytes_of(model)
        optimizer = optimizer_of(model, name)
        get("nested", model, optimizer)
        assert_same_model(model, before, "asked for its state")
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            group["weight_decay"] = 0.0
        if name not in ("asgd", "rprop"):  # whose steps do not come from the rate alone
            train(model, optimizer, 0)
        assert_same_model(model, before, "with a rate of 0")


def test_gradients_of_0_move_no_byte() -> None:
    model = Model()
    before = bytes_of(model)
    optimizer = optimizer_of(model, weight_decay=0.0)
    for _ in range(3):
        gradients(model, 0, scale=0.0)
        optimizer.step()
    assert_same_model(model, before, "gradients of 0")
    own = expand(optimizer.state[model.a.weight], model.a.weight)
    assert not any(value.any() for name, value in own.items() if name not in ("step", "master_recipe"))


def test_gradients_add_up_over_backwards() -> None:
    model, twin = Model(), Model()
    optimizers = [optimizer_of(net) for net in (model, twin)]
    x = torch.randn(4, 96, dtype=torch.bfloat16)
    for net in (model, twin):
        for _ in range(2):
            net.a(x).float().square().sum().backward()
    grads: list[Any] = [net.a.weight.grad for net in (model, twin)]
    assert same_bytes(*grads)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.step()  # gradients stay until zero_grad
    assert_same_model(model, bytes_of(twin), "accumulated")
    assert_bytes_say_masters(nn.ParameterList([model.a.weight]), optimizers[0], "accumulated")


def test_a_seed_draws_others_and_a_draw_is_another_each_step() -> None:
    found = []
    for seed in (0, 0, 1):
        model = Model()
        optimizer = optimizer_of(model)
        optimizer.param_groups[0]["states_seed"] = seed
        train(model, optimizer, 0)
        found.append(joined(optimizer, model.a.weight))
        assert optimizer.param_groups[0]["states_step"] == 1
    assert same_bytes(found[0], found[1])
    assert not same_bytes(found[0], found[2])


# -- which weights take part -------------------------------------------------------------------------------------------


def test_frozen_weights_and_those_without_a_gradient_stay_as_they_are() -> None:
    model = Model()
    optimizer = optimizer_of(model)
    train(model, optimizer, 0)
    before = bytes_of(model)
    states = state_of(optimizer)
    gradients(model, 1)
    model.a.weight.requires_grad_(False)
    model.b.grad = None
    optimizer.step()
    after, own = bytes_of(model), state_of(optimizer)
    numbers = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    for name in ("a.weight", "b"):
        assert all(torch.equal(after[key], value) for key, value in before.items() if key.split(".pa")[0] == name)
        assert_same_state(own["state"][numbers[name]], states["state"][numbers[name]], name)
    assert not torch.equal(after["a.bias."], before["a.bias."])
    model.a.weight.requires_grad_(True)
    train(model, optimizer, 2)
    assert_bytes_say_masters(model, optimizer, "trained again")
    assert not torch.equal(bytes_of(model)["a.weight.payload"], before["a.weight.payload"])


def test_a_weight_that_never_had_a_gradient_has_no_state() -> None:
    model = Model()
    optimizer = optimizer_of(model)
    gradients(model, 0)
    model.a.weight.grad = None
    optimizer.step()
    assert not optimizer.state.get(model.a.weight)


def test_a_group_may_be_added() -> None:
    model, more = Model(), Model(RECIPES_HERE["nvfp4"])
    optimizer = optimizer_of(model)
    train(model, optimizer, 0)
    optimizer.add_param_group({"params": [(f"more.{name}", one) for name, one in more.named_parameters()], "lr": 0.02})
    both = nn.ModuleList([model, more])
    for step in range(1, 3):
        train(both, optimizer, step)
        assert_bytes_say_masters(both, optimizer, f"step {step}")
    assert [group["states_step"] for group in optimizer.param_groups] == [3, 2]
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]


# -- where masters come from -------------------------------------------------------------------------------------------


def test_what_others_write_is_where_training_goes_on() -> None:
    model = Model()
    optimizer = optimizer_of(model, "sgd")
    for step in range(2):
        train(model, optimizer, step)
    other = Model()
    with torch.no_grad():
        for name in ("a.weight", "b"):
            target = model.get_parameter(name)
            target.copy_(weight(*target.shape, seed=9))
    before = bytes_of(model)
    values = model.a.weight.detach().dequantize(torch.float32)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, 2)
    assert_same_model(model, before, "a step with a rate of 0 behind the write")
    assert torch.equal(joined(optimizer, model.a.weight), values)
    assert torch.equal(joined(optimizer, model.b), weight(6, 64, seed=9).float())
    model.load_state_dict(other.state_dict())
    train(model, optimizer, 3)
    expected, own = bytes_of(other), bytes_of(model)
    # a -0.0 of the bias may become +0.0, as under any optimizer
    assert all(torch.equal(own[name], value) for name, value in expected.items() if name != "a.bias.")
    assert not optimizer.state[model.a.weight]["master_remainder"].any()


def preserved(recipe: Any = MXFP8, *, keep: bool = True) -> Any:
    torch.manual_seed(0)
    with quantized_model_init(recipe, preserve_high_precision_init_val=keep):
        return nn.Linear(64, 32, dtype=torch.bfloat16)


@pytest.mark.parametrize("recipe", RECIPES_HERE)
def test_training_starts_from_a_preserved_initial_value(recipe: str) -> None:
    model, twin = preserved(RECIPES_HERE[recipe]), preserved(RECIPES_HERE[recipe])
    initial = high_precision_init_val(model.weight).float()
    optimizer = optimizer_of(model, "sgd", rounding="nearest", lr=0.5)
    exact = MasterWeightOptimizer(torch.optim.SGD, twin.parameters(), lr=0.5)
    for net, its in ((model, optimizer), (twin, exact)):
        gradients(net, 0, scale=1e-3)
        its.step()
    expected = exact.state[twin.weight]["master_weight"]
    assert not torch.equal(expected, initial)
    torch.testing.assert_close(joined(optimizer, model.weight), expected, rtol=2.0**-16, atol=1e-6)
    assert_bytes_say_masters(model, optimizer, "after a step")


def put_bytes(source: Any, target: Any) -> None:
    for name, part in target.detach().parts().items():
        part.copy_(source.detach().parts()[name])


@pytest.mark.parametrize("form", FORMS)
def test_a_preserved_initial_value_is_in_the_state_until_a_step_writes_the_weight(form: str) -> None:
    model, twin = preserved(), preserved(keep=False)
    initial = high_precision_init_val(model.weight).float()
    optimizer = optimizer_of(model)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, 0)  # which moves nothing
    state = get(form, model, optimizer)
    put_bytes(model.weight, twin.weight)  # all that a checkpoint brings of a weight
    assert high_precision_init_val(twin.weight) is None
    again = optimizer_of(twin)
    put(form, twin, again, state)
    for net, its in ((model, optimizer), (twin, again)):
        its.param_groups[0]["lr"] = 0.01
        train(net, its, 1)
    assert not torch.equal(joined(optimizer, model.weight), initial)
    assert_same_model(twin, bytes_of(model), "trained on")
    assert same_bytes(joined(again, twin.weight), joined(optimizer, model.weight))


# -- state dicts and copies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["model", "optimizer"])
@sampled(
    ("name", "form", "steps"),
    [(name, form, steps) for name in KINDS for form in FORMS for steps in (0, 2)],
    pairwise(("adamw", "momentum", "adagrad", "rmsprop"), FORMS, (0, 2)),
)
def test_a_state_comes_back_whole_in_either_order(name: str, form: str, steps: int, first: str) -> None:
    model = Model()
    optimizer = optimizer_of(model, name)
    for step in range(steps):
        train(model, optimizer, step)
    state, weights = get(form, model, optimizer), bytes_of(model)
    assert_same_model(model, weights, "taking the state")
    other = Model(MXFP8)
    fresh = optimizer_of(other, name)
    train(other, fresh, 7)
    saved = copied(model.state_dict())
    if first == "model":
        other.load_state_dict(saved)
    put(form, other, fresh, state)
    if first == "optimizer":
        other.load_state_dict(saved)
    assert_same_model(other, weights, "loaded")
    assert_same_state(get(form, other, fresh), state, "saved after loading")
    for step in range(2, 4):
        train(model, optimizer, step)
        train(other, fresh, step)
    assert_same_model(other, bytes_of(model), "trained on")
    assert_same_state(get(form, other, fresh), get(form, model, optimizer), "saved after training on")


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("name", ["adamw", "adagrad"])
@pytest.mark.parametrize("copy_of", [copy.deepcopy, _pickled])
def test_a_model_and_its_optimizer_copied_together_go_on_alike(copy_of: Callable[[Any], Any], name: str) -> None:
    for steps in (0, 2):
        model = Model()
        optimizer = optimizer_of(model, name)
        for step in range(steps):
            train(model, optimizer, step)
        before, state = bytes_of(model), state_of(optimizer)
        twin, its = copy_of((model, optimizer))
        for step in range(2, 4):
            train(twin, its, step)
        assert_same_model(model, before, "the original")
        assert_same_state(state_of(optimizer), state, "the original's state")
        for step in range(2, 4):
            train(model, optimizer, step)
        assert_same_model(twin, bytes_of(model), "the copy")
        assert_same_state(state_of(its), state_of(optimizer), "the copy's state")


def test_a_pickle_from_before_there_were_compressed_states_is_read() -> None:
    model = Model()
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters())
    train(model, optimizer, 0)
    state = optimizer.__getstate__()
    del state["_states"], state["_remainders"]
    old = MasterWeightOptimizer.__new__(MasterWeightOptimizer)
    old.__setstate__(state)
    train(model, old, 1)
    assert len(old.state_dict()["state"]) == 5


# -- between states in fp32 and compressed ones ------------------------------------------------------------------------


def in_fp32(model: nn.Module, name: str = "adamw") -> MasterWeightOptimizer:
    return optimizer_of(model, name, masters="fp32", moments="fp32")


@pytest.mark.parametrize("name", ["adamw", "momentum", "rmsprop", "adagrad"])
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_state_in_fp32_is_where_compressed_ones_go_on(name: str, first: str) -> None:
    source, target = Model(), Model()
    exact = in_fp32(source, name)
    for step in range(2):
        train(source, exact, step)
    state, saved = state_of(exact), copied(source.state_dict())
    optimizer = optimizer_of(target, name, rounding="nearest")
    train(target, optimizer, 5)
    for part in (first, {"model": "optimizer", "optimizer": "model"}[first]):
        if part == "model":
            target.load_state_dict(saved)
        else:
            optimizer.load_state_dict(copied(state))
    assert_same_model(target, bytes_of(source), "loaded")
    number = [name for name, _ in target.named_parameters()].index("a.weight")
    param = target.a.weight
    held = optimizer.state_dict()["state"][number]
    assert torch.equal(held["master_weight"], state["state"][number]["master_weight"])
    train(source, exact, 2)
    train(target, optimizer, 2)
    assert "master_weight" not in optimizer.state_dict()["state"][number]
    assert_bytes_say_masters(target, optimizer, "after a step")
    step = (exact.state[source.a.weight]["master_weight"] - state["state"][number]["master_weight"]).abs()
    off = (joined(optimizer, param) - exact.state[source.a.weight]["master_weight"]).abs()
    assert off.sum() <= 0.2 * step.sum()
    assert (joined(optimizer, param) - held["master_weight"]).abs().sum() > 0.5 * step.sum()


@pytest.mark.parametrize("name", ["adamw", "momentum", "rmsprop", "adagrad"])
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_compressed_states_are_where_those_in_fp32_go_on(name: str, moments: str, first: str) -> None:
    source, target = Model(), Model()
    optimizer = optimizer_of(source, name, moments=moments)
    for step in range(2):
        train(source, optimizer, step)
    state, saved = state_of(optimizer), copied(source.state_dict())
    exact = in_fp32(target, name)
    train(target, exact, 5)
    for part in (first, {"model": "optimizer", "optimizer": "model"}[first]):
        if part == "model":
            target.load_state_dict(saved)
        else:
            exact.load_state_dict(copied(state))
    own = exact.state_dict()["state"]
    for number, (label, param) in enumerate(source.named_parameters()):
        if param.dtype != torch.float32:
            assert torch.equal(own[number]["master_weight"], joined(optimizer, param)), label
        expected = expand({k: v for k, v in optimizer.state[param].items() if "master" not in k}, param)
        assert_same_state({k: v for k, v in own[number].items() if "master" not in k}, expected, label)
    before = bytes_of(target)
    assert_same_model(target, bytes_of(source), "loaded")
    for group in exact.param_groups:
        group["lr"] = 0.0
    train(target, exact, 2)
    assert_same_model(target, before, "a step with a rate of 0")


def test_states_of_other_options_are_converted() -> None:
    source, target = Model(), Model()
    optimizer = optimizer_of(source)
    train(source, optimizer, 0)
    target.load_state_dict(source.state_dict())
    half = optimizer_of(target, moments="bfloat16")
    half.load_state_dict(state_of(optimizer))
    own = half.state[target.a.weight]
    assert own["exp_avg"].dtype == own["exp_avg_sq"].dtype == torch.bfloat16
    assert "exp_avg_sq_root" not in own
    expected = expand(optimizer.state[source.a.weight], source.a.weight)
    torch.testing.assert_close(own["exp_avg_sq"].float(), expected["exp_avg_sq"], rtol=2.0**-8, atol=0)
    train(target, half, 1)
    assert_bytes_say_masters(target, half, "after a step")


# -- what is refused ---------------------------------------------------------------------------------------------------


class _Own(torch.optim.AdamW):
    pass


class _OfMuon(torch.optim.Muon):
    pass


class _OfLion(Lion):
    """It does not say of itself what its base says."""


def test_optimizers_that_may_look_at_more_than_one_element_are_refused() -> None:
    kinds = [_Own, _OfLion, _OfMuon, torch.optim.Adafactor]
    for kind in kinds:
        for options in (SMALL, {"masters": "remainder"}, {"moments": "bfloat16"}):
            with pytest.raises(NotImplementedError, match=rf"{kind.__name__}.* is not known to step each element"):
                MasterWeightOptimizer(kind, [nn.Parameter(weight(64, 96))], **options)


def test_weights_that_have_no_remainders_are_refused_by_name() -> None:
    half = {"one": nn.Parameter(torch.ones(4, 32, dtype=torch.float16))}
    delayed = {"other": nn.Parameter(quantize(weight(64, 96), Float8DelayedScaling()))}
    for named, why in ((half, "one is torch.float16"), (delayed, "other cannot have its master as a remainder")):
        with pytest.raises(ValueError, match=why):
            MasterWeightOptimizer(torch.optim.AdamW, named.items(), masters="remainder")
        optimizer = MasterWeightOptimizer(torch.optim.AdamW, named.items(), moments="bfloat16")
        train(nn.ParameterDict(named), optimizer, 0)
    optimizer = optimizer_of(Model())
    with pytest.raises(ValueError, match="float16"):
        optimizer.add_param_group({"params": half.values()})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("masters", "moments", "kept"),
    [
        ("remainder", None, "float8"),
        ("remainder", "fp32", "fp32"),
        ("fp32", None, "fp32"),
        ("fp32", "float8", "float8"),
    ],
)
def test_moments_go_with_masters_unless_they_are_asked_for(masters: str, moments: Any, kept: str) -> None:
    model = Model()
    optimizer = optimizer_of(model, masters=masters, moments=moments)
    train(model, optimizer, 0)
    state = optimizer.state[model.a.weight]
    assert ("master_remainder" in state) == (masters == "remainder")
    assert ("exp_avg_sq_root" in state) == (kept == "float8")
    with optimizer.expecting_states(masters=masters, moments=moments):
        assert optimizer.state[model.a.weight].keys() == state.keys()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"masters": "bf16"}, r"masters='bf16'.*expected one of 'fp32', 'remainder'"),
        ({"moments": "fp8"}, r"moments='fp8'.*expected one of 'fp32', 'bfloat16', 'float8'"),
        ({"moments": "float8", "rounding": "up"}, r"rounding='up'.*expected one of 'stochastic', 'nearest'"),
        ({"rounding": "up"}, r"rounding='up'"),
    ],
)
def test_unknown_words_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        MasterWeightOptimizer(torch.optim.AdamW, [nn.Parameter(torch.ones(2))], **options)


def _without_masters(state: Any) -> None:
    del state["state"][3]["master_remainder"]


def _of_another_shape(state: Any) -> None:
    state["state"][3]["master_remainder"] = state["state"][3]["master_remainder"][1:]


def _of_another_dtype(state: Any) -> None:
    state["state"][3]["master_remainder"] = state["state"][3]["master_remainder"].to(torch.bfloat16)


def _of_other_groups(state: Any) -> None:
    state["param_groups"] = []


@pytest.mark.parametrize("damage", [_without_masters, _of_another_shape, _of_another_dtype, _of_other_groups])
def test_a_state_that_is_refused_changes_nothing(damage: Callable[[Any], None]) -> None:
    model = Model()
    optimizer = optimizer_of(model)
    train(model, optimizer, 0)
    bad = state_of(optimizer)
    damage(bad)
    train(model, optimizer, 1)
    before, state = bytes_of(model), state_of(optimizer)
    with pytest.raises(ValueError, match="state"):
        optimizer.load_state_dict(bad)
    assert_same_model(model, before, "refused")
    assert_same_state(state_of(optimizer), state, "refused")
    twin = Model()
    again = optimizer_of(twin)
    twin.load_state_dict(model.state_dict())
    again.load_state_dict(state)
    train(model, optimizer, 2)
    train(twin, again, 2)
    assert_same_model(model, bytes_of(twin), "trained on")


# -- how a step is done ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def chunks_of(elements: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setitem(inner_step.CHUNK, "cpu", elements)
        yield


@pytest.mark.parametrize("name", ["adamw", "nadam", "adagrad", "momentum"])
def test_weights_of_more_than_one_chunk_get_the_bytes_of_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They step twice where something is asked of the new masters first: of fresh weights, whether they moved."""
    found = []
    for elements in (2**30, 100):
        torch.manual_seed(0)
        model = nn.ModuleList([Model(), Model(RECIPES_HERE["nvfp4"])])
        optimizer = optimizer_of(model, name)
        with chunks_of(elements, monkeypatch):
            for step in range(3):
                train(model, optimizer, step)
        assert_bytes_say_masters(model, optimizer, f"{elements} a chunk")
        found.append((bytes_of(model), state_of(optimizer)))
    assert_same_state(found[1][1], found[0][1], "states")
    assert all(torch.equal(value, found[1][0][key]) for key, value in found[0][0].items())


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"states": "host"},
        {"states": "host", "moments": "bfloat16"},
        {"states": "host", "masters": "fp32", "moments": "fp32"},
    ],
    ids=["device", "host", "host half", "host wide"],
)
def test_an_error_of_the_inner_optimizer_leaves_states_as_they_were(options: dict[str, Any], steps: int) -> None:
    model = Model()
    optimizer = optimizer_of(model, **options)
    for step in range(steps):
        train(model, optimizer, step)
    before, state = bytes_of(model), state_of(optimizer)

    def fails(*_: Any) -> None:
        raise FloatingPointError("no such step")

    assert optimizer._inner is not None
    handle = optimizer._inner.register_step_pre_hook(fails)
    gradients(model, 1)
    with pytest.raises(FloatingPointError, match="no such step"):
        optimizer.step()
    handle.remove()
    assert_same_model(model, before, "failed")
    assert_same_state(state_of(optimizer), state, "failed")
    twin = Model()
    again = optimizer_of(twin, **options)
    for step in range(steps):
        train(twin, again, step)
    optimizer.step()
    train(twin, again, 1)
    assert_same_model(model, bytes_of(twin), "the next step")
    assert_same_state(state_of(optimizer), state_of(again), "the next step")


def test_moments_may_be_compressed_alone_and_masters_too() -> None:
    for options in ({"masters": "fp32"}, {"moments": "fp32"}):
        model = Model(Float8BlockScaling())
        optimizer = optimizer_of(model, **options)
        for step in range(2):
            train(model, optimizer, step)
        own = optimizer.state[model.a.weight]
        assert ("exp_avg_sq_root" in own) == ("masters" in options)
        assert ("master_remainder" in own) == ("moments" in options)
        master = own["master_weight"] if "masters" in options else joined(optimizer, model.a.weight)
        assert same_parts(quantize(master, model.a.weight.recipe), model.a.weight.detach())


@pytest.mark.parametrize("moments", MOMENTS)
def test_what_is_subtracted_from_a_mean_of_squares_leaves_it_in_fp32(moments: str) -> None:
    """Of gradients that hardly differ, the mean of squares is hardly more than the square of the mean."""
    model = Model()
    optimizer = optimizer_of(model, "rmsprop", moments=moments, alpha=0.5)
    for _ in range(12):
        for param in model.parameters():
            param.grad = torch.full(param.shape, 0.3, dtype=param.dtype)
        optimizer.step()
    assert optimizer.state[model.a.weight]["square_avg"].dtype == torch.float32
    assert all(
        expand(optimizer.state[param], param)["momentum_buffer"].isfinite().all() for param in model.parameters()
    )
    again = optimizer_of(model, "rmsprop", moments=moments)
    again.load_state_dict(state_of(optimizer))
    assert_same_state(state_of(again), state_of(optimizer), "loaded")


@pytest.mark.parametrize("other", ["mxfp8 e5m2", "float8", "bf16"])
def test_a_remainder_of_another_recipe_is_refused(other: str) -> None:
    """It is counted from the values of codes: from those of another recipe it would be noise."""

    def built(recipe: Any) -> tuple[nn.Module, MasterWeightOptimizer]:
        torch.manual_seed(0)
        weight = torch.randn(32, 64).to(torch.bfloat16)
        model = nn.ParameterList([nn.Parameter(weight if recipe is None else quantize(weight, recipe))])
        return model, MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2, masters="remainder")

    recipes = {"mxfp8 e5m2": MXFP8BlockScaling(element="e5m2"), "float8": Float8CurrentScaling(), "bf16": None}
    model, optimizer = built(MXFP8BlockScaling())
    model[0].grad = torch.ones(32, 64, dtype=torch.bfloat16)
    optimizer.step()
    saved = optimizer.state_dict()
    _, same = built(MXFP8BlockScaling(activations="dynamic"))  # how to compute is nothing of the values
    same.load_state_dict(saved)
    _, target = built(recipes[other])
    with pytest.raises(ValueError, match="master_remainder of state 0 is counted from values of another recipe"):
        target.load_state_dict(saved)
    assert not target.state


# -- a step that fails -------------------------------------------------------------------------------------------------


def _disagree(*_: Any) -> Any:
    raise RuntimeError("the ranks differ")


@pytest.mark.parametrize("states", ["device", "host"])
def test_a_step_that_ranks_do_not_agree_on_counts_nothing(states: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are fresh step before ranks agree: with copies of their counts."""
    model, optimizer = trained()
    target = Model()
    target.load_state_dict(model.state_dict())
    again = optimizer_of(target, states=states)
    again.load_state_dict(state_of(optimizer))
    before = state_of(again)
    gradients(target, 2)
    with monkeypatch.context() as patch:
        patch.setattr("qtensor.optim.master_step.agree", _disagree)
        with pytest.raises(RuntimeError, match="the ranks differ"):
            again.step()
    number = [name for name, _ in target.named_parameters()].index("a.weight")
    assert state_of(again)["state"][number]["step"] == before["state"][number]["step"] == 2
    again.load_state_dict(before)
    target.load_state_dict(model.state_dict())
    for net, its in ((model, optimizer), (target, again)):
        train(net, its, 2)
    assert_same_model(target, bytes_of(model), states)
    assert optimizer.state[model.a.weight]["step"] == again.state[target.a.weight]["step"] == 3


def test_a_step_that_fails_behind_the_agreement_keeps_no_gradients_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    monkeypatch.setattr("qtensor.optim.compressed.step.CompressedStep.finish", _disagree)
    gradients(model, 2)
    with pytest.raises(RuntimeError, match="the ranks differ"):
        optimizer.step()
    assert optimizer._taken is None


# -- what may come between ---------------------------------------------------------------------------------------------


def test_a_state_dict_between_a_read_in_place_and_its_load_takes_nothing_away() -> None:
    """torch.distributed.checkpoint reads into the tensors of a state dict, and into weights: others write these."""
    model, optimizer = trained()
    weights, states = copied(model.state_dict()), state_of(optimizer)
    target = Model()
    loader = optimizer_of(target)
    train(target, loader, 7)
    room = loader.state_dict()
    for number, own in room["state"].items():
        for name, value in own.items():
            value.copy_(states["state"][number][name])
    with torch.no_grad():
        for param, value in zip(target.state_dict().values(), weights.values(), strict=True):
            param.copy_(value)
    loader.state_dict()
    loader.load_state_dict(room)
    for param, same in zip(model.parameters(), target.parameters(), strict=True):
        if "master_remainder" in optimizer.state[param]:
            assert same_bytes(optimizer.state[param]["master_remainder"], loader.state[same]["master_remainder"])


def test_a_state_dict_has_no_remainder_of_bytes_that_others_wrote_over() -> None:
    model, optimizer = trained()
    with torch.no_grad():
        model.a.weight.copy_(weight(64, 96, seed=9))
    optimizer.state_dict()
    assert not optimizer.state[model.a.weight]["master_remainder"].any()


def test_a_step_that_failed_behind_the_agreement_fails_the_next_one_until_a_load(monkeypatch: Any) -> None:
    model, optimizer = trained()
    states = state_of(optimizer)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    gradients(model, 5)
    with monkeypatch.context() as patch:
        patch.setattr("qtensor.optim.compressed.step.write_master", fail)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    with pytest.raises(RuntimeError, match="an earlier step failed on this rank when all had agreed to it"):
        optimizer.step()
    optimizer.load_state_dict(states)
    optimizer.step()


def test_a_first_step_of_lr_0_writes_a_loaded_master() -> None:
    source = Model()
    wide = MasterWeightOptimizer(torch.optim.AdamW, source.named_parameters(), lr=1e-2)
    train(source, wide, 0)
    target = Model()
    optimizer = optimizer_of(target, lr=0.0, weight_decay=0.0)
    optimizer.load_state_dict(copied(wide.state_dict()))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(target, optimizer, 1)
    assert_bytes_say_masters(target, optimizer, "lr=0")
    before = wide.state[source.a.weight]["master_weight"]
    distance = (joined(optimizer, target.a.weight) - before).abs().max()
    assert distance <= before.abs().max() * 2.0**-17


def test_a_seed_outlives_a_load_of_states_in_fp32() -> None:
    source = Model()
    wide = MasterWeightOptimizer(torch.optim.AdamW, source.named_parameters(), lr=1e-2)
    train(source, wide, 0)
    target = Model()
    optimizer = optimizer_of(target)
    optimizer.param_groups[0]["states_seed"] = 5
    optimizer.load_state_dict(copied(wide.state_dict()))
    train(target, optimizer, 1)
    assert (optimizer.param_groups[0]["states_seed"], optimizer.param_groups[0]["states_step"]) == (5, 1)


@pytest.mark.parametrize("moments", MOMENTS)
def test_shards_without_elements_step(moments: str) -> None:
    empty = [nn.Parameter(torch.empty(0, dtype=torch.bfloat16)), nn.Parameter(torch.empty(0, 64, dtype=torch.bfloat16))]
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, empty, masters="remainder", moments=moments)
    for _ in range(2):
        for param in empty:
            param.grad = torch.empty_like(param)
        optimizer.step()


class _Foreign(Tensor):
    pass


def test_a_moment_of_another_library_is_refused_before_anything_is_loaded() -> None:
    _, optimizer = trained()
    before = state_of(optimizer)
    model, other = trained()
    train(model, other, 5)
    saved = state_of(other)
    (number,) = (number for number, own in saved["state"].items() if own["exp_avg"].shape == (3, 32))
    saved["state"][number]["exp_avg"] = torch.zeros(3, 32).as_subclass(_Foreign)
    with pytest.raises(ValueError, match=r"'exp_avg' of a parameter of shape \(3, 32\) is a _Foreign"):
        optimizer.load_state_dict(saved)
    assert_same_state(state_of(optimizer), before, "nothing was loaded")


def test_a_copy_of_an_optimizer_that_failed_knows_it() -> None:
    model, optimizer = trained()
    optimizer._torn = True
    _, same = copy.deepcopy((model, optimizer))
    with pytest.raises(RuntimeError, match="an earlier step failed on this rank"):
        same.step()
