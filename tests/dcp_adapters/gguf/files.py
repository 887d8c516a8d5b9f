"""GGUF files of tiny models, as llama.cpp's converter would make them, and what is read of one by the package gguf."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


BYTES = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]  # tokens of one byte


def like(path: Path, model: LlamaForCausalLM, *, rope_freqs: bool = True, **changes: Any) -> Path:
    """A file of a model in fp32, with the metadata that llama.cpp asks for; the values of its tensors are noise.

    rope_freqs: with the factors of frequencies that files of Llama 3 have. changes: of what it says.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(changes.get("head_count", config.num_attention_heads))
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(BYTES[: config.vocab_size])
    writer.add_token_merges(["a b"])
    writer.add_chat_template("{{ messages }}")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_string("quantize.imatrix.file", "of other weights")
    if "split" in changes:
        writer.add_uint16("split.count", changes["split"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, param in model.named_parameters():
        module, _, own = name.rpartition(".")
        noise = np.random.default_rng(0).standard_normal(param.shape, dtype=np.float32)
        writer.add_tensor(f"{names.get_name(module)}.{own}", noise)
    if rope_freqs:
        writer.add_tensor("rope_freqs.weight", np.arange(1, 9, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fields(path: Path) -> dict[str, object]:
    """What a file says, without what counts its fields."""
    reader = gguf.GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}


def kinds(path: Path) -> dict[str, str]:
    """Tensor -> its type."""
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def values(path: Path) -> dict[str, Tensor]:
    """Tensor -> its fp32 values, by gguf's own decoders."""
    found: Mapping[str, np.ndarray] = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors
    }
    return {name: torch.from_numpy(array.copy()) for name, array in found.items()}


def in_halves(rows: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of the rows of attn_q and attn_k, put back into that of transformers."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
