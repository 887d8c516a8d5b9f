"""State dicts of a model in bf16, MXFP8 and NVFP4: a real model, and one large enough to measure with."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcp_adapters import expand
from qtensor import MXFP8BlockScaling, NVFP4BlockScaling, quantize

RECIPES: dict[str, Any] = {"mxfp8": MXFP8BlockScaling(), "nvfp4": NVFP4BlockScaling()}
FORMATS = ("bf16", *RECIPES)
States = dict[str, dict[str, Tensor]]  # format -> state dict


@dataclasses.dataclass(frozen=True)
class Bench:
    """One model in all formats, and where its files go."""

    name: str
    states: States
    folder: Path

    def first(self, layers: int) -> States:
        """The weights of some layers, aliased."""
        return {
            form: {
                name: value
                for name, value in state.items()
                if (number := re.search(r"layers\.(\d+)\.", name)) and int(number[1]) < layers
            }
            for form, state in self.states.items()
        }

    def parts(self, form: str) -> list[Tensor]:
        """The plain tensors of a format, aliased."""
        return list(expand(self.states[form]).values())

    def nbytes(self, form: str) -> int:
        """Bytes of a format's parts."""
        return sum(part.nbytes for part in self.parts(form))

    def kept(self, form: str) -> Path:
        """The checkpoint that loads read."""
        return self.folder / f"kept-{form}"

    def raw(self, form: str) -> Path:
        """The file with the same bytes and no format."""
        return self.folder / f"raw-{form}"

    @property
    def scratch(self) -> Path:
        """Where saves that are measured go."""
        return self.folder / "scratch"


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
