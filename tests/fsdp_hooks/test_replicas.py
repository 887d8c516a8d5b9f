"""A bit that flips in one replica is found by the next step, and named; comparing costs no collective of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, NVFP4BlockScaling
from qtensor.optim import replicas
from qtensor.optim.replicas import PIECES, Replicas, _name_ranks
from tests.fsdp_hooks.cases import Collectives, Net, batch, bits, build, local, mesh_of, shard, snapshot
from tests.ranks import run_ranks, run_ranks_catching

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

    from qtensor.spec.recipes import Recipe

ROWS = (64, 33)


def trained(recipe: Recipe, *, sharded: bool, check: bool = True) -> tuple[Net, MasterWeightOptimizer]:
    """A model of two replicas (HSDP), or one on all ranks, after a step; all ranks take the same batches."""
    net = build(recipe, ROWS)
    if sharded:
        shard(net, mesh=mesh_of(2, dist.get_world_size() // 2))
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, net.named_parameters(), check_replicas=check, lr=0.01)
    step(net, optimizer)
    return net, optimizer


def step(net: Net, optimizer: MasterWeightOptimizer, seed: int = 0) -> None:
    optimizer.zero_grad()
    net(batch(seed, rank=0)).float().square().mean().backward()
    optimizer.step()


def checked_steps_are_the_same_steps() -> None:
    """The bytes and the collectives of a training that compares nothing."""
    found = []
    for check in (True, False):
        net, optimizer = trained(NVFP4BlockScaling(), sharded=True, check=check)
        with Collectives() as comms:
            optimizer.step()  # with the gradients of the step before
        found.append((comms.counts, {name: bits(part).tolist() for name, part in snapshot(net).items()}))
    assert found[0] == found[1]
    assert found[0][0] == {"allreduce_": 1}


CUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...], list[int]]] = {  # mesh, placements, ranks that agree
    "replicas of a cut weight": ((2, 4), (Replicate(), Shard(0)), [8]),
    "replicas of one cut twice": ((2, 2, 2), (Replicate(), Shard(0), Shard(1)), [2, 2]),
    "replicas, and a mesh dim of one rank": ((2, 1, 4), (Replicate(), Shard(0), Shard(0)), [8]),
    "cut twice": ((2, 4), (Shard(0), Shard(1)), [2, 4]),
    "all hold all": ((8,), (Replicate(),), []),
}


@pytest.mark.parametrize("case", CUTS)
def test_claims_are_reduced_over_all_ranks_only_where_replicas_claim_the_same(case: str) -> None:
    shape, placements, expected = CUTS[case]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        mesh = init_device_mesh("cpu", shape)
        param = DTensor.from_local(torch.zeros(4, 32), mesh, placements, run_check=False)
        plain = torch.zeros(3)  # which all ranks hold: there is something to compare
        (cuts, _) = Replicas([("weight", param), ("plain", plain)]).cuts_of([param, plain])
        assert [group.size() for _, group in cuts] == expected
    finally:
        dist.destroy_process_group()


def test_every_bit_of_a_digest_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        rows: list[Tensor] = []
        for digest in (0, *(1 << bit for bit in range(63)), -1, -(1 << 63)):
            monkeypatch.setattr(replicas, "digests", lambda groups, held=digest: torch.tensor([held] * len(groups)))
            one = Replicas([("weight", torch.zeros(4))])
            one.look()
            rows += one.values
        first = rows[0]
        Replicas([]).check([torch.maximum(first, first)])
        assert all(bool((torch.maximum(first, row).view(2, PIECES).sum(0) != 0).any()) for row in rows[1:])
    finally:
        dist.destroy_process_group()


def test_a_rank_outside_of_a_mesh_takes_part() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        param = DTensor.from_local(torch.zeros(4, 32), DeviceMesh("cpu", [1]), [Shard(0)], run_check=False)
        found = Replicas([("weight", param)])
        assert found.groups == [[dist.group.WORLD]]
        assert found.cuts_of([param]) == [[]]
    finally:
        dist.destroy_process_group()


def flip(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1).view(torch.uint8)[3] ^= 16


def flip_in_a_payload() -> None:
    net, optimizer = trained(MXFP8BlockScaling(), sharded=True)
    if dist.get_rank() == 3:
        flip(local(net.blocks[0].linear.weight).parts()["payload"])
    step(net, optimizer, 1)


def flip_in_a_norm() -> None:
    """A dense parameter, which the exchange would not look at otherwise."""
    net, optimizer = trained(MXFP8BlockScaling(), sharded=True)
    if dist.get_rank() == 0:
        flip(local(net.norm.weight))
    step(net, optimizer, 1)


def flip_where_most_agree() -> None:
    net, optimizer = trained(MXFP8BlockScaling(), sharded=False)
    if dist.get_rank() == 1:
        flip(local(net.blocks[1].linear.weight).parts()["scale"])
    step(net, optimizer, 1)


HEAD = "RuntimeError: MasterWeightOptimizer.step: replicas hold different bytes of "
TAIL = ". No quantized parameter has been written; take that rank's device out of the job and load a checkpoint"


@pytest.mark.parametrize(
    ("world", "fails", "name", "who"),
    [
        (4, flip_in_a_payload, "blocks.0.linear.weight: (64, 64)", "ranks 1, 3 do not agree"),
        (4, flip_in_a_norm, "norm.weight: (64,)", "ranks 0, 2 do not agree"),
        (3, flip_where_most_agree, "blocks.1.linear.weight: (33, 64)", "rank 1, other than ranks 0, 2"),
    ],
)
def test_a_flipped_bit_is_an_error_on_all_ranks_that_names_parameter_and_ranks(
    world: int, fails: object, name: str, who: str
) -> None:
    for message in run_ranks_catching(world, fails):  # type: ignore[arg-type]
        assert message.startswith(HEAD + name), message
        assert message.endswith(f": {who}{TAIL}"), message


def test_comparing_changes_no_byte_and_costs_no_collective() -> None:
    run_ranks(4, checked_steps_are_the_same_steps)


def test_one_process_has_nothing_to_compare() -> None:
    net, optimizer = trained(MXFP8BlockScaling(), sharded=False)
    step(net, optimizer, 1)


def without_replicas() -> None:
    net = shard(build(MXFP8BlockScaling(), ROWS), mesh=mesh_of(2))
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, net.named_parameters(), check_replicas=True)
    with pytest.warns(UserWarning, match="no two ranks hold the same shard, so there are no replicas to compare"):
        step(net, optimizer)


def test_shards_without_replicas_are_not_called_compared() -> None:
    run_ranks(2, without_replicas)


def test_few_are_told_from_many() -> None:
    assert _name_ranks({0: 5, 1: 6}) == "ranks 0, 1 do not agree"
    assert _name_ranks({0: 5, 1: 6, 2: 5, 5: 5}) == "rank 1, other than ranks 0, 2, 5"
    assert _name_ranks({0: 5, 1: 6, 2: 7, 3: 5, 4: 5}) == "ranks 1, 2, other than ranks 0, 3, 4"
    assert _name_ranks({0: 5, 1: 6, 2: 5, 3: 6}) == "ranks 0, 1, 2, 3 do not agree"
