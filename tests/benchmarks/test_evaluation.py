"""The evaluation of calibration quality, on a model of two tiny layers."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qtensor as qt
from benchmarks import dense_models, evaluation
from benchmarks.evaluation_contenders import FORMATS, OURS, Contender, calibrated, quantizing_inputs, table

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
FEW = 2  # rows


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """`bytes`, tiny, after two steps."""
    return dense_models.trained_bytes(tmp_path_factory.mktemp("bytes") / "bytes.safetensors", steps=2, **SMALL)


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return dense_models.token_rows("bytes", "heldout")[:FEW]


def test_a_trained_model_is_read_back_and_dense(tmp_path: Path, dense: nn.Module) -> None:
    path = tmp_path / "bytes.safetensors"
    first = dense_models.trained_bytes(path, steps=1, **SMALL)
    stamp = path.stat().st_mtime_ns
    again = dense_models.trained_bytes(path, steps=1, **SMALL)
    assert path.stat().st_mtime_ns == stamp
    assert dense_models.digest(first) == dense_models.digest(again) != dense_models.digest(dense)
    assert dense_models.fewest_values(dense)["mean"] > 31.9
    on_a_grid = copy.deepcopy(dense)
    for name in dense_models.linear_names(on_a_grid):
        weight = on_a_grid.get_parameter(f"{name}.weight")
        weight.data = qt.quantize(weight.data, qt.Int4GroupScaling(group=32)).dequantize()
    assert dense_models.fewest_values(on_a_grid)["share_with_16_or_fewer"] == 1


def test_a_rotated_model_is_the_same_function_of_other_weights(dense: nn.Module, rows: torch.Tensor) -> None:
    plain = copy.deepcopy(dense).double()
    with torch.no_grad():
        for name, gain in plain.named_parameters():
            if "norm" in name:
                gain.uniform_(0.5, 2)
    turned = dense_models.rotated(copy.deepcopy(plain), seed=0)
    with torch.no_grad():
        # products are fp64, but five norms compute in fp32: some roundings of 6e-8 of logits below 4
        assert torch.allclose(plain(input_ids=rows).logits, turned(input_ids=rows).logits, rtol=0, atol=1e-5)
    for name in dense_models.linear_names(plain):
        assert not torch.allclose(plain.get_parameter(f"{name}.weight"), turned.get_parameter(f"{name}.weight"))


@pytest.mark.parametrize("name", ["bytes", "smollm2"])
def test_splits_share_no_text(name: Any) -> None:
    held_out = dense_models.text(name, "heldout")
    assert len(held_out) > 60_000
    assert held_out[:2000] not in dense_models.text(name, "train")


def test_inputs_are_rounded_as_a_quantized_linear_rounds_them() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 32))
    x = torch.randn(2, 3, 64)
    for name, recipe in FORMATS.items():
        if recipe.activations is None:
            continue
        quantized = copy.deepcopy(plain)
        qt.quantize_(quantized, recipe)
        wanted = quantized(x)
        emulated = copy.deepcopy(plain)
        emulated[0].weight.data = qt.quantize(plain[0].weight.data, recipe).dequantize()
        (hook,) = quantizing_inputs(emulated, ["0"], recipe)
        assert torch.equal(emulated(x), wanted), name
        hook.remove()
        assert not torch.equal(emulated(x), wanted), name


def test_the_table_holds_each_contender_once() -> None:
    names = [each.name for each in table((1, 2, 3))]
    assert len(names) == len(set(names))
    assert {"NVFP4 | GPTQ | 1", "INT4 g32 | AWQ | 2", "Float8 row | Mse | 2"} <= set(names)
    assert Contender("NVFP4", "llm-compressor: GPTQ", 2).library == "llm-compressor"
    assert all(Contender("NVFP4", name, 2).library is None for name in OURS)


def test_rows_are_kept_and_only_missing_ones_computed(tmp_path: Path, dense: nn.Module, rows: torch.Tensor) -> None:
    path = tmp_path / "found.json"
    contenders = [Contender("NVFP4", name, 512) for name in ("Max", "GPTQ")]
    said: list[str] = []
    common: dict[str, Any] = {
        "name": "tiny",
        "dense": dense,
        "calibration": dense_models.token_rows("bytes", "train"),
        "held_out": rows,
        "say": said.append,
    }
    before = dense_models.digest(dense)
    evaluation.evaluate(path, contenders=contenders[:1], **common)
    peer = Contender("NVFP4", "llm-compressor: GPTQ", 512)
    results = evaluation.evaluate(path, contenders=[*contenders, peer], **common)
    assert len(said) == 3  # Max once
    assert dense_models.digest(dense) == before
    assert list(json.loads(path.read_text())["rows"]) == [*(each.name for each in contenders), peer.name]
    row = results["rows"]["NVFP4 | GPTQ | 512"]
    assert len(row["A16"]["kl"]) == len(row["dynamic"]["loss"]) == FEW
    assert all(0 < a < b for a, b in zip(row["A16"]["kl"], row["dynamic"]["kl"], strict=True))
    assert max(results["dense"]["kl"]) == 0
    assert results["rows"][peer.name]["not_run"].endswith("name its Python by --peers-python")

    table_of = evaluation.markdown(results)
    assert "| NVFP4 | 512 | Max |" in table_of
    assert "| NVFP4 | 512 | llm-compressor: GPTQ | not run: llm-compressor needs" in table_of
    evaluation.draw(results, tmp_path / "found.png")
    assert (tmp_path / "found.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="give another --out"):
        evaluation.evaluate(path, contenders=[], **{**common, "held_out": rows[:1]})


def test_differences_are_taken_row_by_row() -> None:
    rows = {
        "NVFP4 | Max | 1": {"A16": {"kl": [3.0, 5.0]}},
        "NVFP4 | GPTQ | 1": {"A16": {"kl": [1.0, 3.0]}},
    }
    assert evaluation.against_reference(rows, "NVFP4 | Max | 1", "A16") == (2.0, 0.0)
    assert evaluation.against_reference(rows, "NVFP4 | GPTQ | 1", "A16") is None
    assert evaluation.against_reference(rows, "NVFP4 | Max | 1", "dynamic") is None
    assert evaluation.mean_and_error([1.0, 3.0]) == (2.0, 1.0)
    assert math.isnan(evaluation.mean_and_error([1.0])[1])


def test_more_tokens_than_the_text_has_are_refused(dense: nn.Module, rows: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="has 512 tokens, fewer than 513"):
        calibrated(Contender("NVFP4", "Max", 513), dense, rows, None)
