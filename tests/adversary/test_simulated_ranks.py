"""Simulated ranks themselves: they compute what real ones do, and what they find is there to be found."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.adversary.attack import Found
from tests.adversary.ranks import running, saving
from tests.adversary.ranks.cases import refused, simulated
from tests.adversary.ranks.groups import threads_as_ranks
from tests.adversary.ranks.world import Fault, World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RANKS = 4
RUNS = {10: "refused", 11: "saved", 13: "death"}  # seed -> how it ends


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with threads_as_ranks():
        yield


def ended(body: Callable[[int], Any], fault: Fault | None = None, *, seed: int = 0) -> list[Any]:
    """The value of each rank, its error in words, or "died"."""
    with simulated(RANKS, Random(seed), body, fault) as outcomes:
        return ["died" if one.died else one.words or one.value for one in outcomes]


def collectives(rank: int) -> list[Any]:
    """One of each kind."""
    largest, total = torch.tensor([rank, -rank]), torch.full((2,), 2.0**rank)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    work = dist.all_reduce(total, async_op=True)
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, f"rank {rank}")
    work.wait()
    told = [everyone if rank == 2 else None]
    dist.broadcast_object_list(told, src=2)
    rows = [torch.zeros(1) for _ in range(RANKS)] if rank == 1 else None
    dist.gather(torch.full((1,), float(rank)), rows, dst=1)
    dealt: list[Any] = [None]
    dist.scatter_object_list(dealt, [10, 11, 12, 13] if rank == 0 else None, src=0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    placed = distribute_tensor(torch.arange(14.0).view(7, 2), mesh, [Shard(1), Shard(0)])
    whole = (placed + 1).full_tensor()
    dist.barrier()
    return [
        largest.tolist(),
        total.tolist(),
        told[0],
        None if rows is None else torch.cat(rows).tolist(),
        dealt[0],
        torch.equal(whole, torch.arange(14.0).view(7, 2) + 1),
        [dist.get_rank(group) for group in mesh.get_all_groups()],
    ]


@pytest.mark.parametrize("seed", range(4))
def test_collectives_give_what_they_give_in_processes(seed: int) -> None:
    for rank, found in enumerate(ended(collectives, seed=seed)):
        everyone = [f"rank {each}" for each in range(RANKS)]
        rows = [0.0, 1.0, 2.0, 3.0] if rank == 1 else None
        assert found == [[3, 0], [15.0, 15.0], everyone, rows, 10 + rank, True, [rank // 2, rank % 2]]


def test_a_rank_that_raises_alone_leaves_the_others_hanging() -> None:
    def body(rank: int) -> None:
        if rank == 2:
            raise OSError("full")
        dist.barrier()

    with pytest.raises(Found, match=r"all wait for ever: rank 0 in barrier .* Ended: rank 2: OSError: full"):
        ended(body)


def test_other_collectives_do_not_meet() -> None:
    def body(rank: int) -> None:
        dist.all_reduce(torch.zeros(3 + rank // 3))

    with pytest.raises(Found, match="different collectives meet: all_reduce"):
        ended(body)


@pytest.mark.parametrize("after", [False, True])
def test_who_needs_a_dead_rank_gets_an_error_and_who_does_not_goes_on(after: bool) -> None:
    def body(rank: int) -> str:
        told = [rank]
        dist.broadcast_object_list(told, src=1)  # two collectives
        dist.all_reduce(torch.zeros(1))
        return "done"

    found = ended(body, Fault(3, 2, after))
    gone = "BrokenGroup: Connection closed by peer"
    assert found == [*(["done"] * 3 if after else [gone] * 3), "died"]
    found = ended(body, Fault(1, 0, after))
    assert found[1] == "died"
    assert set(found[:1] + found[2:]) == {gone}


def test_the_same_seed_is_the_same_scenario_and_others_differ() -> None:
    def order(seed: int) -> list[int]:
        came: list[int] = []

        def body(rank: int) -> None:
            for _ in range(3):
                dist.barrier()
                came.append(rank)

        ended(body, seed=seed)
        return came

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


def test_verdicts() -> None:
    assert not refused(["", ""], "x")
    assert refused(["ValueError: b", "ValueError: b"], "x")
    assert refused(["ValueError: b", "ValueError: c"], "x", alike=False)
    for errors, alike, why in (
        (["ValueError: b", ""], True, "some ranks raised, others went on"),
        (["ValueError: b", "ValueError: c"], True, "different errors"),
        (["KeyError: 'b'"] * 2, True, "an error without help"),
    ):
        with pytest.raises(Found, match=why):
            refused(errors, "x", alike=alike)


def uploading(rank: int, *, without: int = -1) -> float:
    """A collective in a thread beside the rank's own, and one of the rank meanwhile."""
    group, own = dist.new_group(), torch.full((1,), 2.0**rank)
    if rank == without:
        return 0.0
    future = World.here()[0].beside(lambda: dist.all_reduce(own, group=group))
    if without < 0:
        dist.all_reduce(torch.zeros(1))
    future.result()
    return float(own)


@pytest.mark.parametrize("seed", range(3))
def test_threads_beside_ranks_meet_in_groups_of_their_own(seed: int) -> None:
    assert ended(uploading, seed=seed) == [15.0] * RANKS


def test_a_thread_beside_that_waits_for_ever_is_found() -> None:
    with pytest.raises(Found, match=r"all wait for ever: rank 0 in all_reduce .* Ended: rank 2: returned"):
        ended(lambda rank: uploading(rank, without=2))


def test_a_death_ends_the_threads_beside_a_rank_and_is_told_to_the_others() -> None:
    found = ended(uploading, Fault(1, 0, after=False))
    assert found[1] == "died"
    assert set(found[:1] + found[2:]) == {"BrokenGroup: Connection closed by peer"}


@pytest.mark.parametrize(("seed", "end"), RUNS.items())
def test_runs_of_saves_and_deltas(seed: int, end: str) -> None:
    with saving.caches_of_each_rank():
        assert running.scenario(Random(seed)) == end
