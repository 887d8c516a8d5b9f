"""SmoothQuant: the factors of its definition, and Max's scales after them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from layerwise.algorithms.algorithm import COLUMNS, Inputs
from layerwise.algorithms.smoothquant import SmoothQuant
from qtensor import NVFP4BlockScaling
from tests.fsdp_hooks.cases import assert_same_bytes
from tests.layerwise.explicit import K, as_max, factors_of, group_of, inputs_of, stored, tokens, weights_for
from tests.qtensor.recipes_under_test import every_recipe

RECIPE = NVFP4BlockScaling()


@pytest.mark.parametrize("alpha", [0, 0.3, 0.5, 1.0])
def test_the_factors_are_those_of_the_definition(alpha: float) -> None:
    x, weights = tokens(1), weights_for(2)
    got = factors_of(SmoothQuant(alpha=alpha).smooth(group_of(weights, RECIPE, inputs_of(x)), RECIPE))
    assert got is not None
    assert got.dtype == torch.float32
    for k in range(K):
        of_x = max(abs(v) for v in x[:, k].tolist())
        of_w = max(abs(v) for w in weights for v in w[:, k].tolist())
        want = min(max(of_x**alpha / of_w ** (1 - alpha), 1e-4), 1e4)
        assert got[k].item() == pytest.approx(want, rel=1e-5)


def test_half_makes_the_columns_of_input_and_weights_equally_large() -> None:
    x, weights = tokens(1), weights_for(2, torch.float32)
    s = factors_of(SmoothQuant().smooth(group_of(weights, RECIPE, inputs_of(x)), RECIPE))
    assert s is not None
    torch.testing.assert_close((x / s).abs().amax(0), torch.cat(weights).mul(s).abs().amax(0))


def test_columns_without_a_value_stay_and_factors_are_bounded() -> None:
    column_amax = torch.tensor([0.0, 1.0, 1e12, 1e-12, 4.0])
    weight = torch.tensor([[1.0, 0.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, -1.0, float("nan")]])
    group = group_of([weight], RECIPE, Inputs(1, column_amax.amax(), column_amax=column_amax))
    got = factors_of(SmoothQuant().smooth(group, RECIPE))
    assert got is not None
    assert torch.equal(got, torch.tensor([1.0, 1.0, 1e4, 1e-4, 2.0]))


@every_recipe
def test_it_decides_as_max_does(recipe: Any) -> None:
    group = group_of(weights_for(2), recipe, inputs_of(tokens(1)))
    for one, decision in zip(group.linears, SmoothQuant().decide(group, recipe), strict=True):
        assert_same_bytes(stored(one.weight, recipe, decision.quantizer), as_max(one, recipe), one.name)
        assert decision.weight is None


def test_what_it_is() -> None:
    assert SmoothQuant.writes_weights
    assert SmoothQuant().needs == {COLUMNS}
    assert SmoothQuant().to_json() == {"type": "SmoothQuant", "alpha": 0.5}
    assert SmoothQuant().smooth(group_of(weights_for(2), RECIPE, None), RECIPE) is None
    for bad in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=re.escape(f"SmoothQuant: alpha={bad!r} is not between 0 and 1")):
            SmoothQuant(alpha=bad)
