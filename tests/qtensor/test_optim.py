"""MasterWeightOptimizer in one process: the plain optimizer on fp32 masters, its result quantized, and nothing else."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import Tensor, nn

from qtensor import (
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    QuantizedTensor,
    clear_high_precision_init_val,
    high_precision_init_val,
    quantize,
    quantized_model_init,
)
from tests.qtensor.recipes_under_test import main_recipes, raw, same_bytes, same_parts, weight
from tests.recipes import E8M0, facts

MXFP8 = MXFP8BlockScaling()
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw_loop": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
}
all_optimizers = pytest.mark.parametrize(("kind", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


class Model(nn.Module):
    """Parameters of every kind: quantized, bf16 and fp32."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        self.a = nn.Linear(96, 64, dtype=torch.bfloat16)  # a bf16 bias
        self.b = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(32))  # fp32
        if recipe is not None:
            self.a.weight = nn.Parameter(quantize(weight(64, 96), recipe))
            self.b.weight = nn.Parameter(quantize(weight(32, 64, seed=1), recipe))


def grads(model: nn.Module, step: int) -> None:
    """The same pseudo-random gradients for equal (model, step)."""
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def parts_of(model: nn.Module) -> list[Tensor]:
    """Copies of all bytes of a model."""
    return [
        part.clone()
        for param in model.parameters()
        for part in (param.detach().parts().values() if isinstance(param, QuantizedTensor) else [param.detach()])
    ]


def unchanged(model: nn.Module, before: list[Tensor]) -> bool:
    return all(same_bytes(a, b) for a, b in zip(parts_of(model), before, strict=True))


def reference_masters(model: nn.Module) -> list[nn.Parameter]:
    return [
        nn.Parameter(
            (param.dequantize(torch.float32) if isinstance(param, QuantizedTensor) else param.detach().float()).clone()
        )
        for param in model.parameters()
    ]


def assert_equals_masters(model: nn.Module, masters: list[nn.Parameter]) -> None:
    for (name, param), master in zip(model.named_parameters(), masters, strict=True):
        if isinstance(param, QuantizedTensor):
            assert same_parts(param, quantize(master.detach(), param.recipe)), name
        else:
            assert same_bytes(param, master.to(param.dtype)), name


# -- what a step does ------------------------------------------------------------------------------------------------


@main_recipes
@all_optimizers
def test_a_step_is_the_plain_optimizer_on_fp32_masters_then_quantized(
    recipe: Any, kind: Any, options: dict[str, Any]
) -> None:
    model = Model(recipe)
    masters = reference_masters(model)
    optimizer, plain = MasterWeightOptimizer(kind, model.parameters(), **options), kind(masters, **options)
    for step in range(4):
        grads(model, step)
        for param, master in zip(model.parameters(), masters, strict=True):
            master.grad = param.grad.float()
        optimizer.step()
        plain.step()
        assert_equals_masters(model, masters)


@main_recipes
def test_small_updates_add_up_in_the_masters(recipe: Any) -> None:
    """100 steps of a hundredth of the smallest step of bf16 at 1 would each be lost without them."""
    parameter = nn.Parameter(quantize(torch.ones(32, 64, dtype=torch.bfloat16), recipe))
    start = parameter.detach().dequantize(torch.float32)  # 1 where the format holds it
    optimizer = MasterWeightOptimizer(torch.optim.SGD, [parameter], lr=1.0)
    for _ in range(100):
        parameter.grad = torch.full((32, 64), -0.01, dtype=torch.bfloat16)
        optimizer.step()
    hundredth = torch.tensor(0.01, dtype=torch.bfloat16).item()
    expected = start
    for _ in range(100):
        expected += hundredth
    assert same_parts(parameter, quantize(expected, recipe))


@main_recipes
@all_optimizers
def test_a_step_without_a_learning_rate_changes_no_byte(recipe: Any, kind: Any, options: dict[str, Any]) -> None:
    """Neither the first one, where masters come from the bytes, nor later ones, nor ones after a load."""
    model = Model(recipe)
    optimizer = MasterWeightOptimizer(kind, model.parameters(), **options)

    def idle() -> None:
        before = parts_of(model)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        grads(model, 7)
        optimizer.step()
        assert unchanged(model, before)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    idle()
    idle()
    grads(model, 0)
    optimizer.step()
    idle()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    idle()


@main_recipes
def test_bytes_that_quantizing_would_not_choose_survive_an_idle_step(recipe: Any) -> None:
    """A converted checkpoint may hold a scale twice as large as needed: the same values in other bytes."""
    q = quantize(weight(), recipe)
    if facts(recipe).scale is E8M0:
        q.scale.add_(1)
        q.payload.copy_((q.payload.float() / 2).to(q.payload.dtype))
    else:
        q.scale.copy_((q.scale.float() / 2).to(q.scale.dtype))
    before, parameter = q.clone(), nn.Parameter(q)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, [parameter], lr=0.0)
    for _ in range(2):
        parameter.grad = torch.ones(64, 96, dtype=torch.bfloat16)
        optimizer.step()
        assert same_parts(parameter, before)


@main_recipes
def test_parameters_without_gradients_are_not_touched(recipe: Any) -> None:
    model = Model(recipe)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
    grads(model, 0)
    model.b.weight.grad = None
    before = model.b.weight.detach().clone()
    optimizer.step()
    assert same_parts(model.b.weight, before)
    assert model.b.weight not in optimizer.state
    assert not same_parts(model.a.weight, quantize(weight(64, 96), recipe))


@main_recipes
def test_the_step_writes_in_place(recipe: Any) -> None:
    model = Model(recipe)
    addresses = [part.data_ptr() for part in model.a.weight.parts().values()]
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
    grads(model, 0)
    optimizer.step()
    assert [part.data_ptr() for part in model.a.weight.parts().values()] == addresses


# -- masters ---------------------------------------------------------------------------------------------------------


@main_recipes
def test_masters_are_fp32_and_plain_and_only_where_they_are_needed(recipe: Any) -> None:
    model = Model(recipe)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
    grads(model, 0)
    optimizer.step()
    for param in (model.a.weight, model.b.weight, model.a.bias):
        state = optimizer.state[param]
        assert set(state) == {"master_weight", "step", "exp_avg", "exp_avg_sq"}
        assert all(type(value) is Tensor and value.dtype == torch.float32 for value in state.values())
    assert set(optimizer.state[model.scale]) == {"step", "exp_avg", "exp_avg_sq"}


@main_recipes
def test_masters_start_from_the_preserved_initial_value(recipe: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(96, 64, bias=False)
    torch.manual_seed(0)
    with quantized_model_init(recipe, preserve_high_precision_init_val=True):
        model = nn.Linear(96, 64, bias=False)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    clear_high_precision_init_val(model.weight)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        grads(model, step)
        grads(plain, step)
        optimizer.step()
        reference.step()
        assert same_bytes(optimizer.state[model.weight]["master_weight"], plain.weight)
        assert same_parts(model.weight, quantize(plain.weight, recipe))


@main_recipes
def test_an_idle_step_keeps_a_preserved_model_too(recipe: Any) -> None:
    with quantized_model_init(recipe, preserve_high_precision_init_val=True):
        model = nn.Linear(96, 64, bias=False)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=0.0)
    before = parts_of(model)
    grads(model, 0)
    optimizer.step()
    assert unchanged(model, before)


# -- what stands around an optimizer ---------------------------------------------------------------------------------


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "cosine": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=5),
    "one_cycle": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=8),  # changes betas, too
    "warmup": lambda opt: torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.1),
}


@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_learning_rate_schedulers_act_as_on_a_plain_optimizer(schedule: Callable[[Any], Any]) -> None:
    model = Model(MXFP8)
    masters = reference_masters(model)
    optimizer, plain = (
        MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=0.01),
        torch.optim.AdamW(masters, lr=0.01),
    )
    schedulers = schedule(optimizer), schedule(plain)
    for step in range(5):
        grads(model, step)
        for param, master in zip(model.parameters(), masters, strict=True):
            master.grad = param.grad.float()
        for one, scheduler in zip((optimizer, plain), schedulers, strict=True):
            one.step()
            scheduler.step()
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    assert_equals_masters(model, masters)


@main_recipes
def test_gradient_clipping_sees_plain_gradients(recipe: Any) -> None:
    model = Model(recipe)
    grads(model, 0)
    expected = torch.stack([param.grad.float().norm() for param in model.parameters()]).norm()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    # norms of bf16 gradients are rounded to bf16, 2^-8 relative each
    assert abs(total.item() - expected.item()) <= expected.item() * 2.0**-8
    after = torch.stack([param.grad.float().norm() for param in model.parameters()]).norm()
    assert abs(after.item() - 1) <= 2.0**-6  # the norm, the coefficient, and the scaled gradients are rounded once each


@main_recipes
def test_a_closure_is_called_once_with_gradients_enabled(recipe: Any) -> None:
    model = Model(recipe)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    calls = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = (model.b(model.a(torch.ones(2, 96, dtype=torch.bfloat16))) * model.scale).sum()
        loss.backward()
        calls.append(loss.item())
        return loss.item()

    before = parts_of(model)
    assert optimizer.step(closure) == calls[0]
    assert len(calls) == 1
    assert not unchanged(model, before)


@main_recipes
def test_zero_grad_clears_the_parameters_and_masters_keep_none(recipe: Any) -> None:
    model = Model(recipe)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
    grads(model, 0)
    optimizer.step()
    assert all(state["master_weight"].grad is None for state in optimizer.state.values() if "master_weight" in state)
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@main_recipes
def test_groups_have_their_own_options_and_may_be_added(recipe: Any) -> None:
    model = Model(recipe)
    masters = reference_masters(model)
    named = dict(zip((name for name, _ in model.named_parameters()), masters, strict=True))
    optimizer = MasterWeightOptimizer(
        torch.optim.AdamW,
        [{"params": [model.a.weight], "lr": 0.1}, {"params": [model.a.bias], "weight_decay": 0.0}],
        lr=0.01,
    )
    plain = torch.optim.AdamW(
        [{"params": [named["a.weight"]], "lr": 0.1}, {"params": [named["a.bias"]], "weight_decay": 0.0}], lr=0.01
    )
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": [model.b.weight, model.scale], "betas": (0.5, 0.9)})
            plain.add_param_group({"params": [named["b.weight"], named["scale"]], "betas": (0.5, 0.9)})
        assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == [
            {k: v for k, v in group.items() if k != "params"} for group in plain.param_groups
        ]
        grads(model, step)
        for param, master in zip(model.parameters(), masters, strict=True):
            master.grad = param.grad.float()
        optimizer.step()
        plain.step()
    assert_equals_masters(model, masters)


def test_named_parameters_keep_their_names() -> None:
    model = Model(MXFP8)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.named_parameters(), lr=0.1)
    assert optimizer.param_groups[0]["param_names"] == ["scale", "a.weight", "a.bias", "b.weight"]
    grads(model, 0)
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["scale", "a.weight", "a.bias", "b.weight"]


# -- saving and resuming ---------------------------------------------------------------------------------------------


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for step in numbers:
        grads(model, step)
        optimizer.step()


def through_a_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    with torch.serialization.safe_globals(QuantizedTensor.safe_globals()):
        return torch.load(buffer, weights_only=True)


@main_recipes
@all_optimizers
def test_resuming_continues_bit_for_bit(recipe: Any, kind: Any, options: dict[str, Any]) -> None:
    model = Model(recipe)
    optimizer = MasterWeightOptimizer(kind, model.parameters(), **options)
    steps(model, optimizer, range(3))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    steps(model, optimizer, range(3, 6))

    resumed = Model(recipe)
    again = MasterWeightOptimizer(kind, resumed.parameters(), **options)
    steps(resumed, again, range(50, 51))  # something else happened before
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    masters = [state["master_weight"] for state in again.state.values() if "master_weight" in state]
    assert {master.dtype for master in masters} == {torch.float32}  # not cast to the parameters' bf16
    steps(resumed, again, range(3, 6))
    assert unchanged(resumed, parts_of(model))


@main_recipes
def test_a_state_saved_before_the_first_step_takes_masters_from_the_parameters(recipe: Any) -> None:
    model = Model(recipe)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    steps(model, optimizer, range(2))
    expected = parts_of(model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    steps(model, optimizer, range(2))
    assert unchanged(model, expected)


@main_recipes
def test_distributed_state_dict_functions_round_trip(recipe: Any) -> None:
    """get initialises an empty state by a step with lr=0, which must change no byte."""
    model = Model(recipe)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
    before = parts_of(model)
    dcp_state.get_optimizer_state_dict(model, optimizer)
    assert unchanged(model, before)
    steps(model, optimizer, range(2))
    weights, state = dcp_state.get_state_dict(model, optimizer)
    weights, state = copy.deepcopy(weights), copy.deepcopy(state)
    assert set(state["state"]["a.weight"]) == {"master_weight", "step", "exp_avg", "exp_avg_sq"}
    steps(model, optimizer, range(2, 4))

    resumed = Model(recipe)
    again = MasterWeightOptimizer(torch.optim.AdamW, resumed.parameters(), lr=0.1)
    dcp_state.set_state_dict(resumed, again, model_state_dict=weights, optim_state_dict=state)
    assert again.state[resumed.a.weight]["master_weight"].dtype == torch.float32
    steps(resumed, again, range(2, 4))
    assert unchanged(resumed, parts_of(model))


def test_flattened_distributed_state_dicts_work_too() -> None:
    options = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)
    model, resumed = Model(MXFP8), Model(MXFP8)
    optimizer, again = (MasterWeightOptimizer(torch.optim.AdamW, one.parameters(), lr=0.1) for one in (model, resumed))
    steps(model, optimizer, range(2))
    resumed.load_state_dict(model.state_dict())
    state = copy.deepcopy(dcp_state.get_optimizer_state_dict(model, optimizer, options=options))
    dcp_state.set_optimizer_state_dict(resumed, again, state, options=options)
    steps(model, optimizer, range(2, 4))
    steps(resumed, again, range(2, 4))
    assert unchanged(resumed, parts_of(model))


@main_recipes
def test_a_load_that_does_not_fit_changes_nothing(recipe: Any) -> None:
    model = Model(recipe)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
    steps(model, optimizer, range(2))
    before, good = copy.deepcopy(optimizer.state_dict()), optimizer.state_dict()
    no_master, wrong_shape, fewer = copy.deepcopy(good), copy.deepcopy(good), copy.deepcopy(good)
    del no_master["state"][1]["master_weight"]
    wrong_shape["state"][1]["master_weight"] = torch.zeros(3, 96)
    no_values, sparse = copy.deepcopy(good), copy.deepcopy(good)
    no_values["state"][1]["master_weight"] = torch.zeros(64, 96, device="meta")
    sparse["state"][1]["master_weight"] = torch.zeros(64, 96).to_sparse()
    fewer["param_groups"][0]["params"].pop()
    for bad, text in (
        (no_master, r"state 1 holds no master weight, expected one of shape \(64, 96\)"),
        (wrong_shape, r"state 1 holds a master weight of shape \(3, 96\), expected one of shape \(64, 96\)"),
        (no_values, "the master weight of state 1 has no values to copy"),
        (sparse, "the master weight of state 1 has no values to copy"),
        (fewer, "parameter group that doesn't match"),
    ):
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(bad)
        for index, state in optimizer.state_dict()["state"].items():
            assert all(same_bytes(value, before["state"][index][key]) for key, value in state.items())


# -- errors ----------------------------------------------------------------------------------------------------------


def test_parameters_on_the_meta_device_are_refused() -> None:
    with torch.device("meta"), quantized_model_init(MXFP8):
        model = nn.Linear(64, 64)
    with pytest.raises(ValueError, match=r"on the meta device; call to_empty\(\)"):
        MasterWeightOptimizer(torch.optim.AdamW, model.parameters())


def test_wrong_options_are_the_inner_optimizers_errors() -> None:
    model = Model(MXFP8)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=-1.0)
    with pytest.raises(TypeError, match="momentum"):
        MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), momentum=0.9)
    with pytest.raises(ValueError, match="empty parameter list"):
        MasterWeightOptimizer(torch.optim.AdamW, [])


@main_recipes
def test_a_parameter_that_others_wrote_keeps_that_value_and_its_master_starts_anew(recipe: Any) -> None:
    """A checkpoint loaded after the optimizer was built must not be undone by the next step."""
    model, other = Model(recipe), Model(recipe)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
    for step in range(2):
        grads(model, step)
        optimizer.step()
    with torch.no_grad():
        other.a.weight.copy_(weight(64, 96, seed=7))
        other.a.bias.add_(1.0)
    model.load_state_dict(other.state_dict())
    loaded = parts_of(model)
    optimizer.param_groups[0]["lr"] = 0.0
    grads(model, 2)
    optimizer.step()
    assert unchanged(model, loaded)
    masters = reference_masters(model)
    sgd = MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    model.load_state_dict(other.state_dict())
    grads(model, 3)
    for master, param in zip(masters, model.parameters(), strict=True):
        assert param.grad is not None
        master.grad = param.grad.float()
    torch.optim.SGD(masters, lr=0.1).step()
    sgd.step()
    assert_equals_masters(model, masters)


@main_recipes
def test_a_write_through_the_parts_of_a_state_dict_is_seen_too(recipe: Any) -> None:
    """dcp.load writes through aliases that share no version counter with the parameter."""
    model = Model(recipe)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    grads(model, 0)
    optimizer.step()
    alias = model.state_dict()["a.weight"].parts()["payload"].view(torch.uint8)
    alias.copy_(alias.flip(0))  # a permutation of rows
    optimizer.param_groups[0]["lr"] = 0.0
    loaded = parts_of(model)
    grads(model, 1)
    optimizer.step()
    assert unchanged(model, loaded)


def test_what_an_optimizer_keeps_in_its_groups_survives() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1
            return super().step(closure)

    model = Model(MXFP8)
    optimizer = MasterWeightOptimizer(Counting, model.parameters(), lr=0.1)
    for step in range(3):
        grads(model, step)
        optimizer.step()
    assert optimizer.param_groups[0]["steps"] == 3


def test_a_group_of_meta_parameters_is_refused_and_not_added() -> None:
    optimizer = MasterWeightOptimizer(torch.optim.SGD, Model(MXFP8).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="parameters are on the meta device"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.empty(4, device="meta"))]})
    assert len(optimizer.param_groups) == 1


def _two_layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    with quantized_model_init(MXFP8BlockScaling()):
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def _idle_step(net: nn.Module, optimizer: MasterWeightOptimizer) -> None:
    for param in net.parameters():
        param.grad = torch.zeros(param.shape)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stepped", [0, 1, 2])
def test_a_model_loaded_after_an_optimizer_without_state_for_it_stays(stepped: int) -> None:
    """torch restores the optimizer first; what it had no master for follows the model."""
    a, b = _two_layers(0), _two_layers(1)
    first, second = (MasterWeightOptimizer(torch.optim.SGD, net.parameters(), lr=0.1) for net in (a, b))
    for layer in a[:stepped]:
        layer.weight.grad = torch.ones(64, 64)
    if stepped:
        first.step()
    second.load_state_dict(first.state_dict())
    b.load_state_dict(a.state_dict())
    _idle_step(b, second)
    for mine, its in zip(b, a, strict=True):
        assert same_parts(mine.weight.detach(), its.weight.detach())


def test_writes_are_noticed_after_a_load_and_a_step_without_gradient() -> None:
    net = _two_layers(0)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    for layer in net:
        layer.weight.grad = torch.ones(64, 64)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    net[0].weight.grad = torch.ones(64, 64)
    optimizer.step()
    new = quantize(weight(64, 64, torch.float32, seed=3), MXFP8BlockScaling())
    with torch.no_grad():
        net[1].weight.copy_(new)
    _idle_step(net, optimizer)
    assert same_parts(net[1].weight.detach(), new)


def test_a_write_into_the_parts_outlives_a_preserved_value() -> None:
    with quantized_model_init(MXFP8BlockScaling(), preserve_high_precision_init_val=True):
        net = nn.Sequential(nn.Linear(64, 64))
    optimizer = MasterWeightOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    new = quantize(weight(64, 64, torch.float32, seed=3), MXFP8BlockScaling())
    for name, part in net[0].weight.parts().items():
        part.copy_(new.parts()[name])
    _idle_step(net, optimizer)
    assert same_parts(net[0].weight.detach(), new)
    assert high_precision_init_val(net[0].weight) is None


@pytest.mark.parametrize("exchange", ["others", "one of them twice", "fewer"])
def test_a_step_refuses_parameters_that_it_was_not_built_with(exchange: str) -> None:
    model = Model(MXFP8)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1.0)
    before, group = parts_of(model), optimizer.param_groups[0]
    mine = group["params"]
    others = {"others": list(Model(MXFP8).parameters()), "one of them twice": [*mine[:-1], mine[0]], "fewer": mine[:-1]}
    group["params"] = others[exchange]
    grads(model, 0)
    with pytest.raises(RuntimeError, match=r"no longer hold the parameters it was built with.*shard the model first"):
        optimizer.step()
    assert all(torch.equal(raw(mine), raw(held)) for mine, held in zip(parts_of(model), before, strict=True))
    group["params"] = mine
    optimizer.step()
    assert not any(
        torch.equal(raw(mine), raw(held)) for mine, held in zip(parts_of(model)[::2], before[::2], strict=True)
    )
