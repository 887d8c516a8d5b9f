"""Models that the tests of streams share, and comparisons of streams with exported files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from qtensor import quantize_, quantized_model_init
from tests import recipes
from tests.dcp_adapters.cases import values

K = 128
CONFIG = {"model_type": "tiny", "hidden_size": K, "tie_word_embeddings": False}
# What engines read of the recipes that tests share: square blocks of floats with 8 bits, and no other element.
EXPORTED = {
    each.name: each.recipe
    for each in recipes.TABLE
    if getattr(each.recipe, "element", "e4m3") == "e4m3" and not each.name.startswith(("float8_block_row", "nf4"))
}


class Layer(nn.Module):
    """Linears with even, uneven and (from 4 ranks on) empty shards, or with whole square blocks."""

    def __init__(self, seed: int, rows: Iterable[int]) -> None:
        super().__init__()
        first, second = rows
        self.o_proj = nn.Linear(K, first, bias=True, dtype=torch.bfloat16)
        self.down_proj = nn.Linear(K, second, bias=False, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(K, dtype=torch.bfloat16)
        self.register_buffer("steps", torch.tensor(3 + seed))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm(x)
        return x + self.o_proj(x).sum(-1, keepdim=True) / 100 + self.down_proj(x).sum(-1, keepdim=True) / 100


class Model(nn.Module):
    """An embedding, layers and a head; every parameter has values of its own."""

    def __init__(self, rows: Iterable[int] = (72, 3), layers: int = 3) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(40, K, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Layer(number, rows) for number in range(layers))
        self.lm_head = nn.Linear(K, 40, bias=False, dtype=torch.bfloat16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def rows_for(name: str) -> tuple[int, int]:
    """Rows that fit the recipe's blocks."""
    known = next(each for each in recipes.TABLE if each.name == name)
    return (96, 64) if known.square and not known.ragged else (72, 3)


def filled(model: Model) -> Model:
    """The same values on every rank."""
    with torch.no_grad():
        for seed, param in enumerate(model.parameters()):
            param.copy_(values(tuple(param.shape), seed))
    return model


def dense(name: str) -> Model:
    """Before it is quantized."""
    return filled(Model(rows_for(name)))


def quantized(name: str) -> Model:
    """Its layers' linears quantized."""
    model = dense(name)
    quantize_(model, EXPORTED[name], include=["layers.*"])
    return model


def high_precision(recipe: Any, rows: Iterable[int] = (72, 3)) -> Model:
    """Dense at rest, quantized on the way into a gather; the head stays dense."""
    torch.manual_seed(0)
    with quantized_model_init(recipe, storage="high_precision"):
        model = Model(rows)
    model.lm_head = nn.Linear(K, 40, bias=False, dtype=torch.bfloat16)
    return filled(model)


def sharded(model: Model, mesh: Any = None, **options: Any) -> Model:
    """An FSDP module for each layer, and the root: as many groups."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)  # type: ignore[return-value] # the module itself


def files(directory: Path | str) -> dict[str, Tensor]:
    """All tensors of an export."""
    return {
        name: tensor
        for file in sorted(Path(directory).glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def streamed(buckets: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """All tensors of a pass; none may come twice."""
    found: dict[str, Tensor] = {}
    for bucket in buckets:
        assert not found.keys() & bucket.keys()
        found |= bucket
    return found


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, dtypes, shapes and bytes."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(raw(found[name]), raw(tensor)), name


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
