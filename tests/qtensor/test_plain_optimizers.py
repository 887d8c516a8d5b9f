"""Ordinary torch optimizers, and what stands around them, on quantized parameters in one process."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from qtensor import (
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
    stochastic_rounding,
)
from tests.qtensor.recipes_under_test import main_recipes, same_bytes, same_parts, weight
from tests.recipes import MAIN, facts
from tests.sampling import pairwise, sampled

MXFP8 = MXFP8BlockScaling()
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd_momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd_weight_decay": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.02}),
    "adam_weight_decay": (torch.optim.Adam, {"lr": 0.02, "weight_decay": 0.1, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.0}),
    "adamw_weight_decay": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
}
all_optimizers = pytest.mark.parametrize(("kind", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


class Model(nn.Module):
    """Quantized and plain parameters of one dtype."""

    def __init__(self, recipe: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(96, 64, dtype=dtype), nn.Linear(64, 32, dtype=dtype)
        for number, linear in enumerate((self.a, self.b)):
            linear.weight = nn.Parameter(quantize(weight(*linear.weight.shape, dtype, seed=number), recipe))
            nn.init.ones_(linear.bias)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def grads(model: nn.Module, step: int) -> None:
    generator = seeded(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        grads(model, step)
        optimizer.step()


def dense_of(model: nn.Module) -> list[nn.Parameter]:
    """Plain parameters of the same values and dtypes."""
    return [
        nn.Parameter(p.dequantize().detach() if isinstance(p, QuantizedTensor) else p.detach().clone())
        for p in model.parameters()
    ]


def parts_of(model: nn.Module) -> list[Tensor]:
    """Copies of all bytes."""
    return [
        part.clone()
        for param in model.parameters()
        for part in (param.detach().parts().values() if isinstance(param, QuantizedTensor) else [param.detach()])
    ]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(same_bytes(a, b) for a, b in zip(first, second, strict=True))


def text_of(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


# -- updates ---------------------------------------------------------------------------------------------------------


@main_recipes
@all_optimizers
def test_foreach_and_single_tensor_give_the_same_bytes(recipe: Any, kind: Any, options: dict[str, Any]) -> None:
    """In fp32; in bf16 torch's _foreach_mul_ by a number rounds otherwise than its mul_, on dense tensors as well."""
    results = []
    for foreach in (False, True):
        model = Model(recipe, torch.float32)
        optimizer = kind(model.parameters(), foreach=foreach, **options)
        train(model, optimizer)
        assert not same_parts(model.a.weight, Model(recipe, torch.float32).a.weight)
        state = [value for entries in optimizer.state.values() for value in entries.values()]
        results.append(parts_of(model) + [value for value in state if isinstance(value, Tensor)])
    assert equal(*results)


@main_recipes
@all_optimizers
@pytest.mark.parametrize("foreach", [False, True])
def test_every_step_is_the_dense_one_then_quantized(
    recipe: Any, kind: Any, options: dict[str, Any], foreach: bool
) -> None:
    """Decoupled weight decay writes the weight on its own, and so requantizes twice a step."""
    model = Model(recipe)
    weights = [param for param in model.parameters() if isinstance(param, QuantizedTensor)]
    twins = [nn.Parameter(param.dequantize().detach()) for param in weights]
    optimizer = kind(model.parameters(), foreach=foreach, **options)
    twice = kind is torch.optim.AdamW
    plain = kind(twins, foreach=foreach, **{**options, **({"weight_decay": 0.0} if twice else {})})
    for step in range(3):
        grads(model, step)
        with torch.no_grad():
            for param, twin in zip(weights, twins, strict=True):
                twin.grad = param.grad.clone()
                values = param.dequantize()
                if twice and options["weight_decay"]:
                    factor = 1 - options["lr"] * options["weight_decay"]
                    torch._foreach_mul_([values], factor) if foreach else values.mul_(factor)
                    values = quantize(values, recipe).dequantize()
                twin.copy_(values)
        optimizer.step()
        plain.step()
        for param, twin in zip(weights, twins, strict=True):
            assert same_parts(param, quantize(twin.detach(), recipe))
            for name, value in plain.state[twin].items():
                assert value is None or same_bytes(optimizer.state[param][name], value)


@all_optimizers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("foreach", [False, True])
def test_state_is_plain_and_of_the_appearance_dtype(
    kind: Any, options: dict[str, Any], dtype: torch.dtype, foreach: bool
) -> None:
    model = Model(MXFP8, dtype)
    optimizer = kind(model.parameters(), foreach=foreach, **options)
    train(model, optimizer, 2)
    for param, entries in optimizer.state.items():
        for name, value in entries.items():
            if value is not None:  # SGD without momentum
                assert type(value) is Tensor, name
                assert value.dtype == (torch.float32 if name == "step" else dtype), name
                assert value.shape == (() if name == "step" else param.shape), name


REPEATED = [*itertools.product(MAIN, OPTIMIZERS, [False, True])]


# What is rounded does not know which optimizer calls: any two of format, optimizer and way of stepping meet.
@sampled(("name", "optimizer_name", "foreach"), REPEATED, pairwise(MAIN, OPTIMIZERS, [False, True]))
def test_stochastic_rounding_repeats_itself_and_leaves_plain_members_alone(
    name: str, optimizer_name: str, foreach: bool
) -> None:
    recipe, (kind, options) = MAIN[name], OPTIMIZERS[optimizer_name]
    models = []
    for stochastic in (True, True, False):
        model = Model(recipe)
        optimizer = kind(model.parameters(), foreach=foreach, **options)
        if stochastic:
            with stochastic_rounding(seeded(5)):
                train(model, optimizer)
        else:
            train(model, optimizer)
        models.append(model)
    assert equal(parts_of(models[0]), parts_of(models[1]))
    assert not same_parts(models[0].a.weight, models[2].a.weight)
    assert same_bytes(models[0].a.bias, models[2].a.bias)


@pytest.mark.parametrize("foreach", [False, True])
def test_adamw_moves_by_less_than_a_step_inside_stochastic_rounding_only(foreach: bool) -> None:
    """100 steps of 1e-4 each in one direction (Adam's with constant gradients): 0.01, where the grid has 1/16."""
    x = torch.full((256, 64), 0.5, dtype=torch.bfloat16)
    x[:, ::32] = 0.875  # 448 * 2^-9; elements of 0.5 to 0.875 lie 32 * 2^-9 apart
    parameter, moving, moved = nn.Parameter(quantize(x, MXFP8)), x == 0.5, {}
    parameter.grad = -moving.to(torch.bfloat16)
    for stochastic in (False, True):
        optimizer = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.0, foreach=foreach)
        for step in range(100):
            if stochastic:
                with stochastic_rounding(seeded(step)):
                    optimizer.step()
            else:
                optimizer.step()
        moved[stochastic] = (parameter.dequantize(torch.float32) - x.float())[moving].double().mean().item()
    assert moved[False] == 0
    # Azuma: sums of 100 errors inside one step each, averaged over all moving elements, at a probability of 1e-9
    bound = 2.0**-4 * math.sqrt(100 * math.log(2e9) / (2 * int(moving.sum())))
    # Adam's own arithmetic is in bf16: two moments with rounded recurrences, and their quotient
    assert abs(moved[True] - 0.01) <= bound + 0.01 * 2.0**-4
    assert bound < 0.7 * 2.0**-4


# -- what stands around an optimizer ---------------------------------------------------------------------------------


@main_recipes
@pytest.mark.parametrize("foreach", [False, True])
def test_gradient_clipping_equals_that_of_a_dense_model(recipe: Any, foreach: bool) -> None:
    model = Model(recipe)
    grads(model, 0)
    twins = dense_of(model)
    for param, twin in zip(model.parameters(), twins, strict=True):
        twin.grad = param.grad.clone()
    found = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
    assert type(found) is Tensor
    assert same_bytes(found, nn.utils.clip_grad_norm_(twins, 1.0, foreach=foreach))
    for param, twin in zip(model.parameters(), twins, strict=True):
        assert same_bytes(param.grad, twin.grad)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    ],
    ids=["cosine", "one_cycle", "lambda"],
)
def test_learning_rate_schedulers_set_the_rate_of_the_next_step(schedule: Callable[[Any], Any]) -> None:
    model, by_rate = Model(MXFP8), Model(MXFP8)
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.02) for m in (model, by_rate))
    scheduler = schedule(optimizer)
    for step in range(4):
        for name in ("lr", "betas"):
            other.param_groups[0][name] = optimizer.param_groups[0][name]
        for net, one in ((model, optimizer), (by_rate, other)):
            grads(net, step)
            one.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] != other.param_groups[0]["lr"]
    assert equal(parts_of(model), parts_of(by_rate))


@main_recipes
@pytest.mark.parametrize("foreach", [False, True])
def test_a_grad_scaler_unscales_and_skips_steps_with_infinite_gradients(recipe: Any, foreach: bool) -> None:
    model, unscaled = Model(recipe), Model(recipe)
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.02, foreach=foreach) for m in (model, unscaled))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        overflows = step == 2
        before, state = parts_of(model), copy.deepcopy(optimizer.state_dict()["state"])
        scaler.scale(torch.ones(()))
        grads(model, step)
        for param in model.parameters():
            param.grad.mul_(scaler.get_scale())  # a power of two: exact
        if overflows:
            model.a.weight.grad[3, 4] = math.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if overflows:
            assert equal(parts_of(model), before)
            for index, entries in optimizer.state_dict()["state"].items():
                assert all(same_bytes(value, state[index][name]) for name, value in entries.items())
        else:
            assert not equal(parts_of(model), before)
            grads(unscaled, step)
            other.step()
    assert scaler.get_scale() == 512.0
    assert equal(parts_of(model), parts_of(unscaled))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_fused_optimizers_are_refused(kind: Any) -> None:
    model = Model(MXFP8)
    optimizer, before = kind(model.parameters(), lr=0.1, fused=True), parts_of(model)
    grads(model, 0)
    assert text_of(optimizer.step, NotImplementedError) == (
        f"fused=True: fused optimizers can not update a quantized weight of shape (64, 96) ({MXFP8}); leave fused out, "
        "or use MasterWeightOptimizer, whose fp32 masters are plain tensors"
    )
    assert equal(parts_of(model), before)


def test_the_masters_of_a_fused_optimizer_are_plain() -> None:
    model = Model(MXFP8)
    before = parts_of(model)
    train(model, MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=0.1, fused=True), 1)
    assert not equal(parts_of(model), before)


def test_a_gradient_takes_a_weight_as_its_decay_and_sums_of_weights_are_refused() -> None:
    q, dense = quantize(weight(), MXFP8), weight(seed=1)
    expected = torch.add(dense, q.dequantize(), alpha=0.1)
    assert same_bytes(torch.add(dense, q, alpha=0.1), expected)
    assert same_bytes(torch._foreach_add([dense], [q], alpha=0.1)[0], expected)
    for call in (lambda: q + dense, lambda: q + q, lambda: torch._foreach_add([dense, q], [q, dense])):
        message = text_of(call, NotImplementedError)
        assert message.endswith(
            "is not defined for quantized tensors (got MXFP8Tensor); call .dequantize() on them first if a dense "
            "result is what you want"
        )


QUANTIZED_OPERANDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda own, other: own.add_(other, alpha=0.5),
    "sub_": lambda own, other: own.sub_(other),
    "mul_": lambda own, other: own.mul_(other),
    "lerp_": lambda own, other: own.lerp_(other, 0.75),
    "_foreach_add_": lambda own, other: torch._foreach_add_([own], [other], alpha=0.5),
    "_foreach_sub_": lambda own, other: torch._foreach_sub_([own], [other]),
    "_foreach_mul_": lambda own, other: torch._foreach_mul_([own], [other]),
    "_foreach_lerp_": lambda own, other: torch._foreach_lerp_([own], [other], 0.75),
    "_foreach_addcmul_": lambda own, other: torch._foreach_addcmul_([own], [other], [other], value=0.5),
}


@pytest.mark.parametrize("name", QUANTIZED_OPERANDS)
@main_recipes()
def test_a_quantized_operand_counts_as_its_values(recipe: Any, name: str) -> None:
    """As with dense operands of these values: the same bytes in a quantized tensor, and in a dense one."""
    update, other = QUANTIZED_OPERANDS[name], quantize(weight(seed=1), recipe)
    by_quantized, by_dense = quantize(weight(), recipe), quantize(weight(), recipe)
    update(by_quantized, other)
    update(by_dense, other.dequantize())
    assert same_parts(by_quantized, by_dense)
    dense, expected = weight(), weight()
    update(dense, other)
    update(expected, other.dequantize())
    assert same_bytes(dense, expected)


@main_recipes()
def test_a_copy_of_a_list_is_that_of_each(recipe: Any) -> None:
    """Bytes where recipes are equal, though quantizing the values again would make others; values everywhere else."""
    source = quantize(weight(seed=1), recipe)
    other = quantize(weight(seed=2), MXFP8 if recipe != MXFP8 else NVFP4BlockScaling())
    one = [quantize(weight(), recipe), quantize(weight(), recipe), quantize(weight(), recipe), weight()]
    each = [quantize(weight(), recipe), quantize(weight(), recipe), quantize(weight(), recipe), weight()]
    sources = [source, weight(seed=3), other, source]
    versions = [own._version for own in one]
    torch._foreach_copy_(one, sources)
    for own, value in zip(each, sources, strict=True):
        own.copy_(value)
    assert same_parts(one[0], source)
    for own, expected in zip(one[:3], each, strict=False):
        assert same_parts(own, expected)
    assert same_bytes(one[3], source.dequantize())
    assert all(own._version > version for own, version in zip(one, versions, strict=True))


# -- averages of the weights -----------------------------------------------------------------------------------------


def target(recipe: Any) -> Model:
    model = Model(recipe)
    with torch.no_grad():
        for number, linear in enumerate((model.a, model.b)):
            linear.weight.copy_(weight(*linear.weight.shape, seed=7 + number))
    return model


def distance(ema: nn.Module, model: nn.Module) -> float:
    squares = [
        (a.dequantize(torch.float32) - b.dequantize(torch.float32)).square().sum().item()
        for a, b in zip(ema.parameters(), model.parameters(), strict=True)
        if isinstance(a, QuantizedTensor)
    ]
    assert len(squares) == 2
    return math.sqrt(sum(squares))


def lerp_by_hand(ema: nn.Module, model: nn.Module, share: float) -> None:
    with torch.no_grad():
        for average, param in zip(ema.parameters(), model.parameters(), strict=True):
            average.lerp_(param, share)


AVERAGES = [*itertools.product(MAIN, ["AveragedModel", "deepcopy and lerp_"])]


# Both ways call lerp_: each format with one of them, in turn.
@sampled(("name", "way"), AVERAGES, [case for number, case in enumerate(AVERAGES) if number % 4 in (0, 3)])
def test_a_moving_average_follows_inside_stochastic_rounding(name: str, way: str) -> None:
    recipe, averaged = MAIN[name], way == "AveragedModel"
    model, goal, share = Model(recipe), target(recipe), 0.02
    if averaged:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(1 - share))
        average.update_parameters(model)  # the first one copies the bytes
        ema: nn.Module = average.module
    else:
        ema = copy.deepcopy(model)
    assert equal(parts_of(ema), parts_of(model))
    before = distance(ema, goal)
    for step in range(100):
        with stochastic_rounding(seeded(step)):
            average.update_parameters(goal) if averaged else lerp_by_hand(ema, goal, share)
    assert type(ema.get_parameter("a.weight").detach()) is type(model.a.weight.detach())
    # (1 - 0.02)^100 = 0.13, and noise. What every write takes from the largest values comes on top of it:
    # scale_rounding="floor" up to an eighth (E4M3) or a quarter (E2M1), INT4 up to 1/15.
    known = facts(recipe)
    floor = getattr(recipe, "scale_rounding", "up") == "floor"
    left = (0.65 if known.element.bits == 4 else 0.6) if floor else (0.4 if known.element.uniform else 0.3)
    assert distance(ema, goal) < left * before


@main_recipes
def test_a_moving_average_that_would_stand_still_is_refused(recipe: Any) -> None:
    model, goal = Model(recipe), target(recipe)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    ema.update_parameters(model)
    before = parts_of(ema.module)
    message = (
        f"lerp_ with weight 0.001 on a quantized weight of shape (64, 96) ({recipe}): rounding to nearest takes back "
        "what is less than half a step, so an average with such small weights stands still; update it inside "
        "qtensor.stochastic_rounding(generator), or average .dequantize(torch.float32) into plain tensors"
    )
    assert text_of(lambda: ema.update_parameters(goal), RuntimeError) == message
    assert text_of(lambda: lerp_by_hand(ema.module, goal, 0.001), RuntimeError) == message
    assert equal(parts_of(ema.module), before)


def test_other_averages_of_torch_say_what_they_need() -> None:
    """Those that compute a dense average out of place, and the plain mean from the ninth model on."""
    model = Model(MXFP8)
    for options in ({"avg_fn": get_ema_avg_fn(0.9)}, {}):
        ema = AveragedModel(model, **options)
        ema.update_parameters(model)
        message = text_of(lambda ema=ema: ema.update_parameters(model), (NotImplementedError, RuntimeError))
        assert "is not defined for quantized tensors (got MXFP8Tensor); call .dequantize()" in message
    mean = AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn())
    for _ in range(8):
        mean.update_parameters(model)
    assert "lerp_ with weight 0.111111" in text_of(lambda: mean.update_parameters(model), RuntimeError)
    with stochastic_rounding(seeded()):
        mean.update_parameters(model)


@main_recipes
def test_a_dense_average_takes_dequantized_weights(recipe: Any) -> None:
    model, goal = Model(recipe), target(recipe)
    averages = {name: model.get_parameter(name).detach().dequantize(torch.float32) for name in ("a.weight", "b.weight")}
    for name, average in averages.items():
        start, end = average.clone(), goal.get_parameter(name).detach().dequantize(torch.float32)
        for _ in range(3):
            average.lerp_(end, 0.01)
        # three steps of at most two fp32 roundings, of values up to the larger end
        largest = torch.maximum(start.abs(), end.abs())
        expected = start.double() + (end.double() - start.double()) * (1 - 0.99**3)
        assert ((average - expected).abs() <= 6 * 2.0**-23 * largest).all()
