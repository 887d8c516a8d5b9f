"""Stacked weights of experts, [E, N, K], quantized as one parameter and sharded by experts.

Looped, batched and grouped products give the outputs and the plain gradients of the unsharded stack, also where the
experts do not divide evenly over the ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from qtensor import QuantizedTensor, quantize
from tests.fsdp_hooks.cases import HANDS, RECIPES, TENSOR_WIDE, K, assert_gathers_exactly, local
from tests.fsdp_hooks.test_matrix import follow
from tests.ranks import run_ranks_each
from tests.sampling import sampled

ROWS, TOKENS = 32, 4


def _looped(x: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([F.linear(x[e], weight[e]) for e in range(x.shape[0])])


def _batched(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x, weight.transpose(-2, -1))


def _grouped(x: Tensor, weight: Tensor) -> Tensor:
    experts, tokens, _ = x.shape
    ends = torch.arange(1, experts + 1, dtype=torch.int32) * tokens
    return F.grouped_mm(x.flatten(0, 1), weight.transpose(-2, -1), offs=ends).unflatten(0, (experts, tokens))


def _dequantized(x: Tensor, weight: Any) -> Tensor:
    return torch.einsum("etk,enk->etn", x, weight.dequantize())


PRODUCTS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "F.linear in a loop": _looped,
    "bmm": _batched,
    "grouped_mm": _grouped,
    "dequantize": _dequantized,
}


class Experts(nn.Module):
    """Every expert takes its own tokens; a bias that is not quantized stands in the same group."""

    def __init__(self, recipe: Any, experts: int, product: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        scale = torch.arange(1, experts + 1).reshape(-1, 1, 1) / 40  # another magnitude for every expert
        self.weight = nn.Parameter(quantize((torch.randn(experts, ROWS, K) * scale).bfloat16(), recipe))
        self.bias = nn.Parameter(torch.zeros(experts, 1, ROWS, dtype=torch.bfloat16))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(PRODUCTS[self.product](x, self.weight) + self.bias)


def _tokens(step: int, experts: int) -> Tensor:
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(experts, TOKENS, K, generator=generator).bfloat16()


def _trains_experts(case: tuple[str, str], experts: int) -> None:
    name, product = case
    net: Any = Experts(RECIPES[name], experts, product)
    reference = copy.deepcopy(net)
    fully_shard(net)
    q = local(net.weight)
    assert isinstance(q, QuantizedTensor)
    assert q.shape[1:] == (ROWS, K)
    # 2 ranks: FSDP's mean of two gradients is that of plain tensors, bit for bit
    alone = torch.distributed.get_world_size() <= 2
    follow(net, reference, lambda step: _tokens(step, experts), own_gradients=alone)
    assert_gathers_exactly(net, "after training")


@sampled(("world_size", "experts"), [(2, 1), (2, 4), (2, 5), (4, 5)], [(2, 1), (4, 5)])
def test_stacked_experts_train_like_one_process(world_size: int, experts: int) -> None:
    """5 experts on 4 ranks: 2, 2, 1 and none; 1 on 2: all and none. All products, and on 4 ranks all formats."""
    hands = HANDS if world_size == 4 else [(name,) for name in TENSOR_WIDE]
    cases = [(name, product) for number, product in enumerate(PRODUCTS) for name in hands[number % 3]]
    run_ranks_each(world_size, cases, _trains_experts, experts)
