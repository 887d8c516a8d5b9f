"""What a rotation has written comes along with the result of a calibration, so that no older file takes its place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcp_adapters import export_hf
from layerwise import Max, calibrate, rotate_
from qtensor import NVFP4BlockScaling, QuantizedTensor
from tests.layerwise.rotating.decoders import BLOCK, VOCAB, decoder, digest, filled, ids
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")


def llama(**changes: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes | heads | {"tie_word_embeddings": False} | changes)
    return filled(transformers.LlamaForCausalLM(config), torch.float32)


def calibrated(model: Any, **options: Any) -> Any:
    batches = [{"input_ids": ids(), "use_cache": False}]
    options = {"recipe": NVFP4BlockScaling(), "algorithm": Max(), "exclude": ("lm_head",)} | options
    return calibrate(model, batches, **options, progress=False)


def stored(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def test_an_export_with_the_rest_of_the_original_has_the_rotated_values(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "original")
    report = rotate_(model, {"input_ids": ids()})
    result = calibrated(model, exclude=("lm_head", "*.o_proj"))
    export_hf(result, tmp_path / "out", rest=tmp_path / "original", config=tmp_path / "original", progress=False)
    files, original = stored(tmp_path / "out"), stored(tmp_path / "original")
    dense = {name: param for name, param in model.named_parameters() if name in files}
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} < {*dense} & {*report.changed}
    assert "model.layers.1.self_attn.o_proj.weight" in dense
    for name, param in dense.items():
        assert torch.equal(files[name], param.detach()), name
        assert torch.equal(files[name], original[name]) == (name not in report.changed), name


def test_without_a_rotation_a_result_has_quantized_weights_alone() -> None:
    found = calibrated(llama()).state_dict()
    assert found
    assert all(isinstance(value, QuantizedTensor) for value in found.values())


def test_a_tied_weight_comes_once() -> None:
    model = decoder().float()
    model.lm_head.weight = model.embed_tokens.weight
    torch.nn.init.constant_(model.norm.weight, 0.7)
    rotate_(model, ids(), block=BLOCK)
    found = calibrate(
        model, [ids()], recipe=NVFP4BlockScaling(), algorithm=Max(), exclude=("lm_head",), progress=False
    ).state_dict()
    assert "embed_tokens.weight" in found
    assert "lm_head.weight" not in found


def sharded() -> list[str]:
    """The names of a result's dense values, after comparing them with those of a model that is not sharded."""
    model = llama()
    rotate_(model, {"input_ids": ids()})
    dense = digest(model)
    model = copy.deepcopy(model)  # the note is kept
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found = {n: v for n, v in calibrated(model).state_dict().items() if "proj" not in n}
    for name, value in found.items():
        assert digest(torch.nn.ParameterDict({"one": value.full_tensor()}))["one"] == dense[name], name
    return list(found)


def test_a_sharded_result_has_them_in_shards() -> None:
    for names in run_ranks(2, sharded):
        assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} <= {*names}
        assert sum(name.endswith("layernorm.weight") for name in names) == 4
