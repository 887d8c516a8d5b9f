"""Simulated ranks: many in one process, under a scheduler that a seed drives, with faults at any collective.

    world.py      ranks as threads of which one runs at a time, and when collectives are complete
    groups.py     the process groups between them
    saving.py     saves into one directory, by DCP's coordinator and the save planner
    running.py    full saves and deltas, asynchronous ones too; what removes old ones; loads in between
    loading.py    loads, as they are and converted
    stepping.py   optimizer steps
    syncing.py    merges, and scales that shards agree on
    living.py     digests, deltas, streams, exports
    calibrating.py  calibrations, interrupted and resumed
    cases.py      weights, layouts and verdicts

What must hold: every rank ends, and none waits for one that failed; all raise, alike, or none does; what is visible
afterwards is bit for bit what one process makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

from tests.adversary.attack import Attack
from tests.adversary.ranks import calibrating, living, loading, running, saving, stepping, syncing
from tests.adversary.ranks.groups import threads_as_ranks

KINDS = {
    "calibrating": calibrating.scenario,
    "living": living.scenario,
    "loading": loading.scenario,
    "running": running.scenario,
    "saving": saving.scenario,
    "stepping": stepping.scenario,
    "syncing": syncing.scenario,
}
QUICK = ("loading", "running", "saving")


def scenario(seed: int) -> str:
    """One kind of scenario, and how it ended."""
    random = Random(seed)
    kind = random.choice([*sorted(KINDS), *QUICK * 3])
    return f"{kind}: {KINDS[kind](random)}"


@contextmanager
def held() -> Iterator[None]:
    """Threads are ranks."""
    with threads_as_ranks(), saving.caches_of_each_rank(), living.full_disks(), loading.groups_of_loads():
        yield


ATTACK = Attack("ranks", scenario, held)
