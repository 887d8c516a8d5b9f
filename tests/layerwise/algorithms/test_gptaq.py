"""GPTAQ: dense least squares in float64 chooses the same elements."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from layerwise import GPTAQ, Max
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import format_of
from tests.layerwise.algorithms.two_streams import ROWS, K, Streams, decided, randn, stored_values, two_streams
from tests.recipes import MAIN

DAMPING = 0.05


def _naive(
    pairs: Streams, weight: torch.Tensor, recipe: Recipe, quantizer: Any, *, act_order: bool, alpha: float
) -> Any:
    """The values as they stand when their turn comes, from least squares over tokens: no H, no factor.

    Damping are more tokens: rows that pull every change of a weight to zero.
    """
    x, y, w = pairs.x.numpy(), pairs.y.numpy(), weight.double().numpy().copy()
    plain, out, squares = w.copy(), np.zeros_like(w), (pairs.x**2).sum(dim=0).numpy()
    pull = np.sqrt(DAMPING * squares.mean()) * np.eye(len(squares))
    left = list(np.argsort(-squares, kind="stable")) if act_order else list(range(len(squares)))
    fmt = format_of(recipe)
    enc, dec = (
        s.expand(len(weight), -1).numpy()
        for s in (s if s.ndim == 2 else s.reshape(1, 1) for s in fmt.grid(recipe, quantizer))
    )
    while left:
        j, rest = left[0], left[1:]
        out[:, j] = w[:, j]
        scale = j // (len(squares) // enc.shape[1])
        scaled = torch.from_numpy(w[:, j]).float() * torch.from_numpy(enc[:, scale].copy())
        q = fmt.snap(scaled, recipe).double().numpy() * dec[:, scale]
        if rest:
            system = np.concatenate([x[:, rest], pull[:, rest]])
            rounding = np.concatenate([x[:, j], pull[:, j]])[:, None] * (w[:, j] - q)  # [tokens + K, rows]
            drift = np.concatenate([y[:, j] - x[:, j], 0 * pull[:, j]])[:, None] * plain[:, j] * alpha
            w[:, rest] += np.linalg.lstsq(system, rounding + drift, rcond=None)[0].T
        left = rest
    return out


@pytest.mark.parametrize("recipe", MAIN.values(), ids=MAIN)
@pytest.mark.parametrize(("act_order", "alpha"), [(False, 1.0), (True, 1.0), (True, 0.25)])
def test_least_squares_over_tokens_in_float64_choose_the_same_elements(
    recipe: Recipe, act_order: bool, alpha: float
) -> None:
    """A row may go its own way from the first value on that lies within rounding noise of a tie; few do."""
    streams, weight = two_streams(), randn(ROWS, K).float() * 0.02
    algorithm = GPTAQ(damping=DAMPING, block=24, act_order=act_order, alpha=alpha, scales=Max())
    decision, got = decided(algorithm, weight, streams.inputs(), recipe)
    values = _naive(streams, weight, recipe, decision.quantizer, act_order=act_order, alpha=alpha)
    expected = stored_values(recipe, dataclasses.replace(decision, weight=torch.from_numpy(values).float()), weight)
    same = (got == expected).all(dim=1)
    assert same.sum() >= ROWS - 3
    assert decision.weight is not None
    np.testing.assert_allclose(decision.weight[same], values[same.numpy()], rtol=1e-3, atol=1e-5)
