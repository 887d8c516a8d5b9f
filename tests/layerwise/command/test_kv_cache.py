"""The key `kv_cache`: scales of caches in what is exported, and refusals before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("yaml")

import torch
from safetensors.torch import load_file

from dcp_adapters import import_hf
from tests.layerwise.command.runs import command, save_model, write_config
from tests.layerwise.command.test_checks import refusal

pytestmark = pytest.mark.usefixtures("alone")
MAX = {"algorithm": "Max"}


@pytest.mark.parametrize(
    ("granularity", "strategy", "shape"), [("tensor", "tensor", (1,)), ("head", "attn_head", (2, 1, 1))]
)
def test_scales_are_exported(tmp_path: Path, granularity: str, strategy: str, shape: tuple[int, ...]) -> None:
    save_model(tmp_path)
    status, told = command(write_config(tmp_path, calibration={"kv_cache": granularity}, **MAX))
    assert status == 0, told
    config = json.loads((tmp_path / "config-out" / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["strategy"] == strategy
    tensors = load_file(tmp_path / "config-out" / "model.safetensors")
    names = [f"model.layers.{layer}.self_attn.{own}_scale" for layer in (0, 1) for own in "kv"]
    assert [name for name in sorted(tensors) if name.endswith(("k_scale", "v_scale"))] == names
    assert {tensors[name].shape for name in names} == {shape}
    found = import_hf(tmp_path / "config-out")
    assert all(torch.equal(found[name].flatten(), tensors[name].flatten()) for name in names)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    (line,) = refusal(tmp_path, calibration={"kv_cache": "head"}, output={"layout": "modelopt"}, **MAX)
    assert line.startswith("output: model.layers.0.self_attn.k_scale, ")
    assert "a scale for each head, and the layout modelopt has one for all heads of an attention" in line
    (line,) = refusal(tmp_path, calibration={"kv_cache": "token"}, **MAX)
    assert line.startswith("calibration.kv_cache: expected one of tensor, head or null, got 'token'")
    (line,) = refusal(tmp_path, calibration={"kv_cache": "head", "inputs": "dynamic"}, data=None, **MAX)
    assert line == "data: missing; kv_cache takes scales from data"
