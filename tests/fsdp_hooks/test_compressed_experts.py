"""Compressed states of weights with more than two dims, in shards: those of one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from qtensor import quantize
from tests.fsdp_hooks.cases import RECIPES, K
from tests.fsdp_hooks.test_compressed_states import assert_same, optimizer_of, tensors_of, train, whole
from tests.ranks import run_ranks_each
from tests.sampling import sampled

ROWS = 32
NAMES = ("mxfp8", "nvfp4", "float8_tensor", "mxfp8_square")


class Stacks(nn.Module):
    """Quantized experts, experts in bf16, a convolution and a vector."""

    def __init__(self, recipe: Any, experts: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        scale = torch.arange(1, experts + 1).reshape(-1, 1, 1) / 40  # another magnitude for every expert
        self.weight = nn.Parameter(quantize((torch.randn(experts, ROWS, K) * scale).bfloat16(), recipe))
        self.dense = nn.Parameter(torch.randn(experts, 4, K).bfloat16())
        self.kernel = nn.Parameter(torch.randn(6, 4, 3, 32).bfloat16())
        self.bias = nn.Parameter(torch.randn(experts).bfloat16())


def equals_one_process(name: str, experts: int) -> None:
    for options in ({}, {"moments": "bfloat16"}):
        reference = Stacks(RECIPES[name], experts)
        model: Any = fully_shard(copy.deepcopy(reference))
        its, optimizer = optimizer_of(reference, **options), optimizer_of(model, **options)
        train(reference, its)
        train(model, optimizer)
        assert_same(whole(model, optimizer), tensors_of(reference, its), f"{name}, {options}")
        assert its.state[reference.weight]["master_remainder"].any()


@sampled(("ranks", "experts"), [(2, 3), (3, 5), (4, 5), (2, 1)], [(4, 5)])
def test_stacked_experts_in_shards_hold_what_one_process_holds(ranks: int, experts: int) -> None:
    """5 experts on 4 ranks: 2, 2, 1 and none."""
    run_ranks_each(ranks, NAMES[:2] if ranks == 4 else NAMES, equals_one_process, experts)


def equals_one_process_within_experts(name: str) -> None:
    """Cut along the rows of each expert, so that a rank has some rows of all of them."""
    reference = Stacks(RECIPES[name], 3)
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (2,))
    for key, value in reference.named_parameters():
        dim = 1 if value.ndim == 3 else 0
        placed = distribute_tensor(value.detach(), mesh, [Shard(dim)], src_data_rank=None)
        setattr(model, key, nn.Parameter(placed))
    its, optimizer = optimizer_of(reference), optimizer_of(model)
    train(reference, its)
    train(model, optimizer)
    for key in ("weight", "dense"):
        for entry in ("master_remainder", "exp_avg", "exp_avg_sq_root"):
            found = optimizer.state[getattr(model, key)][entry]
            assert isinstance(found, DTensor)
            own, expected = (_plain(one) for one in (found.full_tensor(), its.state[getattr(reference, key)][entry]))
            assert torch.equal(own, expected), (key, entry)


def _plain(value: Any) -> Tensor:
    value = value.dequantize(torch.float32) if hasattr(value, "recipe") else value
    return value.view(torch.int16) if value.dtype == torch.float16 else value


def test_experts_that_are_cut_along_their_rows_hold_what_one_process_holds() -> None:
    run_ranks_each(2, ["mxfp8"], equals_one_process_within_experts)
