"""Tiny random models of transformers whose tensors have other names in files than in memory, and some that have not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
QWEN2_VL_VISION = {"depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 8}
PROMPT = torch.tensor([[1, 9, 17, 3, 77, 20]])


def _config(name: str, **values: Any) -> Any:
    return getattr(transformers, name)(**values)


def _gemma3() -> Any:
    text = _config("Gemma3TextConfig", **TEXT, sliding_window=32)
    return _config("Gemma3Config", text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_index=5)


def _llava(text: str = "LlamaConfig") -> Any:
    vision = _config("CLIPVisionConfig", **VISION, projection_dim=32)
    return _config("LlavaConfig", text_config=_config(text, **TEXT), vision_config=vision, image_token_index=5)


def _mistral3() -> Any:
    text = _config("MistralConfig", **TEXT)
    return _config(
        "Mistral3Config", text_config=text, vision_config=_config("PixtralVisionConfig", **VISION), image_token_index=5
    )


def _qwen2_vl() -> Any:
    text = {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 4]}}
    return _config("Qwen2VLConfig", text_config=text, vision_config=QWEN2_VL_VISION)


def _llama4() -> Any:
    return _config(
        "Llama4TextConfig",
        **TEXT,
        intermediate_size_mlp=128,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        attention_chunk_size=32,
    )


def _deepseek_v3() -> Any:
    text = {key: value for key, value in TEXT.items() if key not in ("head_dim", "num_key_value_heads")}
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {**EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1}
    return _config("DeepseekV3Config", **text, **sizes, **experts)


# class of the model -> its config
CONFIGS: dict[str, Callable[[], Any]] = {
    "LlamaForCausalLM": lambda: _config("LlamaConfig", **TEXT),
    "Gemma3ForConditionalGeneration": _gemma3,
    "LlavaForConditionalGeneration": _llava,
    "Mistral3ForConditionalGeneration": _mistral3,
    "Qwen2VLForConditionalGeneration": _qwen2_vl,
    "MixtralForCausalLM": lambda: _config("MixtralConfig", **TEXT, num_local_experts=4, num_experts_per_tok=2),
    "Qwen3MoeForCausalLM": lambda: _config("Qwen3MoeConfig", **TEXT, **EXPERTS, num_experts=4),
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "Llama4ForCausalLM": _llama4,
}


def built(name: str, *, seed: int = 7) -> PreTrainedModel:
    """A random bf16 model."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    # As from_pretrained builds it: .to(bfloat16) would round the frequencies of the rotary embedding.
    model: PreTrainedModel = getattr(transformers, name)._from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for own, weight in model.named_parameters():
            if weight.ndim >= 2 and "embed" not in own:
                weight.copy_(torch.randn_like(weight) * 0.05)
    for own, buffer in model.named_buffers():
        if own.endswith("e_score_correction_bias"):  # from_pretrained keeps it in fp32
            buffer.data = torch.rand(buffer.shape, dtype=torch.float32)
    return model


def logits(model: nn.Module) -> Tensor:
    """Of a prompt of text."""
    with torch.no_grad():
        found: Tensor = model(PROMPT, attention_mask=torch.ones_like(PROMPT)).logits
    return found
