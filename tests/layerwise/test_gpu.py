"""Calibration on a GPU: what looks at weights alone gives the bytes of the CPU, the rest does not do worse."""

from __future__ import annotations

from typing import Any

import pytest

from layerwise import GPTQ, CalibrationResult, Max, calibrate
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from tests.devices import every_device
from tests.layerwise import models, small_runs

RECIPES = [Float8CurrentScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()]


def calibrated(device: str, recipe: Any, algorithm: Any) -> CalibrationResult:
    model = small_runs.model_of(shard=False).to(device)
    data = [batch.to(device) for batch in small_runs.batches()]
    return calibrate(model, data, recipe=recipe, algorithm=algorithm, progress=False)


def bytes_of(result: CalibrationResult) -> dict[str, str]:
    return models.fingerprints({name: value.cpu() for name, value in result.state_dict().items()})


@every_device
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_max_gives_the_bytes_of_the_cpu(recipe: Any, device: str) -> None:
    result = calibrated(device, recipe, Max())
    assert {value.device.type for value in result.state_dict().values()} == {device}
    assert bytes_of(result) == bytes_of(calibrated("cpu", recipe, Max()))
    assert bytes_of(result) != bytes_of(calibrated(device, recipe, GPTQ()))


@every_device
def test_gptq_lowers_the_error_of_outputs(device: str) -> None:
    """Sums of products differ between devices in their last bits, and with them codes; what GPTQ is for does not."""
    decibels = []
    for algorithm in (GPTQ(), Max()):
        records = calibrated(device, NVFP4BlockScaling(), algorithm).report.records
        decibels.append(sum(record.snr_db for record in records if record.snr_db is not None))
    assert decibels[0] > decibels[1] > 0
