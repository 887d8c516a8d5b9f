"""Exports of Float8 in blocks in the hands of transformers, torch's reader and compressed-tensors: the values of each.

All of them multiply a payload of 4 significant bits by an fp32 scale in fp32 and round once, as this library does; so
the values are the same, bit for bit, and no test here has a tolerance.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import QuantizedHuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import FineGrainedFP8Config

from dcp_adapters import export_hf, import_hf
from qtensor import Float8BlockScaling, quantize
from tests.dcp_adapters.cases import alone, assert_holds, assert_piece, bits, values
from tests.dcp_adapters.hf.directories import write
from tests.dcp_adapters.hf.exports import Exported, assert_equal, export, greedy, linears, loaded, raw
from tests.ranks import run_ranks

BLOCKS = Float8BlockScaling()
RECIPES = {"plain": BLOCKS, "powers of two": Float8BlockScaling(power_of_two=True)}
RAGGED = {"l.o": (576, 320), "l.down": (192, 128), "l.small": (100, 5), "l.one": (1, 300), "l.even": (256, 384)}


def random_model(config: Any) -> PreTrainedModel:
    torch.manual_seed(7)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(values(tuple(weight.shape), len(name)) / 64 if weight.ndim > 1 else torch.ones_like(weight))
    return model


def llama() -> PreTrainedModel:
    """Weights of several blocks each."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=128, num_hidden_layers=2, tie_word_embeddings=False, dtype="bfloat16", **sizes)
    return random_model(config)


def check(exported: Exported, client: torch.nn.Module) -> None:
    for module, weight in exported.quantized.items():
        assert_equal(module, client.get_submodule(module).weight, weight.dequantize(torch.bfloat16))
    state = client.state_dict()
    for name, tensor in exported.dense.items():
        assert_equal(name, state[name], tensor)


def ragged_state(recipe: Any = BLOCKS) -> dict[str, Any]:
    state: dict[str, Any] = {"embed.weight": values((19, 64), 500)}
    for seed, (module, shape) in enumerate(RAGGED.items()):
        state[f"{module}.weight"] = quantize(values(shape, seed), recipe)
    return state


class TestTransformers:
    @pytest.mark.parametrize("name", RECIPES)
    def test_reads_every_weight(self, name: str, tmp_path: Path) -> None:
        """Without a GPU it dequantizes while it loads."""
        exported = export(tmp_path / "out", RECIPES[name], model=llama(), exclude=["*.1.mlp.*"], layout="fp8")
        assert len(exported.quantized) == len(linears(exported.model)) - 4  # lm_head, too
        client = loaded(exported.path, dequantize=False)
        check(exported, client)
        assert torch.equal(greedy(client), greedy(exported.reference()))

    @pytest.mark.parametrize("name", RECIPES)
    def test_its_config_takes_ours(self, name: str, tmp_path: Path) -> None:
        exported = export(tmp_path / "out", RECIPES[name], model=llama(), exclude=["*.1.mlp.*"], layout="fp8")
        said = AutoConfig.from_pretrained(exported.path).quantization_config
        parsed = FineGrainedFP8Config.from_dict(said)
        assert (parsed.activation_scheme, tuple(parsed.weight_block_size)) == ("dynamic", (128, 128))
        assert parsed.scale_fmt == ("float" if name == "plain" else "ue8m0")
        told = {name for name in linears(exported.model) if should_convert_module(name, parsed.modules_to_not_convert)}
        assert told == set(exported.quantized)

    def test_reads_experts(self, tmp_path: Path) -> None:
        config = Qwen3MoeConfig(
            vocab_size=128,
            hidden_size=256,
            moe_intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=128,
            num_experts=4,
            num_experts_per_tok=2,
            dtype="bfloat16",
        )
        model = random_model(config)
        experts = {name: quantize(value, BLOCKS) for name, value in model.state_dict().items() if ".experts." in name}
        assert {name.rpartition(".")[2] for name in experts} == {"gate_up_proj", "down_proj"}
        exported = export(tmp_path / "out", BLOCKS, model=model, extra=experts, layout="fp8")
        assert set(exported.of("model.layers.0.mlp.experts.3.up_proj")) == {"weight", "weight_scale_inv"}
        client = loaded(exported.path, dequantize=False)
        read = client.state_dict()
        for name, weight in experts.items():
            assert_equal(name, read[name], weight.dequantize(torch.bfloat16))
        for module, weight in exported.quantized.items():
            assert_equal(module, client.get_submodule(module).weight, weight.dequantize(torch.bfloat16))

    def test_writes_what_is_read(self, tmp_path: Path) -> None:
        """Its own quantizer's blocks, of scales in fp32 and in 8 bits."""
        for name in ("float", "ue8m0"):
            client = type("Client", (), {"quantization_config": FineGrainedFP8Config(scale_fmt=name)})()
            dense = values((256, 384), 3)
            tensors = Fp8Quantize(client).convert({"a.weight": dense})
            config = FineGrainedFP8Config(scale_fmt=name).to_dict() | {"modules_to_not_convert": ["lm_head"]}
            found = read_again(tmp_path / name, tensors, config)
            back = Fp8Dequantize(client).convert(
                {"weight": [tensors["a.weight"]], "weight_scale_inv": [tensors["a.weight_scale_inv"].float()]}
            )
            assert bits(found.payload) == bits(tensors["a.weight"])
            assert torch.equal(found.dequantize(torch.float32), back["weight"])
            assert found.recipe.power_of_two is (name == "ue8m0")

    def test_takes_ragged_blocks_for_smaller_ones(self) -> None:
        """What docs/export.md says of it: it makes the size of a block from the numbers of rows and of scales."""
        read = Fp8Dequantize(None)
        for shape in ((256, 384), (100, 5), (128, 300)):
            q: Any = quantize(values(shape, 1), BLOCKS)
            parts = {"weight": [q.payload], "weight_scale_inv": [q.scale[::128]]}
            if shape[1] != 300:
                assert torch.equal(read.convert(parts)["weight"], q.dequantize(torch.float32))
            else:  # 3 scales for 300 columns: blocks of 100
                assert not torch.equal(read.convert(parts)["weight"], q.dequantize(torch.float32))
        q = quantize(values((576, 128), 1), BLOCKS)
        with pytest.raises(ValueError, match=re.escape("(576, 128) not divisible by scale grid (5, 1)")):
            read.convert({"weight": [q.payload], "weight_scale_inv": [q.scale[::128]]})


def read_again(path: Path, tensors: dict[str, Tensor], config: Any) -> Any:
    return import_hf(write(path, tensors, {"quantization_config": config}))["a.weight"]


def _sharded(path: str) -> None:
    """What torch's reader makes of each rank's rows, which cut blocks."""
    whole = {name: value for name, value in ragged_state().items() if name != "embed.weight"}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {name: distribute_tensor(torch.zeros(q.shape), mesh, [Shard(0)]) for name, q in whole.items()}
    dcp.load(dict(found), storage_reader=QuantizedHuggingFaceStorageReader(path))
    for name, q in whole.items():
        assert_piece(found[name], q.dequantize(torch.float32), name)


class TestTorch:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_its_reader_gives_every_value(self, dtype: torch.dtype, tmp_path: Path) -> None:
        state = ragged_state()
        path = export_hf(state, tmp_path / "out", layout="fp8", config={"model_type": "tiny"}, max_shard_size=100_000)
        found = {name: torch.zeros(value.shape, dtype=dtype) for name, value in state.items()}
        with alone():
            dcp.load(found, storage_reader=QuantizedHuggingFaceStorageReader(str(path), target_dtype=dtype))
        for name, value in state.items():
            expected = value.to(dtype) if name == "embed.weight" else value.dequantize(dtype)
            assert torch.equal(found[name], expected), name

    @pytest.mark.parametrize("ranks", [1, 3])
    def test_its_reader_gives_every_value_of_a_shard(self, ranks: int, tmp_path: Path) -> None:
        options = {"config": {"model_type": "tiny"}, "max_shard_size": 100_000}
        path = export_hf(ragged_state(), tmp_path / "out", layout="fp8", **options)
        run_ranks(ranks, _sharded, str(path))


class TestCompressedTensors:
    def test_transformers_reads_every_weight(self, tmp_path: Path) -> None:
        exported = export(tmp_path / "out", BLOCKS, model=llama(), exclude=["*.1.mlp.*"])
        client = loaded(exported.path, dequantize=True)
        check(exported, client)
        assert torch.equal(greedy(client), greedy(exported.reference()))

    def test_its_scheme_is_the_one_that_is_written(self, tmp_path: Path) -> None:
        exported = export(tmp_path / "out", BLOCKS, model=llama())
        (scheme,) = QuantizationConfig.model_validate(exported.quantization).config_groups.values()
        preset = preset_name_to_scheme("FP8_BLOCK", ["Linear"])
        assert (scheme.weights, scheme.input_activations) == (preset.weights, preset.input_activations)
        assert scheme.format == "float-quantized"

    @pytest.mark.parametrize("name", RECIPES)
    def test_its_compressor_writes_and_reads_the_same_tensors(self, name: str, tmp_path: Path) -> None:
        """Ragged blocks, too."""
        state = ragged_state(RECIPES[name])
        exported = Exported(export_hf(state, tmp_path / "out", config={"model_type": "tiny"}), None, {}, {})  # type: ignore[arg-type]
        (scheme,) = QuantizationConfig.model_validate(exported.quantization).config_groups.values()
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        for module in RAGGED:
            stored, weight = exported.of(module), state[f"{module}.weight"].dequantize(torch.float32)
            assert torch.equal(compressor.decompress(dict(stored), scheme)["weight"], weight), module
            again = compressor.compress({"weight": weight, "weight_scale": stored["weight_scale"]}, scheme)
            assert again.keys() == stored.keys()
            assert all(torch.equal(raw(again[own]), raw(tensor)) for own, tensor in stored.items()), module
        assert_holds(import_hf(exported.path), state)
