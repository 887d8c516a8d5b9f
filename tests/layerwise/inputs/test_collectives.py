"""Collectives are found before they are entered, by whatever name they are called."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention.flex_attention import flex_attention

from layerwise.inputs.replaying.collectives import Collective, refuse_collectives
from tests.ranks import run_ranks

x, y = torch.ones(4), torch.empty(4)
CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda _: dist.all_reduce(y),
    "all_gather": lambda _: dist.all_gather([y, x], x),
    "all_to_all": lambda _: dist.all_to_all_single(y, x, [2, 2], [2, 2]),
    "broadcast": lambda _: dist.broadcast(x, 0),
    "reduce": lambda _: dist.reduce(y, 0),
    "scatter": lambda _: dist.scatter(y, [x, x], 0),
    "send": lambda _: dist.send(x, 1),
    "recv": lambda _: dist.recv(y, 1),
    "barrier": lambda _: dist.barrier(),
    "objects": lambda _: dist.all_gather_object([None, None], "text"),
    "functional all_reduce": lambda mesh: functional.all_reduce(x, "sum", mesh),
    "functional all_to_all": lambda mesh: functional.all_to_all_single(x, [2, 2], [2, 2], mesh),
    "all_to_all of trainers": lambda mesh: functional.all_to_all_single_autograd(x, [2, 2], [2, 2], mesh),
    "full_tensor": lambda mesh: DTensor.from_local(x, mesh, [Shard(0)]).full_tensor(),
    "redistribute": lambda mesh: DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]),
    "behind an operation of higher order": lambda _: dist.all_reduce(attention()),
    "where errors are caught": lambda _: careless(),
}


def attention() -> Tensor:
    q = torch.ones(1, 1, 4, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        return flex_attention(q, q, q)


def careless() -> None:
    with suppress(Exception):
        dist.all_reduce(y)


def alone() -> list[str]:
    """The first rank calls everything, the other one nothing."""
    mesh = init_device_mesh("cpu", (2,))
    if dist.get_rank():
        return []
    found = []
    for name, call in CALLS.items():
        try:
            with refuse_collectives():
                call(mesh)
        except Collective:
            found.append(name)
    return found


def test_every_collective_is_found_before_it_waits() -> None:
    assert run_ranks(2, alone)[0] == [*CALLS]


def test_what_does_not_communicate_is_computed_as_ever() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    with refuse_collectives():
        found = torch.nn.functional.gelu(weight @ weight)
    assert torch.equal(found, torch.nn.functional.gelu(weight @ weight))
