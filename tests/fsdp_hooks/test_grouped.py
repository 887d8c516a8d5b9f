"""Experts whose products quantize both operands, sharded: they train as one process does, and keep what they turned."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from qtensor import Float8CurrentScaling, MXFP8BlockScaling, QuantizedTensor, quantize
from qtensor.products.grouped import linear
from tests.fsdp_hooks.cases import K, assert_gathers_exactly, assert_same_bytes, local
from tests.fsdp_hooks.test_matrix import follow
from tests.ranks import run_ranks_each
from tests.recipes import MAIN

ROWS, EXPERTS, TOKENS = 32, 3, 40  # 2 experts on the first rank, 1 on the second
RECIPES = {
    "float8": Float8CurrentScaling(activations="dynamic", gradients="e5m2"),
    "float8 tensor": Float8CurrentScaling(granularity="tensor", activations="dynamic", gradients="e4m3"),
    "mxfp8 square": MXFP8BlockScaling(blocks="square", activations="dynamic", gradients="e4m3"),
    "nvfp4": dataclasses.replace(MAIN["nvfp4"], activations="dynamic"),
}


class Experts(nn.Module):
    """Up and down again; which expert gets how many tokens changes with the rank and the step."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        scale = torch.arange(1, EXPERTS + 1).reshape(-1, 1, 1) / 40  # another magnitude for every expert
        up, down = torch.randn(EXPERTS, ROWS, K) * scale, torch.randn(EXPERTS, K, ROWS) * scale
        self.up, self.down = (nn.Parameter(quantize(values.bfloat16(), recipe)) for values in (up, down))
        self.uses = 0

    def forward(self, x: Tensor) -> Tensor:
        ends = _ends(self.uses)
        self.uses += 1
        hidden = torch.tanh(F.grouped_mm(x, self.up.transpose(-2, -1), offs=ends))
        return F.grouped_mm(hidden, self.down.transpose(-2, -1), offs=ends)


def _ends(step: int) -> Tensor:
    """One expert has none; the last two tokens belong to nobody."""
    first = [(7, 7), (0, 30)][(step + torch.distributed.get_rank()) % 2]
    return torch.tensor([*first, TOKENS - 2], dtype=torch.int32)


def _tokens(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + torch.distributed.get_rank())
    return torch.randn(TOKENS, K, generator=generator).bfloat16()


def _trains(name: str) -> None:
    net: Any = Experts(RECIPES[name])
    reference = copy.deepcopy(net)
    fully_shard(net)
    assert isinstance(local(net.up), QuantizedTensor)
    # 2 ranks: FSDP's mean of two gradients is that of plain tensors, bit for bit
    follow(net, reference, _tokens, own_gradients=True)
    assert_gathers_exactly(net, "after training")


def test_sharded_experts_train_like_one_process() -> None:
    run_ranks_each(2, RECIPES, _trains)


def _turns_once(name: str) -> None:
    """Several micro-batches of one gather turn each stack once, and the next gather turns it anew."""
    net: Any = Experts(RECIPES[name])
    alone = copy.deepcopy(net)
    fully_shard(net)
    net.set_reshard_after_backward(False)
    turned = []
    turn, linear.turn_stack = linear.turn_stack, lambda *args: turned.append(1) or turn(*args)
    try:
        x = _tokens(0).requires_grad_()
        for again in (1, 2):
            net.uses = 0
            net(x).float().square().sum().backward()
            assert len(turned) == 2, again
        net.reshard()
        net.uses = 0
        net(x).float().square().sum().backward()
        assert len(turned) == 4
    finally:
        linear.turn_stack = turn
    own = _tokens(0).requires_grad_()
    for _ in range(3):
        alone.uses = 0
        alone(own).float().square().sum().backward()
    assert_same_bytes(x.grad, own.grad, "dx")


def test_a_gathered_stack_is_turned_once() -> None:
    run_ranks_each(2, ["float8", "mxfp8 square"], _turns_once)
