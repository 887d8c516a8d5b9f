"""Optimizers of other libraries whose step takes a matrix as a whole, under MasterWeightOptimizer on shards.

The masters are DTensors, so what torch multiplies in such a step are whole matrices, whoever holds their rows. The sums
of these products are added up in another order on another number of ranks, in bf16, and so the bytes are not the same;
the promise that they are is one of torch's own Muon (test_muon.py) and of optimizers that step each element by itself.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_hooks import unsharded
from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, quantized_model_init
from tests.ranks import run_ranks

ROWS, COLUMNS = 96, 64
FULL = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()  # the gradient


class OfALibrary(torch.optim.Muon):
    """Not torch's own, so nobody knows what it does; its step is Muon's all the same."""


def moved(shards: int) -> Tensor:
    """Minus the update of one step of plain Muon, in fp32, for each of so many pieces of rows by itself."""
    pieces = [nn.Parameter(torch.zeros(piece.shape)) for piece in FULL.chunk(shards)]
    for piece, grad in zip(pieces, FULL.float().chunk(shards), strict=True):
        piece.grad = grad
    torch.optim.Muon(pieces, lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    return torch.cat([piece.detach() for piece in pieces])


def moved_by_shards() -> Tensor:
    with quantized_model_init(MXFP8BlockScaling()):
        model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False)).bfloat16()
    with torch.no_grad():
        model[0].weight.zero_()
    fully_shard(model)
    optimizer = MasterWeightOptimizer(
        OfALibrary, model.parameters(), lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    (param,) = model.parameters()
    assert isinstance(param, DTensor)
    param.grad = distribute_tensor(FULL, param.device_mesh, param.placements, src_data_rank=None)
    optimizer.step()
    with unsharded(model):
        return model[0].weight.detach().dequantize(torch.float32)


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_takes_whole_matrices(world_size: int) -> None:
    """Storing rounds each element by at most 2**-4 of itself; pieces by themselves would be a different update."""
    whole = moved(shards=1)
    for found in run_ranks(world_size, moved_by_shards):
        assert apart(found, whole) < 2**-4
    if world_size > 1:
        assert apart(moved(shards=world_size), whole) > 4 * 2**-4


def orthogonal_step(param: Tensor, grad: Any) -> None:
    piece = grad.to_local()
    param.to_local().sub_(torch.linalg.qr(piece.float()).Q.view(piece.shape))


class OfShards(torch.optim.SGD):
    """Mixes elements of each shard by itself, in a function of its module."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                orthogonal_step(param, param.grad)


class OfStatic(torch.optim.SGD):
    """Likewise, in a static method."""

    @staticmethod
    def moved(grad: Any) -> Tensor:
        return grad._local_tensor


class OfShardsAndSaysSo(OfShards):
    elementwise = False


class Scaled(torch.optim.SGD):
    """Elementwise, and says so."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.to_local().sub_(param.grad.to_local())


def warned() -> list[int]:
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False)).bfloat16()
    fully_shard(model)
    found = []
    kinds = (OfShards, OfStatic, OfShardsAndSaysSo, Scaled, OfALibrary, torch.optim.SGD)
    for kind in (*kinds, functools.partial(torch.optim.SGD)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            MasterWeightOptimizer(kind, model.parameters(), lr=1.0)
        found.append(len(told))
        assert not told or f"code of {kind.__name__} takes shards by themselves (to_local)" in str(told[0].message)
    return found


def test_a_class_whose_code_takes_shards_by_themselves_is_asked_what_it_does() -> None:
    assert run_ranks(2, warned) == [[1, 1, 0, 0, 0, 0, 0]] * 2
    # there are no shards of which it could mix elements
    assert run_ranks(1, warned) == [[0] * 7]
