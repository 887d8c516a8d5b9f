"""A dense Hugging Face checkpoint read into quantized shards: the bytes of quantizing each full tensor."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from examples.trainers import transformers_fsdp2
from qtensor import NVFP4BlockScaling, QuantizedTensor, quantize, quantized_model_init
from tests.examples.trainers.checkpoints import hold_the_same, quantized_in
from tests.qtensor.recipes_under_test import raw, same_parts
from tests.ranks import run_ranks


def test_it_trains_from_a_dense_checkpoint_whatever_the_number_of_ranks(shared_tmp_path: Path) -> None:
    for ranks in (1, 2):
        for losses in run_ranks(ranks, transformers_fsdp2.main, ["--out", str(shared_tmp_path / str(ranks))]):
            assert losses[-1] < 0.9 * losses[0]
    held = quantized_in(shared_tmp_path / "2" / "trained")
    assert len(held) == 2 * 7 + 1
    assert set(held.values()) == {"NVFP4BlockScaling"}
    assert hold_the_same(shared_tmp_path / "1" / "quantized", shared_tmp_path / "2" / "quantized")
    assert not hold_the_same(shared_tmp_path / "2" / "quantized", shared_tmp_path / "2" / "trained")


def _has_the_bytes_of_the_full_tensors(directory: Path) -> int:
    stored = load_file(directory / "model.safetensors")
    quantized = 0
    for name, param in transformers_fsdp2.load_sharded(directory).named_parameters():
        assert isinstance(param, DTensor)
        full = param.detach().full_tensor()
        if isinstance(full, QuantizedTensor):
            quantized += 1
            assert same_parts(full, quantize(stored[name], NVFP4BlockScaling()))
        else:
            assert torch.equal(raw(full), raw(stored[name]))
    return quantized


@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_has_the_bytes_of_its_full_tensor_quantized(tied: bool, tmp_path: Path) -> None:
    config = LlamaConfig(
        **transformers_fsdp2.TINY, num_hidden_layers=1, num_key_value_heads=2, tie_word_embeddings=tied
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    assert run_ranks(2, _has_the_bytes_of_the_full_tensors, tmp_path) == [7 + (not tied)] * 2


def _is_dense_when_transformers_shards(directory: Path) -> bool:
    with quantized_model_init(NVFP4BlockScaling()):
        sharding = DistributedConfig(fsdp_size=dist.get_world_size())
        model = LlamaForCausalLM.from_pretrained(directory, distributed_config=sharding, dtype=torch.bfloat16)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert isinstance(weight, DTensor)
    return not isinstance(weight.to_local(), QuantizedTensor)


def test_models_that_transformers_shards_are_dense(tmp_path: Path) -> None:
    # what the recipe warns of; when this fails, transformers keeps the parameters it finds, and the warning can go
    config = LlamaConfig(**transformers_fsdp2.TINY, num_hidden_layers=1, num_key_value_heads=2)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    assert all(run_ranks(2, _is_dense_when_transformers_shards, tmp_path))
