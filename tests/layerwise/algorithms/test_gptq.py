"""GPTQ: the elements that a naive float64 column-by-column implementation chooses, and what it says when it cannot."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from layerwise.algorithms import gptq
from layerwise.algorithms.algorithm import COLUMNS, HESSIAN, LOCAL_HESSIAN, Algorithm, Decision, Group, Inputs, Linear
from layerwise.algorithms.awq import AWQ
from layerwise.algorithms.gptq import GPTQ
from layerwise.algorithms.local_hessian import LocalHessian
from layerwise.algorithms.maximum import Max
from layerwise.algorithms.mse import Mse
from layerwise.algorithms.smoothquant import SmoothQuant
from layerwise.algorithms.solvers import descent
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import format_of, shared_amax
from tests.recipes import E8M0, MAIN, facts

every_recipe = pytest.mark.parametrize("recipe", MAIN.values(), ids=MAIN)
every_scales = pytest.mark.parametrize("scales", [Max(), Mse(), LocalHessian()], ids=repr)
K, TOKENS = 96, 400
DAMPING = K / 2 / TOKENS  # of GPTQ() with so few tokens


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _hessian(k: int = K, *, silent: Sequence[int] = (), seed: int = 3) -> Tensor:
    """Of correlated inputs, with columns of very different magnitude."""
    x = _randn(TOKENS, k, seed=seed) @ (_randn(k, k, seed=seed + 1) / k**0.5 + torch.eye(k))
    x *= torch.exp2(2 * _randn(k, seed=seed + 2))
    x[:, list(silent)] = 0
    return 2 * x.T @ x / len(x)


def _group(recipe: Recipe, *weights: Tensor, hessian: Tensor | None = None) -> Group:
    linears = tuple(
        Linear(f"layers.0.w{index}.weight", weight, shared_amax(weight.float(), recipe))
        for index, weight in enumerate(weights)
    )
    inputs = None if hessian is None else Inputs(TOKENS, torch.tensor(1.0), hessian=hessian)
    return Group(linears, inputs)


def _stored(recipe: Recipe, decision: Decision, weight: Tensor) -> Tensor:
    fmt = format_of(recipe)
    values = weight.float() if decision.weight is None else decision.weight
    return fmt.decode(fmt.encode_with(values, recipe, decision.quantizer), recipe)


class _Naive:
    """The definitions, in float64 and in the order of their formulas, one column at a time."""

    def __init__(self, recipe: Recipe, weight: Tensor, hessian: Tensor, quantizer: Mapping[str, Tensor]) -> None:
        self.recipe, self.fmt = recipe, format_of(recipe)
        rows = (x if x.ndim == 2 else x.expand(1, 1) for x in self.fmt.grid(recipe, quantizer))
        self.enc, self.dec = (x.expand(len(weight), -1) for x in rows)
        self.diagonal = hessian.diagonal().double().numpy()
        self.h = hessian.double().numpy() + DAMPING * self.diagonal.mean() * np.eye(len(hessian))
        self.w = weight.double().numpy()

    def rounded(self, values: np.ndarray, j: int) -> np.ndarray:
        """Column j under the scales of its own block."""
        scale = j // (self.w.shape[1] // self.enc.shape[1])
        scaled = torch.from_numpy(values).float() * self.enc[:, scale]
        return np.asarray((self.fmt.snap(scaled, self.recipe) * self.dec[:, scale]).double().numpy())

    def compensated(self, *, act_order: bool) -> np.ndarray:
        """The values as they stood when their turn came: solves for the other columns from what remains of H."""
        w, out = self.w.copy(), np.zeros_like(self.w)
        left = list(np.argsort(-self.diagonal, kind="stable")) if act_order else list(range(len(self.h)))
        while left:
            j, rest = left[0], left[1:]
            out[:, j] = w[:, j]
            error = w[:, j] - self.rounded(w[:, j], j)
            if rest:
                # min over d of (e_j, d) H (e_j, d)^T, e_j = q - w = -error: H_rr d = H_rj error
                w[:, rest] += np.outer(error, np.linalg.solve(self.h[np.ix_(rest, rest)], self.h[rest, j]))
            left = rest
        return out

    def descended(self, stored: np.ndarray) -> np.ndarray:
        """After one sweep, each column set to where the error is least, given all others."""
        q = stored.copy()
        for j in range(len(self.h)):
            others = (q - self.w) @ self.h[:, j] - (q[:, j] - self.w[:, j]) * self.h[j, j]
            q[:, j] = self.rounded(self.w[:, j] - others / self.h[j, j], j)
        return q

    def errors(self, stored: np.ndarray) -> np.ndarray:
        """e H e^T of each row."""
        off = stored - self.w
        return np.asarray((off @ self.h * off).sum(axis=1))


@every_recipe
@pytest.mark.parametrize(("act_order", "scales"), [(False, Max()), (True, Mse()), (True, LocalHessian())], ids=repr)
def test_the_naive_algorithm_in_float64_chooses_the_same_elements(
    recipe: Recipe, act_order: bool, scales: Algorithm
) -> None:
    """A row may go its own way from the first value on that lies within rounding noise of a tie; nearly none does."""
    weight, hessian = _randn(64, K) * 0.02, _hessian()
    algorithm = GPTQ(block=32, act_order=act_order, scales=scales, descent=0)
    (decision,) = algorithm.decide(_group(recipe, weight, hessian=hessian), recipe)
    got = _stored(recipe, decision, weight)
    naive = _Naive(recipe, weight, hessian, decision.quantizer)
    values = torch.from_numpy(naive.compensated(act_order=act_order)).float()
    expected = _stored(recipe, dataclasses.replace(decision, weight=values), weight)
    same = (got == expected).all(dim=1)
    assert same.sum() >= 62
    assert decision.weight is not None
    np.testing.assert_allclose(decision.weight[same], values[same], rtol=1e-3, atol=1e-5)


@every_recipe
def test_a_naive_descent_in_float64_chooses_the_same_elements(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descent, "BLOCK", 40)
    weight, hessian = _randn(64, K) * 0.02, _hessian()
    group = _group(recipe, weight, hessian=hessian)
    (before,) = GPTQ(descent=0).decide(group, recipe)
    (after,) = GPTQ(descent=1).decide(group, recipe)
    naive = _Naive(recipe, weight, hessian, before.quantizer)
    start = _stored(recipe, before, weight)
    got, expected = _stored(recipe, after, weight), naive.descended(start.double().numpy())
    assert (got.double().numpy() == expected).all(axis=1).sum() >= 62
    assert (got != start).any()


@every_recipe
@pytest.mark.parametrize("scales", [Max(), LocalHessian()], ids=repr)
def test_errors_only_fall_in_a_descent_and_its_values_round_to_themselves(recipe: Recipe, scales: Algorithm) -> None:
    weight, hessian = _randn(64, K) * 0.02, _hessian()
    group = _group(recipe, weight, hessian=hessian)
    errors = []
    for rounds in (0, 1, 3):
        (decision,) = GPTQ(scales=scales, descent=rounds).decide(group, recipe)
        stored = _stored(recipe, decision, weight)
        assert decision.weight is not None
        assert not rounds or torch.equal(stored, decision.weight)
        errors.append(_Naive(recipe, weight, hessian, decision.quantizer).errors(stored.double().numpy()))
    for before, after in pairwise(errors):
        assert (after <= before).all()
    assert errors[1].sum() < errors[0].sum()


def test_a_descent_that_would_raise_the_error_of_a_row_leaves_the_row() -> None:
    """As where fp32 loses what columns owe to others: here the slopes are those of another matrix."""
    recipe = MAIN["nvfp4"]
    weight, hessian = _randn(64, K) * 0.02, _hessian()
    (decision,) = GPTQ(descent=0).decide(_group(recipe, weight, hessian=hessian), recipe)
    start = _stored(recipe, decision, weight).t().contiguous()
    rounding = gptq.rounding_of(_group(recipe, weight), recipe, [decision.quantizer])
    lopsided = hessian + 0.5 * (hessian.tril(-1) - hessian.triu(1))  # e^T L e is e^T H e, and L e is not H e
    naive = _Naive(recipe, weight, hessian, decision.quantizer)
    naive.h = hessian.double().numpy()
    before = naive.errors(start.t().double().numpy())
    found = descent.descend(weight.t().contiguous(), start, lopsided, rounding, 1)
    after = naive.errors(found.t().double().numpy())
    kept = (found == start).all(dim=0).numpy()
    assert 0 < kept.sum() < 64
    assert (after[~kept] < before[~kept]).all()


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
        algorithm = GPTQ(damping=0.01, act_order=act_order, scales=Max())
        (decision,) = algorithm.decide(_group(recipe, weight, hessian=hessian), recipe)
        assert error(_stored(recipe, decision, weight)) < 0.7 * plain
        _assert_same_scales(decision, quantizer)
        assert not decision.notes
        assert decision.weight is not None
        assert decision.weight.dtype == torch.float32
        assert decision.weight.shape == weight.shape


def _assert_same_scales(decision: Decision, quantizer: Mapping[str, Tensor]) -> None:
    assert decision.quantizer.keys() == quantizer.keys()
    for name, value in quantizer.items():
        assert torch.equal(decision.quantizer[name].float(), value.float()), name


@every_scales
@every_recipe
def test_scales_are_those_of_another_algorithm(recipe: Recipe, scales: Algorithm) -> None:
    weight, hessian = _randn(64, K) ** 3, _hessian()  # with outliers, for which clipping pays
    group = _group(recipe, weight, weight * 2, hessian=hessian)
    blocks = torch.stack([hessian[i : i + 16, i : i + 16] / 2 for i in range(0, K, 16)])
    local = Group(group.linears, Inputs(TOKENS, torch.tensor(1.0), local_hessian=blocks))
    theirs = scales.decide(local, recipe)
    for decision, other in zip(GPTQ(scales=scales).decide(group, recipe), theirs, strict=True):
        _assert_same_scales(decision, other.quantizer)
        assert decision.notes == other.notes
    if facts(recipe).scale is not E8M0 and scales != Max():  # among powers of two, none is better than Max's here
        own, found = Max().decide(group, recipe)[0].quantizer, theirs[0].quantizer
        assert any(not torch.equal(own[name].float(), value.float()) for name, value in found.items())


@dataclass(frozen=True, kw_only=True)
class _Halved(Algorithm):
    """An own algorithm for scales, which reads columns."""

    writes_weights: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({COLUMNS})

    def decide(self, group: Group, recipe: Recipe) -> Sequence[Decision]:
        halved = [dataclasses.replace(linear, weight=linear.weight / 2) for linear in group.linears]
        return Max().decide(dataclasses.replace(group, linears=tuple(halved)), recipe)


def test_scales_of_an_algorithm_of_your_own() -> None:
    recipe = MAIN["nvfp4"]
    group = _group(recipe, _randn(64, K), hessian=_hessian())
    own = GPTQ(scales=_Halved())
    assert own.needs == {HESSIAN, COLUMNS}
    (decision,) = own.decide(group, recipe)
    _assert_same_scales(decision, _Halved().decide(group, recipe)[0].quantizer)


@pytest.mark.parametrize("smoothing", [AWQ(), AWQ(variant="lite", alpha_step=0.5), SmoothQuant(alpha=0.25)], ids=repr)
def test_factors_are_those_of_another_algorithm(smoothing: Any) -> None:
    recipe, hessian = MAIN["nvfp4"], _hessian()
    weight = _randn(64, K)
    columns = hessian.diagonal().sqrt()
    inputs = Inputs(TOKENS, columns.amax(), column_amax=columns, column_mean=columns / 3, hessian=hessian)
    group = Group(_group(recipe, weight).linears, inputs)
    own, theirs = GPTQ(smoothing=smoothing).smooth(group, recipe), smoothing.smooth(group, recipe)
    assert own is not None
    assert theirs is not None
    assert torch.equal(own.factors, theirs.factors)
    assert own.notes == theirs.notes
    assert own.factors.unique().numel() > 1
    assert GPTQ(smoothing=smoothing).smooths
    assert GPTQ(smoothing=smoothing).needs == {HESSIAN, COLUMNS}
    assert GPTQ().smooth(group, recipe) is None
    assert not GPTQ().smooths


@every_recipe
@pytest.mark.parametrize("act_order", [False, True])
def test_what_is_stored_is_what_was_made_up_for(recipe: Recipe, act_order: bool) -> None:
    """Each column's value follows from the stored elements of those before it; one other element would show."""
    weight, hessian = _randn(64, K) * 0.02, _hessian()
    algorithm = GPTQ(block=32, act_order=act_order, descent=0)
    (decision,) = algorithm.decide(_group(recipe, weight, hessian=hessian), recipe)
    assert decision.weight is not None
    h = hessian.double() + DAMPING * hessian.diagonal().double().mean() * torch.eye(K)
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
                (decision,) = GPTQ(descent=1).decide(group, recipe)
            assert decision.weight is not None
            found.append(decision.weight.numpy().tobytes())
            with pytest.raises(RuntimeError, match="not positive definite"):
                GPTQ(damping=0.01).decide(_group(recipe, _randn(32, K), hessian=_indefinite(50.0)), recipe)
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
        algorithm = GPTQ(act_order=act_order, descent=0)
        (decision,) = algorithm.decide(_group(recipe, weight, hessian=hessian), recipe)
        assert decision.weight is not None
        assert torch.equal(decision.weight[:, silent], weight[:, silent])
        assert (decision.weight[:, [6, 41]] != weight[:, [6, 41]]).any()
        assert "warning" not in decision.notes
        (after,) = dataclasses.replace(algorithm, descent=2).decide(_group(recipe, weight, hessian=hessian), recipe)
        plain = _stored(recipe, dataclasses.replace(decision, weight=weight), weight)
        assert torch.equal(_stored(recipe, after, weight)[:, silent], plain[:, silent])
    (decision,) = GPTQ(descent=0).decide(_group(recipe, weight, hessian=torch.zeros(K, K)), recipe)
    assert decision.weight is not None
    assert torch.equal(decision.weight, weight)


def test_without_a_token_it_rounds_to_nearest_and_says_so() -> None:
    recipe = MAIN["nvfp4"]
    weight = _randn(32, K).bfloat16()
    (decision,) = GPTQ().decide(_group(recipe, weight), recipe)
    assert decision.weight is None
    (mse,) = Mse().decide(_group(recipe, weight), recipe)
    _assert_same_scales(decision, mse.quantizer)
    warning = "no token reached it; rounded to nearest under scales from its values"
    assert decision.notes == {**mse.notes, "warning": warning}


def _indefinite(strength: float) -> Tensor:
    """Diagonal 1, least eigenvalue 1 - strength."""
    hessian = torch.eye(K)
    hessian[3, 50] = hessian[50, 3] = strength
    return hessian


def test_damping_is_raised_and_said() -> None:
    recipe = MAIN["mxfp8"]
    weight = _randn(32, K)
    for strength, warning in ((1.05, "0.1"), (1.5, "1"), (5.0, "10")):
        group = _group(recipe, weight, weight, hessian=_indefinite(strength))
        (first, second) = GPTQ(damping=0.01).decide(group, recipe)
        text = f"the Hessian was not positive definite: damping raised from 0.01 to {warning}"
        assert first.notes["warning"] == second.notes["warning"] == text
        assert first.weight is not None
        assert torch.isfinite(first.weight).all()


@pytest.mark.parametrize(("tokens", "damping"), [(20, 2.4), (400, 0.12), (4800, 0.01), (10**6, 0.01)])
def test_the_fewer_tokens_the_more_damping(tokens: int, damping: float) -> None:
    """K / (2 tokens), at least 0.01: to the same bytes as under that number."""
    recipe = MAIN["nvfp4"]
    linears = _group(recipe, _randn(64, K)).linears
    group = Group(linears, Inputs(tokens, torch.tensor(1.0), hessian=_hessian()))
    found = [GPTQ(damping=given).decide(group, recipe)[0].weight for given in (None, damping, 0.05)]
    assert all(values is not None for values in found)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_with_few_tokens_the_error_on_others_is_not_larger_than_with_rounding_to_nearest() -> None:
    """Of four times as many columns as tokens; as little damping as is usual with many tokens makes it so."""
    recipe, tokens = MAIN["nvfp4"], K // 4
    mix = _randn(K, K, seed=8) / K**0.5 + torch.eye(K)
    seen, others = _randn(tokens, K, seed=9) @ mix, _randn(4000, K, seed=10) @ mix
    weight = _randn(64, K) * 0.02
    group = Group(_group(recipe, weight).linears, Inputs(tokens, torch.tensor(1.0), hessian=2 * seen.T @ seen / tokens))
    (nearest,) = Max().decide(group, recipe)

    def error(decision: Decision) -> float:
        return float(((_stored(recipe, decision, weight) - weight) @ others.T).square().sum())

    plain = error(nearest)
    assert error(GPTQ(scales=Max()).decide(group, recipe)[0]) < plain
    assert error(GPTQ(scales=Max(), damping=0.01).decide(group, recipe)[0]) > 1.2 * plain


def test_what_can_not_be_factorised_raises_by_name() -> None:
    recipe = MAIN["mxfp8"]
    group = _group(recipe, _randn(32, K), _randn(32, K), hessian=_indefinite(50.0))
    message = (
        r"^layers.0.w0.weight, layers.0.w1.weight: the Hessian of their input \(400 tokens of 96 columns\) is not "
        r"positive definite, not even with damping 10; calibrate on more tokens, give a larger GPTQ\(damping=...\), or"
    )
    with pytest.raises(RuntimeError, match=message):
        GPTQ(damping=0.01).decide(group, recipe)
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


class LocalSmoothing(SmoothQuant):
    """Factors that need the local Hessian, which GPTQ cuts out of the Hessian."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({COLUMNS, LOCAL_HESSIAN})


def test_options() -> None:
    assert GPTQ().needs == {HESSIAN}
    assert GPTQ.writes_weights
    assert GPTQ.layer_inputs == "quantized"
    assert GPTQ(act_order=False, smoothing=SmoothQuant()).to_json() == {
        "type": "GPTQ",
        "damping": None,
        "block": 128,
        "act_order": False,
        "descent": 0,
        "scales": {"type": "Mse"},
        "smoothing": {"type": "SmoothQuant", "alpha": 0.5},
        "hessians": "shared",
    }
    for options, message in (
        ({"damping": 0.0}, r"GPTQ\(damping=0.0\): expected a positive number, such as 0.01, or None"),
        ({"damping": float("nan")}, r"GPTQ\(damping=nan\): expected a positive number"),
        ({"damping": 10**400}, r"GPTQ\(damping=10+\): expected a positive number"),
        ({"block": 2.5}, r"GPTQ\(block=2.5\): expected a positive number of columns"),
        ({"block": 0}, r"GPTQ\(block=0\): expected a positive number of columns"),
        ({"descent": -1}, r"GPTQ\(descent=-1\): expected a number of rounds, such as 1, or 0 for none"),
        ({"descent": True}, r"GPTQ\(descent=True\): expected a number of rounds"),
        ({"scales": "mse"}, r"GPTQ\(scales='mse'\): expected an algorithm that writes no weights, such as Mse"),
        ({"scales": Mse}, r"GPTQ\(scales=<class .*Mse'>\): expected an algorithm that writes no weights"),
        ({"scales": AWQ()}, r"GPTQ\(scales=AWQ\(.*\)\): expected an algorithm that writes no weights"),
        ({"smoothing": "awq"}, r"GPTQ\(smoothing='awq'\): expected an algorithm with factors for columns, AWQ\(\) or"),
        ({"smoothing": AWQ(variant="clip")}, r"GPTQ\(smoothing=AWQ\(variant='clip'.*expected .* with factors"),
        ({"smoothing": GPTQ()}, r"GPTQ\(smoothing=GPTQ\(.*expected .* with factors"),
        (
            {"smoothing": LocalSmoothing(), "hessians": "one_at_a_time"},
            r"GPTQ\(smoothing=LocalSmoothing\(.*\), hessians='one_at_a_time'\): its factors need the Hessians",
        ),
        (
            {"smoothing": AWQ(), "hessians": "one_at_a_time"},
            r"GPTQ\(smoothing=AWQ\(.*\), hessians='one_at_a_time'\): its factors need the Hessians of all linears",
        ),
        ({"hessians": "none"}, r"GPTQ\(hessians='none'\): expected one of 'shared', 'one_at_a_time'"),
    ):
        with pytest.raises(ValueError, match=message):
            GPTQ(**options)
    assert GPTQ(smoothing=SmoothQuant(), hessians="one_at_a_time").one_at_a_time
