"""Which tensor of a transformers model is which of a GGUF file, and the order of its rows there.

Only architectures of which both are known are here: a file with the right names, but a wrong order of rows, would load
and compute nonsense. Names of other frameworks (Meta's own files, say) are refused for the same reason.

The rows of attn_q and attn_k of "llama" move. In a head of d channels transformers rotates channel i with d / 2 + i,
and llama.cpp rotates neighbours, so its files have the rows 0, d / 2, 1, d / 2 + 1, ... of each head. A block lies
within a row, so its bytes stay as they are.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
IN_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class GGUFArchitecture:
    """What is known of an architecture.

    Attributes:
        in_block: transformers' names behind "model.layers.N." -> the names in the file behind "blk.N.".
        in_pairs: names in the file of linears whose rows `pair_rows` reorders.
    """

    in_block: Mapping[str, str]
    in_pairs: frozenset[str] = frozenset()


# `general.architecture` of a file -> what is known of it
ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(IN_BLOCK, in_pairs=frozenset({"attn_q", "attn_k"})),
}


def name_in_file(architecture: GGUFArchitecture, module: str) -> str | None:
    """Return a file's name of a module of a transformers model: "model.norm" -> "output_norm"; None if unknown."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if layer is None:
        return OUTSIDE.get(module)
    own = architecture.in_block.get(layer[2])
    return None if own is None else f"blk.{int(layer[1])}.{own}"


def pair_rows(part: Tensor, heads: int) -> Tensor:
    """Put the rows of each head into the order 0, d / 2, 1, d / 2 + 1, ...: [heads * d, ..] -> the same shape."""
    pairs: Tensor = part.unflatten(0, (heads, 2, -1)).transpose(1, 2)  # [heads, d / 2, 2, ..]
    return pairs.flatten(0, 2)
