"""Parameter names and shapes of large models, from their public configurations; the layers' projections are quantized.

name -> (global shape, whether it is quantized)
"""

from collections.abc import Iterator

Shapes = dict[str, tuple[tuple[int, ...], bool]]


def llama_405b() -> Shapes:
    """Llama-3.1-405B: 126 layers, hidden 16384, intermediate 53248, 128 heads of 128, 8 key/value heads."""
    hidden, middle, kv, vocabulary = 16384, 53248, 1024, 128256
    projections = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    shapes: Shapes = {"model.embed_tokens.weight": ((vocabulary, hidden), False)}
    for i in range(126):
        shapes |= {f"model.layers.{i}.{name}.weight": (shape, True) for name, shape in projections.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{norm}.weight"] = ((hidden,), False)
    return shapes | {"model.norm.weight": ((hidden,), False), "lm_head.weight": ((vocabulary, hidden), False)}


def deepseek_671b(*, stacked: bool) -> Shapes:
    """DeepSeek-V3: 61 layers, the first 3 dense, 256 routed experts and a shared one in each of the others.

    stacked: the routed experts of a layer are three tensors [256, .., ..]; else each expert has three of its own.
    """
    hidden, vocabulary = 7168, 129280
    attention = {
        "q_a_proj": (1536, hidden),
        "q_b_proj": (24576, 1536),
        "kv_a_proj_with_mqa": (576, hidden),
        "kv_b_proj": (32768, 512),
        "o_proj": (hidden, 16384),
    }
    norms = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_a_layernorm": (1536,),
        "self_attn.kv_a_layernorm": (512,),
    }
    shapes: Shapes = {"model.embed_tokens.weight": ((vocabulary, hidden), False)}
    for i in range(61):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}.weight": (shape, True) for name, shape in attention.items()}
        shapes |= {f"{layer}.{name}.weight": (shape, False) for name, shape in norms.items()}
        if i < 3:
            shapes |= dict(_mlp(f"{layer}.mlp", hidden, 18432))
            continue
        shapes |= {f"{layer}.mlp.gate.weight": ((256, hidden), False)}
        shapes |= {f"{layer}.mlp.gate.e_score_correction_bias": ((256,), False)}
        shapes |= dict(_mlp(f"{layer}.mlp.shared_experts", hidden, 2048))
        if stacked:
            shapes |= {name: ((256, *size), True) for name, (size, _) in _mlp(f"{layer}.mlp.experts", hidden, 2048)}
        else:
            for expert in range(256):
                shapes |= dict(_mlp(f"{layer}.mlp.experts.{expert}", hidden, 2048))
    return shapes | {"model.norm.weight": ((hidden,), False), "lm_head.weight": ((vocabulary, hidden), False)}


def _mlp(prefix: str, hidden: int, middle: int) -> Iterator[tuple[str, tuple[tuple[int, ...], bool]]]:
    yield f"{prefix}.gate_proj.weight", ((middle, hidden), True)
    yield f"{prefix}.up_proj.weight", ((middle, hidden), True)
    yield f"{prefix}.down_proj.weight", ((hidden, middle), True)


MODELS: dict[str, Shapes] = {
    "llama_405b": llama_405b(),
    "deepseek_671b": deepseek_671b(stacked=True),
    "deepseek_671b_per_expert": deepseek_671b(stacked=False),
}
