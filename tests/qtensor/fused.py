"""A model whose linears an engine runs as one, and what they are then: rows of one weight, quantized as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qtensor import Float8CurrentScaling, NVFP4BlockScaling, quantize, quantized_model_init, share_scales

K = 64
ROWS = {"q_proj": 48, "k_proj": 32, "v_proj": 16}
RECIPES: dict[str, Any] = {
    "nvfp4": NVFP4BlockScaling(),
    "nvfp4_square": NVFP4BlockScaling(blocks="square"),
    "float8_tensor": Float8CurrentScaling(granularity="tensor"),
}
GROUPS = [[f"layers.{layer}.{name}" for name in ROWS] for layer in range(2)]
NAMES = [tuple(f"{module}.weight" for module in group) for group in GROUPS]


class Attention(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, rows in ROWS.items():
            setattr(self, name, nn.Linear(K, rows, bias=False, dtype=dtype))
        self.o_proj = nn.Linear(sum(ROWS.values()), K, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.o_proj(torch.cat([getattr(self, name)(x) for name in ROWS], dim=-1)))


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(dtype) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def values(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Dense weights; in each group the magnitudes differ, and another one leads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: param.shape for name, param in Model().named_parameters()}
    found = {}
    for number, (name, shape) in enumerate(shapes.items()):
        found[name] = (torch.randn(shape, generator=generator) * 3.0 ** (number % 3) / 20).to(dtype)
    return found


def built(recipe: Any, dtype: torch.dtype = torch.bfloat16, *, share: bool = True, **init: Any) -> Model:
    with quantized_model_init(recipe, **init):
        model = Model(dtype)
    if share:
        share_scales(model, GROUPS)
    return model


def as_one(dense: Mapping[str, Tensor], recipe: Any) -> dict[str, dict[str, Tensor]]:
    """Name -> parts of each weight: rows of what is quantized as one, others by themselves."""
    found = {name: quantize(value, recipe).parts() for name, value in dense.items()}
    for group in NAMES:
        parts = quantize(torch.cat([dense[name] for name in group]), recipe).parts()
        start = 0
        for name in group:
            stop = start + dense[name].shape[0]
            found[name] = {part: value[start:stop] if value.ndim else value for part, value in parts.items()}
            start = stop
    return found


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(5, K, generator=torch.Generator().manual_seed(100 * step + rank)).to(torch.bfloat16)
