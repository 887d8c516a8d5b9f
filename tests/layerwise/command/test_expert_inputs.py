"""The key `expert_inputs`: experts calibrated on all tokens, and refusals before a weight is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("yaml")

from layerwise import Report
from tests.layerwise.command.runs import LENGTH, SAMPLES, command, save_model, write_config
from tests.layerwise.command.test_checks import refusal
from tests.layerwise.models import VOCAB, qwen3_moe

pytestmark = pytest.mark.usefixtures("alone")
MAX = {"algorithm": "Max"}
ALL = {"expert_inputs": "all", "inputs": "dynamic", "checkpoint_dir": None}


def test_every_expert_gets_every_token(tmp_path: Path) -> None:
    qwen3_moe().save_pretrained(tmp_path / "model")
    ids = np.arange(SAMPLES * LENGTH, dtype=np.int64).reshape(SAMPLES, LENGTH) % VOCAB
    np.save(tmp_path / "ids.npy", ids)
    config = write_config(
        tmp_path,
        calibration=ALL,
        output={"path": None, "checkpoint": str(tmp_path / "quantized")},
        **MAX,
    )
    status, told = command(config)
    assert status == 0, told
    records = Report.load(tmp_path / "config.json").records
    experts = [record for record in records if ".experts." in record.name]
    assert len(experts) == 2 * 4 * 2
    assert {record.tokens for record in experts} == {SAMPLES * LENGTH}


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    (line,) = refusal(tmp_path, calibration=ALL, **MAX)
    assert line.startswith('calibration: expert_inputs="all": the model has no experts to quantize; expected a list of')
    (line,) = refusal(tmp_path, calibration={"expert_inputs": "every"}, **MAX)
    assert line.startswith("calibration.expert_inputs: expected one of routed, all, got 'every'")
    (line,) = refusal(tmp_path, calibration=ALL, data=None, **MAX)
    assert line == "data: missing; expert_inputs: all sends the tokens of data to all experts"
