"""What a directory is taken for: every scheme of every layout, and what is refused, with its text."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import struct
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from dcp_adapters import export_hf, import_hf, read_manifest
from dcp_adapters.hf.files.directory import FileTensor
from dcp_adapters.hf.layouts.compressed_tensors import COMPRESSED_TENSORS
from dcp_adapters.hf.layouts.forms import BLOCKS, ONE_OVER, WORDS, Form
from dcp_adapters.hf.layouts.layout import KINDS, Scheme
from dcp_adapters.hf.layouts.registry import LAYOUTS
from dcp_adapters.hf.reading.delayed import history_of
from dcp_adapters.hf.reading.placed import Slice
from dcp_adapters.hf.reading.reader import HuggingFaceReader
from dcp_adapters.records.entry import Entry
from qtensor import Float8CurrentScaling, Float8DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize
from qtensor.tensor import contents
from tests.dcp_adapters.cases import assert_holds, bits, values
from tests.dcp_adapters.hf.directories import (
    dense_tensors,
    linear_names,
    quantized_directory,
    stored_as,
    write,
)

SCHEMES = [  # of linears of 64 columns
    (layout.name, scheme)
    for layout in LAYOUTS.values()
    for scheme in layout.schemes
    if layout.experts == "each" and scheme.kind != "int4_128"
]
LAYER = "model.layers.0.self_attn.q_proj"
GROUP = {"targets": ["Linear"], "input_activations": None, "output_activations": None}
FP8_ROW = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}


def ct(weights: dict[str, Any], inputs: Any = None, **more: Any) -> dict[str, Any]:
    group = {**GROUP, "weights": weights, "input_activations": inputs}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}}


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm, **more}}


def fp8(rows: int = 32, columns: int = 64) -> Tensor:
    return values((rows, columns), 3).to(torch.float8_e4m3fn)


def codes(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 100).to(dtype).reshape(shape)


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:  # every message says which directory
        import_hf(path)
    return str(caught.value)


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_load_that_names_another_directory_reads_its_files(tmp_path: Path) -> None:
    for name, value in (("one", 1.0), ("two", 2.0)):
        (tmp_path / name).mkdir()
        save_file({"a": torch.full((4,), value)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text("{}")
    reader, state = HuggingFaceReader(tmp_path / "one"), {"a": torch.zeros(4)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert state["a"].tolist() == [1.0] * 4
    dcp.load(state, checkpoint_id=tmp_path / "two", storage_reader=reader, no_dist=True)
    assert state["a"].tolist() == [2.0] * 4


@pytest.mark.parametrize(("layout", "scheme"), SCHEMES, ids=lambda value: str(value).replace(" ", "_"))
def test_every_scheme_of_a_layout_is_read_by_its_tables(layout: str, scheme: Scheme, tmp_path: Path) -> None:
    path, state = quantized_directory(tmp_path, layout, dict.fromkeys(linear_names(), scheme), files=2)
    found = import_hf(path)
    assert_holds(found, state)
    assert found[f"{LAYER}.weight"].recipe == KINDS[scheme.kind]
    manifest = read_manifest(HuggingFaceReader(path))
    assert set(manifest.tensors) == {f"{name}.weight" for name in linear_names()}


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        ("compressed-tensors", ["fp8_row", "mxfp8", "nvfp4"]),
        ("modelopt", ["fp8_tensor", "nvfp4", "nvfp4"]),
    ],
)
def test_mixed_precision_is_read_module_by_module(layout: str, kinds: list[str], tmp_path: Path) -> None:
    dynamic = {"fp8_row": "dynamic", "mxfp8": "dynamic", "nvfp4": "none", "fp8_tensor": "static"}
    schemes = {name: Scheme(kind, dynamic[kind]) for name, kind in zip(linear_names(1), kinds, strict=True)}
    path, state = quantized_directory(tmp_path, layout, schemes)
    assert_holds(import_hf(path), state)


def test_a_dense_directory_is_a_state_dict(tmp_path: Path) -> None:
    tensors = dense_tensors() | {"position_ids": torch.arange(9)[None], "steps": torch.tensor(3.0)}
    assert_holds(import_hf(write(tmp_path, tensors, files=3)), tensors)
    assert read_manifest(HuggingFaceReader(tmp_path)).tensors == {}


def test_scales_in_fewer_bits_are_read_as_fp32(tmp_path: Path) -> None:
    scale = values((32, 1), 9).abs()
    write(tmp_path, {"a.weight": fp8(), "a.weight_scale": scale}, ct(FP8_ROW))
    found: Any = import_hf(tmp_path)["a.weight"]
    assert found.scale.dtype == torch.float32
    assert torch.equal(found.scale, scale.float())


def test_hf_quant_config_alone_tells_of_modelopt(tmp_path: Path) -> None:
    path, state = quantized_directory(tmp_path, "modelopt", dict.fromkeys(linear_names(), Scheme("nvfp4", "static")))
    (path / "config.json").unlink()
    assert_holds(import_hf(path), state)


def test_the_dtype_of_the_config_is_the_appearance(tmp_path: Path) -> None:
    tensors = {"a.weight": fp8(), "a.weight_scale": torch.ones(32, 1)}
    for key in ("dtype", "torch_dtype"):
        found = import_hf(write(tmp_path, tensors, {**ct(FP8_ROW), key: "float16"}))
        assert found["a.weight"].dtype == torch.float16
    assert import_hf(write(tmp_path, tensors, ct(FP8_ROW)))["a.weight"].dtype == torch.bfloat16
    assert "dtype 'float64'" in refusal(write(tmp_path, tensors, {**ct(FP8_ROW), "dtype": "float64"}))


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_scales_of_the_kv_cache_have_their_calibrated_names(layout: str, tmp_path: Path) -> None:
    path, state = quantized_directory(tmp_path, layout, dict.fromkeys(linear_names(), Scheme("fp8_tensor", "static")))
    names = LAYOUTS[layout].kv_scales
    tensors = {f"model.layers.0.self_attn.{names[own]}": torch.tensor(index + 0.25) for index, own in enumerate(names)}
    held = {
        name: value
        for name, value in import_hf(path).items()
        if name.endswith(("embed_tokens.weight", "norm.weight", "lm_head.weight"))
    }
    schemes = dict.fromkeys(linear_names(), Scheme("fp8_tensor", "static"))
    stored, files = stored_as(layout, schemes, {name: state[f"{name}.weight"] for name in linear_names()})
    write(path, held | stored | tensors, {"quantization_config": files["config.json"]})
    found = import_hf(path)
    assert found["model.layers.0.self_attn.k_scale"].item() == 0.25
    assert found["model.layers.0.self_attn.v_scale"].item() == 1.25
    if layout == "modelopt":
        quantization = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}}
        write(path, held | stored | tensors, {"quantization_config": files["config.json"]}, quantization=quantization)
        assert "hf_quant_config.json says kv_cache_quant_algo 'NVFP4'" in refusal(path)
    else:
        config = {**files["config.json"], "kv_cache_scheme": {"num_bits": 8, "type": "int"}}
        write(path, held | stored | tensors, {"quantization_config": config})
        assert "the kv_cache_scheme says type 'int', expected 'float'" in refusal(path)


# -- recipes in the metadata of the file -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("nvfp4", NVFP4BlockScaling(blocks="square")),
        ("mxfp8", MXFP8BlockScaling(blocks="square")),
        ("fp8_row", Float8CurrentScaling(power_of_two=True)),
        ("fp8_tensor", Float8CurrentScaling(granularity="tensor", power_of_two=True)),
    ],
)
def test_a_recorded_recipe_is_restored(kind: str, recipe: Any, tmp_path: Path) -> None:
    scheme = Scheme(kind, {"nvfp4": "none"}.get(kind, "dynamic"))
    path, state = quantized_directory(tmp_path, "compressed-tensors", {LAYER: scheme}, recipes={LAYER: recipe})
    found = import_hf(path)
    assert found[f"{LAYER}.weight"].recipe == recipe
    assert_holds(found, state)


def test_a_recorded_delayed_recipe_comes_with_a_history(tmp_path: Path) -> None:
    recipe = Float8DelayedScaling(amax_history_len=4)
    scheme = Scheme("fp8_tensor", "dynamic")
    path, state = quantized_directory(tmp_path, "compressed-tensors", {LAYER: scheme}, recipes={LAYER: recipe})
    assert_holds(import_hf(path), state)  # the amax that quantize put into its history, too


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            json.dumps({"a.weight": MXFP8BlockScaling().to_json()}),
            "a.weight: its tensors are fp8_row, and the file's metadata says MXFP8",
        ),
        ("[]", "qtensor.recipes in the metadata of its files is not JSON with a recipe for each weight"),
        ("nonsense", "qtensor.recipes in the metadata of its files is not JSON with a recipe for each weight"),
        (json.dumps({"a.weight": {"type": "Unheard"}}), "unknown recipe type 'Unheard'"),
        (json.dumps({"a.weight": 3}), "is not JSON with a recipe for each weight"),
    ],
)
def test_a_recorded_recipe_of_another_kind_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    tensors = {"a.weight": fp8(), "a.weight_scale": torch.ones(32, 1)}
    assert expected in refusal(write(tmp_path, tensors, ct(FP8_ROW), notes={"qtensor.recipes": text}))


@pytest.mark.parametrize("compute", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_the_history_of_a_scale_gives_the_scale(margin: int, compute: str) -> None:
    recipe = Float8DelayedScaling(amax_history_len=3, margin=margin, amax_compute=compute)
    for seed in range(40):
        q: Any = quantize(values((4, 32), seed, torch.float32) * 2.0 ** (seed - 20), recipe)
        again = history_of(q.scale, recipe)
        stepped = type(q).from_parts({**q.parts(), "amax_history": again}, recipe, q.dtype)
        contents.write(stepped, q.dequantize(), torch.ones(()), step=True)
        assert torch.equal(stepped.scale, q.scale), seed


def test_the_history_of_a_foreign_scale_is_next_to_it() -> None:
    recipe = Float8DelayedScaling(amax_history_len=3)
    scale = torch.rand(200, generator=torch.Generator().manual_seed(0)) + 0.01
    q: Any = quantize(torch.ones(1, 32), recipe)
    for one in scale:
        stepped = type(q).from_parts({**q.parts(), "amax_history": history_of(one, recipe)}, recipe, q.dtype)
        contents.write(stepped, q.dequantize(), torch.ones(()), step=True)
        assert abs(stepped.scale.view(torch.int32).item() - one.view(torch.int32).item()) <= 1


# -- parts in another form ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "shape"), [(WORDS, (3, 8)), (BLOCKS, (3, 2, 16))])
def test_any_columns_are_cut_out_of_words_and_blocks(form: Form, shape: tuple[int, ...]) -> None:
    part = (torch.arange(96) * 37 % 256).to(torch.uint8).reshape(3, 32)
    stored: Any = form.write(part)
    assert stored.shape == shape
    for first in range(32):
        for last in range(first + 1, 33):
            source = Slice(FileTensor("a", "f", "I32", shape), form.read, columns=form.columns)
            assert torch.equal(source.take(stored, (1, first), (2, last - first)), part[1:, first:last])


def test_scales_of_the_cache_have_the_forms_of_their_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = Form(shape=tuple, write=lambda part: 2 * part, read=lambda stored: stored / 2)
    mine = dataclasses.replace(COMPRESSED_TENSORS, name="mine", kv_form=ONE_OVER, kv_heads=flat)
    monkeypatch.setitem(LAYOUTS, "mine", mine)
    weights = {"l.self_attn.q_proj.weight": quantize(values((64, 64), 1), MXFP8BlockScaling())}
    for path, scale, held in (("one", torch.tensor(0.25), [4.0]), ("heads", torch.tensor([1.0, 3.0]), [2.0, 6.0])):
        state = {**weights, "l.self_attn.k_scale": scale, "l.self_attn.v_scale": scale}
        export_hf(state, tmp_path / path, layout="mine", config={"model_type": "tiny"}, progress=False)
        assert load_file(tmp_path / path / "model.safetensors")["l.self_attn.k_scale"].tolist() == held
        found = import_hf(tmp_path / path, progress=False)
        assert torch.equal(found["l.self_attn.k_scale"], scale)


def test_words_are_the_bytes_of_little_endian_machines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    for convert, tensor in ((WORDS.write, codes(2, 8)), (WORDS.read, codes(2, 8, dtype=torch.int32))):
        with pytest.raises(NotImplementedError, match="codes would be out of order; use a little-endian machine"):
            convert(tensor)


# -- what is refused ---------------------------------------------------------------------------------------------------

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
ROW = {"a.weight": fp8(), "a.weight_scale": torch.ones(32, 1)}
NVFP4 = {
    "a.weight_packed": codes(32, 32),
    "a.weight_scale": codes(32, 4).view(torch.float8_e4m3fn),
    "a.weight_global_scale": torch.ones(1),
}
GPT_OSS = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
NVFP4_CT = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
PACK = {
    "a.weight_packed": codes(32, 8, dtype=torch.int32),
    "a.weight_scale": torch.ones(32, 2, dtype=torch.bfloat16),
    "a.weight_shape": torch.tensor([32, 64]),
}
REFUSED = {
    "int4": (
        {
            "a.weight_packed": codes(32, 8, dtype=torch.int32),
            "a.weight_scale": torch.ones(32, 2),
            "a.weight_shape": torch.tensor([32, 64]),
        },
        ct(INT4),
        "a: weight_packed I32 [32, 8], weight_scale F32 [32, 2], weight_shape I64 [2]: INT4 in groups whose scales are",
    ),
    "int4, fp16": (
        {**PACK, "a.weight_scale": torch.ones(32, 2).half()},
        ct(INT4),
        "whose scales are not bf16, which is",
    ),
    "int4, other groups": (
        {**PACK, "a.weight_scale": torch.ones(32, 4).bfloat16()},
        ct({**INT4, "group_size": 16}),
        "integers packed into int32 (pack-quantized), of other bits or in other groups (the JSON says num_bits 4, type",
    ),
    "int8, packed": (
        {**PACK, "a.weight_packed": codes(32, 16, dtype=torch.int32), "a.weight_scale": torch.ones(32, 1).bfloat16()},
        ct({**INT4, "num_bits": 8, "group_size": 64}),
        "config.json says weights of num_bits 8, expected 4",
    ),
    "int8, packed as wide as int4": (PACK, ct({**INT4, "num_bits": 8}), "says weights of num_bits 8, expected 4"),
    "int4, another shape": (
        {**PACK, "a.weight_shape": torch.tensor([32, 60])},
        ct(INT4),
        "a.weight_shape: it says [32, 60], and the codes are those of [32, 64]",
    ),
    "int4, zero points": (
        {**PACK, "a.weight_zero_point": codes(4, 2, dtype=torch.int32)},
        ct({**INT4, "symmetric": False}),
        ": zero points",
    ),
    "int4, asymmetric": (PACK, ct({**INT4, "symmetric": False}), "weights of symmetric False, expected True"),
    "int4, actorder": ({**PACK, "a.weight_g_idx": codes(64, dtype=torch.int32)}, ct(INT4), "(actorder)"),
    "int4, said actorder": (PACK, ct({**INT4, "actorder": "weight"}), "weights with actorder 'weight'"),
    "int4, int8 inputs": (
        PACK,
        ct(INT4, {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}),
        "inputs of num_bits 8, expected 4",
    ),
    "int8 of the tensor": (
        {"a.weight": codes(32, 64, dtype=torch.int8), "a.weight_scale": torch.ones(1)},
        ct({**FP8_ROW, "type": "int", "strategy": "tensor"}),
        "a: weight I8 [32, 64], weight_scale F32 [1]: int8",
    ),
    "int8 that is said to be a float": (
        {"a.weight": codes(32, 64, dtype=torch.int8), "a.weight_scale": torch.ones(32, 1)},
        ct(FP8_ROW),
        "type 'float', expected 'int'",
    ),
    "int4 in int8": (
        {"a.weight": codes(32, 64, dtype=torch.int8), "a.weight_scale": torch.ones(32, 1)},
        ct({**FP8_ROW, "num_bits": 4, "type": "int"}),
        "num_bits 4, expected 8",
    ),
    "fp8 blocks, deepseek": (
        {"a.weight": fp8(), "a.weight_scale_inv": torch.ones(1, 1)},
        ct({**FP8_ROW, "strategy": "block"}),
        "a: weight F8_E4M3 [32, 64], weight_scale_inv F32 [1, 1]: FP8 in blocks (quant_method fp8)",
    ),
    "fp8 blocks": (
        {"a.weight": fp8(256), "a.weight_scale": torch.ones(4, 1)},
        ct(FP8_ROW),
        "FP8 in blocks that this layout does not have",
    ),
    "mxfp4": (
        {"a.weight_packed": codes(32, 32), "a.weight_scale": codes(32, 2)},
        ct(FP8_ROW),
        "mxfp4 weights with unquantized inputs, and config.json says weights of num_bits 8, expected 4; weights of",
    ),
    "mxfp4, other blocks": ({"a.weight_packed": codes(32, 32), "a.weight_scale": codes(32, 4)}, ct(FP8_ROW), ": MXFP4"),
    "w4a8": (
        {"a.weight": codes(16, 64), "a.weight_scale": torch.ones(32, 1), "a.input_scale": torch.ones(())},
        modelopt("W4A8_AWQ"),
        "4-bit integers",
    ),
    "zero points": ({**ROW, "a.weight_zero_point": torch.zeros(32, 1)}, ct(FP8_ROW), ": zero points"),
    "actorder": ({**ROW, "a.weight_g_idx": torch.arange(64)}, ct(FP8_ROW), "(actorder)"),
    "awq": (
        {**ROW, "a.pre_quant_scale": torch.ones(64)},
        modelopt("NVFP4_AWQ"),
        "inputs that are scaled before they are quantized",
    ),
    "not compressed": (
        {"a.weight": values((32, 64), 1), "a.weight_scale": torch.ones(32, 1)},
        ct(FP8_ROW),
        "saved before it was compressed",
    ),
    "scales alone": ({"a.weight_scale": torch.ones(32, 1)}, ct(FP8_ROW), "scales without a weight"),
    "nothing said": (ROW, {}, "it is quantized, and no quantization_config in config.json says how"),
    "codes alone": ({"a.weight": fp8()}, {}, "a: weight F8_E4M3 [32, 64]: it is quantized, and no quantization_config"),
    "gpt-oss": (
        {"e.gate_up_proj_blocks": codes(4, 8, 16), "e.gate_up_proj_scales": codes(4, 8)},
        {},
        "e: gate_up_proj_blocks U8 [4, 8, 16], gate_up_proj_scales U8 [4, 8]",
    ),
    "gpt-oss, other blocks": (
        {"e.gate_up_proj_blocks": codes(2, 4, 8, 8), "e.gate_up_proj_scales": codes(2, 4, 8)},
        GPT_OSS,
        "e.gate_up_proj: _blocks U8 [2, 4, 8, 8], _scales U8 [2, 4, 8]: MXFP4",
    ),
    "gpt-oss, scales alone": (
        {"e.gate_up_proj_scales": codes(2, 4, 8)},
        GPT_OSS,
        "e.gate_up_proj: _scales U8 [2, 4, 8]: scales without a weight",
    ),
    "gpt-oss, not converted": (
        {"m.0.e.gate_up_proj_blocks": codes(2, 4, 8, 16), "m.0.e.gate_up_proj_scales": codes(2, 4, 8)},
        {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["m.*.e"]}},
        "config.json says by modules_to_not_convert that m.*.e is not quantized",
    ),
    "gpt-oss, modules": (
        ROW,
        {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"}},
        "the modules_to_not_convert of config.json are 'lm_head', expected names",
    ),
    "gpt-oss, other codes": (ROW, GPT_OSS, "  a: weight F8_E4M3 [32, 64]"),
    "other shape": (
        {**ROW, "a.weight_scale": torch.ones(31, 1)},
        ct(FP8_ROW),
        "a: weight F8_E4M3 [32, 64], weight_scale F32 [31, 1]",
    ),
    "wrong bits": (
        ROW,
        ct({**FP8_ROW, "num_bits": 6}),
        "fp8_row weights with dynamic inputs, and config.json says weights of num_bits 6, expected 8",
    ),
    "wrong strategy": (ROW, ct({**FP8_ROW, "strategy": "tensor"}), "weights of strategy 'tensor', expected 'channel'"),
    "asymmetric": (ROW, ct({**FP8_ROW, "symmetric": False}), "weights of symmetric False, expected True"),
    "said actorder": (ROW, ct({**FP8_ROW, "actorder": "group"}), "weights with actorder 'group'"),
    "outputs": (
        ROW,
        ct(FP8_ROW, None)
        | {
            "quantization_config": {
                **ct(FP8_ROW)["quantization_config"],
                "config_groups": {"g": {**GROUP, "weights": FP8_ROW, "output_activations": FP8_ROW}},
            }
        },
        "quantized outputs",
    ),
    "int inputs": (ROW, ct(FP8_ROW, {**FP8_TOKEN, "type": "int"}), "inputs of type 'int', expected 'float'"),
    "no input scale": (
        ROW,
        ct(FP8_ROW, {**FP8_TOKEN, "dynamic": False}),
        "inputs under a calibrated scale, and none is there",
    ),
    "an input scale": (
        {**ROW, "a.input_scale": torch.ones(1)},
        ct(FP8_ROW, FP8_TOKEN),
        "inputs quantized on the fly, and an input scale is there",
    ),
    "dense inputs": (
        {**ROW, "a.input_scale": torch.ones(1)},
        ct(FP8_ROW),
        "no quantized inputs, and an input scale is there",
    ),
    "no target": (
        ROW,
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {**GROUP, "weights": FP8_ROW, "targets": ["re:b.*"]}},
            }
        },
        "no group of config.json has it as a target",
    ),
    "group size": (NVFP4, ct({**NVFP4_CT, "group_size": 32}), "weights of group_size 32, expected 16"),
    "zero global scale": (
        {**NVFP4, "a.weight_global_scale": torch.zeros(1)},
        ct(NVFP4_CT),
        "a.weight_global_scale: its reciprocal, inf, is no scale",
    ),
    "algorithm": (
        {"a.weight": fp8(), "a.weight_scale": torch.ones(32)},
        modelopt("MXFP8"),
        "config.json says quant_algo 'MXFP8', expected 'FP8_PER_CHANNEL_PER_TOKEN'",
    ),
    "no layer": (
        {"a.weight": fp8(), "a.weight_scale": torch.ones(32)},
        modelopt("MIXED_PRECISION", quantized_layers={"b": {"quant_algo": "FP8"}}),
        "it is none of the quantized_layers of config.json",
    ),
    "no algorithm": (ROW, {"quantization_config": {"quant_method": "modelopt"}}, "config.json says no quant_algo"),
    "sparse": (ROW, ct(FP8_ROW, sparsity_config={"format": "sparse-24-bitmask"}), "stored sparsely"),
    "rotated": (ROW, ct(FP8_ROW, transform_config={"config_groups": {"R1": {}}}), "R1: type None, expected 'hadamard'"),
    "no groups": (
        ROW,
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        "no config_groups, expected weights and targets in each",
    ),
    "bad pattern": (
        ROW,
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {**GROUP, "weights": FP8_ROW, "targets": ["re:("]}},
            }
        },
        "a target that is no pattern",
    ),
    "endless pattern": (
        ROW,
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {**GROUP, "weights": FP8_ROW, "targets": ["re:(.+)+!"]}},
            }
        },
        "has a target that is not used: '(.+)+!' repeats what has repeats or choices, and could take for ever; name",
    ),
    **{
        f"quant_method {method}": (  # a name of its own: some of these words are cases above
            ROW,
            {"quantization_config": {"quant_method": method}},
            f"its quant_method is {method!r}, which the library does not read; it reads compressed-tensors, ",
        )
        for method in ("gptq", "awq", "fbgemm_fp8", "bitsandbytes")
    },
    "no object": (ROW, {"quantization_config": "fp8"}, "the quantization_config of config.json is 'fp8'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_quantized_otherwise_is_refused(case: str, tmp_path: Path) -> None:
    tensors, config, expected = REFUSED[case]
    assert expected in refusal(write(tmp_path, tensors, config))


@pytest.mark.parametrize("name", ["a.weight.payload", "a.weight.scale"])
def test_a_tensor_with_the_name_of_a_part_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path, {**ROW, name: values((3,), 1)}, ct(FP8_ROW))
    assert f"{name}: the directory has it twice, as a tensor and as a part or scale of a linear" in refusal(tmp_path)


def test_one_refusal_names_all_modules_but_not_thousands(tmp_path: Path) -> None:
    tensors = {f"layers.{number}.weight": fp8(4, 32) for number in range(50)}
    message = refusal(write(tmp_path, tensors, ct(FP8_ROW)))
    assert "layers.0: weight F8_E4M3 [4, 32]" in message
    assert "and 30 more" in message
    assert "it has" not in message
    assert "compressed-tensors: fp8_tensor weights with dynamic inputs" in message  # what there is
    assert len(message) < 3000


def test_a_module_is_held_beside_its_most_exact_group(tmp_path: Path) -> None:
    tensors = {
        f"{name}.{own}": tensor
        for name in ("a", "b", "m.c")
        for own, tensor in (("weight", fp8()), ("weight_scale", torch.ones(32, 1)))
    }
    wrong = {**GROUP, "weights": INT4}
    groups = {
        "g0": {**wrong, "targets": ["Linear"]},
        "g1": {**GROUP, "weights": FP8_ROW, "targets": ["a", "re:b", "m.c"]},
    }
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}
    assert set(import_hf(write(tmp_path, tensors, config))) == {"a.weight", "b.weight", "m.c.weight"}
    groups["g2"] = {**wrong, "targets": ["b"]}
    message = refusal(write(tmp_path, tensors, config))
    assert "b: weight F8_E4M3" in message
    assert "a: weight" not in message


# -- experts -----------------------------------------------------------------------------------------------------------


def expert_tensors(scales: list[float] | None = None, count: int = 3) -> tuple[dict[str, Tensor], Tensor]:
    """FP8 linears of experts, and their payloads as one weight [E, 2I, K]."""
    gate_up = torch.stack([fp8(64).view(torch.uint8).roll(e) for e in range(count)]).view(torch.float8_e4m3fn)
    tensors = {}
    for e in range(count):
        for number, half in enumerate(("gate_proj", "up_proj")):
            module = f"m.experts.{e}.{half}"
            tensors[f"{module}.weight"] = gate_up[e, number * 32 : (number + 1) * 32].clone()
            tensors[f"{module}.weight_scale"] = torch.full((1,), (scales or [0.5] * count)[e])
    return tensors, gate_up


FP8_TENSOR = {**FP8_ROW, "strategy": "tensor"}
GATE_UP = {"m.experts.gate_up_proj": Entry("m.experts.gate_up_proj", None, (3, 64, 64), torch.bfloat16)}


def test_linears_of_experts_are_chunks_of_the_weight_of_all(tmp_path: Path) -> None:
    tensors, gate_up = expert_tensors()
    reader = HuggingFaceReader(write(tmp_path, tensors, ct(FP8_TENSOR)), wanted=GATE_UP)
    record: Any = reader.read_metadata().state_dict_metadata["m.experts.gate_up_proj.payload"]
    assert tuple(record.size) == (3, 64, 64)
    assert [tuple(chunk.offsets) for chunk in record.chunks] == [(e, row, 0) for e in range(3) for row in (0, 32)]
    assert set(read_manifest(reader).tensors) == {"m.experts.gate_up_proj"}
    assert gate_up.shape == (3, 64, 64)


EXPERTS = {
    "fit": ({}, None),
    "scales": (
        expert_tensors([0.5, 0.5, 0.25])[0],
        "m.experts.gate_up_proj: their weights have tensor-wide scales that differ",
    ),
    "missing": (
        {"m.experts.2.up_proj.weight": None, "m.experts.2.up_proj.weight_scale": None},
        "it consists of linears that are not there: m.experts.2.up_proj",
    ),
    "dense": (
        {"m.experts.2.up_proj.weight": values((32, 64), 1), "m.experts.2.up_proj.weight_scale": None},
        "it consists of linears some of which are quantized, some not",
    ),
    "rows": (
        {"m.experts.2.up_proj.weight": fp8(31)},
        "m.experts.2.up_proj: a weight of (31, 64), expected (32, 64) of m.experts.gate_up_proj",
    ),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_linears_of_experts_must_fit_together(case: str, tmp_path: Path) -> None:
    change, expected = EXPERTS[case]
    tensors = {name: tensor for name, tensor in (expert_tensors()[0] | change).items() if tensor is not None}
    reader = HuggingFaceReader(write(tmp_path, tensors, ct(FP8_TENSOR)), wanted=GATE_UP)
    if expected is None:
        reader.read_metadata()
        return
    with pytest.raises(ValueError, match="can not be imported; nothing has been loaded") as caught:
        reader.read_metadata()
    assert expected in str(caught.value)


@pytest.mark.parametrize("alike", [True, False])
def test_input_scales_of_experts_are_one_where_they_agree(alike: bool, tmp_path: Path) -> None:
    tensors, _ = expert_tensors()
    for number, module in enumerate(
        sorted(name.removesuffix(".weight") for name in tensors if name.endswith("weight"))
    ):
        tensors[f"{module}.input_scale"] = torch.full((1,), 1.0 if alike else 1.0 + number)
    config = ct(FP8_TENSOR, {**FP8_TENSOR})
    scales = HuggingFaceReader(write(tmp_path, tensors, config), wanted=GATE_UP).presented().scales
    if alike:
        assert scales == {"m.experts.gate_up_proj.input_scale"}
    else:
        assert scales == {f"m.experts.{e}.{half}.input_scale" for e in range(3) for half in ("gate_proj", "up_proj")}


# -- hostile and damaged directories -----------------------------------------------------------------------------------


def sharded(path: Path) -> dict[str, Any]:
    write(path, dense_tensors(1), files=2)
    index: dict[str, Any] = json.loads((path / "model.safetensors.index.json").read_text())
    return index


def put(path: Path, index: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../x", "C:\\x", "", "\\\\host\\x", "a\0b"])
def test_an_index_names_files_inside_of_the_directory(name: str, tmp_path: Path) -> None:
    index = sharded(tmp_path)
    index["weight_map"]["lm_head.weight"] = name
    put(tmp_path, index)
    message = refusal(tmp_path)
    assert "it names files outside of the directory" in message


def test_the_index_and_the_files_must_agree(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"] |= {"ghost.weight": files[0]}
    put(tmp_path, index)
    assert f"ghost.weight: model.safetensors.index.json says {files[0]}, which lacks it" in refusal(tmp_path)
    del index["weight_map"]["ghost.weight"]
    moved = index["weight_map"]["lm_head.weight"]
    other = next(file for file in files if file != moved)
    index["weight_map"]["lm_head.weight"] = other
    put(tmp_path, index)
    message = refusal(tmp_path)
    assert f"lm_head.weight: it is in {moved}, and model.safetensors.index.json says {other}" in message
    del index["weight_map"]["lm_head.weight"]
    put(tmp_path, index)
    assert f"lm_head.weight: it is in {moved}, and model.safetensors.index.json does not list it" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' is there twice"),
        ('{"weight_map": ["a"]}', "its weight_map is no object of file names"),
        ('{"weight_map": {"a": 3}}', "its weight_map is no object of file names"),
        ("[]", "it holds a list, expected an object"),
        ("{", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("{}", "its weight_map is no object of file names"),
        ('{"weight_map": {}}', "its weight_map names no tensors; get the directory again"),
    ],
    ids=range(8),
)
def test_an_index_that_is_none_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert expected in refusal(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        import_hf(tmp_path)
    index = sharded(tmp_path)
    lost = index["weight_map"]["lm_head.weight"]
    (tmp_path / lost).unlink()
    with pytest.raises(FileNotFoundError, match=f"names files that are not there: {lost}"):
        import_hf(tmp_path)


def test_two_models_in_one_directory_are_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file(dense_tensors(1), tmp_path / "model.safetensors")
    assert "are both there, and which of them is meant is not known" in refusal(tmp_path)


def raw(path: Path, header: Any, data: bytes = b"") -> None:
    path.mkdir(exist_ok=True)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}, b"cut off"),
        ({"a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}}, b"a" * 12),
        ({"a.weight": {"dtype": "F32", "shape": [1, 2**62], "data_offsets": [0, 8]}}, b"a" * 8),
        ({"a.weight": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, b"a" * 8),
        ({"a.weight": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, b"a" * 12),
        ({"a.weight": {"dtype": "UNHEARD", "shape": [2], "data_offsets": [0, 8]}}, b"a" * 8),
        (b"nonsense", b""),
        (b"{" * 1000, b""),
    ],
    ids=range(8),
)
def test_a_damaged_header_is_found_before_anything_is_loaded(header: Any, data: bytes, tmp_path: Path) -> None:
    raw(tmp_path, header, data)
    message = refusal(tmp_path)
    assert "model.safetensors: it is damaged or cut off" in message
    assert "Nothing has been loaded" in message


def test_every_cut_of_a_file_is_found(tmp_path: Path) -> None:
    write(tmp_path, {"a.weight": values((4, 8), 1)})
    whole = (tmp_path / "model.safetensors").read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        assert "damaged or cut off" in refusal(tmp_path)


def test_dtypes_that_torch_does_not_slice_are_refused(tmp_path: Path) -> None:
    raw(tmp_path, {"a.weight": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}}, b"ab")
    assert "a: weight F4 [2, 2]: it is quantized" in refusal(tmp_path)
    raw(tmp_path, {"a.weight": {"dtype": "U16", "shape": [2], "data_offsets": [0, 4]}}, b"abcd")
    assert "a: weight U16 [2]" in refusal(tmp_path)


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    value = torch.arange(4.0)
    header = {
        "a.bytes": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [3, 19]},
    }
    raw(tmp_path, header, b"abc" + value.numpy().tobytes())
    assert torch.equal(import_hf(tmp_path)["a.weight"], value.view(2, 2))


def test_links_may_lead_out_of_the_directory_pipes_are_no_files(tmp_path: Path) -> None:
    """As in the cache of the Hugging Face hub, whose snapshots are links."""
    tensors = {"a.weight": values((4, 8), 1)}
    write(tmp_path / "blobs", tensors)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blobs" / "model.safetensors")
    assert_holds(import_hf(tmp_path / "snapshot"), tensors)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        import_hf(tmp_path / "pipe")


def test_the_same_header_twice_is_the_same_tensor(tmp_path: Path) -> None:
    one = b'"a.weight":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
    raw(tmp_path, b"{" + one + b"," + one + b"}", b"abcd")
    assert bits(import_hf(tmp_path)["a.weight"]) == b"abcd"


ODD: list[Any] = [None, True, -1, 2**70, 0.5, "", "x", "re:(", [], [[]], ["x", 3], {}, {"a": {}}, {"": None}, "F8_E4M3"]


def bent(value: Any, random: Random) -> Any:
    """A JSON value with something odd in one place."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(sorted(value))
        if random.random() < 0.1:
            return {**{name: its for name, its in value.items() if name != key}, "odd": value[key]}
        return value | {key: bent(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.9:
        index = random.randrange(len(value))
        return [*value[:index], bent(value[index], random), *value[index + 1 :]]
    return random.choice(ODD)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_odd_json_and_headers_raise_a_clear_error_or_are_read(layout: str, tmp_path: Path) -> None:
    scheme = Scheme("nvfp4", "static")
    recipe = NVFP4BlockScaling(blocks="square")
    quantized_directory(tmp_path, layout, {LAYER: scheme}, recipes={LAYER: recipe}, files=2)
    random = Random(0)
    names = [file.name for file in sorted(tmp_path.iterdir())]
    whole = {name: (tmp_path / name).read_bytes() for name in names}
    messages: list[str] = []
    for _ in range(120):
        name = random.choice(names)
        if name.endswith(".json"):
            new = json.dumps(bent(json.loads(whole[name]), random)).encode()
        else:
            (length,) = struct.unpack("<Q", whole[name][:8])
            header = json.dumps(bent(json.loads(whole[name][8 : 8 + length]), random)).encode()
            new = struct.pack("<Q", len(header)) + header + whole[name][8 + length :]
        (tmp_path / name).write_bytes(new)
        try:
            import_hf(tmp_path)
        except (ValueError, FileNotFoundError) as error:
            messages.append(str(error))
        (tmp_path / name).write_bytes(whole[name])
    assert 30 < len(messages) < 120
    assert all(str(tmp_path) in message and len(message) < 10_000 for message in messages)
