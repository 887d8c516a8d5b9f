"""Qronos: least squares over tokens in float64, solved anew for each column, chooses the same elements."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layerwise import GPTAQ, GPTQ, Max, Qronos
from qtensor import NVFP4BlockScaling
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import format_of
from tests.layerwise.algorithms.two_streams import ROWS, K, Streams, decided, randn, stored_values, two_streams
from tests.recipes import MAIN

DAMPING = 0.05
NVFP4 = NVFP4BlockScaling()


def _system(pairs: Streams, weight: Tensor, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and wanted outputs; damping are more tokens, for which the weights as they were are right."""
    x, w = pairs.x.numpy(), weight.double().numpy().T
    pull = np.sqrt(DAMPING * (x**2).sum(axis=0).mean()) * np.eye(x.shape[1])
    wanted = (x + alpha * (pairs.y.numpy() - x)) @ w
    return np.concatenate([x, pull]), np.concatenate([wanted, pull @ w])


def _naive(pairs: Streams, weight: Tensor, recipe: Recipe, quantizer: Any, *, act_order: bool, alpha: float) -> Any:
    """The values to round by the definition: before each, all that are left are those of least error to the outputs."""
    inputs, missing = _system(pairs, weight, alpha)
    squares, out = (pairs.x**2).sum(dim=0).numpy(), np.zeros(weight.shape)
    left = list(np.argsort(-squares, kind="stable")) if act_order else list(range(len(squares)))
    fmt = format_of(recipe)
    enc, dec = (
        s.expand(len(weight), -1).numpy()
        for s in (s if s.ndim == 2 else s.reshape(1, 1) for s in fmt.grid(recipe, quantizer))
    )
    while left:
        j = left[0]
        out[:, j] = np.linalg.lstsq(inputs[:, left], missing, rcond=None)[0][0]
        scale = j // (len(squares) // enc.shape[1])
        scaled = torch.from_numpy(out[:, j]).float() * torch.from_numpy(enc[:, scale].copy())
        q = fmt.snap(scaled, recipe).double().numpy() * dec[:, scale]
        missing = missing - inputs[:, [j]] * q
        left = left[1:]
    return out


@pytest.mark.parametrize("recipe", MAIN.values(), ids=MAIN)
@pytest.mark.parametrize(("act_order", "alpha"), [(False, 1.0), (True, 1.0), (True, 0.25)])
def test_least_squares_over_tokens_in_float64_choose_the_same_elements(
    recipe: Recipe, act_order: bool, alpha: float
) -> None:
    """A row may go its own way from the first value on that lies within rounding noise of a tie; few do."""
    pairs, weight = two_streams(), randn(ROWS, K).float() * 0.02
    algorithm = Qronos(damping=DAMPING, block=24, act_order=act_order, alpha=alpha, scales=Max())
    decision, got = decided(algorithm, weight, pairs.inputs(), recipe)
    values = _naive(pairs, weight, recipe, decision.quantizer, act_order=act_order, alpha=alpha)
    expected = stored_values(recipe, dataclasses.replace(decision, weight=torch.from_numpy(values).float()), weight)
    same = (got == expected).all(dim=1)
    assert same.sum() >= ROWS - 3
    assert decision.weight is not None
    np.testing.assert_allclose(decision.weight[same], values[same.numpy()], rtol=1e-3, atol=1e-5)


def test_the_more_is_corrected_the_nearer_are_the_calibrations_own_outputs() -> None:
    """All of it is best for them, and better than all of what GPTAQ corrects; in all rows together, and in most."""
    weight = randn(ROWS, K).float() * 0.02
    for seed in (0, 10, 20):
        pairs = two_streams(0.3, seed=seed)
        algorithms = [GPTQ(), *(Qronos(alpha=alpha) for alpha in (0.25, 0.5, 0.75, 1.0)), GPTAQ(alpha=1.0)]
        errors = [pairs.errors(weight, decided(one, weight, pairs.inputs(), NVFP4)[1]) for one in algorithms]
        sums = [float(one.sum()) for one in errors]
        assert sums[:5] == sorted(sums[:5], reverse=True), sums
        assert sums[4] < 0.9 * sums[5] < sums[0], sums
        assert (errors[4] < errors[5]).sum() > 0.9 * ROWS


def test_the_output_is_nearer_on_other_tokens_too() -> None:
    """Of what is linear in the difference, which any tokens show; with enough of them to know it."""
    weight, pairs = randn(ROWS, K).float() * 0.02, two_streams(0.2, tokens=4000)
    known, others = Streams(pairs.x[:2000], pairs.y[:2000]), Streams(pairs.x[2000:], pairs.y[2000:])
    errors = {}
    for algorithm in (GPTQ(), GPTAQ(alpha=1.0), Qronos(alpha=1.0)):
        _, stored = decided(algorithm, weight, known.inputs(), NVFP4)
        errors[type(algorithm)] = float(others.errors(weight, stored).sum())
    assert errors[Qronos] < 0.9 * errors[GPTAQ] < errors[GPTQ], errors


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_a_round_of_descent_brings_what_it_minimises_down_in_every_row(alpha: float) -> None:
    """The squared error over tokens and damping, in float64. The aims of fp32 are off by far less than a step."""
    pairs, weight = two_streams(), randn(ROWS, K).float() * 0.02
    inputs, wanted = _system(pairs, weight, alpha)
    errors = []
    for descent in (0, 1):
        algorithm = Qronos(damping=DAMPING, alpha=alpha, descent=descent)
        _, stored = decided(algorithm, weight, pairs.inputs(), NVFP4)
        errors.append(((wanted - inputs @ stored.double().numpy().T) ** 2).sum(axis=0))
    assert (errors[1] <= errors[0] * (1 + 2**-14)).all()
    assert (errors[1] < 0.999 * errors[0]).sum() > ROWS / 2


def test_the_aim_is_the_same_for_any_order_of_columns() -> None:
    """Under a grid so fine that values are rounded by little, act_order changes next to nothing; in GPTAQ it does."""
    pairs, weight = two_streams(0.3), randn(ROWS, K).float() * 0.02
    moved = {}
    for kind in (GPTAQ, Qronos):
        one, other = (
            decided(kind(alpha=1.0, act_order=act_order), weight, pairs.inputs(), MAIN["mxfp8"])[1]
            for act_order in (False, True)
        )
        moved[kind] = float((one - other).norm() / (one - weight).norm())
    assert 5 * moved[Qronos] < moved[GPTAQ], moved
