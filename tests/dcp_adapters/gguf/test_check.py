"""`check` on GGUF files: those that export_gguf writes, and one of gguf's own writer in types of llama.cpp's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers")

import gguf
import numpy as np
import torch

from dcp_adapters import export_gguf
from dcp_adapters.cli.main import main
from qtensor import MXFP4BlockScaling, NVFP4BlockScaling, quantize_
from tests.dcp_adapters.gguf import files
from tests.dcp_adapters.hf.exports import llama

RECIPES: dict[str, Any] = {"MXFP4": MXFP4BlockScaling(), "NVFP4": NVFP4BlockScaling()}
BITS = {"MXFP4": 4.25, "NVFP4": 4.5, "Q8_0": 8.5, "Q4_0": 4.5, "Q1_0": 1.125}


def check(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()  # what transformers says while it writes a model
    status = main(["check", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    return status, json.loads(out)


def exported(path: Path, kind: str) -> Path:
    """A model's file in this type, and the directory of the model beside it."""
    model = llama()
    model.save_pretrained(path / "dense")
    quantize_(model, RECIPES[kind], exclude=("lm_head",))
    return export_gguf(model, path / "model.gguf", like=files.like(path / "like.gguf", model), progress=False)


def written(path: Path, types: dict[str, gguf.GGMLQuantizationType], weights: dict[str, np.ndarray]) -> Path:
    """A file of gguf's own writer and quantizers, of an architecture that is not known here."""
    writer = gguf.GGUFWriter(path, "gpt2")
    for name, weight in weights.items():
        kind = types.get(name, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    names = ("blk.0.ffn_up.weight", "blk.0.ffn_down.weight", "blk.0.attn_norm.weight")
    return {name: random.standard_normal((8, 256), dtype=np.float32) for name in names}


@pytest.mark.parametrize("kind", RECIPES)
def test_an_export_is_close_to_the_directory_it_comes_from(kind: str, tmp_path: Path, capsys: Any) -> None:
    path = exported(tmp_path, kind)
    status, found = check(capsys, path, "--against", tmp_path / "dense")
    assert (status, found["findings"], found["layout"]) == (0, [], "gguf")
    assert len(found["weights"]) == 14  # seven linears in each of two layers: no dense tensor, no global scale
    for each in found["weights"]:
        assert (each["kind"], each["bits"]) == (kind, BITS[kind])
        assert 0.05 < each["error"]["relative"] < 0.15  # rows in another order would be at 1.4, a missing scale beyond


def test_the_error_is_that_of_the_values(tmp_path: Path, capsys: Any) -> None:
    path = exported(tmp_path, "NVFP4")
    model = llama()
    _, found = check(capsys, path, "--against", tmp_path / "dense", "--match", "blk.0.attn_q.weight")
    (each,) = found["weights"]
    dense = model.model.layers[0].self_attn.q_proj.weight.detach()
    quantize_(model, RECIPES["NVFP4"], exclude=("lm_head",))
    decoded = model.model.layers[0].self_attn.q_proj.weight.dequantize(torch.float32)
    distance = (decoded.double() - dense.double()).norm() / dense.double().norm()
    assert each["error"]["relative"] == pytest.approx(float(distance.detach()), rel=1e-6)
    assert each["shape"] == [64, 64]


def test_a_file_of_another_tool_against_a_file(tmp_path: Path, capsys: Any) -> None:
    kinds = gguf.GGMLQuantizationType
    types = {"blk.0.ffn_up.weight": kinds.Q8_0, "blk.0.ffn_down.weight": kinds.Q4_0}
    path = written(tmp_path / "q.gguf", types, weights())
    dense = written(tmp_path / "bf16.gguf", dict.fromkeys(weights(), kinds.BF16), weights())
    status, found = check(capsys, path, "--against", dense)
    assert (status, found["findings"]) == (0, [])
    told = {each["name"]: each for each in found["weights"]}
    assert {name: each["kind"] for name, each in told.items()} == {name: kind.name for name, kind in types.items()}
    assert all(each["bits"] == BITS[each["kind"]] for each in told.values())
    assert 0 < told["blk.0.ffn_up.weight"]["error"]["relative"] < 0.02
    assert 0.05 < told["blk.0.ffn_down.weight"]["error"]["relative"] < 0.15


def test_values_of_another_tensor_are_an_error(tmp_path: Path, capsys: Any) -> None:
    types = dict.fromkeys(weights(), gguf.GGMLQuantizationType.Q8_0)
    names, arrays = [*weights()], [*weights().values()]
    path = written(tmp_path / "q.gguf", types, weights())
    other = dict(zip(names, [arrays[1], arrays[0][:4]], strict=False))
    status, found = check(capsys, path, "--against", written(tmp_path / "f32.gguf", {}, other))
    assert status == 1
    told = {one["name"]: one["message"] for one in found["findings"]}
    assert "far from the dense ones" in told[names[0]]
    assert told[names[1]] == f"{tmp_path / 'f32.gguf'} has [4, 256] of this name, expected [8, 256]"
    assert told[names[2]] == f"{tmp_path / 'f32.gguf'} has no tensor of this name"


def test_what_is_not_finite_is_an_error(tmp_path: Path, capsys: Any) -> None:
    held = weights()
    path = written(tmp_path / "q.gguf", dict.fromkeys(held, gguf.GGMLQuantizationType.Q8_0), held)
    raw = bytearray(path.read_bytes())
    at = gguf.GGUFReader(path).tensors[0].data_offset
    raw[at : at + 2] = b"\x00\x7e"  # the scale of the first block: NaN
    path.write_bytes(raw)
    status, found = check(capsys, path)
    assert status == 1
    (one,) = found["findings"]
    assert one["message"] == "32 values are not finite"


def test_a_type_that_is_not_decoded_is_listed_with_a_warning(tmp_path: Path, capsys: Any) -> None:
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((8, 36), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q1_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    status, found = check(capsys, tmp_path / "q.gguf")
    (each,), (one,) = found["weights"], found["findings"]
    assert (status, each["kind"], each["bits"], each["error"]) == (0, "Q1_0", BITS["Q1_0"], None)
    message = "the package gguf does not decode Q1_0: its values were not looked at"
    assert (one["severity"], one["name"], one["message"]) == ("warning", "blk.0.ffn_up.weight", message)


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: Any) -> None:
    path = written(tmp_path / "q.gguf", dict.fromkeys(weights(), gguf.GGMLQuantizationType.Q8_0), weights())
    llama().save_pretrained(tmp_path / "dense")
    (tmp_path / "text").write_text("no file of weights")
    for against, told in (
        ("dense", "is of the architecture 'gpt2', and the names of a directory are known for llama alone"),
        ("nothing", "no such file or directory; --against takes the dense original"),
        ("text", "expected a GGUF file or a Hugging Face directory beside a GGUF file"),
    ):
        assert main(["check", str(path), "--against", str(tmp_path / against)]) == 2
        assert told in capsys.readouterr().err


def test_a_dense_file_has_nothing_to_check(tmp_path: Path, capsys: Any) -> None:
    status, found = check(capsys, written(tmp_path / "f32.gguf", {}, weights()))
    assert (status, [one["severity"] for one in found["findings"]], found["weights"]) == (0, ["warning"], [])


def test_the_table_names_types_and_bits(tmp_path: Path, capsys: Any) -> None:
    path = written(tmp_path / "q.gguf", {"blk.0.ffn_up.weight": gguf.GGMLQuantizationType.Q4_0}, weights())
    assert main(["check", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].split() == ["blk.0.ffn_up.weight", "Q4_0", "[8,", "256]", "4.50", "-"]
    assert "no errors (1 quantized tensors" in out
    assert "Q4_0, layout gguf)" in out
