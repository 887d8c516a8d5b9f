"""Weights in files that are quantized: calibrated on as the values that they stand for, or refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from dcp_adapters import export_hf, import_hf
from layerwise import GPTQ, calibrate
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize_
from tests.layerwise.families import assert_same
from tests.layerwise.test_offloaded import DIM, Net, assert_on_meta, batches, on_meta, tensors_of
from tests.layerwise.test_offloaded import write as write_dense
from tests.ranks import run_ranks

ROWS = Float8CurrentScaling(granularity="row")
EXPORTS: dict[str, tuple[str, Any, bool]] = {
    "FP8 rows": ("compressed-tensors", ROWS, False),
    "FP8": ("modelopt", Float8CurrentScaling(granularity="tensor"), True),
    "MXFP8": ("compressed-tensors", MXFP8BlockScaling(), False),
    "MXFP8 of modelopt": ("modelopt", MXFP8BlockScaling(), False),
    "NVFP4": ("compressed-tensors", NVFP4BlockScaling(), False),
    "NVFP4 of modelopt": ("modelopt", NVFP4BlockScaling(), True),
}


def exported(path: Path, kind: str) -> tuple[Path, Net]:
    """A directory, and the model in memory whose weights are the values that it stands for."""
    layout, recipe, static = EXPORTS[kind]
    model = Net()
    quantize_(model, recipe, exclude=["head"])
    state = model.state_dict()
    weights = [name for name in state if "layers" in name and name.endswith((".up.weight", ".down.weight"))]
    scales = [name.replace(".weight", ".input_scale") for name in (*weights, "last.weight")] if static else []
    export_hf({**state, **dict.fromkeys(scales, torch.tensor(0.5))}, path, layout=layout, config={"model_type": "mine"})
    dense = Net()
    import_hf(path, dense, on_mismatch="convert", progress=False)
    assert not torch.equal(dense.last.weight, Net().last.weight)
    return path, dense


def run(model: Any, data: Any = None, **options: Any) -> Any:
    data = batches() if data is None else data
    return calibrate(model, data, **{"recipe": NVFP4BlockScaling(), "progress": False, **options})


@pytest.mark.parametrize("kind", EXPORTS)
def test_quantized_files_are_calibrated_on_as_their_values(kind: str, tmp_path: Path) -> None:
    path, dense = exported(tmp_path / "quantized", kind)
    model = on_meta()
    found = run(model, weights=path, algorithm=GPTQ(), checkpoint_dir=tmp_path / "run").state_dict()
    again = run(dense, algorithm=GPTQ(), checkpoint_dir=tmp_path / "run")
    assert len(again.report.resumed) == 4, "the same weights as those in memory"
    assert_same(found, again.state_dict(), kind)
    assert_same(found, run(exported(tmp_path / "other", kind)[1], algorithm=GPTQ()).state_dict(), kind)
    assert_on_meta(model)


def _on_ranks(path: Path) -> None:
    data = batches()[dist.get_rank() :: 2]
    found = run(on_meta(), data, weights=path, algorithm=GPTQ()).state_dict()
    dense = Net()
    import_hf(path, dense, on_mismatch="convert", progress=False)
    assert_same(found, run(dense, data, algorithm=GPTQ()).state_dict(), "on ranks")
    assert_same(found, torch.load(path.parent / "alone.pt", weights_only=False), "as one process")


def test_ranks_read_quantized_files_as_one_process_does(shared_tmp_path: Path) -> None:
    path, dense = exported(shared_tmp_path / "quantized", "NVFP4 of modelopt")
    torch.save(run(dense, algorithm=GPTQ()).state_dict(), shared_tmp_path / "alone.pt")
    run_ranks(2, _on_ranks, path)


def _codes(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).remainder(100).reshape(shape).to(dtype)


F8 = torch.float8_e4m3fn
UP = (64, DIM)
METHOD = {"quant_method": "fbgemm_fp8"}
# Of layers.1.up what stands there instead of its weight; config.json's quantization_config; what the refusal says.
UNKNOWN: dict[str, tuple[dict[str, Tensor], Any, str]] = {
    "float8 alone": ({"weight": _codes(UP, F8)}, None, "layers.1.up: weight F8_E4M3 [64, 32]: it is quantized, and"),
    "float8 with a scale": (
        {"weight": _codes(UP, F8), "weight_scale": torch.ones(64, 1)},
        None,
        "layers.1.up: weight F8_E4M3 [64, 32], weight_scale F32 [64, 1]: it is quantized, and no quantization_config",
    ),
    "float8 with an inverse": (
        {"weight": _codes(UP, F8), "weight_scale_inv": torch.ones(1, 1)},
        None,
        "layers.1.up: weight F8_E4M3 [64, 32], weight_scale_inv F32 [1, 1]: it is quantized",
    ),
    "float8 by an unknown method": (
        {"weight": _codes(UP, F8), "weight_scale_inv": torch.ones(1, 1)},
        METHOD,
        "its quant_method is 'fbgemm_fp8', which the library does not read; it reads compressed-tensors, ",
    ),
    "float8 of a norm": ({"weight": torch.ones(UP), "bias": _codes((64,), F8)}, None, "layers.1.up: bias F8_E4M3 [64]"),
    "int8": ({"weight": _codes(UP, torch.int8), "SCB": torch.ones(64)}, None, "layers.1.up: weight I8 [64, 32]"),
    "packed into int32": (
        {"qweight": _codes((4, 64), torch.int32), "scales": torch.ones(1, 64)},
        None,
        "layers.1.up: qweight I32 [4, 64]",
    ),
    "packed by compressed-tensors": (
        {"weight_packed": _codes((64, 4), torch.int32), "weight_scale": torch.ones(64, 1)},
        None,
        "layers.1.up: weight_packed I32 [64, 4], weight_scale",
    ),
    "blocks and scales": (
        {"weight_blocks": _codes((64, 1, 16), torch.uint8), "weight_scales": _codes((64, 1), torch.uint8)},
        None,
        "layers.1.up: weight_blocks U8 [64, 1, 16], weight_scales U8 [64, 1]: it is quantized",
    ),
    "values beside scales": (
        {"weight": torch.ones(UP), "weight_scale": torch.ones(64, 1)},
        None,
        "weight F32 [64, 32]",
    ),
}


@pytest.mark.parametrize("kind", UNKNOWN)
@pytest.mark.parametrize("one_file", [False, True])
def test_codes_that_are_not_known_are_refused(kind: str, one_file: bool, tmp_path: Path) -> None:
    tensors, config, message = UNKNOWN[kind]
    state = {name: value for name, value in tensors_of(Net()).items() if name != "layers.1.up.weight"}
    state |= {f"layers.1.up.{name}": value for name, value in tensors.items()}
    path = write_dense(state, tmp_path / "weights", "file" if one_file else "two files")
    if config is not None:
        (tmp_path / "weights" / "config.json").write_text(json.dumps({"quantization_config": config}))
    model = on_meta()
    with pytest.raises(ValueError, match=re.escape(message)):
        run(model, weights=path)
    assert_on_meta(model)


def test_json_that_contradicts_the_tensors_is_refused(tmp_path: Path) -> None:
    path, _ = exported(tmp_path / "quantized", "FP8")
    (path / "config.json").unlink()
    said = json.loads((path / "hf_quant_config.json").read_text())
    said["quantization"]["quant_algo"] = "NVFP4"
    (path / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"hf_quant_config\.json says quant_algo 'NVFP4', expected 'FP8'"):
        run(on_meta(), weights=path)


def test_what_the_model_has_not_may_be_codes(tmp_path: Path) -> None:
    extra = {"visual.up.weight": _codes(UP, F8), "layers.9.up.qweight": _codes((4, 64), torch.int32)}
    path = write_dense(tensors_of(Net()) | extra, tmp_path / "weights", "file")
    assert_same(run(on_meta(), weights=path).state_dict(), run(Net()).state_dict())


def test_files_that_contradict_the_model_or_each_other_are_refused(tmp_path: Path) -> None:
    head = {"head.weight": torch.zeros(48, DIM)}
    tied = write_dense(tensors_of(Net()) | head, tmp_path / "tied", "file")
    message = f"calibrate: the model ties head.weight to embed.weight, and {tied} has other values for it; untie them"
    with pytest.raises(ValueError, match=re.escape(message)):
        run(on_meta(), weights=tied)
    both = write_dense(tensors_of(Net()), tmp_path / "both", "two files")
    first, second = sorted(both.glob("*.safetensors"))
    save_file({**load_file(first), **load_file(second)}, second)
    message = f"it is in {first.name} and in {second.name}, and no model.safetensors.index.json says which is meant"
    with pytest.raises(ValueError, match=re.escape(message)):
        run(on_meta(), weights=both)
