"""What a life is about: a model of independent layers, and the values that go into it.

Layers do not feed each other, and inputs and gradients are small whole numbers. So every gradient is exact, in whatever
order it is summed and over however many ranks, and what a life comes to can be told to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtensor import quantize, quantize_, quantized_model_init
from tests import recipes

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FACTS = {each.name: each for each in recipes.TABLE}
TOKENS = 4


@dataclass(frozen=True)
class Layer:
    """One layer: what its weight is, and how it is made.

    kind: "linear"; "tied", a second linear that uses the weight as well; "experts", a stack [E, N, K]; "dense".
    made: "init" under quantized_model_init, "after" by quantize_.
    """

    kind: str
    recipe: str
    rows: int
    columns: int
    dtype: torch.dtype
    experts: int = 0
    bias: bool = False
    storage: str = "quantized"
    made: str = "init"
    preserved: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.experts, self.rows, self.columns) if self.experts else (self.rows, self.columns)

    @property
    def quantized(self) -> bool:
        return self.kind != "dense" and self.storage == "quantized"

    @property
    def weight(self) -> str:
        """The name of the weight in the layer."""
        return "weight" if self.kind == "experts" else "linear.weight"


def drawn(random: Random, *, most_rows: int = 70) -> Layer:
    """A layer of any kind."""
    facts = random.choice(recipes.TABLE)
    kind = random.choices(("linear", "tied", "experts", "dense"), (6, 1, 2, 1))[0]
    unit = facts.block if facts.square and not facts.ragged else 1
    rows = unit * random.randint(1, max(1, most_rows // unit))
    if facts.ragged and random.random() < 0.3:
        rows += 128
    block = 1 if facts.ragged else max(facts.block, 2)
    columns = block * random.randint(1, max(1, 64 // block))
    layer = Layer(
        kind=kind,
        recipe=facts.name,
        rows=rows,
        columns=columns,
        dtype=random.choice(DTYPES),
        experts=random.randint(1, 4) if kind == "experts" else 0,
        bias=kind in ("linear", "dense") and random.random() < 0.3,
        storage=random.choice(facts.storages) if kind in ("linear", "tied") else "quantized",
        made=random.choice(("init", "after")),
    )
    if layer.storage == "high_precision" or layer.kind == "tied":
        layer = replace(layer, made="init")
    preserved = layer.made == "init" and layer.kind in ("linear", "tied") and random.random() < 0.25
    return replace(layer, preserved=preserved and layer.storage == "quantized")


def several(random: Random, *, most_rows: int = 70) -> tuple[Layer, ...]:
    """Some layers; often two of one kind, which optimizers write together."""
    layers = [drawn(random, most_rows=most_rows)]
    for _ in range(random.randint(0, 2)):
        layers.append(layers[-1] if random.random() < 0.3 else drawn(random, most_rows=most_rows))
    return tuple(layers)


class Block(nn.Module):
    """A layer of a life."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        if layer.kind == "experts":
            zeros = torch.zeros(layer.shape, dtype=layer.dtype, device="cpu")
            self.weight = nn.Parameter(quantize(zeros, FACTS[layer.recipe].recipe))
            return
        self.linear = self._linear()
        if layer.kind == "tied":
            self.second = self._linear()
            self.second.weight = self.linear.weight

    def _linear(self) -> nn.Linear:
        layer = self.layer
        return nn.Linear(layer.columns, layer.rows, bias=layer.bias, dtype=layer.dtype, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        """[TOKENS, K] -> [TOKENS, N], or [E, TOKENS, K] -> [E, TOKENS, N]."""
        if self.layer.kind == "experts":
            return torch.stack([F.linear(tokens, weight) for tokens, weight in zip(x, self.weight, strict=True)])
        y = self.linear(x)
        return y + self.second(x) if self.layer.kind == "tied" else y.clone()  # FSDP2 warns of outputs that are views


class Net(nn.Module):
    """The layers, each with an input of its own."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Net.block(layer) for layer in layers)

    @staticmethod
    def block(layer: Layer) -> Block:
        inside: AbstractContextManager[Any] = nullcontext()
        if layer.kind in ("linear", "tied") and layer.made == "init":
            inside = quantized_model_init(
                FACTS[layer.recipe].recipe,
                storage=layer.storage,
                preserve_high_precision_init_val=layer.preserved,
            )
        with inside:
            return Block(layer)

    def forward(self, xs: Sequence[Tensor]) -> list[Tensor]:
        return [block(x) for block, x in zip(self.layers, xs, strict=True)]


def build(layers: Sequence[Layer], values: Callable[[str, tuple[int, ...], torch.dtype], Tensor]) -> Net:
    """A model with these values, in the dtypes of its parameters."""
    net = Net(layers)
    with torch.no_grad():
        for name, param in net.named_parameters():
            param.copy_(values(name, tuple(param.shape), param.dtype))
    for number, layer in enumerate(layers):
        if layer.kind == "linear" and layer.made == "after":
            quantize_(net, FACTS[layer.recipe].recipe, include=[f"layers.{number}.linear"])
    return net


def small(shape: Sequence[int], seed: int, dtype: torch.dtype) -> Tensor:
    """-1, 0 and 1."""
    generator = torch.Generator("cpu").manual_seed(seed)
    numbers = torch.randint(-1, 2, tuple(shape), generator=generator, dtype=torch.int64, device="cpu")
    return numbers.to(dtype)


KINDS = ("normal", "rows", "tiny", "large", "zeros", "sparse", "powers", "same", "broken")


def weights(shape: Sequence[int], seed: int, dtype: torch.dtype, kind: str = "") -> Tensor:
    """Values of a weight; of a kind that the seed chooses, where none is named."""
    random, shape = Random(seed), tuple(shape)
    kind = kind or random.choices(KINDS, (6, 6, 1, 1, 1, 2, 2, 1, 1))[0]
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    exponents = torch.randint(-6, 7, (*shape[:-1], 1), generator=generator, dtype=torch.int64, device="cpu")
    chance = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
    if kind == "rows":
        x = x * torch.exp2(exponents.float())
    elif kind == "tiny":
        x = x * (1e-7 if dtype is torch.float16 else 1e-30)
    elif kind == "large":
        x = (x * 8000 if dtype is torch.float16 else x * 1e30).clamp(-6e4 if dtype is torch.float16 else -3e38, None)
        x = x.clamp(None, 6e4 if dtype is torch.float16 else 3e38)
    elif kind == "zeros":
        x = torch.where(chance < 0.5, -0.0, 0.0)
    elif kind == "sparse":
        x = torch.where(chance < 0.9, 0.0, x)
    elif kind == "powers":
        x = torch.exp2((x * 3).round()) * x.sign()
    elif kind == "same":
        x = torch.full_like(x, float(x.flatten()[0]) if x.numel() else 0.0)
    elif kind == "broken":
        x = torch.where(chance < 0.002, torch.where(x > 0, torch.nan, torch.inf), x)
    return x.to(dtype)
