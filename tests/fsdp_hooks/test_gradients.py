"""Low-precision backward on several ranks: of this rank's tokens alone, and refused under tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from fsdp_hooks import sync_scales
from qtensor import (
    Float8CurrentScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantize,
    quantized_model_init,
)
from tests.fsdp_hooks.cases import Collectives, K, assert_same_bytes, batch, exchanged
from tests.fsdp_hooks.test_compile import compiles_once
from tests.fsdp_hooks.test_tensor_parallel import HIDDEN, WIDTH, mesh_2d
from tests.ranks import run_ranks, run_ranks_catching
from tests.sampling import sampled

ROWS = 96
RECIPES = {
    "float8_row": Float8CurrentScaling(activations="dynamic", gradients="e5m2"),
    "float8_tensor": Float8CurrentScaling(granularity="tensor", activations="dynamic", gradients="e5m2"),
    "mxfp8": MXFP8BlockScaling(activations="dynamic", gradients="e4m3"),
    "mxfp8_square": MXFP8BlockScaling(blocks="square", activations="dynamic", gradients="e4m3"),
    "nvfp4_square": NVFP4BlockScaling(blocks="square", activations="dynamic", gradients="nvfp4"),
    "nvfp4_4over6": NVFP4BlockScaling(scale_choice="4over6", activations="dynamic", gradients="nvfp4"),
}


class Doubled(nn.Module):
    """A linear layer inside of a module, as models have it."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(K, ROWS, bias=False)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.linear, x, use_reentrant=False) if self.again else self.linear(x)
        return 2 * y


def _seed(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(7 + rank)
    return torch.randn(5, ROWS, generator=generator).to(torch.bfloat16)


def _mean_of_the_ranks_own(name: str, storage: str, *, again: bool) -> None:
    """Each rank's gradients are those of one process with its tokens; dw is then averaged, in fp32."""
    recipe: Any = RECIPES[name]
    value = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).float()
    with quantized_model_init(recipe, storage=storage):
        net: Any = Doubled(again=again)
    with torch.no_grad():
        net.linear.weight.copy_(value)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(net, mp_policy=policy)
    sync_scales(net)
    x, dy = batch(0).requires_grad_(), _seed(torch.distributed.get_rank())
    y = net(x)
    with Collectives() as comms:
        y.backward(dy / 2)
    gathers = {"_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"}
    assert set(comms.counts) - gathers == {"_reduce_scatter_base_"}, comms.counts
    alone, w = batch(0).requires_grad_(), nn.Parameter(quantize(value.to(torch.bfloat16), recipe))
    F.linear(alone, w).backward(dy)
    grads = exchanged(w.grad.float())
    assert not torch.equal(*grads)
    assert_same_bytes(net.linear.weight.grad.full_tensor(), sum(grads) / len(grads), "dw")
    assert_same_bytes(x.grad, alone.grad, "dx")


@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
@pytest.mark.parametrize("name", RECIPES)
def test_the_gradient_is_the_mean_of_the_ranks_own(name: str, storage: str) -> None:
    run_ranks(2, _mean_of_the_ranks_own, name, storage, again=name in ("mxfp8", "nvfp4_square"))


def _trains(name: str) -> None:
    """A few steps bring the loss down, and the ranks stay alike."""
    torch.manual_seed(0)
    with quantized_model_init(RECIPES[name]):
        net: Any = nn.Sequential(nn.Linear(K, ROWS), nn.Tanh(), nn.Linear(ROWS, 32)).to(torch.bfloat16)
    fully_shard(net)
    sync_scales(net)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, net.parameters(), lr=1e-2)
    x = batch(0)
    losses = []
    for _ in range(8):
        loss = (net(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses


@pytest.mark.parametrize("name", ["float8_row", "mxfp8_square", "nvfp4_square"])
def test_it_trains(name: str) -> None:
    run_ranks(2, _trains, name)


def _compiles(name: str, *, sharded: bool) -> None:
    compiles_once(RECIPES[name], "quantized", sharded=sharded, compiler="aot_eager")


@pytest.mark.slow
@sampled("name", ["float8_tensor", "mxfp8", "nvfp4_square"], ["float8_tensor", "nvfp4_square"])
def test_blocks_compile_as_one_graph_and_once(name: str) -> None:
    run_ranks(2, _compiles, name, sharded=True)


def _tensor_parallel(storage: str) -> None:
    mesh = mesh_2d(1, 2)
    torch.manual_seed(0)
    with quantized_model_init(RECIPES["mxfp8"], storage=storage):
        net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)).to(torch.bfloat16)
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    with torch.no_grad():
        assert net(torch.ones(2, WIDTH, dtype=torch.bfloat16)).shape == (2, WIDTH)
    with Collectives() as comms:
        try:
            net(torch.ones(2, WIDTH, dtype=torch.bfloat16))
        finally:
            assert not comms.counts, comms.counts


@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
def test_tensor_parallelism_is_refused_on_all_ranks_alike(storage: str) -> None:
    """DTensor makes a dense backward of its own, which no operation of the weight sees."""
    messages = run_ranks_catching(2, _tensor_parallel, storage)
    assert len(set(messages)) == 1, messages
    for words in ("NotImplementedError", "gradients='e4m3' is defined for F.linear", "tensor parallelism", "no_grad"):
        assert words in messages[0], messages[0]
