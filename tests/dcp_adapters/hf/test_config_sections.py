"""A quantization_config in a section of config.json is read as one at the top; no export leaves an old one behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dcp_adapters import WeightStream, digest, export_hf, import_hf, write_delta
from dcp_adapters.cli.diff import diff
from dcp_adapters.hf.reading.stored_directory import StoredDirectory
from dcp_adapters.hf.reading.verify_directory import verify_directory
from layerwise import calibrate
from qtensor import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, QuantizedTensor, quantize, quantize_
from tests.dcp_adapters.cases import values

Told = dict[str, Any]
KEY = "quantization_config"
PLACES: dict[str, Callable[[Told], Told]] = {
    "text_config": lambda said: {"model_type": "mine", "text_config": {"model_type": "text", KEY: said}},
    "decoder": lambda said: {"model_type": "mine", "encoder": {"hidden_size": 1}, "decoder": {KEY: said}},
    "a text model in a model": lambda said: {"thinker_config": {"text_config": {KEY: said}, "audio_config": {}}},
    "null at the top": lambda said: {KEY: None, "text_config": {KEY: said}},
    "an old name": lambda said: {"model_type": "mine", "compression_config": said},
    "an old name in a section": lambda said: {"text_config": {"compression_config": said}, "vision_config": {}},
    "others in the section": lambda said: {KEY: said, "text_config": {KEY: {"quant_method": "gptq"}}},
    "others of the vision model": lambda said: {
        "vision_config": {KEY: {"quant_method": "awq"}},
        "text_config": {KEY: said},
    },
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).bfloat16()


def moved(directory: Path, place: str) -> Path:
    """A copy that says the same of its quantization in another place."""
    other = directory.parent / f"{directory.name} {place}"
    shutil.copytree(directory, other)
    said = json.loads((directory / "config.json").read_text())[KEY]
    (other / "config.json").write_text(json.dumps(PLACES[place](said)))
    return other


def assert_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert type(value) is type(two[name])
        held, expected = (
            each.parts() if isinstance(each, QuantizedTensor) else {"": each} for each in (value, two[name])
        )
        assert all(torch.equal(held[part], expected[part]) for part in expected), name


@pytest.mark.parametrize("place", PLACES)
def test_a_directory_is_recognised_wherever_it_says_so(place: str, tmp_path: Path) -> None:
    quantized = model()
    quantize_(quantized, MXFP8BlockScaling())
    top = export_hf(quantized, tmp_path / "top", config={"model_type": "mine"}, progress=False)
    other = moved(top, place)
    assert_same(import_hf(other), import_hf(top))
    again = model()
    quantize_(again, MXFP8BlockScaling())
    assert_same(import_hf(other, again, progress=False), quantized.state_dict())
    assert StoredDirectory(other).layout == "compressed-tensors"
    assert [found.severity for found in verify_directory(other).findings] == []
    assert digest(other) == digest(top)
    assert not diff(StoredDirectory(other), StoredDirectory(top)).differences
    assert write_delta(top, other, tmp_path / "delta").delta.changed == 0
    with torch.device("meta"):
        on_meta = model()
    recipe = Float8CurrentScaling()
    found = calibrate(on_meta, [values((8, 64), 0)], recipe=recipe, layers=(), weights=other, progress=False)
    dense = model()
    import_hf(top, dense, on_mismatch="convert", progress=False)
    expected = calibrate(dense, [values((8, 64), 0)], recipe=recipe, layers=(), progress=False)
    assert_same(found.state_dict(), expected.state_dict())
    with pytest.raises(ValueError, match="holds quantized weights; rest= takes a directory of dense ones"):
        export_hf(found, tmp_path / "out", rest=other, progress=False)


def test_no_old_one_is_left_in_an_export(tmp_path: Path) -> None:
    home, old = tmp_path / "home", {"quant_method": "gptq", "bits": 4}
    home.mkdir()
    sections = {"hidden_size": 8, KEY: old, "compression_config": old, "inner_config": {KEY: old, "a": 1}}
    names = ("text_config", "vision_config", "audio_config", "decoder")
    config = {"model_type": "mine", KEY: old, "compression_config": old, **dict.fromkeys(names, sections)}
    (home / "config.json").write_text(json.dumps(config))
    for name in ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "recipe.yaml"):
        (home / name).write_text("{}")
    (home / "tokenizer.json").write_text("{}")

    class Config:
        def to_dict(self) -> Told:
            return config

    quantized = model()
    quantize_(quantized, MXFP8BlockScaling())
    for number, given in enumerate((home, home / "config.json", config, Config())):
        out = export_hf(quantized, tmp_path / f"out-{number}", config=given, progress=False)
        told = json.loads((out / "config.json").read_text())
        assert told.pop(KEY)["quant_method"] == "compressed-tensors"
        expected = {"hidden_size": 8, "inner_config": {"a": 1}}
        assert told == {"model_type": "mine", **dict.fromkeys(names, expected), "dtype": "bfloat16"}
        assert {path.name for path in out.iterdir()} - {"tokenizer.json"} == {"config.json", "model.safetensors"}
        streamed = WeightStream(quantized, config=given).json["config.json"]
        assert streamed == json.loads((out / "config.json").read_text())


def test_transformers_reads_the_same(tmp_path: Path) -> None:
    """Llava, whose files it renames as it loads; its own order where both places say something."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    text = transformers.LlamaConfig(**sizes, vocab_size=96)
    torch.manual_seed(0)
    llava = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=5)
    )
    llava.bfloat16().save_pretrained(tmp_path / "dense")
    dense = import_hf(tmp_path / "dense")
    by_recipe: dict[str, Any] = {"compressed-tensors": Float8CurrentScaling(), "fp8": Float8BlockScaling()}
    states = {
        layout: {
            name: quantize(value, recipe) if value.ndim == 2 and "embed" not in name else value
            for name, value in dense.items()
        }
        for layout, recipe in by_recipe.items()
    }
    told = {}
    for layout, state in states.items():
        out = export_hf(state, tmp_path / layout, layout=layout, config=tmp_path / "dense", progress=False)
        told[layout] = json.loads((out / "config.json").read_text())
    ours, stale = (told[layout][KEY] for layout in ("compressed-tensors", "fp8"))
    rest = {key: value for key, value in told["compressed-tensors"].items() if key != KEY}
    dequantized = transformers.CompressedTensorsConfig(dequantize=True)
    own = {"lm_head.weight": "language_model.lm_head.weight"}
    own |= {
        f"model.language_model.{name}": f"language_model.model.{name}"
        for name in ("layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight")
    }
    for number, config in enumerate(
        (
            {**rest, "text_config": {**rest["text_config"], KEY: ours}},
            {**rest, KEY: ours, "text_config": {**rest["text_config"], KEY: stale}},
        )
    ):
        out = shutil.copytree(tmp_path / "compressed-tensors", tmp_path / f"said {number}")
        (out / "config.json").write_text(json.dumps(config))
        with pytest.warns(UserWarning, match="already has a `quantization_config` attribute"):
            loaded = transformers.LlavaForConditionalGeneration.from_pretrained(out, quantization_config=dequantized)
        found: dict[str, Any] = import_hf(out)
        assert_same(found, states["compressed-tensors"])
        for name, in_files in own.items():
            assert torch.equal(loaded.state_dict()[name], found[in_files].dequantize()), name
