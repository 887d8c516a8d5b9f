"""What a compiled block keeps from forward to backward: its inputs and the parts of its weights, nothing dense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from qtensor import QuantizedTensor, quantize, quantized_model_init
from qtensor.scales.high_precision import HighPrecisionWeight
from tests.ranks import run_ranks
from tests.recipes import MAIN, facts
from tests.sampling import sampled

N = 256  # a dense weight has 2 N^2 elements; activations have 8 N


class Block(nn.Module):
    """An MLP: two quantized linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(N, 2 * N, dtype=torch.bfloat16)
        self.down = nn.Linear(2 * N, N, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def products(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    y = torch.tanh(torch.mm(x, weight.t()))
    y = torch.tanh(torch.bmm(y.view(2, -1, N), experts.transpose(-2, -1)))
    return y.view(-1, N) + torch.mv(weight, x[0])


def dense_ones(saved: list[Tensor]) -> list[str]:
    """The tensors among `saved` that take the memory of a dense weight; a model's own weights are not copies."""
    own = (nn.Parameter, QuantizedTensor, HighPrecisionWeight)
    found = [one for one in saved if not isinstance(one, own) and one.dtype.itemsize > 1 and one.numel() >= N * N]
    return [f"{one.dtype} {tuple(one.shape)}" for one in found]


def saving(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output, and what autograd saved for backward."""
    saved: list[Tensor] = []

    def save(one: Tensor) -> Tensor:
        saved.append(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(save, lambda one: one):
        return function(x), saved


def block_of(recipe: Any, storage: str) -> Block:
    torch.manual_seed(0)
    with quantized_model_init(recipe, storage=storage):
        return Block()


@pytest.mark.full
@pytest.mark.parametrize("name", MAIN)
def test_a_compiled_block_saves_no_dense_weight(name: str) -> None:
    """Both storages, and products that are no linear layers, in one graph; the gradients are those of eager code."""
    recipe = MAIN[name]
    blocks = nn.ModuleList(block_of(recipe, storage) for storage in facts(recipe).storages)
    weight, experts = (
        nn.Parameter(quantize(torch.randn(*shape, dtype=torch.bfloat16), recipe)) for shape in ((N, N), (2, N, N))
    )

    def run(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return F.gelu(products(x, weight, experts))

    x = torch.randn(8, N, dtype=torch.bfloat16)
    torch.compiler.reset()
    compiled, found, grads = torch.compile(run, fullgraph=True, backend="aot_eager"), [], []
    for function in (compiled, run):
        y, saved = saving(function, x)
        found.append(dense_ones(saved))
        y.float().square().sum().backward()
        grads.append([y.detach(), *(param.grad for param in [*blocks.parameters(), weight, experts])])
        for param in [*blocks.parameters(), weight, experts]:
            param.grad = None
    assert found == [[], []]
    assert all(torch.equal(mine, its) for mine, its in zip(*grads, strict=True))
    torch.compiler.reset()


def alive_after_forward(storage: str) -> None:
    block = fully_shard(block_of(MAIN["nvfp4"], storage), reshard_after_forward=True)
    block.compile(fullgraph=True, backend="aot_eager")
    x = torch.randn(8, N, dtype=torch.bfloat16)
    block(x).float().sum().backward()  # compiles; FSDP2 reshards modules other than the root at once
    y, saved = saving(block, x)
    plain = [one for one in saved if type(one) is Tensor]
    alive = sum({one.untyped_storage()._cdata: one.untyped_storage().size() for one in plain}.values())
    assert alive <= 2 * x.nbytes + 4 * (8 * 2 * N) * 2  # activations: x and y, and a few of the wide ones
    y.float().sum().backward()
    torch.compiler.reset()


@sampled("storage", ["quantized", "high_precision"], ["quantized"])
def test_the_bytes_alive_between_forward_and_backward_are_those_of_activations(storage: str) -> None:
    run_ranks(2, alive_after_forward, storage)
