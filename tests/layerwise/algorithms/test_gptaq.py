"""GPTAQ: dense least squares in float64 chooses the same elements, and the error to the unquantized output falls."""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layerwise import GPTAQ, GPTQ, Algorithm, Decision, Group, Inputs, Linear, Max, Mse
from layerwise.folding.folds import transformed
from qtensor import NVFP4BlockScaling
from qtensor.formats import format_of, shared_amax
from qtensor.recipes import Recipe
from tests.recipes import MAIN

K, ROWS, TOKENS, DAMPING = 64, 48, 300, 0.05
NVFP4 = NVFP4BlockScaling()


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, eq=False)
class _Streams:
    """x and y [TOKENS, K], float64: inputs in the quantized and in the unquantized model."""

    x: Tensor
    y: Tensor

    def inputs(self) -> Inputs:
        """Their statistics, in fp32."""
        hessian, cross = 2 * self.x.T @ self.x / len(self.x), 2 * (self.y - self.x).T @ self.x / len(self.x)
        amax = self.x.abs().amax()
        return Inputs(len(self.x), amax.float(), hessian=hessian.float(), cross=cross.float())

    def errors(self, weight: Tensor, stored: Tensor) -> Tensor:
        """Squared errors of each row's output, to that of the unquantized model."""
        return (self.y @ weight.double().T - self.x @ stored.double().T).square().sum(dim=0)


def _streams(noise: float = 0.2, *, k: int = K, seed: int = 0) -> _Streams:
    """Correlated inputs of very different magnitude; y differs by something linear, and by noise."""
    mix = _randn(k, k, seed=seed + 1) / k**0.5 + torch.eye(k, dtype=torch.float64)
    y = _randn(TOKENS, k, seed=seed + 2) @ mix * torch.exp2(_randn(k, seed=seed + 3))
    off = y @ (_randn(k, k, seed=seed + 4) / k**0.5) + y.std(dim=0) * _randn(TOKENS, k, seed=seed + 5)
    return _Streams(y + noise * off, y)


def _decided(algorithm: Algorithm, weight: Tensor, inputs: Inputs, recipe: Recipe) -> tuple[Decision, Tensor]:
    """A decision, and the values that are stored."""
    linear = Linear("layers.1.w.weight", weight, shared_amax(weight.float(), recipe))
    (decision,) = algorithm.decide(Group((linear,), inputs), recipe)
    return decision, _stored(recipe, decision, weight)


def _stored(recipe: Recipe, decision: Decision, weight: Tensor) -> Tensor:
    fmt = format_of(recipe)
    values = weight.float() if decision.weight is None else decision.weight
    return fmt.decode(fmt.encode_with(values, recipe, decision.quantizer), recipe)


def _naive(streams: _Streams, weight: Tensor, recipe: Recipe, quantizer: Any, *, act_order: bool, alpha: float) -> Any:
    """The values as they stand when their turn comes, from least squares over tokens: no H, no factor.

    Damping are more tokens: rows that pull every change of a weight to zero.
    """
    x, y, w = streams.x.numpy(), streams.y.numpy(), weight.double().numpy().copy()
    plain, out, squares = w.copy(), np.zeros_like(w), (streams.x**2).sum(dim=0).numpy()
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
    streams, weight = _streams(), _randn(ROWS, K).float() * 0.02
    algorithm = GPTAQ(damping=DAMPING, block=24, act_order=act_order, alpha=alpha, scales=Max())
    decision, got = _decided(algorithm, weight, streams.inputs(), recipe)
    values = _naive(streams, weight, recipe, decision.quantizer, act_order=act_order, alpha=alpha)
    expected = _stored(recipe, dataclasses.replace(decision, weight=torch.from_numpy(values).float()), weight)
    same = (got == expected).all(dim=1)
    assert same.sum() >= ROWS - 3
    assert decision.weight is not None
    np.testing.assert_allclose(decision.weight[same], values[same.numpy()], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("recipe", MAIN.values(), ids=MAIN)
@pytest.mark.parametrize("case", ["no second input", "equal inputs", "alpha"])
def test_without_a_difference_the_bytes_are_those_of_gptq(recipe: Recipe, case: str) -> None:
    streams, weight = _streams(), _randn(ROWS, K).float() * 0.02
    weight[:, 3] = -0.0  # its sign is stored, too
    inputs = streams.inputs()
    if case != "alpha":
        inputs = dataclasses.replace(inputs, cross=torch.zeros(K, K) if case == "equal inputs" else None)
    found, _ = _decided(GPTAQ(alpha=0.0 if case == "alpha" else 1.0, descent=1), weight, inputs, recipe)
    expected, _ = _decided(GPTQ(descent=1), weight, inputs, recipe)
    assert found.weight is not None
    assert expected.weight is not None
    assert torch.equal(found.weight.view(torch.int32), expected.weight.view(torch.int32))
    other, _ = _decided(GPTAQ(descent=1), weight, streams.inputs(), recipe)
    assert other.weight is not None
    assert not torch.equal(other.weight, expected.weight), "a difference between the inputs changes it"


@pytest.mark.parametrize("descent", [0, 1])
@pytest.mark.parametrize("scales", [Max(), Mse()], ids=repr)
def test_the_output_is_nearer_to_that_of_the_unquantized_model(scales: Algorithm, descent: int) -> None:
    """In all rows together, and in most of them; the more, the larger the difference between the inputs."""
    weight, gains = _randn(ROWS, K).float() * 0.02, []
    for noise in (0.02, 0.1, 0.3):
        streams, errors = _streams(noise), []
        for algorithm in (GPTQ(scales=scales, descent=descent), GPTAQ(scales=scales, descent=descent, alpha=1.0)):
            _, stored = _decided(algorithm, weight, streams.inputs(), NVFP4)
            errors.append(streams.errors(weight, stored))
        gains.append(float(errors[0].sum() / errors[1].sum()))
    assert gains == sorted(gains)
    assert gains[-1] > 1.2
    assert (errors[1] < errors[0]).sum() > 0.9 * ROWS


def _least_errors(streams: _Streams, weight: Tensor, scales: Tensor) -> Tensor:
    """The least error of each row over all elements that its columns can have, all of them under one scale."""
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    elements = sorted({*magnitudes, *(-one for one in magnitudes)})
    every = torch.tensor(list(itertools.product(elements, repeat=weight.shape[1])), dtype=torch.float64)  # [15^4, 4]
    squares = (every @ (streams.x.T @ streams.x) * every).sum(dim=1)
    least = []
    for row, scale in zip(weight, scales.tolist(), strict=True):
        aim = streams.y @ row.double()
        errors = aim.square().sum() - 2 * scale * (every @ (streams.x.T @ aim)) + scale**2 * squares
        least.append(errors.amin())
    return torch.stack(least)


def test_against_all_elements_of_a_few_columns() -> None:
    """Four columns that matter: GPTAQ comes nearer than GPTQ does to the best of all that could be stored."""
    active, k = 4, 16
    beyond = {"GPTQ": 0.0, "GPTAQ": 0.0}
    for seed in range(0, 40, 10):
        few, weight = _streams(0.3, k=active, seed=seed), _randn(12, k, seed=seed).float()
        streams = _Streams(*(torch.nn.functional.pad(one, (0, k - active)) for one in (few.x, few.y)))
        for algorithm in (GPTQ(damping=1e-6, scales=Max()), GPTAQ(damping=1e-6, scales=Max(), alpha=1.0)):
            decision, stored = _decided(algorithm, weight, streams.inputs(), NVFP4)
            _, dec = format_of(NVFP4).grid(NVFP4, decision.quantizer)
            best = _least_errors(few, weight[:, :active], dec[:, 0])
            errors = streams.errors(weight, stored)
            assert (errors >= best * (1 - 1e-9)).all(), "these are all elements there are"
            beyond[type(algorithm).__name__] += float((errors - best).sum())
    assert beyond["GPTAQ"] < 0.8 * beyond["GPTQ"], beyond


def test_smoothing_divides_both_inputs() -> None:
    streams, factors = _streams(), torch.exp2(_randn(K, seed=9)).float()
    inputs = dataclasses.replace(
        streams.inputs(),
        column_amax=streams.x.abs().amax(dim=0).float(),
        column_mean=streams.x.abs().mean(dim=0).float(),
    )
    expected = _Streams(streams.x / factors, streams.y / factors).inputs()
    found = transformed(inputs, factors)
    assert found.cross is not None
    torch.testing.assert_close(found.cross, expected.cross, rtol=2**-20, atol=0)  # some roundings to fp32


def test_the_note_tells_of_tokens_without_pairs() -> None:
    weight, inputs = _randn(ROWS, K).float(), dataclasses.replace(_streams().inputs(), unpaired=7)
    decision, _ = _decided(GPTAQ(), weight, inputs, NVFP4)
    assert decision.notes["warning"] == (
        "7 of 300 tokens came in batches that bring it others in the unquantized model; for those it is GPTQ"
    )
    assert inputs.hessian is not None
    mean, least = inputs.hessian.diagonal().mean(), torch.linalg.eigvalsh(inputs.hessian)[0]
    shifted = inputs.hessian - (least + 5e-4 * mean) * torch.eye(K)
    raised = dataclasses.replace(inputs, hessian=shifted)
    decision, _ = _decided(GPTAQ(damping=1e-5), weight, raised, NVFP4)
    assert str(decision.notes["warning"]).startswith(
        "the Hessian was not positive definite: damping raised from 1e-05 "
    )
    assert str(decision.notes["warning"]).endswith("; for those it is GPTQ")


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_refused_options(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"GPTAQ\(alpha=.*\): expected a number from 0 to 1, such as 0.5"):
        GPTAQ(alpha=alpha)
    with pytest.raises(ValueError, match=r"^GPTAQ\(block=0\): expected a positive number of columns"):
        GPTAQ(block=0)


def test_its_name_and_options_are_in_a_fingerprint() -> None:
    assert GPTAQ(alpha=0.5).to_json() == {**GPTQ().to_json(), "type": "GPTAQ", "alpha": 0.5}
