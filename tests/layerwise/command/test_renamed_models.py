"""Models whose tensors have other names in files than in memory, in one command: read, calibrated and exported."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("yaml")

from safetensors.torch import load_file

from dcp_adapters.hf.reading.verify_directory import verify_directory
from tests.dcp_adapters.hf.renamed_models import built
from tests.layerwise.command.runs import command, save_model, write_config

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("weights_on", ["device", "disk"])
@pytest.mark.parametrize(
    ("name", "exclude", "quantized"),
    [
        (
            "LlavaForConditionalGeneration",  # of images and text; the class that its config names
            ["lm_head", "*vision_tower*", "*projector*"],
            "language_model.model.layers.1.mlp.down_proj.weight_scale",
        ),
        ("MixtralForCausalLM", ["lm_head"], "model.layers.1.block_sparse_moe.experts.3.w2.weight_scale"),
    ],
)
def test_from_one_directory_into_another(
    tmp_path: Path, name: str, exclude: list[str], quantized: str, weights_on: str
) -> None:
    save_model(tmp_path)
    for file in (tmp_path / "model").iterdir():
        file.unlink()
    built(name).save_pretrained(tmp_path / "model")
    config = write_config(
        tmp_path,
        model={"weights_on": weights_on},
        recipe="mxfp8",
        algorithm="Max",
        calibration={"exclude": exclude, "inputs": "dynamic", "checkpoint_dir": None},
    )
    status, told = command(config)
    assert status == 0, told
    assert verify_directory(tmp_path / "config-out").findings == ()
    held = load_file(tmp_path / "config-out" / "model.safetensors")
    assert quantized in held
    dense = load_file(tmp_path / "model" / "model.safetensors")
    assert {own.removesuffix("_scale") for own in held} == set(dense)
