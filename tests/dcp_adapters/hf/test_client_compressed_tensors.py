"""Exports in the layout of compressed-tensors in the hands of its own parser, matching and compressors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils import match_named_modules
from pydantic import ValidationError

from qtensor import (
    Float8CurrentScaling,
    Int4GroupScaling,
    Int8RowScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.dcp_adapters.hf.exports import Exported, assert_nvfp4, export, layers_of, linears, llama, members, raw

ALL = ("",)  # the end of every name
TENSOR = Float8CurrentScaling(granularity="tensor")
ROWS = Float8CurrentScaling()
MXFP8 = MXFP8BlockScaling()
NVFP4 = NVFP4BlockScaling()
MXFP4 = MXFP4BlockScaling()
INT4, INT4_64 = Int4GroupScaling(), Int4GroupScaling(group=64)
INT8 = Int8RowScaling()
MIXED = {"*.mlp.*": NVFP4, "*.self_attn.*": ROWS}
EXCLUDED = ["model.layers.1.self_attn.*", "model.layers.0.mlp.down_proj"]

COMPRESSED_TENSORS: dict[str, tuple[Any, tuple[str, ...], list[str]]] = {
    "fp8_tensor": (TENSOR, (), []),
    "fp8_tensor_static": (TENSOR, ALL, []),
    "fp8_row": (ROWS, (), []),
    "fp8_row_static": (ROWS, ALL, []),
    "mxfp8": (MXFP8, (), []),
    "nvfp4": (NVFP4, (), ["*.1.mlp.*"]),
    "nvfp4_static": (NVFP4, ALL, []),
    "mxfp4": (MXFP4, (), []),
    "int4": (INT4, (), ["*.1.mlp.*"]),
    "int4_64": (INT4_64, (), []),
    "int8_row": (INT8, (), []),
    "mixed_4_bits": ({"*.mlp.*": INT4_64, "*.self_attn.*": MXFP4}, (), EXCLUDED[1:]),
    "mixed": (MIXED, (), EXCLUDED),
    "mixed_static": ({"*.mlp.*": NVFP4, "*.self_attn.*": TENSOR}, ("self_attn.o_proj", "down_proj"), EXCLUDED[:1]),
}


def positive_zeros(packed: torch.Tensor) -> torch.Tensor:
    """Pairs of E2M1 with -0 as 0."""
    low, high = packed & 15, packed >> 4
    return torch.where(low == 8, 0, low) | torch.where(high == 8, 0, high) << 4


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    """An export of each scheme that the layout of compressed-tensors has, and of mixtures."""
    root = tmp_path_factory.mktemp("compressed")
    return {
        case: export(root / case, plan, static=static, exclude=exclude)
        for case, (plan, static, exclude) in COMPRESSED_TENSORS.items()
    }


class TestCompressedTensors:
    @pytest.mark.parametrize("case", COMPRESSED_TENSORS)
    def test_its_parser_takes_the_config(self, compressed: dict[str, Exported], case: str) -> None:
        told = compressed[case].quantization
        parsed = QuantizationConfig.model_validate(told)
        assert parsed.quantization_status.value == "compressed"
        assert parsed.format == told["format"] == ("mixed-precision" if case.startswith("mixed") else parsed.format)
        assert parsed.ignore == told["ignore"]
        for name, group in told["config_groups"].items():
            scheme = parsed.config_groups[name]
            assert scheme.format == group["format"]
            for part in ("weights", "input_activations"):
                args = getattr(scheme, part)
                held = None if args is None else json.loads(args.model_dump_json())
                assert held == (None if group[part] is None else {**held, **group[part]})
        wrong = json.loads(json.dumps(told))
        wrong["config_groups"]["group_0"]["weights"]["unknown"] = 1
        with pytest.raises(ValidationError, match="unknown"):
            QuantizationConfig.model_validate(wrong)

    @pytest.mark.parametrize("case", COMPRESSED_TENSORS)
    def test_its_targets_are_what_is_quantized(self, compressed: dict[str, Exported], case: str) -> None:
        exported = compressed[case]
        parsed = QuantizationConfig.model_validate(exported.quantization)
        found: dict[str, Any] = {}
        for scheme in parsed.config_groups.values():
            for module, _ in match_named_modules(llama(), scheme.targets, parsed.ignore):
                assert module not in found
                found[module] = scheme
        assert set(found) == set(exported.quantized)
        assert set(parsed.ignore) == (set(linears(exported.model)) | {"model.embed_tokens"}) - set(found)
        for module, scheme in found.items():
            weight, inputs = scheme.weights, scheme.input_activations
            recipe = exported.quantized[module].recipe
            kinds = {TENSOR: (8, "tensor", None), ROWS: (8, "channel", None), MXFP8: (8, "group", 32)}
            kinds |= {INT8: (8, "channel", None)}
            kinds |= {MXFP4: (4, "group", 32), INT4: (4, "group", 32), INT4_64: (4, "group", 64)}
            assert (weight.num_bits, weight.strategy, weight.group_size) == kinds.get(recipe, (4, "tensor_group", 16))
            number = "int" if recipe in (INT4, INT4_64, INT8) else "float"
            assert (weight.type, weight.symmetric, weight.dynamic) == (number, True, False)
            static = module in exported.inputs
            if recipe == NVFP4:
                assert (inputs is not None) is static
                assert inputs is None or (inputs.dynamic, inputs.strategy) == ("local", "tensor_group")
            elif recipe in (MXFP4, INT4, INT4_64):
                assert inputs is None
            elif recipe == MXFP8:
                assert (inputs.dynamic, inputs.strategy, inputs.group_size) == (True, "group", 32)
            else:
                assert (inputs.dynamic, inputs.strategy) == ((False, "tensor") if static else (True, "token"))

    @pytest.mark.parametrize("case", COMPRESSED_TENSORS)
    def test_its_compressors_write_and_read_the_same_tensors(self, compressed: dict[str, Exported], case: str) -> None:
        exported = compressed[case]
        parsed = QuantizationConfig.model_validate(exported.quantization)
        for scheme in parsed.config_groups.values():
            compressor = BaseCompressor.get_value_from_registry(scheme.format)
            for module, _ in match_named_modules(llama(), scheme.targets, parsed.ignore):
                stored, weight = exported.of(module), exported.quantized[module]
                got = compressor.decompress(dict(stored), scheme)["weight"]
                recipe = weight.recipe
                if recipe == NVFP4:
                    assert_nvfp4(module, got, weight)
                else:
                    dtype = torch.bfloat16 if recipe in (MXFP8, MXFP4, INT4, INT4_64) else torch.float32
                    assert torch.equal(got, weight.dequantize(dtype)), module
                # The other way round, from the same values and scales.
                scale = stored["weight_scale"]
                if recipe in (MXFP8, MXFP4):
                    scale = torch.exp2(scale.float() - 127)
                elif recipe not in (INT4, INT4_64):
                    scale = scale.float()
                inputs = {name: tensor for name, tensor in stored.items() if name.startswith("input")}
                dense = {**inputs, "weight": weight.dequantize(torch.float32), "weight_scale": scale}
                if recipe == NVFP4:
                    dense["weight_global_scale"] = stored["weight_global_scale"]
                again = compressor.compress(dense, scheme)
                assert {name: (tensor.dtype, tensor.shape) for name, tensor in again.items()} == {
                    name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()
                }
                for name, tensor in stored.items():
                    got, kept = raw(again[name]), raw(tensor)
                    if name == "weight_packed" and tensor.dtype == torch.uint8:  # the client drops the sign of zeros
                        kept = positive_zeros(kept)
                    assert torch.equal(got, kept), (module, name)

    @pytest.mark.parametrize("case", COMPRESSED_TENSORS)
    def test_engines_find_one_scheme_for_what_they_fuse(self, compressed: dict[str, Exported], case: str) -> None:
        exported = compressed[case]
        for layer in layers_of(linears(exported.model)):
            group = compressed_group(exported.quantization, layer)
            assert (group is not None) is (members(layer)[0] in exported.quantized)
            if group is not None and group["format"] == "nvfp4-pack-quantized":
                stored = [exported.of(module) for module in members(layer)]
                assert len({float(tensors["weight_global_scale"]) for tensors in stored}) == 1
                assert (group["input_activations"] is not None) is ("input_global_scale" in stored[0])


def compressed_group(told: Mapping[str, Any], layer: str) -> Mapping[str, Any] | None:
    """The group that vLLM runs a layer under, by its rules: None for one that is ignored.

    What is ignored are names of modules; targets are such names, too, or that of a class. Of a fused layer either all
    linears are ignored or none, and all are targets of one group.
    """
    ignored = {module in told["ignore"] for module in members(layer)}
    assert len(ignored) == 1, f"{layer}: different schemes in what is fused"
    if ignored == {True}:
        return None
    groups = list(told["config_groups"].values())
    found = [
        {number for number, group in enumerate(groups) if module in group["targets"] or "Linear" in group["targets"]}
        for module in members(layer)
    ]
    assert len(set.union(*found)) == 1, f"{layer}: {found}"
    return dict(groups[found[0].pop()])
