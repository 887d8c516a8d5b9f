"""`dtype=` casts parameters; buffers stay, and what transformers keeps in fp32; config.json says what is there."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from dcp_adapters import export_hf
from dcp_adapters.hf.models.kept_dtypes import Roles
from qtensor import MXFP8BlockScaling, quantize_
from tests.dcp_adapters.cases import save
from tests.dcp_adapters.streams.cases import files
from tests.ranks import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32
MXFP8 = MXFP8BlockScaling()
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 96,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "tie_word_embeddings": False,
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
ROUTERS = {
    "DeepseekV3ForCausalLM": SIZES | LATENT,
    "Glm4MoeForCausalLM": SIZES | {"head_dim": 32},
    # what stays in fp32 are parameters here, and the rest of the name is that of a linear
    "Ernie4_5_MoeForCausalLM": {**SIZES, "moe_num_experts": 32, "moe_k": 4},
}
STAY = ("e_score_correction_bias", "gate.weight", "moe_statics")


def router(name: str, dtype: torch.dtype = FP32) -> Any:
    """A model of transformers, whose correction bias has differences that bf16 does not have; linears quantized."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**ROUTERS[name]))
    for module in model.modules():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if (tensor.ndim == 1 and tensor.numel() == 32) or tensor.shape == (1, 32):
                tensor.data = 1 + torch.rand(tensor.shape, dtype=FP32) / 64
    quantize_(model, MXFP8, include=["*_proj*"], exclude=["*experts*"])
    if dtype != FP32:  # as transformers loads it
        for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "bias" not in tensor_name and "gate.weight" not in tensor_name and "moe_statics" not in tensor_name:
                tensor.data = tensor.data.to(dtype)
    return model


def written(source: Any, path: Path, **options: Any) -> dict[str, Tensor]:
    export_hf(source, path, **{"dtype": BF16, "progress": False, **options})
    return files(path)


def assert_kept(found: dict[str, Tensor], state: dict[str, Any], stay: tuple[str, ...]) -> None:
    """What stays is there bit for bit, and it alone is in fp32."""
    kept = [name for name in found if name.endswith(stay)]
    assert kept
    for name in kept:
        own = state[name] if name in state else state[name.replace("mlp.moe_statics", "mlp.gate.moe_statics")]
        assert torch.equal(found[name], own), name
        assert not torch.equal(found[name], own.bfloat16().float()), "bf16 has none of these values"
    wide = {name for name, tensor in found.items() if tensor.dtype == FP32}
    assert wide == {*kept}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_s_bias_stays_whatever_the_model_is_given_as(name: str, tmp_path: Path) -> None:
    model = router(name)
    state = model.state_dict()
    stay = ("e_score_correction_bias",) if "Ernie" not in name else STAY
    config = model.config.to_dict() | {"architectures": [name]}
    save(state, tmp_path / "checkpoint")
    dense = {key: value for key, value in state.items() if not hasattr(value, "recipe")}
    for number, (source, options) in enumerate(
        (
            (model, {}),
            ({"model": state, "step": torch.zeros(())}, {"config": config, "prefix": "model."}),
            (tmp_path / "checkpoint", {"config": config}),
            ({key: value for key, value in state.items() if key not in dense}, {"config": config, "rest": dense}),
            ({key: value for key, value in state.items() if key not in dense}, {"config": config, "rest": model}),
        )
    ):
        out = tmp_path / str(number)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = written(source, out, **options)
        assert_kept(found, state, stay)
        told = json.loads((out / "config.json").read_text())
        assert told["dtype"] == "bfloat16"


def test_transformers_loads_the_bias_of_the_training(tmp_path: Path) -> None:
    """And computes with it: in bf16 many of the 32 values would be one."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    model = router("DeepseekV3ForCausalLM")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = model.state_dict()[name]
    assert len(bias.unique()) > 4 * len(bias.bfloat16().unique())
    written(model, tmp_path / "out")
    how = transformers.CompressedTensorsConfig(dequantize=True)
    with pytest.warns(UserWarning, match="already has a `quantization_config` attribute"):
        loaded = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "out", quantization_config=how)
    assert loaded.dtype == BF16
    assert torch.equal(loaded.state_dict()[name], bias)


class Stranger(nn.Module):
    """A model of nobody's: a norm with running statistics, and in a module of it, what transformers would keep."""

    class Part(nn.Module):
        _keep_in_fp32_modules_strict = ("gate.weight",)
        _keep_in_fp32_modules = ("wo*.bias",)

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.wo2 = nn.Linear(64, 4, bias=False), nn.Linear(64, 64)

    def __init__(self) -> None:
        super().__init__()
        self.up, self.part, self.norm = nn.Linear(64, 64), self.Part(), nn.BatchNorm1d(64)
        self.register_buffer("table", torch.rand(4, 64) + 1)
        torch.nn.init.uniform_(self.norm.running_mean, 1, 2)
        quantize_(self, MXFP8, include=["up", "part.wo2"])


KEPT = {"part.gate.weight", "part.wo2.bias", "norm.running_mean", "norm.running_var", "table"}


def test_of_any_module_buffers_stay(tmp_path: Path) -> None:
    model = Stranger()
    state = model.state_dict()
    for number, (source, options) in enumerate(
        ((model, {}), (nn.ModuleDict({"m": model}), {"prefix": "m."}), (torch.compile(model), {}))
    ):
        found = written(source, tmp_path / str(number), config={"model_type": "mine"}, **options)
        assert {name for name, tensor in found.items() if tensor.dtype == FP32} == KEPT
        assert all(torch.equal(found[name], state[name]) for name in KEPT)
        assert found["norm.num_batches_tracked"].dtype == torch.int64
        assert torch.equal(found["up.bias"], state["up.bias"].bfloat16())


def on_ranks(path: str) -> None:
    torch.manual_seed(0)
    model = Stranger()
    fully_shard(model)
    found = written(model, Path(path), config={"model_type": "mine"})
    if dist.get_rank() == 0:
        assert {name for name, tensor in found.items() if tensor.dtype == FP32} == KEPT


def test_of_a_sharded_module_buffers_stay(tmp_path: Path) -> None:
    run_ranks(2, on_ranks, str(tmp_path / "out"))


def test_where_nobody_knows_what_is_in_fp32_beside_others_stays(tmp_path: Path) -> None:
    model = Stranger()
    state = model.state_dict()
    few = {name: value.bfloat16() if name.endswith(".bias") else value for name, value in state.items()}
    words = (
        r"^export_hf: dtype=torch.bfloat16: nothing tells parameters.* beside others in fewer bits stay .*; give the"
    )
    with pytest.warns(UserWarning, match=words):
        found = written(few, tmp_path / "few", config={"model_type": "mine"})
    wide = {name for name, tensor in found.items() if tensor.dtype == FP32}
    assert wide == KEPT - {"part.wo2.bias"} | {"norm.weight"}
    with pytest.warns(
        UserWarning, match=r"among 8 tensors \(table, up.bias, .*\): all are cast; give the module itself"
    ):
        found = written(state, tmp_path / "all", config={"model_type": "mine"})
    assert not any(tensor.dtype == FP32 for tensor in found.values())
    already = {name: value.bfloat16() if value.dtype == FP32 and name in few else value for name, value in few.items()}
    dense = {name: value for name, value in already.items() if value.dtype == BF16}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert written(dense, tmp_path / "none", config={"model_type": "mine"}), "nothing is cast, nothing is told"


def test_names_that_begin_otherwise_than_the_model_s() -> None:
    """Their ends tell, where all tensors of that end are alike."""
    roles = Roles.of(router("DeepseekV3ForCausalLM"))
    assert roles.stays("language_model.layers.1.mlp.gate.e_score_correction_bias") is True
    assert roles.stays("language_model.layers.1.mlp.gate.weight") is False
    assert roles.stays("score.weight") is None


def test_linears_of_experts_that_one_weight_in_memory_is_made_of_are_cast(tmp_path: Path) -> None:
    """Taken from a directory in fp32, under names of which no word is known in memory (w1)."""
    renamed = pytest.importorskip("tests.dcp_adapters.hf.renamed_models")
    model = renamed.built("MixtralForCausalLM").float()
    model.save_pretrained(tmp_path / "dense")
    quantize_(model, MXFP8, include=["*_proj"])
    state = {name: value for name, value in model.state_dict().items() if "_proj" in name and "experts" not in name}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = written(state, tmp_path / "out", config=tmp_path / "dense", rest=tmp_path / "dense")
    experts = {name: value.dtype for name, value in found.items() if ".experts." in name}
    assert len(experts) == 24
    assert set(experts.values()) == {BF16}


def test_config_json_says_the_dtype_in_all_its_sections(tmp_path: Path) -> None:
    config = {
        "model_type": "mine",
        "torch_dtype": "float32",
        "text_config": {"dtype": "float32", "a": 1, "rope": {"dtype": "linear"}},
        "vision_config": {"torch_dtype": "float32", "head_config": {"dtype": "float16"}},
        "audio_config": {"a": 1},
    }
    model = nn.Sequential(nn.Linear(64, 64))
    quantize_(model, MXFP8)
    written(model, tmp_path / "out", config=config)
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    del told["quantization_config"]
    assert told == {
        "model_type": "mine",
        "dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "a": 1, "rope": {"dtype": "linear"}},
        "vision_config": {"torch_dtype": "bfloat16", "head_config": {"dtype": "bfloat16"}},
        "audio_config": {"a": 1},
    }


def test_the_command_builds_models_as_transformers_loads_them(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    from layerwise.command.config import ModelKeys
    from layerwise.command.model import built

    transformers = pytest.importorskip("transformers")
    kind = transformers.DeepseekV3ForCausalLM
    model = kind(kind.config_class(**ROUTERS["DeepseekV3ForCausalLM"]))
    model.save_pretrained(tmp_path / "m")
    loaded = kind.from_pretrained(tmp_path / "m", dtype=BF16)
    found = built(ModelKeys(path=tmp_path / "m", dtype="bfloat16"))
    dtypes = {name: tensor.dtype for name, tensor in loaded.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in found.state_dict().items()} == dtypes
    assert {name for name, dtype in dtypes.items() if dtype == FP32} == {
        "model.layers.1.mlp.gate.e_score_correction_bias"
    }
