"""GPTQ: the elements that a naive float64 column-by-column implementation chooses, and what it says when it cannot."""

import dataclasses
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from layerwise.algorithms import gptq
from layerwise.algorithms.algorithm import HESSIAN, Decision, Group, Inputs, Linear
from layerwise.algorithms.gptq import GPTQ
from layerwise.algorithms.mse import Mse
from qtensor.formats import format_of, shared_amax
from qtensor.recipes import Recipe
from tests.recipes import E8M0, MAIN, facts

every_recipe = pytest.mark.parametrize("recipe", MAIN.values(), ids=MAIN)
K = 96


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _hessian(k: int = K, *, silent: Sequence[int] = (), seed: int = 3) -> Tensor:
    """Of correlated inputs, with columns of very different magnitude."""
    x = _randn(400, k, seed=seed) @ (_randn(k, k, seed=seed + 1) / k**0.5 + torch.eye(k))
    x *= torch.exp2(2 * _randn(k, seed=seed + 2))
    x[:, list(silent)] = 0
    return 2 * x.T @ x / len(x)


def _group(recipe: Recipe, *weights: Tensor, hessian: Tensor | None = None) -> Group:
    linears = tuple(
        Linear(f"layers.0.w{index}.weight", weight, shared_amax(weight.float(), recipe))
        for index, weight in enumerate(weights)
    )
    inputs = None if hessian is None else Inputs(400, torch.tensor(1.0), hessian=hessian)
    return Group(linears, inputs)


def _stored(recipe: Recipe, decision: Decision, weight: Tensor) -> Tensor:
    fmt = format_of(recipe)
    values = weight.float() if decision.weight is None else decision.weight
    return fmt.decode(fmt.encode_with(values, recipe, decision.quantizer), recipe)


def _naive(recipe: Recipe, weight: Tensor, hessian: Tensor, *, act_order: bool = False) -> np.ndarray:
    """The definition, in float64: solve for the remaining columns from the inverse of what remains of H.

    Returns the compensated values as they stood when their turn came.
    """
    fmt = format_of(recipe)
    enc, dec = fmt.grid(recipe, fmt.quantizer(weight.float(), recipe, shared_amax(weight.float(), recipe)))
    enc, dec = (x.expand(len(weight), -1) if x.ndim == 2 else x.expand(len(weight), 1) for x in (enc, dec))
    h = hessian.double().numpy().copy()
    diagonal = h.diagonal().copy()
    h += 0.01 * diagonal.mean() * np.eye(len(h))
    w = weight.double().numpy().copy()
    out = np.zeros_like(w)
    left = list(np.argsort(-diagonal, kind="stable")) if act_order else list(range(len(h)))
    while left:
        j, rest = left[0], left[1:]
        out[:, j] = w[:, j]
        scale = j // (w.shape[1] // enc.shape[1])
        scaled = torch.from_numpy(w[:, j]).float() * enc[:, scale]
        error = w[:, j] - (fmt.snap(scaled, recipe) * dec[:, scale]).double().numpy()
        if rest:
            # min over d of (e_j, d) H (e_j, d)^T, e_j = q - w = -error: H_rr d = H_rj error
            w[:, rest] += np.outer(error, np.linalg.solve(h[np.ix_(rest, rest)], h[rest, j]))
        left = rest
    return out


@every_recipe
@pytest.mark.parametrize("act_order", [False, True])
def test_the_naive_algorithm_in_float64_chooses_the_same_elements(recipe: Recipe, act_order: bool) -> None:
    """A row may go its own way from the first value on that lies within rounding noise of a tie; nearly none does."""
    weight, hessian = _randn(64, K) * 0.02, _hessian()
    (decision,) = GPTQ(block=32, act_order=act_order).decide(_group(recipe, weight, hessian=hessian), recipe)
    got = _stored(recipe, decision, weight)
    values = torch.from_numpy(_naive(recipe, weight, hessian, act_order=act_order)).float()
    expected = _stored(recipe, dataclasses.replace(decision, weight=values), weight)
    same = (got == expected).all(dim=1)
    assert same.sum() >= 62
    assert decision.weight is not None
    np.testing.assert_allclose(decision.weight[same], values[same], rtol=1e-3, atol=1e-5)


@every_recipe
def test_the_output_is_nearer_than_with_rounding_to_nearest(recipe: Recipe) -> None:
    weight, hessian = _randn(64, K) * 0.02, _hessian()
    fmt = format_of(recipe)
    quantizer = fmt.quantizer(weight, recipe, shared_amax(weight, recipe))

    def error(stored: Tensor) -> float:
        delta = (stored - weight).double()
        return float((delta @ hessian.double() * delta).sum())

    plain = error(fmt.decode(fmt.encode_with(weight, recipe, quantizer), recipe))
    for act_order in (False, True):
        (decision,) = GPTQ(act_order=act_order).decide(_group(recipe, weight, hessian=hessian), recipe)
        assert error(_stored(recipe, decision, weight)) < 0.7 * plain
        assert decision.quantizer.keys() == quantizer.keys()
        for name, value in quantizer.items():
            assert torch.equal(decision.quantizer[name].float(), value.float()), name
        assert not decision.notes
        assert decision.weight is not None
        assert decision.weight.dtype == torch.float32
        assert decision.weight.shape == weight.shape


@every_recipe
def test_scales_of_mse(recipe: Recipe) -> None:
    weight = _randn(64, K) ** 3  # with outliers, for which clipping pays
    group = _group(recipe, weight, weight * 2, hessian=_hessian())
    from_mse = Mse().decide(group, recipe)
    for decision, mse in zip(GPTQ(scales="mse").decide(group, recipe), from_mse, strict=True):
        for name, value in mse.quantizer.items():
            assert torch.equal(decision.quantizer[name].float(), value.float()), name
    if facts(recipe).scale is not E8M0:  # among its scales, powers of two, none is better than Max's here
        (from_max, _) = GPTQ().decide(group, recipe)
        found = from_mse[0].quantizer
        assert any(not torch.equal(from_max.quantizer[name].float(), value.float()) for name, value in found.items())


@every_recipe
@pytest.mark.parametrize("act_order", [False, True])
def test_what_is_stored_is_what_was_made_up_for(recipe: Recipe, act_order: bool) -> None:
    """Each column's value follows from the stored elements of those before it; one other element would show."""
    weight, hessian = _randn(64, K) * 0.02, _hessian()
    (decision,) = GPTQ(block=32, act_order=act_order).decide(_group(recipe, weight, hessian=hessian), recipe)
    assert decision.weight is not None
    h = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(K)
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(K)
    factor = torch.linalg.cholesky(torch.linalg.inv(h[order][:, order]), upper=True)
    values, stored = (x[:, order].double() for x in (decision.weight, _stored(recipe, decision, weight)))
    owed = (values - stored) / factor.diagonal() @ factor.triu(1)
    np.testing.assert_allclose(values, weight[:, order].double() - owed, atol=2e-6)


@every_recipe
def test_linears_of_one_group_are_decided_as_if_alone(recipe: Recipe) -> None:
    weights = [(_randn(rows, K, seed=rows) * scale).bfloat16() for rows, scale in ((32, 0.02), (64, 3.0))]
    hessian = _hessian()
    before = hessian.clone(), [weight.clone() for weight in weights]
    together = GPTQ().decide(_group(recipe, *weights, hessian=hessian), recipe)
    for weight, decision in zip(weights, together, strict=True):
        (alone,) = GPTQ().decide(_group(recipe, weight, hessian=hessian), recipe)
        same = (_stored(recipe, decision, weight) == _stored(recipe, alone, weight)).all(dim=1)
        assert same.sum() >= len(weight) - 1
    assert torch.equal(hessian, before[0])
    assert all(torch.equal(*both) for both in zip(weights, before[1], strict=True))


def test_it_computes_in_one_way_whatever_the_caller_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(hessian: Tensor, damping: float) -> Tensor | None:
        seen.append((torch.get_num_threads(), torch.backends.mkldnn.matmul.fp32_precision))
        return inverse_factor(hessian, damping)

    inverse_factor = gptq._inverse_factor
    monkeypatch.setattr(gptq, "_inverse_factor", watched)
    recipe = MAIN["nvfp4"]
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    found = []
    group = _group(recipe, _randn(64, 256) * 0.02, hessian=_hessian(256))
    try:
        for count, allowed in ((1, "highest"), (2, "medium")):
            torch.set_num_threads(count)
            torch.set_float32_matmul_precision(allowed)
            with torch.autocast("cpu", torch.bfloat16, enabled=count == 2):
                (decision,) = GPTQ().decide(group, recipe)
            assert decision.weight is not None
            found.append(decision.weight.numpy().tobytes())
            with pytest.raises(RuntimeError, match="not positive definite"):
                GPTQ().decide(_group(recipe, _randn(32, K), hessian=_indefinite(50.0)), recipe)
            assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (count, allowed)
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
    assert found[0] == found[1]
    assert set(seen) == {(1, "ieee")}


def test_the_block_is_a_matter_of_speed() -> None:
    recipe = MAIN["nvfp4"]
    weight, hessian = _randn(64, K) * 0.02, _hessian()
    stored = []
    for block, act_order in product((1, 7, 32, 200), (False, True)):
        (decision,) = GPTQ(block=block, act_order=act_order).decide(_group(recipe, weight, hessian=hessian), recipe)
        stored.append(_stored(recipe, decision, weight))
    for index in (0, 1):
        for other in stored[index + 2 :: 2]:
            assert (stored[index] == other).all(dim=1).sum() >= 62


def test_columns_that_never_saw_input_are_rounded_to_nearest_and_take_no_error() -> None:
    recipe = MAIN["mxfp8"]
    silent = [0, 5, 40, 95]
    weight, hessian = _randn(64, K) * 0.02, _hessian(silent=silent)
    hessian[5, 6] = hessian[6, 5] = 1e-3  # what a sum leaves whose diagonal vanished beside larger values
    for act_order in (False, True):
        (decision,) = GPTQ(act_order=act_order).decide(_group(recipe, weight, hessian=hessian), recipe)
        assert decision.weight is not None
        assert torch.equal(decision.weight[:, silent], weight[:, silent])
        assert (decision.weight[:, [6, 41]] != weight[:, [6, 41]]).any()
        assert not decision.notes
    (decision,) = GPTQ().decide(_group(recipe, weight, hessian=torch.zeros(K, K)), recipe)
    assert decision.weight is not None
    assert torch.equal(decision.weight, weight)


def test_without_a_token_it_rounds_to_nearest_and_says_so() -> None:
    recipe = MAIN["nvfp4"]
    weight = _randn(32, K).bfloat16()
    (decision,) = GPTQ().decide(_group(recipe, weight), recipe)
    assert decision.weight is None
    assert decision.notes == {"warning": "no token reached it; rounded to nearest under scales from its values"}


def _indefinite(strength: float) -> Tensor:
    """Diagonal 1, least eigenvalue 1 - strength."""
    hessian = torch.eye(K)
    hessian[3, 50] = hessian[50, 3] = strength
    return hessian


def test_damping_is_raised_and_said() -> None:
    recipe = MAIN["mxfp8"]
    weight = _randn(32, K)
    for strength, warning in ((1.05, "0.1"), (1.5, "1"), (5.0, "10")):
        (first, second) = GPTQ().decide(_group(recipe, weight, weight, hessian=_indefinite(strength)), recipe)
        assert (
            first.notes
            == second.notes
            == {"warning": f"the Hessian was not positive definite: damping raised from 0.01 to {warning}"}
        )
        assert first.weight is not None
        assert torch.isfinite(first.weight).all()


def test_what_can_not_be_factorised_raises_by_name() -> None:
    recipe = MAIN["mxfp8"]
    group = _group(recipe, _randn(32, K), _randn(32, K), hessian=_indefinite(50.0))
    message = (
        r"^layers.0.w0.weight, layers.0.w1.weight: the Hessian of their input \(400 tokens of 96 columns\) is not "
        r"positive definite, not even with damping 10; calibrate on more tokens, give a larger GPTQ\(damping=...\), or"
    )
    with pytest.raises(RuntimeError, match=message):
        GPTQ().decide(group, recipe)
    group = _group(recipe, _randn(32, K), hessian=torch.full((K, K), float("nan")))
    with pytest.raises(RuntimeError, match="not positive definite"):
        GPTQ().decide(group, recipe)
    weight = _randn(32, K)
    weight[7, 7] = float("nan")
    with pytest.raises(RuntimeError, match=r"^layers.0.w0.weight holds values that are not finite"):
        GPTQ().decide(_group(recipe, weight, hessian=_hessian()), recipe)
    without = Group(group.linears, Inputs(5, torch.tensor(1.0)))
    with pytest.raises(ValueError, match=r"layers.0.w0.weight: GPTQ needs the Hessian of their input"):
        GPTQ().decide(without, recipe)


def test_options() -> None:
    assert GPTQ().needs == {HESSIAN}
    assert GPTQ.writes_weights
    assert GPTQ.layer_inputs == "quantized"
    assert GPTQ(act_order=True).to_json() == {
        "type": "GPTQ",
        "damping": 0.01,
        "block": 128,
        "act_order": True,
        "scales": "max",
        "hessians": "shared",
    }
    for options, message in (
        ({"damping": 0.0}, r"GPTQ\(damping=0.0\): expected a positive number"),
        ({"damping": float("nan")}, r"GPTQ\(damping=nan\): expected a positive number"),
        ({"block": 0}, r"GPTQ\(block=0\): expected a positive number of columns"),
        ({"scales": "min"}, r"GPTQ\(scales='min'\): expected one of 'max', 'mse'"),
        ({"hessians": "none"}, r"GPTQ\(hessians='none'\): expected one of 'shared', 'one_at_a_time'"),
    ):
        with pytest.raises(ValueError, match=message):
            GPTQ(**options)
