"""Tiny models of transformers' families, with data, and how results of calibrations are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from qtensor import QuantizedTensor

VOCABULARY, HIDDEN = 48, 32
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **TOKENS,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
SMALL = {**GROUPED, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
SHARED = {  # the last layer takes keys and values of the one before
    **SMALL,
    "num_hidden_layers": 3,
    "intermediate_size": [64] * 3,
    "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 4,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 32,
    "laurel_rank": 32,
    "activation_sparsity_pattern": [0.0] * 3,
}

Make: TypeAlias = Callable[[], nn.Module]

FAMILIES: dict[str, Make] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **EXPERTS)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, **WINDOWS)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, **WINDOWS)),
    "gemma3n": lambda: Gemma3nForCausalLM(Gemma3nTextConfig(**SHARED)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**GROUPED)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=64, **TOKENS)
    ),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(**{**SMALL, **WINDOWS}, num_local_experts=4, num_experts_per_tok=2)
    ),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**COMMON)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**COMMON, ffn_dim=64, word_embed_proj_dim=HIDDEN)),
    "bert": lambda: BertForMaskedLM(BertConfig(**COMMON)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, d_model=HIDDEN, d_ff=64, d_kv=8, num_layers=2, num_heads=4, **TOKENS)
    ),
    "qwen3-vl": lambda: Qwen3VLTextModel(Qwen3VLTextConfig(**SMALL)),
}


def family(name: str) -> nn.Module:
    """A model with weights, norms and biases that all differ."""
    torch.manual_seed(0)
    model = FAMILIES[name]().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator) * 0.1)
    return model


def batches_for(name: str, lengths: tuple[int, ...] = (12, 7, 9)) -> list[dict[str, Any]]:
    """Keyword arguments; the first batch is padded where the family takes a mask."""
    generator = torch.Generator().manual_seed(2)
    batches = []
    for length in lengths:
        ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
        batch: dict[str, Any] = {"input_ids": ids}
        if name == "t5":
            batch["decoder_input_ids"] = torch.randint(3, VOCABULARY, (2, length - 2), generator=generator)
        elif name == "qwen3-vl":
            seen = ids % 3 == 0
            features = [torch.randn(int(seen.sum()), HIDDEN, generator=generator) for _ in range(2)]
            batch |= {"visual_pos_masks": seen, "deepstack_visual_embeds": features}
        else:
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][0, : length // 4] = 0
        batches.append(batch)
    return batches


@torch.no_grad()
def output(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Logits, or the last hidden state of a model without a head."""
    return model(**batch)[0]


def off(found: Tensor, expected: Tensor) -> float:
    """Relative RMS error."""
    return float((found - expected).detach().norm() / expected.detach().norm())


def parts(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """All the bytes of a result's state dict on this rank."""
    taken = {}
    for name, value in state.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        own = local.parts() if isinstance(local, QuantizedTensor) else {"": local.detach()}
        taken |= {f"{name}:{part}": tensor for part, tensor in own.items()}
    return taken


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any], what: str = "") -> None:
    """Two state dicts, byte for byte."""
    got, want = parts(found), parts(expected)
    assert got.keys() == want.keys(), (what, got.keys() ^ want.keys())
    for name, tensor in want.items():
        assert (got[name].shape, got[name].dtype) == (tensor.shape, tensor.dtype), (what, name)
        same = got[name].reshape(-1).view(torch.uint8) == tensor.reshape(-1).view(torch.uint8)
        assert bool(same.all()), f"{what}: {name}: {int((~same).sum())} of {same.numel()} bytes differ"
