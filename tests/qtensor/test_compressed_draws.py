"""What an optimizer's roundings are drawn by: seed, name, step, purpose and the place of an element, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, QuantizedTensor, quantize
from qtensor.optim.compressed.masters import expand_master
from tests.qtensor.recipes_under_test import same_bytes

ROWS, COLUMNS = 64, 256
MX = MXFP8BlockScaling()
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "mxfp8": lambda x: quantize(x, MX),
    "fp32": lambda x: x.clone(),  # its moments alone are rounded
}
# of a step, in which m = sqrt(v) = g / 2
BETAS = (0.5, 0.75)


def values() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def held(kind: str, name: str = "w", *, grad: Tensor | None = None, moments: str = "float8", **group: Any) -> Any:
    """What a weight's step leaves of it and of its states, by name; `group`: of its options."""
    param = nn.Parameter(KINDS[kind](values()))
    optimizer = MasterWeightOptimizer(
        torch.optim.AdamW, [(name, param)], lr=1e-3, betas=BETAS, masters="remainder", moments=moments
    )
    optimizer.param_groups[0].update(group)
    param.grad = values().flip(0) if grad is None else grad
    optimizer.step()
    state = optimizer.state[param]
    found = {key: parts(value) for key, value in state.items() if key in ("exp_avg", "exp_avg_sq_root", "exp_avg_sq")}
    return found | ({"master": expand_master(param, state["master_remainder"])} if kind == "mxfp8" else {})


def parts(value: Tensor) -> Tensor:
    return value.dequantize(torch.float32) if isinstance(value, QuantizedTensor) else value


@pytest.mark.parametrize("moments", ["float8", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "other", [{"name": "x"}, {"states_step": 1}, {"states_seed": 1}, {"states_seed": -(2**40)}], ids=str
)
def test_another_name_step_or_seed_is_another_draw_of_everything(
    other: dict[str, Any], kind: str, moments: str
) -> None:
    one, same, found = (held(kind, moments=moments, **options) for options in ({}, {}, other))
    for name, value in one.items():
        assert same_bytes(value, same[name]), name
        assert (value != found[name]).float().mean() > 0.02, name


def test_first_and_second_moments_are_drawn_apart() -> None:
    grad = values().abs() + 2.0**-10
    found = held("fp32", grad=grad)
    # the same numbers, so the same draws would give the same bytes
    torch.testing.assert_close(found["exp_avg"], found["exp_avg_sq_root"], rtol=2.0**-2, atol=2.0**-6)
    assert (found["exp_avg"] != found["exp_avg_sq_root"]).float().mean() > 0.1


def test_moments_in_bf16_are_drawn_apart_and_right_on_average() -> None:
    """A quarter of the way to the next bf16 number, and half of it: the same draws would never raise m alone."""
    grad = torch.full((ROWS, COLUMNS), 1 + 2.0**-9)
    found = held("fp32", grad=grad, moments="bfloat16")
    first, second = found["exp_avg"].float() > 0.5, found["exp_avg_sq"].float() > 0.25
    deviation = 6 * 0.5 / (ROWS * COLUMNS) ** 0.5
    assert abs(first.double().mean() - 0.25) < deviation
    assert abs(second.double().mean() - 0.5) < deviation
    assert abs((first & ~second).double().mean() - 0.125) < deviation


def test_weights_of_one_optimizer_are_drawn_apart() -> None:
    params = {name: nn.Parameter(quantize(values(), MX)) for name in ("one", "other")}
    for named in (params.items(), params.values()):  # with names, and by their numbers
        optimizer = MasterWeightOptimizer(torch.optim.AdamW, named, lr=1e-3, masters="remainder", moments="float8")
        for param in params.values():
            param.grad = values()
        optimizer.step()
        states = [optimizer.state[param] for param in params.values()]
        masters = [expand_master(param, optimizer.state[param]["master_remainder"]) for param in params.values()]
        assert (masters[0] != masters[1]).float().mean() > 0.1
        assert (parts(states[0]["exp_avg"]) != parts(states[1]["exp_avg"])).float().mean() > 0.1


def test_rows_and_columns_are_drawn_apart() -> None:
    """Of a weight and a gradient that are the same everywhere; whatever repeats is in neither direction."""
    grad = torch.full((ROWS, COLUMNS), 1.03)
    found = held("fp32", grad=grad)["exp_avg"]
    up = found > found.amin()
    assert up.any()
    for shifted in (up.roll(1, 0), up.roll(1, 1), up.roll(32, 1)):
        assert 0.2 < (up != shifted).float().mean() / (2 * up.float().mean() * (1 - up.float().mean())) < 1.8


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_to_the_nearest_draws_nothing(kind: str) -> None:
    found = []
    for name, seed in (("w", 0), ("x", 5)):
        param = nn.Parameter(KINDS[kind](values()))
        optimizer = MasterWeightOptimizer(
            torch.optim.AdamW, [(name, param)], lr=1e-3, masters="remainder", moments="float8", rounding="nearest"
        )
        optimizer.param_groups[0]["states_seed"] = seed
        param.grad = values().flip(0)
        optimizer.step()
        found.append({key: parts(value) for key, value in optimizer.state[param].items() if value.ndim})
    assert all(torch.equal(found[0][key].view(torch.uint8), found[1][key].view(torch.uint8)) for key in found[0])


def test_the_rows_of_all_experts_are_drawn_apart() -> None:
    """A row of one expert has no other's draws: its number counts the rows of the experts before it."""
    param = nn.Parameter(torch.zeros(4, 16, COLUMNS))
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, [("w", param)], lr=1e-3, moments="float8")
    param.grad = torch.full_like(param, 1.03)
    optimizer.step()
    rows = parts(optimizer.state[param]["exp_avg"]).view(-1, COLUMNS)
    assert rows.unique(dim=0).shape[0] == 4 * 16
