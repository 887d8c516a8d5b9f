"""Models of transformers as others hand them over: adapters of peft, wrappers of torch around them or their layers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
}


def llama(seed: int = 0) -> Any:
    """A tiny Llama in bf16."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).to(torch.bfloat16)


def adapted(config: Any, model: Any = None) -> Any:
    """A model with adapters whose values are not zero, as after some training."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = peft.get_peft_model(llama() if model is None else model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, param in found.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                param.normal_(std=0.05)
    return found
