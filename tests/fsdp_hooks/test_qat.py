"""Training through quantization under FSDP2: a dense shard's gradient is the mean of the ranks' straight-through ones.

In one process tests/qtensor/test_qat.py shows it for every recipe.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_hooks import sync_scales
from qtensor import quantize, quantized_model_init
from tests.fsdp_hooks.cases import RECIPES, K, assert_same_bytes, batch, exchanged
from tests.ranks import run_ranks

ROWS = 96


class Doubled(nn.Module):
    """A linear layer inside of a module, as models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(K, ROWS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.linear(x)


def _seed() -> Tensor:
    """A gradient for the outputs, another one on each rank."""
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    return torch.randn(5, ROWS, generator=generator).to(torch.bfloat16)


def _mean_of_straight_through_gradients(name: str, activations: str | None) -> None:
    recipe: Any = dataclasses.replace(RECIPES[name], activations=activations)
    value = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(0))  # fp32
    with quantized_model_init(recipe, storage="high_precision"):
        net: Any = Doubled()
    with torch.no_grad():
        net.linear.weight.copy_(value)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(net, mp_policy=policy)
    sync_scales(net)
    x, dy = batch(0).requires_grad_(), _seed()
    net(x).backward(dy / 2)
    grads = exchanged((dy.T @ x.detach()).float())
    assert not torch.equal(*grads)
    assert_same_bytes(net.linear.weight.grad.full_tensor(), sum(grads) / len(grads), "dw")
    full = quantize(value, recipe).dequantize(torch.bfloat16)  # of the fp32 values: they are not rounded to bf16 first
    assert_same_bytes(x.grad, dy @ full, "dx")


@pytest.mark.parametrize("activations", [None, "dynamic"])
@pytest.mark.parametrize("name", ["float8_tensor", "nvfp4"])
def test_the_gradient_is_the_mean_of_the_straight_through_ones(name: str, activations: str | None) -> None:
    run_ranks(2, _mean_of_straight_through_gradients, name, activations)
