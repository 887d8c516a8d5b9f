"""Exports in the layout of ModelOpt: names, types, values and JSON, and what its engines and ModelOpt make of them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers")

from safetensors.torch import load_file

from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from tests.dcp_adapters.hf.exports import Exported, export, layers_of, linears, members, raw

ALL = ("",)  # the end of every name
TENSOR = Float8CurrentScaling(granularity="tensor")
ROWS = Float8CurrentScaling()
MXFP8 = MXFP8BlockScaling()
NVFP4 = NVFP4BlockScaling()
E4M3, U8, F32 = torch.float8_e4m3fn, torch.uint8, torch.float32
EXCLUDED = ["model.layers.1.self_attn.*", "model.layers.0.mlp.down_proj"]
IGNORED = ["model.embed_tokens", "lm_head"]

FP8_ARGS = {"dynamic": False, "num_bits": 8, "type": "float"}
NVFP4_ARGS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
BOTH = {"FP8": FP8_ARGS, "NVFP4": NVFP4_ARGS}
# algorithm -> recipe, ends of modules with an input_scale, group_size, tensors (types; dims by their number of columns)
MODELOPT: dict[str, tuple[Any, tuple[str, ...], int | None, dict[str, tuple[torch.dtype, int | None]]]] = {
    "FP8": (TENSOR, ALL, None, {"weight": (E4M3, 1), "weight_scale": (F32, None), "input_scale": (F32, None)}),
    "FP8_PER_CHANNEL_PER_TOKEN": (ROWS, (), None, {"weight": (E4M3, 1), "weight_scale": (F32, 0)}),
    "NVFP4": (
        NVFP4,
        ALL,
        16,
        {"weight": (U8, 2), "weight_scale": (E4M3, 16), "weight_scale_2": (F32, None), "input_scale": (F32, None)},
    ),
    "W4A16_NVFP4": (NVFP4, (), 16, {"weight": (U8, 2), "weight_scale": (E4M3, 16), "weight_scale_2": (F32, None)}),
    "MXFP8": (MXFP8, (), 32, {"weight": (E4M3, 1), "weight_scale": (U8, 32)}),
}
KV = {
    f"model.layers.{layer}.self_attn.{own}": torch.tensor(0.01 * (layer + 1))
    for layer in (0, 1)
    for own in ("k_scale", "v_scale")
}


@pytest.fixture(scope="module")
def modelopt(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    """An export of each scheme that the layout of ModelOpt has, and of a mixture with a quantized KV cache."""
    root = tmp_path_factory.mktemp("modelopt")
    made = {
        algorithm: export(root / algorithm, recipe, static=static, layout="modelopt")
        for algorithm, (recipe, static, _, _) in MODELOPT.items()
    }
    plan = {"*.mlp.*": NVFP4, "*.self_attn.*": TENSOR}
    static = ("q_proj", "k_proj", "v_proj", "o_proj")
    mixed = export(root / "mixed", plan, static=static, exclude=EXCLUDED, extra=KV, layout="modelopt")
    return {**made, "MIXED_PRECISION": mixed}


def of_columns(rows: int, columns: int, per: int | None) -> tuple[int, ...]:
    """The shape of a tensor with an element for so many columns: None for the whole weight, 0 for a row of it."""
    return () if per is None else (rows,) if per == 0 else (rows, columns // per)


def modelopt_algorithm(told: Mapping[str, Any], layer: str) -> str | None:
    """The algorithm that vLLM runs a layer under, by its rules: None for one that is excluded.

    A layer is excluded by its name, by those of all linears in it, by a part of its name or by a glob.
    """
    named = {module in told["ignore"] for module in members(layer)}
    assert len(named) == 1, f"{layer}: different schemes in what is fused"
    if named == {True} or any(name in layer or fnmatch(layer, name) for name in told["ignore"]):
        return None
    if told["quant_algo"] != "MIXED_PRECISION":
        return str(told["quant_algo"])
    found = {told["quantized_layers"][module]["quant_algo"] for module in members(layer)}
    assert len(found) == 1, f"{layer}: {found}"
    return str(found.pop())


class TestModelOpt:
    @pytest.mark.parametrize("algorithm", MODELOPT)
    def test_tensors(self, modelopt: dict[str, Exported], algorithm: str) -> None:
        exported, tensors = modelopt[algorithm], MODELOPT[algorithm][3]
        assert len(exported.quantized) == 14
        for module, weight in exported.quantized.items():
            stored, parts = exported.of(module), weight.parts()
            assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()} == {
                name: (dtype, of_columns(*weight.shape, per)) for name, (dtype, per) in tensors.items()
            }
            assert torch.equal(raw(stored["weight"]), raw(parts["payload"])), module
            assert torch.equal(raw(stored["weight_scale"]), raw(parts["scale"])), module
            if "weight_scale_2" in stored:
                assert torch.equal(stored["weight_scale_2"], parts["global_scale"]), module
            if "input_scale" in stored:
                assert torch.equal(stored["input_scale"], torch.tensor(exported.inputs[module])), module
        rest = {
            name: tensor
            for name, tensor in exported.tensors.items()
            if name.rpartition(".")[0] not in exported.quantized
        }
        assert rest.keys() == exported.dense.keys()
        assert all(torch.equal(rest[name], tensor) for name, tensor in exported.dense.items())

    @pytest.mark.parametrize("algorithm", MODELOPT)
    def test_json(self, modelopt: dict[str, Exported], algorithm: str) -> None:
        exported, size = modelopt[algorithm], MODELOPT[algorithm][2]
        told = json.loads((exported.path / "hf_quant_config.json").read_text())
        assert set(told) == {"producer", "quantization"}
        assert told["producer"]["name"] == "modelopt"  # TensorRT-LLM reads no other
        assert set(told["producer"]) == {"name", "version", "written_by"}
        assert told["quantization"] == {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": None,
            "group_size": size,
            "exclude_modules": IGNORED,
        }
        groups: dict[str, Any] = {"weights": BOTH.get(algorithm, NVFP4_ARGS), "targets": ["Linear"]}
        if algorithm in BOTH:
            groups["input_activations"] = BOTH[algorithm]
        expected = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": IGNORED}
        expected["producer"] = told["producer"]
        if algorithm in ("FP8", "NVFP4", "W4A16_NVFP4"):
            expected["config_groups"] = {"group_0": groups}
        assert exported.quantization == expected

    def test_mixtures_and_the_kv_cache(self, modelopt: dict[str, Exported]) -> None:
        exported = modelopt["MIXED_PRECISION"]
        algorithms = {
            module: {"quant_algo": "W4A16_NVFP4", "group_size": 16} if weight.recipe == NVFP4 else {"quant_algo": "FP8"}
            for module, weight in exported.quantized.items()
        }
        assert len(algorithms) == 9
        told = json.loads((exported.path / "hf_quant_config.json").read_text())["quantization"]
        config = exported.quantization
        assert told["quant_algo"] == config["quant_algo"] == "MIXED_PRECISION"
        assert told["quantized_layers"] == config["quantized_layers"] == algorithms
        assert (
            set(told["exclude_modules"])
            == set(config["ignore"])
            == {
                *IGNORED,
                "model.layers.0.mlp.down_proj",
                *(f"model.layers.1.self_attn.{own}_proj" for own in "qkvo"),
            }
        )
        assert told["kv_cache_quant_algo"] == "FP8"
        assert told["group_size"] == 16
        assert config["kv_cache_scheme"] == FP8_ARGS
        tensors = exported.tensors
        for name, scale in KV.items():
            attention, _, own = name.rpartition(".")
            assert torch.equal(tensors[f"{attention}.{own[0]}_proj.{own}"], scale)
            assert name not in tensors

    @pytest.mark.parametrize("algorithm", [*MODELOPT, "MIXED_PRECISION"])
    def test_engines_find_one_algorithm_for_what_they_fuse(self, modelopt: dict[str, Exported], algorithm: str) -> None:
        exported = modelopt[algorithm]
        for layer in layers_of(linears(exported.model)):
            found = modelopt_algorithm(exported.quantization, layer)
            assert (found is not None) is (members(layer)[0] in exported.quantized), layer
            stored = [exported.of(module) for module in members(layer)]
            if found in ("FP8", "NVFP4"):
                assert len({float(tensors["input_scale"]) for tensors in stored}) == 1
            if found is not None and "NVFP4" in found:
                assert len({float(tensors["weight_scale_2"]) for tensors in stored}) == 1

    def test_the_bytes_are_those_of_the_other_layout(self, modelopt: dict[str, Exported], tmp_path: Path) -> None:
        for algorithm, (recipe, static, _, _) in MODELOPT.items():
            exported = modelopt[algorithm]
            compressed = export(tmp_path / algorithm, recipe, static=static)
            for module in exported.quantized:
                one, other = exported.of(module), compressed.of(module)
                payload = other["weight_packed"] if recipe == NVFP4 else other["weight"]
                assert torch.equal(raw(one["weight"]), raw(payload)), module
                assert torch.equal(raw(one["weight_scale"]), raw(other["weight_scale"])), module
                if recipe == NVFP4:
                    assert torch.equal(torch.reciprocal(other["weight_global_scale"])[0], one["weight_scale_2"])

    @pytest.mark.full
    def test_modelopt_reads_every_weight_and_its_config(self, modelopt: dict[str, Exported]) -> None:
        if importlib.util.find_spec("modelopt") is None:
            pytest.skip("nvidia-modelopt is not installed")
        script = Path(__file__).with_name("modelopt_client.py")
        paths = [str(exported.path) for exported in modelopt.values()]
        done = subprocess.run([sys.executable, str(script), *paths], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for exported in modelopt.values():
            read = load_file(exported.path / "dequantized.st")
            assert set(read) == set(exported.quantized)
            for module, weight in exported.quantized.items():
                assert torch.equal(read[module], weight.dequantize(F32)), module
            converted = json.loads((exported.path / "converted.json").read_text())
            assert without_order(converted) == without_order(exported.quantization)


def without_order(told: Mapping[str, Any]) -> dict[str, Any]:
    """A config with its groups in the order of what is in them."""
    groups = [
        json.dumps({**group, "targets": sorted(group["targets"])}, sort_keys=True)
        for group in told.get("config_groups", {}).values()
    ]
    return {**told, "config_groups": sorted(groups)}
