"""The life of a seed. One that fails is lived again without some of its steps and layers, as long as it fails alike."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from tests.adversary.attack import Found
from tests.adversary.lives import calibrating, checkpoints, deltas, models, on_ranks, outgoing, training, writes
from tests.adversary.lives.life import Failure, Plan, live
from tests.adversary.lives.on_ranks import Era, eras
from tests.adversary.lives.plans import planned, shortened, smaller
from tests.ranks import run_ranks

TABLE = training.STEPS | writes.STEPS | checkpoints.STEPS | outgoing.STEPS | deltas.STEPS | calibrating.STEPS
SHARDED = 0.1  # of the lives
MOST = 60  # shorter lives that are tried


def scenario(seed: int) -> str:
    """One life; returns what kind of life it was."""
    if Random(seed).random() < SHARDED:
        return sharded(seed)
    plan = planned(seed)
    _judge(
        plan,
        lambda one: live(one, TABLE),
        smaller,
        lambda one: [*one.layers, *one.steps, replace(one, layers=(), steps=())],
    )
    return "one process, masters" if plan.masters else "one process"


def _told(plan: Plan) -> list[Any]:
    return [replace(plan, layers=(), steps=()), *plan.layers, *plan.steps]


def sharded(seed: int) -> str:
    """One life on ranks."""
    life = eras(seed)
    _judge(life, live_eras, _smaller_eras, lambda one: [line for era in one for line in (era.style, *_told(era.plan))])
    return f"{max(era.ranks for era in life)} ranks"


def live_eras(life: Sequence[Era]) -> list[tuple[models.Layer, ...]]:
    """One era after the other, each from the checkpoint of the one before; returns the layers that each one left."""
    left = []
    before: Any = None
    with tempfile.TemporaryDirectory(prefix="life-") as path:
        for era in life:
            if before is not None:
                era = Era(era.style, replace(era.plan, layers=tuple(before[1])))  # noqa: PLW2901
            before = run_ranks(era.ranks, on_ranks.live_era, (era, path, before), timeout=300)[0]
            left.append(tuple(before[1]))
    return left


def _smaller_eras(life: tuple[Era, ...]) -> Iterator[tuple[Era, ...]]:
    if len(life) > 1:
        yield life[:-1]
    for number, era in enumerate(life):
        for plan in smaller(era.plan):
            yield (*life[:number], Era(era.style, plan), *life[number + 1 :])


def _judge(
    life: Any, attempt: Callable[[Any], Any], less: Callable[[Any], Iterator[Any]], told: Callable[[Any], Sequence[Any]]
) -> None:
    """Raise `Found` with the shortest life that fails as this one does."""
    try:
        attempt(life)
        return
    except (Exception, CheckpointException) as error:
        kind, last = _kind(error), error

    def fails(shorter: Any) -> bool:
        nonlocal last
        try:
            attempt(shorter)
        except (Exception, CheckpointException) as error:
            if _kind(error) == kind:
                last = error
                return True
        return False

    short = shortened(life, fails, less, most=MOST)
    raise Found("\n".join([str(last), *(f"    {line}" for line in told(short))])) from last


def _kind(error: Exception) -> tuple[str, str]:
    """The step that failed and the type of its error."""
    if isinstance(error, Failure):
        return error.step.name, type(error.error).__name__
    found = re.search(r"Failure: step -?\d+, (\w+)\(\d+\): (\w+)", str(error))
    return (found[1], found[2]) if found else ("", type(error).__name__)
