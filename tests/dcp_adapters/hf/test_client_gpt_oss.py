"""The experts of gpt-oss: what transformers makes of an export, and an import of the files that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import Mxfp4Config

from dcp_adapters import export_hf, import_hf
from dcp_adapters.hf.reading.reader import HuggingFaceReader
from dcp_adapters.hf.reading.verify_directory import verify_directory
from qtensor import Int4GroupScaling, MXFP4BlockScaling, quantize, quantize_
from tests.dcp_adapters.cases import assert_holds, bits, values
from tests.dcp_adapters.hf.directories import write
from tests.dcp_adapters.hf.exports import PROMPT, assert_equal, loaded
from tests.ranks import run_ranks

RECIPE = MXFP4BlockScaling()
EXPERTS, HIDDEN, INNER = 5, 64, 32  # two of three ranks get more experts than the last
CONFIG = {"model_type": "gpt_oss"}


def tiny() -> Any:
    torch.manual_seed(3)
    config = GptOssConfig(
        vocab_size=128,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) / 8)
    return model


def quantized_experts(model: Any) -> dict[str, Any]:
    """The state dict with the experts' weights as rows of linears, quantized."""
    return {
        name: quantize(value.transpose(1, 2).contiguous(), RECIPE) if name.endswith(("up_proj", "down_proj")) else value
        for name, value in model.state_dict().items()
    }


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, Any]]:
    path = tmp_path_factory.mktemp("gpt_oss") / "out"
    model = tiny()
    state = quantized_experts(model)
    export_hf(state, path, layout="mxfp4", config=model.config, progress=False)
    return path, model, state


def test_transformers_reads_every_weight(exported: Any) -> None:
    path, _, state = exported
    options = {"dtype": torch.bfloat16, "local_files_only": True}
    client = AutoModelForCausalLM.from_pretrained(path, quantization_config=Mxfp4Config(dequantize=True), **options)
    read, count = client.state_dict(), 0
    for name, value in state.items():
        if hasattr(value, "recipe"):
            assert_equal(name, read[name], value.dequantize(torch.bfloat16).transpose(1, 2).contiguous())
            count += 1
        else:
            assert_equal(name, read[name], value)
    assert count == 4
    assert client(PROMPT).logits.isfinite().all()


def test_its_packed_tensors_are_the_bytes(exported: Any) -> None:
    path, _, state = exported
    stored = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    weight = state[name]
    assert bits(stored[f"{name}_blocks"]) == bits(weight.payload)
    assert stored[f"{name}_blocks"].shape == (EXPERTS, 2 * INNER, HIDDEN // 32, 16)
    assert bits(stored[f"{name}_scales"]) == bits(weight.scale)
    assert f"{name}_bias" in stored
    values_of = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
    assert_equal(name, values_of, weight.dequantize(torch.bfloat16).transpose(1, 2).contiguous())


def test_what_is_imported_is_exported_to_the_same_files(exported: Any, tmp_path: Path) -> None:
    path, model, state = exported
    found = import_hf(path)
    assert_holds(found, state)
    export_hf({name: found[name] for name in state}, tmp_path / "b", layout="mxfp4", config=model.config)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "b" / file).read_bytes() == (path / file).read_bytes()
    assert verify_directory(path).ok
    assert HuggingFaceReader(path).presented().layout == "mxfp4"


def test_a_model_that_multiplies_by_the_weight_as_it_is_is_refused(exported: Any) -> None:
    path, model, _ = exported
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for on_mismatch in ("raise", "convert"):
        with pytest.raises(ValueError, match="can not be imported; nothing has been loaded") as caught:
            import_hf(path, model, on_mismatch=on_mismatch)
        text = "experts.down_proj: the directory has rows of linears, [E, N, K], and the model multiplies by the weight"
        assert f"model.layers.0.mlp.{text} as it is, [E, K, N]" in str(caught.value)
    assert_holds(model.state_dict(), before)


def test_the_dense_model_takes_the_values_by_the_way_out_of_the_message(exported: Any) -> None:
    path, model, state = exported
    found = import_hf(path)
    name = "model.layers.0.mlp.experts.down_proj"
    dense = found[name].dequantize().transpose(1, 2)
    assert dense.shape == model.state_dict()[name].shape
    assert torch.equal(dense, state[name].dequantize().transpose(1, 2))


# -- models whose weights are rows of linears --------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("gate_up_proj", (EXPERTS, 2 * INNER, HIDDEN)), ("down_proj", (EXPERTS, HIDDEN, INNER))):
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))
            bias = torch.zeros(shape[:2], dtype=torch.bfloat16)
            self.register_parameter(f"{name}_bias", nn.Parameter(bias))


def model_of_linears(recipe: Any) -> Any:
    net = nn.Module()
    net.mlp = nn.Module()
    net.mlp.experts = Experts()
    if recipe is not None:
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(net.mlp.experts, name)
            setattr(net.mlp.experts, name, nn.Parameter(quantize(weight.detach(), recipe), requires_grad=False))
    return net


def state_of_linears() -> dict[str, Any]:
    return {
        "mlp.experts.gate_up_proj": quantize(values((EXPERTS, 2 * INNER, HIDDEN), 1), RECIPE),
        "mlp.experts.gate_up_proj_bias": values((EXPERTS, 2 * INNER), 2),
        "mlp.experts.down_proj": quantize(values((EXPERTS, HIDDEN, INNER), 3), RECIPE),
        "mlp.experts.down_proj_bias": values((EXPERTS, HIDDEN), 4),
    }


def by_hand(path: Path, state: dict[str, Any]) -> Path:
    """The files, written from the parts by what the layout says of them."""
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if hasattr(value, "recipe"):
            e, n, k = value.shape
            tensors |= {f"{name}_blocks": value.payload.reshape(e, n, k // 32, 16), f"{name}_scales": value.scale}
        else:
            tensors[name] = value
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return write(path, tensors, {**CONFIG, "quantization_config": config}, files=2)


def _imported(path: str, full: dict[str, Any]) -> None:
    net, dense = model_of_linears(RECIPE), model_of_linears(None)
    if dist.is_initialized():
        fully_shard(net)
        fully_shard(dense)
    found = import_hf(path, net)
    assert_holds(found, full)
    export_hf(found, f"{path}-again", layout="mxfp4", config=CONFIG, progress=False)
    expected = {name: value.dequantize() if hasattr(value, "recipe") else value for name, value in full.items()}
    assert_holds(import_hf(path, dense, on_mismatch="convert"), expected)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_hold_the_bytes_and_export_them(ranks: int, tmp_path: Path) -> None:
    state = state_of_linears()
    path = by_hand(tmp_path / "a", state)
    run_ranks(ranks, _imported, str(path), state)
    assert_holds(import_hf(tmp_path / "a-again"), state)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another model": (
        {"layout": "mxfp4", "config": {"model_type": "llama"}},
        "layout='mxfp4' is that of gpt_oss, and the config is that of llama; use layout=\"compressed-tensors\"",
    ),
    "another layout": (
        {"config": CONFIG},
        'engines know the experts of gpt_oss in layout="mxfp4" alone; use that',
    ),
    "another layout, and no config": (
        {"layout": "modelopt"},
        "mlp.experts.gate_up_proj, mlp.experts.down_proj: with biases beside them, these are experts as gpt-oss has",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_engines_would_misread_is_refused(case: str, tmp_path: Path) -> None:
    options, text = REFUSED[case]
    with pytest.raises(ValueError, match=r"mlp|layout") as caught:
        export_hf(state_of_linears(), tmp_path / "out", **options)
    assert text in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_linears_beside_dense_experts_are_those_of_any_layout(tmp_path: Path) -> None:
    model = tiny()
    quantize_(model, Int4GroupScaling(), include=("*.self_attn.*",))
    state = dict(model.state_dict())
    export_hf(state, tmp_path / "out", config=model.config, progress=False)
    read = loaded(tmp_path / "out", dequantize=True).state_dict()
    for name, value in state.items():
        assert_equal(name, read[name], value.dequantize(torch.bfloat16) if hasattr(value, "recipe") else value)
