"""Calibrated scales of a KV cache in the hands of compressed-tensors, transformers and ModelOpt; and back again."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from compressed_tensors.quantization import QuantizationConfig, QuantizationStrategy

from dcp_adapters import export_hf, import_hf
from layerwise import CalibrationResult, KVCache, calibrate
from qtensor import MXFP8BlockScaling
from tests.dcp_adapters.hf.exports import llama, loaded

LAYERS = 2
NAMES = [f"model.layers.{layer}.self_attn.{own}_scale" for layer in range(LAYERS) for own in "kv"]
BATCHES = [torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]


# Its own exporter, in a process of its own, for it warns and patches on import.
MODELOPT = """
import json, sys, torch
from modelopt.torch.export.quant_utils import postprocess_state_dict
amaxes = {name: torch.tensor(value) for name, value in json.load(sys.stdin).items()}
made = postprocess_state_dict(amaxes, 448.0, "FP8")
print(json.dumps({name: value.item() for name, value in made.items()}))
"""


@pytest.fixture(scope="module")
def results() -> dict[str, CalibrationResult]:
    """Granularity -> a calibration."""
    return {
        granularity: calibrate(
            llama(),
            BATCHES,
            recipe=MXFP8BlockScaling(),
            exclude=["lm_head"],
            kv_cache=KVCache(granularity=granularity),
            progress=False,
        )
        for granularity in ("tensor", "head")
    }


def exported(path: Path, result: CalibrationResult, layout: str = "compressed-tensors") -> tuple[dict[str, Any], Any]:
    """config.json's quantization_config, and the tensors."""
    model = llama()
    export_hf(result, path, layout=layout, rest=model, config=model.config, progress=False)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    return config, load_file(path / "model.safetensors")


@pytest.mark.parametrize(("granularity", "strategy"), [("tensor", "tensor"), ("head", "attn_head")])
def test_compressed_tensors(
    results: dict[str, CalibrationResult], tmp_path: Path, granularity: str, strategy: str
) -> None:
    """Its own classes read the scheme and hold the scales, in a cache that quantizes under them."""
    calibrated = results[granularity].state_dict()
    config, tensors = exported(tmp_path / "out", results[granularity])
    scheme = QuantizationConfig.model_validate(config).kv_cache_scheme
    assert scheme is not None
    assert (scheme.strategy, scheme.num_bits, scheme.type, scheme.symmetric, scheme.dynamic) == (
        QuantizationStrategy(strategy), 8, "float", True, False,
    )  # fmt: skip
    shape = (1,) if granularity == "tensor" else (2, 1, 1)
    for name in NAMES:
        assert tensors[name].shape == shape
        assert torch.equal(tensors[name].flatten(), calibrated[name].flatten()), name
    client: Any = loaded(tmp_path / "out", dequantize=False)
    state = client.state_dict()
    for name in NAMES:  # transformers casts scales to the dtype of the model
        assert state[name].shape == shape
        assert torch.equal(state[name].float(), tensors[name].to(state[name].dtype).float()), name
    assert client(BATCHES[0]).logits.isfinite().all()


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_scales_come_back(results: dict[str, CalibrationResult], tmp_path: Path, granularity: str) -> None:
    calibrated = results[granularity].state_dict()
    _, first = exported(tmp_path / "first", results[granularity])
    for model in (None, llama()):
        state = import_hf(tmp_path / "first", model, **({} if model is None else {"on_mismatch": "convert"}))
        found: dict[str, Tensor] = {name: state[name] for name in NAMES}
        for name, value in found.items():
            assert value.dtype == torch.float32
            assert torch.equal(value, calibrated[name]), name
    again = import_hf(tmp_path / "first")
    export_hf(again, tmp_path / "again", config=llama().config, progress=False)
    second = load_file(tmp_path / "again" / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("modelopt") is None, reason="nvidia-modelopt is not installed")
def test_modelopt(results: dict[str, CalibrationResult], tmp_path: Path) -> None:
    """Names and values as its own exporter makes them of the largest magnitudes."""
    calibrated = results["tensor"].state_dict()
    config, tensors = exported(tmp_path / "out", results["tensor"], "modelopt")
    assert config["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    told = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert told["kv_cache_quant_algo"] == "FP8"
    amaxes = {
        name.replace("k_scale", "k_bmm_quantizer._amax").replace("v_scale", "v_bmm_quantizer._amax"): float(
            448 * calibrated[name]
        )
        for name in NAMES
    }
    script = [sys.executable, "-W", "ignore", "-c", MODELOPT]
    done = subprocess.run(script, input=json.dumps(amaxes), capture_output=True, text=True, check=True)
    theirs: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert {name for name in tensors if name.endswith(("k_scale", "v_scale"))} == theirs.keys()
    for name, value in theirs.items():
        assert tensors[name].shape == ()
        # ours is 1 / (448 / amax) and theirs amax / 448: with the product here, four roundings by 2^-24 at most
        assert abs(float(tensors[name]) - value) <= 4 * 2**-24 * value, name


def test_scales_of_heads_are_refused_where_a_layout_has_none(
    results: dict[str, CalibrationResult], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"self_attn\.k_scale.*a scale for each head, and the layout modelopt has one"):
        exported(tmp_path / "out", results["head"], "modelopt")
    state = dict(results["head"].state_dict())
    mixed = {**state, NAMES[2]: torch.tensor(1.0)}
    model = llama()
    with pytest.raises(
        ValueError, match=r"a scale for each head, and model\.layers\.1\.self_attn\.k_scale has the shape"
    ):
        export_hf(mixed, tmp_path / "out", rest=model, config=model.config, progress=False)
    for value in (0.0, float("inf"), float("nan")):
        broken = {**state, NAMES[0]: torch.tensor([1.0, value])}
        with pytest.raises(
            ValueError, match=r"scales of the KV cache .* which engines divide by; calibrate them again"
        ):
            export_hf(broken, tmp_path / "out", rest=model, config=model.config, progress=False)
    assert not (tmp_path / "out").exists()
