"""Models that store weights transposed, in one command: experts of gpt-oss are exported, Conv1D is refused first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("yaml")

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from layerwise import calibrate
from qtensor import MXFP4BlockScaling
from tests.layerwise.command.runs import command, save_model, write_config
from tests.layerwise.families import family

pytestmark = pytest.mark.usefixtures("alone")


def saved(directory: Path, name: str) -> None:
    """A model of a family in the place of the Llama."""
    save_model(directory)
    for file in (directory / "model").iterdir():
        file.unlink()
    family(name).to(torch.bfloat16).save_pretrained(directory / "model")


def test_experts_of_gpt_oss_are_exported(tmp_path: Path) -> None:
    saved(tmp_path, "gpt-oss")
    config = write_config(
        tmp_path,
        recipe="mxfp4",
        data=None,
        algorithm="Max",
        calibration={"include": ["*.experts"], "exclude": [], "inputs": "dynamic"},
        output={"layout": "mxfp4"},
    )
    status, told = command(config)
    assert status == 0, told
    options: dict[str, Any] = {"dtype": torch.bfloat16, "local_files_only": True}
    found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "config-out", quantization_config=Mxfp4Config(dequantize=True), **options
    )
    expected = family("gpt-oss").to(torch.bfloat16)
    calibrate(expected, None, recipe=MXFP4BlockScaling(), include=["*.experts"], progress=False)
    for key, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[key], value), key


def test_a_conv1d_is_refused_before_anything_runs(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    config = write_config(tmp_path, data=None, algorithm="Max", calibration={"inputs": "dynamic"})
    status, told = command(config, "--check")
    assert status == 2
    assert "h.0.attn.c_attn.weight: quantized [N, K], and files of gpt2 have weights of Conv1D as [K, N]" in told
