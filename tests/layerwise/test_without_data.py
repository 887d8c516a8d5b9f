"""Without data: all that Max and Mse need; under other algorithms no linear has an input, and the result says so."""

from __future__ import annotations

from typing import Any

import pytest

from layerwise import GPTQ, CalibrationResult, Max, calibrate
from qtensor import NVFP4BlockScaling
from tests.layerwise import models, small_runs
from tests.layerwise.algorithm_table import TABLE

BATCHES = small_runs.batches()


def calibrated(algorithm: Any, data: Any) -> CalibrationResult:
    model = small_runs.model_of(shard=False)
    return calibrate(model, data, recipe=NVFP4BlockScaling(), algorithm=algorithm, progress=False)


def bytes_of(algorithm: Any, data: Any) -> dict[str, str]:
    return models.fingerprints(calibrated(algorithm, data).state_dict())


@pytest.mark.parametrize("algorithm", [facts.quick for facts in TABLE.values() if facts.alone == facts.quick], ids=repr)
def test_max_and_mse_come_to_the_same_without_data(algorithm: Any) -> None:
    assert bytes_of(algorithm, None) == bytes_of(algorithm, BATCHES)


@pytest.mark.parametrize(
    ("algorithm", "equal"),
    [
        *((facts.quick, facts.alone) for facts in TABLE.values() if facts.alone != facts.quick),
        (GPTQ(scales=Max()), Max()),
    ],
    ids=repr,
)
def test_others_quantize_from_the_weights_alone_and_name_every_linear(algorithm: Any, equal: Any) -> None:
    with pytest.warns(UserWarning, match=f"{type(algorithm).__name__} fits weights to data, and no rank has a batch"):
        result = calibrated(algorithm, None)
    assert models.fingerprints(result.state_dict()) == bytes_of(equal, None)
    assert [*result.starved] == [record.name for record in result.report.records]
    assert len(result.starved) == 6 * small_runs.LAYERS + 1


def test_scales_of_inputs_are_not_made_up() -> None:
    """The model is as it was."""
    model = small_runs.model_of(shard=False)
    before = small_runs.state_of(model)
    with pytest.raises(ValueError, match='inputs="static" takes scales from inputs, and no rank has a batch'):
        calibrate(model, iter(()), recipe=NVFP4BlockScaling(), inputs="static")
    assert small_runs.state_of(model) == before
