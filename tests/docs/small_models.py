"""What pages call `build_model()`: small, with the names that their code relies on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_hooks import sync_scales

WIDTH = 64


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False, dtype=torch.bfloat16)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.relu(self.up_proj(x)))


class Layer(nn.Module):
    """A block with `mlp.up_proj`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, dtype=torch.bfloat16)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Pair(nn.Module):
    """A block with `up` and `down`, which tensor parallelism cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Adapted(nn.Module):
    """A linear `base` and a low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.down = nn.Linear(WIDTH, 4, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(4, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Model(nn.Module):
    """Layers of one kind."""

    def __init__(self, kind: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch() -> Tensor:
    return torch.randn(4, WIDTH, dtype=torch.bfloat16)


def shard(model: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def fill(model: nn.Module) -> None:
    """Materialise, initialise, agree on scales."""
    if any(param.is_meta for param in model.parameters()):
        model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            mine: Any = param.to_local() if isinstance(param, DTensor) else param  # whose draws torch does not warn of
            mine.copy_(torch.randn(mine.shape) / 8 if param.ndim > 1 else torch.ones(mine.shape))
    sync_scales(model)


def train(model: nn.Module, optimizer: Any) -> None:
    """One step."""
    model(batch()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
