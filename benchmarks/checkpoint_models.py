"""State dicts of one model in bf16, MXFP8 and NVFP4: a real one, and one of a size to measure with."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtensor import MXFP8BlockScaling, NVFP4BlockScaling, quantize

__all__ = ["FORMATS", "RECIPES", "States", "llama_like", "smollm2_135m"]

RECIPES: dict[str, Any] = {"mxfp8": MXFP8BlockScaling(), "nvfp4": NVFP4BlockScaling()}
FORMATS = ("bf16", *RECIPES)
States = dict[str, dict[str, Tensor]]  # format -> state dict


def smollm2_135m() -> States:
    """The weights of the demo; the embedding, a fifth of them, is bf16 in every format."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))  # scripts, which import one another by bare name
    import smollm2  # type: ignore[import-not-found, unused-ignore]

    return _in_all_formats({name: weight.contiguous() for name, weight in smollm2.iter_weights()})


def llama_like(layers: int, hidden: int, keys: int, inner: int) -> States:
    """Decoder layers without an embedding: 7 linear weights and 2 norms each.

    One layer is quantized, the others are copies: no figure depends on values, and quantizing takes longer than saving.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = {f"self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
    shapes |= {f"self_attn.{name}_proj.weight": (keys, hidden) for name in "kv"}
    shapes |= {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (hidden, inner)
    layer = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}
    layer |= {f"{name}_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in ("input", "post")}
    return {
        form: {f"layers.{i}.{name}": value.clone() for i in range(layers) for name, value in state.items()}
        for form, state in _in_all_formats(layer).items()
    }


def _in_all_formats(dense: dict[str, Tensor]) -> States:
    states: States = {"bf16": dense}
    for form, recipe in RECIPES.items():
        states[form] = {
            name: quantize(value, recipe) if name.endswith("_proj.weight") else value.clone()
            for name, value in dense.items()
        }
    return states
