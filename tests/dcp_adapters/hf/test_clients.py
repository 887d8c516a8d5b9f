"""Exports in the hands of transformers, compressed-tensors and safetensors: each weight, and the text they make."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers")

from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
)

from dcp_adapters import export_hf
from examples import smollm2
from qtensor import (
    Float8CurrentScaling,
    Int4GroupScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
    quantize_,
)
from tests.dcp_adapters.hf.exports import (
    FUSED,
    PROMPT,
    Exported,
    assert_equal,
    assert_nvfp4,
    export,
    greedy,
    layers_of,
    linears,
    llama,
    loaded,
    members,
)

ALL = ("",)  # the end of every name
TENSOR = Float8CurrentScaling(granularity="tensor")
ROWS = Float8CurrentScaling()
NVFP4 = NVFP4BlockScaling()
CASES = {
    "fp8_tensor": (TENSOR, ()),
    "fp8_tensor_static": (TENSOR, ALL),
    "fp8_tensor_power_of_two": (Float8CurrentScaling(granularity="tensor", power_of_two=True), ()),
    "fp8_row": (ROWS, ()),
    "fp8_row_static": (ROWS, ALL),
    "fp8_row_power_of_two": (Float8CurrentScaling(power_of_two=True), ALL),
    "mxfp8": (MXFP8BlockScaling(), ()),
    "nvfp4": (NVFP4, ()),
    "nvfp4_static": (NVFP4, ALL),
    "mxfp4": (MXFP4BlockScaling(), ()),
    "int4": (Int4GroupScaling(), ()),
    "int4_64": (Int4GroupScaling(group=64), ()),
}


def check_weights(exported: Exported, client: torch.nn.Module, *, dequantize: bool) -> None:
    """Every tensor of the model, as the client computes with it."""
    rounded = False
    for module, weight in exported.quantized.items():
        got = client.get_submodule(module).weight
        recipe = weight.recipe
        if isinstance(recipe, NVFP4BlockScaling):
            assert_nvfp4(module, got, weight)
            continue
        expected = weight.dequantize(torch.bfloat16)
        if isinstance(recipe, Float8CurrentScaling) and not dequantize:
            # Without it, scales are rounded to bf16 at loading, and so is the product on both sides: 2^-8 each.
            bound = 3 * 2**-8 * (1 + 2**-6) * expected.float().abs()
            assert bool(((got.float() - expected.float()).abs() <= bound).all()), module
            scale = weight.scale.to(torch.bfloat16)
            rounded |= not torch.equal(scale.float(), weight.scale)
            # Products of 4 and 8 bits are exact in fp32, so nothing else is lost.
            expected = (weight.payload.float() * scale.float()).to(torch.bfloat16)
        assert_equal(module, got, expected)
    recipes = [weight.recipe for weight in exported.quantized.values()]
    whole = not any(isinstance(recipe, Float8CurrentScaling) and not recipe.power_of_two for recipe in recipes)
    assert rounded is not (whole or dequantize), "there should be scales that bf16 rounds"
    kept = dict(client.state_dict())
    for name, tensor in exported.dense.items():
        assert_equal(name, kept[name], tensor)


def check_inputs(exported: Exported, client: torch.nn.Module, recipe: Any) -> None:
    """The scales of the inputs, where the export has them."""
    for module, scale in exported.inputs.items():
        state = client.get_submodule(module).state_dict()
        if recipe is NVFP4:
            assert float(1 / state["input_global_scale"]) == pytest.approx(scale, rel=2**-23)
        else:
            assert torch.equal(state["input_scale"], torch.tensor([scale]).to(torch.bfloat16))


def nvfp4_in_file(exported: Exported, module: str) -> QuantizedTensor:
    """The weight that the file tells of."""
    tensors = exported.of(module)
    parts = {
        "payload": tensors["weight_packed"],
        "scale": tensors["weight_scale"],
        "global_scale": torch.reciprocal(tensors["weight_global_scale"]).reshape(()),
    }
    return QuantizedTensor.from_parts(parts, NVFP4, torch.bfloat16)


def check_rounded_again(module: str, old: QuantizedTensor, new: QuantizedTensor) -> None:
    """Each element moves by at most half the largest step of E2M1, which is 1 of 6, under a scale that is rounded to
    E4M3: to 2^-4 of itself, or to half its smallest number, 2^-10."""
    before, after = old.dequantize(torch.float32), new.dequantize(torch.float32)
    amax = before.unflatten(1, (-1, 16)).abs().amax(-1, keepdim=True).expand(-1, -1, 16).flatten(1)
    bound = amax / 6 * (1 + 2**-4) + float(new.global_scale) * 6 * 2**-10
    assert bool(((after - before).abs() <= bound).all()), module


class TestTransformers:
    @pytest.mark.parametrize("case", CASES)
    def test_reads_every_weight_and_the_scales_of_inputs(self, tmp_path: Path, case: str) -> None:
        """In the forward and at loading."""
        recipe, static = CASES[case]
        exported = export(tmp_path / "out", recipe, static=static)
        assert set(exported.quantized) == set(linears(exported.model)) - {"lm_head"}
        expected = greedy(exported.reference())
        for dequantize in (False, True):
            client = loaded(exported.path, dequantize=dequantize)
            check_weights(exported, client, dequantize=dequantize)
            if getattr(recipe, "power_of_two", False):  # exact in both ways
                for module, weight in exported.quantized.items():
                    assert_equal(module, client.get_submodule(module).weight, weight.dequantize(torch.bfloat16))
            tokens = greedy(client)
            if dequantize or case in (
                "nvfp4",
                "mxfp4",
                "int4",
                "int4_64",
            ):  # otherwise the client also quantizes inputs, or rounds the scales
                assert torch.equal(tokens, expected)
            if not dequantize:
                check_inputs(exported, client, recipe)

    @pytest.mark.parametrize(("case", "dequantize"), [("mxfp8", True), ("nvfp4", False)])
    def test_reads_tied_models(self, tmp_path: Path, case: str, dequantize: bool) -> None:
        exported = export(tmp_path / "out", CASES[case][0], model=llama(tied=True))
        assert "lm_head.weight" not in exported.tensors
        client = loaded(exported.path, dequantize=dequantize)
        assert client.lm_head.weight is client.model.embed_tokens.weight
        check_weights(exported, client, dequantize=dequantize)
        assert torch.equal(greedy(client), greedy(exported.reference()))

    @pytest.mark.parametrize(
        ("plan", "exclude"),
        [
            ({"*.mlp.*": NVFP4, "*.self_attn.*": ROWS}, ["model.layers.1.self_attn.*"]),
            ({"*.mlp.*": NVFP4, "*.self_attn.*": ROWS}, ["model.layers.0.mlp.down_proj", "*.1.self_attn.o_proj"]),
            ({"*.mlp.*": MXFP8BlockScaling(), "*.self_attn.*": TENSOR}, ["model.layers.0.*"]),
        ],
    )
    def test_reads_mixtures(self, tmp_path: Path, plan: dict, exclude: list[str]) -> None:
        exported = export(tmp_path / "out", plan, exclude=exclude)
        dense = {name.removesuffix(".weight") for name in exported.dense} & set(linears(exported.model))
        assert len(dense) > 1
        client = loaded(exported.path, dequantize=False)
        check_weights(exported, client, dequantize=False)
        assert greedy(client).shape == (1, 12)

    @pytest.mark.parametrize("exclude", [["model.layers.1.*"], ["model.layers.0.mlp.down_proj"], ["*.self_attn.*"]])
    def test_leaves_excluded_linears_alone(self, tmp_path: Path, exclude: list[str]) -> None:
        exported = export(tmp_path / "out", NVFP4, exclude=exclude)
        for dequantize in (False, True):
            client = loaded(exported.path, dequantize=dequantize)
            check_weights(exported, client, dequantize=dequantize)
            assert torch.equal(greedy(client), greedy(exported.reference()))

    def test_reads_the_kv_cache_scales(self, tmp_path: Path) -> None:
        scales = {
            f"model.layers.{layer}.self_attn.{name}": torch.tensor(0.5 * (layer + 1) * value)
            for layer in range(2)
            for name, value in (("k_scale", 0.25), ("v_scale", 0.125))
        }
        exported = export(tmp_path / "out", MXFP8BlockScaling(), extra=scales)
        client = loaded(exported.path, dequantize=False)
        check_weights(exported, client, dequantize=False)
        state = client.state_dict()
        assert {name: float(state[name]) for name in scales} == {name: float(scale) for name, scale in scales.items()}

    @pytest.mark.parametrize("case", ["fp8_tensor", "fp8_row", "mxfp8", "nvfp4", "mxfp4", "int4"])
    def test_reads_zeros_and_the_smallest_numbers(self, tmp_path: Path, case: str) -> None:
        model = llama()
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.zero_()
            model.model.layers[1].mlp.down_proj.weight.mul_(1e-38)
        exported = export(tmp_path / "out", CASES[case][0], model=model)
        zero, small = (exported.quantized[f"model.layers.{layer}.mlp.down_proj"] for layer in (0, 1))
        assert not zero.dequantize().any()
        assert 0 < float(small.dequantize(torch.float32).abs().max()) < 1e-37
        assert all(tensor.isfinite().all() for tensor in exported.tensors.values() if tensor.dtype == torch.float32)
        assert all(tensor.all() for name, tensor in exported.tensors.items() if name.endswith("global_scale"))
        check_weights(exported, loaded(exported.path, dequantize=True), dequantize=True)

    @pytest.mark.parametrize("case", ["fp8_row", "mxfp4", "int4"])
    def test_reads_experts(self, tmp_path: Path, case: str) -> None:
        recipe = CASES[case][0]
        config = Qwen3MoeConfig(
            vocab_size=128,
            hidden_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            dtype="bfloat16",
        )
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        experts = {name: quantize(value, recipe) for name, value in model.state_dict().items() if ".experts." in name}
        assert {name.rpartition(".")[2] for name in experts} == {"gate_up_proj", "down_proj"}
        exported = export(tmp_path / "out", recipe, model=model, extra=experts)
        stored = {"fp8_row": {"weight"}, "mxfp4": {"weight_packed"}, "int4": {"weight_packed", "weight_shape"}}[case]
        assert set(exported.of("model.layers.0.mlp.experts.3.up_proj")) == {*stored, "weight_scale"}
        client = loaded(exported.path, dequantize=True)
        read = client.state_dict()
        for name, weight in experts.items():
            assert_equal(name, read[name], weight.dequantize(torch.bfloat16))
        for module, weight in exported.quantized.items():
            assert_equal(module, client.get_submodule(module).weight, weight.dequantize(torch.bfloat16))

    def test_fused_weights_that_are_rounded_again_are_read_as_written(self, tmp_path: Path) -> None:
        model = llama()
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight[0, 0] *= 3
        exported = export(tmp_path / "out", NVFP4, model=model, fused_scales="requantize")
        client = loaded(exported.path, dequantize=False)
        for module, weight in exported.quantized.items():
            got = client.get_submodule(module).weight
            renewed = module in ("model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj")
            written = nvfp4_in_file(exported, module)
            assert_nvfp4(module, got, written if renewed else weight)
            if renewed:
                assert torch.equal(
                    written.global_scale, exported.quantized["model.layers.0.self_attn.q_proj"].global_scale
                )
                check_rounded_again(module, weight, written)


class TestSafetensors:
    def test_reads_one_file(self, tmp_path: Path) -> None:
        exported = export(tmp_path / "out", NVFP4)
        assert sorted(path.name for path in exported.path.iterdir()) == ["config.json", "model.safetensors"]
        with safe_open(exported.path / "model.safetensors", "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert set(file.keys()) == set(exported.tensors)

    def test_reads_shards_by_their_index(self, tmp_path: Path) -> None:
        limit = 20_000
        exported = export(tmp_path / "out", MXFP8BlockScaling(), max_shard_size=limit)
        whole = export(tmp_path / "whole", MXFP8BlockScaling())
        index = json.loads((exported.path / "model.safetensors.index.json").read_text())
        files = {name: load_file(exported.path / name) for name in sorted(set(index["weight_map"].values()))}
        assert len(files) > 3
        assert set(files) == {path.name for path in exported.path.glob("*.safetensors")}
        assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
        sizes = {file: sum(tensor.nbytes for tensor in tensors.values()) for file, tensors in files.items()}
        assert index["metadata"]["total_size"] == sum(sizes.values())
        assert max(sizes.values()) <= limit
        for file in files:
            with safe_open(exported.path / file, "pt") as opened:
                assert opened.metadata()["format"] == "pt"
        assert set(exported.tensors) == set(whole.tensors)
        for name, tensor in whole.tensors.items():
            assert torch.equal(exported.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name
        for module in exported.quantized:  # an engine reads a weight with its scales
            assert len({index["weight_map"][f"{module}.{name}"] for name in exported.of(module)}) == 1
        client = loaded(exported.path, dequantize=False)
        check_weights(exported, client, dequantize=False)


class TestConfigs:
    def test_keep_what_the_model_says_of_itself(self, tmp_path: Path) -> None:
        exported = export(tmp_path / "out", MXFP8BlockScaling())
        read = AutoConfig.from_pretrained(exported.path)
        assert type(read) is type(exported.model.config)
        assert read.dtype == torch.bfloat16
        assert {**read.to_dict(), "quantization_config": None, "architectures": None, "_name_or_path": ""} == {
            **exported.model.config.to_dict(),
            "quantization_config": None,
            "architectures": None,
            "_name_or_path": "",
        }

    def test_of_a_module_name_its_architecture_and_its_generation(self, tmp_path: Path) -> None:
        model = llama()
        model.generation_config = GenerationConfig(max_new_tokens=3, eos_token_id=2, pad_token_id=0)
        quantize_(model, MXFP8BlockScaling(), exclude=("lm_head",))
        export_hf(model, tmp_path / "out", progress=False)
        assert AutoConfig.from_pretrained(tmp_path / "out").architectures == ["LlamaForCausalLM"]
        assert loaded(tmp_path / "out", dequantize=False).generate(PROMPT).shape == (1, PROMPT.shape[1] + 3)


@pytest.fixture(scope="module")
def smollm2_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model and its tokenizer, as transformers saves them."""
    directory = tmp_path_factory.mktemp("smollm2") / "dense"
    smollm2.save_pretrained(directory)
    return directory


@pytest.mark.full
# Once in either way: a load takes seconds, and the weights of all kinds are read from a small model above.
@pytest.mark.parametrize(("recipe", "dequantize"), [(NVFP4, False), (TENSOR, True)], ids=["nvfp4", "fp8_tensor"])
def test_the_real_model_makes_the_text_of_its_weights(
    tmp_path: Path, smollm2_directory: Path, recipe: Any, dequantize: bool
) -> None:
    """SmolLM2 in shards: its weights, its tokenizer, its text."""
    model = LlamaForCausalLM.from_pretrained(smollm2_directory, dtype=torch.bfloat16).eval()
    options = {"config": smollm2_directory, "max_shard_size": "40MB"}
    exported = export(tmp_path / "out", recipe, model=model, fused_scales="requantize", **options)
    assert len(exported.quantized) == 30 * 7
    assert len(list(exported.path.glob("*.safetensors"))) > 2
    if recipe == NVFP4:
        written = {module: nvfp4_in_file(exported, module) for module in exported.quantized}
        renewed = {
            module
            for module, weight in written.items()
            if weight.global_scale != exported.quantized[module].global_scale
        }
        assert {name.rpartition(".")[2] for name in renewed} == {name for names in FUSED.values() for name in names}
        for module, weight in written.items():
            if module in renewed:
                check_rounded_again(module, exported.quantized[module], weight)
            else:
                assert torch.equal(weight.payload, exported.quantized[module].payload), module
        for layer in layers_of(list(written)):
            assert len({float(written[module].global_scale) for module in members(layer)}) == 1, layer
        exported = dataclasses.replace(exported, quantized=written)
    client = loaded(exported.path, dequantize=dequantize)
    check_weights(exported, client, dequantize=dequantize)
    tokenizer = AutoTokenizer.from_pretrained(exported.path)
    prompt = tokenizer("One, two, three, four,", return_tensors="pt").input_ids
    text = tokenizer.decode(greedy(client, prompt)[0])
    assert text == tokenizer.decode(greedy(exported.reference(), prompt)[0])
    assert text.startswith(" five, six, seven, eight,")
