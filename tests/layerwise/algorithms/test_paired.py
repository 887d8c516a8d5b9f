"""GPTAQ and Qronos: nothing to correct is GPTQ, and the error to the unquantized output falls."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from layerwise import GPTAQ, GPTQ, Algorithm, Max, Mse, Qronos
from layerwise.folding.folds import transform_inputs
from qtensor import NVFP4BlockScaling
from qtensor.spec.registry import format_of
from tests.layerwise.algorithms.two_streams import ROWS, K, Streams, decided, randn, two_streams
from tests.recipes import MAIN
from tests.sampling import pairwise, sampled

NVFP4 = NVFP4BlockScaling()
Kind = type[GPTAQ] | type[Qronos]
both = pytest.mark.parametrize("kind", [GPTAQ, Qronos])


# The second input goes before the format is asked: any two meet, and each kind meets each case with several formats.
SAME = [*itertools.product([GPTAQ, Qronos], MAIN, ["no second input", "equal inputs", "alpha"])]


@sampled(("kind", "name", "case"), SAME, pairwise([GPTAQ, Qronos], MAIN, ["no second input", "equal inputs", "alpha"]))
def test_without_a_difference_the_bytes_are_those_of_gptq(kind: Kind, name: str, case: str) -> None:
    recipe = MAIN[name]
    streams, weight = two_streams(), randn(ROWS, K).float() * 0.02
    weight[:, 3] = -0.0  # its sign is stored, too
    inputs = streams.inputs()
    if case != "alpha":
        equal = Streams(streams.x, streams.x).inputs()
        inputs = equal if case == "equal inputs" else dataclasses.replace(equal, cross=None)
    found, _ = decided(kind(alpha=0.0 if case == "alpha" else 1.0, descent=1), weight, inputs, recipe)
    expected, _ = decided(GPTQ(descent=1), weight, inputs, recipe)
    assert found.weight is not None
    assert expected.weight is not None
    assert torch.equal(found.weight.view(torch.int32), expected.weight.view(torch.int32))
    other, _ = decided(kind(descent=1), weight, streams.inputs(), recipe)
    assert other.weight is not None
    assert not torch.equal(other.weight, expected.weight), "a difference between the inputs changes it"


@both
@pytest.mark.parametrize("descent", [0, 1])
@pytest.mark.parametrize("scales", [Max(), Mse()], ids=repr)
def test_the_output_is_nearer_to_that_of_the_unquantized_model(kind: Kind, scales: Algorithm, descent: int) -> None:
    """In all rows together, and in most of them; the more, the larger the difference between the inputs."""
    weight, gains = randn(ROWS, K).float() * 0.02, []
    for noise in (0.02, 0.1, 0.3):
        streams, errors = two_streams(noise), []
        for algorithm in (GPTQ(scales=scales, descent=descent), kind(scales=scales, descent=descent, alpha=1.0)):
            _, stored = decided(algorithm, weight, streams.inputs(), NVFP4)
            errors.append(streams.errors(weight, stored))
        gains.append(float(errors[0].sum() / errors[1].sum()))
    assert gains == sorted(gains)
    assert gains[-1] > 1.2
    assert (errors[1] < errors[0]).sum() > 0.9 * ROWS


def _least_errors(streams: Streams, weight: Tensor, scales: Tensor) -> Tensor:
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


@both
def test_against_all_elements_of_a_few_columns(kind: Kind) -> None:
    """Four columns that matter: it comes nearer than GPTQ does to the best of all that could be stored."""
    active, k = 4, 16
    beyond = {GPTQ: 0.0, kind: 0.0}
    for seed in range(0, 40, 10):
        few, weight = two_streams(0.3, k=active, seed=seed), randn(12, k, seed=seed).float()
        streams = Streams(*(torch.nn.functional.pad(one, (0, k - active)) for one in (few.x, few.y)))
        for algorithm in (GPTQ(damping=1e-6, scales=Max()), kind(damping=1e-6, scales=Max(), alpha=1.0)):
            decision, stored = decided(algorithm, weight, streams.inputs(), NVFP4)
            _, dec = format_of(NVFP4).grid(NVFP4, decision.quantizer)
            best = _least_errors(few, weight[:, :active], dec[:, 0])
            errors = streams.errors(weight, stored)
            assert (errors >= best * (1 - 2**-20)).all(), "these are all elements there are, stored in fp32"
            beyond[type(algorithm)] += float((errors - best).sum())
    assert beyond[kind] < 0.8 * beyond[GPTQ], beyond


def test_smoothing_divides_both_inputs() -> None:
    streams, factors = two_streams(), torch.exp2(randn(K, seed=9)).float()
    inputs = dataclasses.replace(
        streams.inputs(),
        column_amax=streams.x.abs().amax(dim=0).float(),
        column_mean=streams.x.abs().mean(dim=0).float(),
    )
    expected = Streams(streams.x / factors, streams.y / factors).inputs()
    found = transform_inputs(inputs, factors)
    assert found.cross is not None
    torch.testing.assert_close(found.cross, expected.cross, rtol=2**-20, atol=0)  # some roundings to fp32


@both
def test_the_note_tells_of_tokens_without_pairs(kind: Kind) -> None:
    weight, inputs = randn(ROWS, K).float(), dataclasses.replace(two_streams().inputs(), unpaired=7)
    decision, _ = decided(kind(), weight, inputs, NVFP4)
    assert decision.notes["warning"] == (
        "7 of 300 tokens came in batches that bring it others in the unquantized model; for those it is GPTQ"
    )
    assert inputs.hessian is not None
    mean, least = inputs.hessian.diagonal().mean(), torch.linalg.eigvalsh(inputs.hessian)[0]
    shifted = inputs.hessian - (least + 5e-4 * mean) * torch.eye(K)
    raised = dataclasses.replace(inputs, hessian=shifted)
    decision, _ = decided(kind(damping=1e-5), weight, raised, NVFP4)
    assert str(decision.notes["warning"]).startswith(
        "the Hessian was not positive definite: damping raised from 1e-05 "
    )
    assert str(decision.notes["warning"]).endswith("; for those it is GPTQ")


@both
@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_refused_options(kind: Kind, alpha: float) -> None:
    name = kind.__name__
    with pytest.raises(ValueError, match=rf"^{name}\(alpha=.*\): expected a number from 0 to 1, such as 0.5"):
        kind(alpha=alpha)
    with pytest.raises(ValueError, match=rf"^{name}\(block=0\): expected a positive number of columns"):
        kind(block=0)


@both
def test_its_name_and_options_are_in_a_fingerprint(kind: Kind) -> None:
    assert kind(alpha=0.5).to_json() == {**GPTQ().to_json(), "type": kind.__name__, "alpha": 0.5}
