"""Histories of one run: a trainer saves and removes what is old, others look for the newest save; kills, power losses.

One at a time saves or removes, as the documents ask for; loads come at any moment, by `latest_verified`. What a load
gives is at least as new as the last save that was surely there when it began. Nothing of it may fail but where its
choice was replaced by a newer save and removed meanwhile.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dcp_adapters import checkpoint_bases, latest_verified
from tests.adversary.attack import Found
from tests.adversary.crashes.disk import Tree
from tests.adversary.crashes.explore import SETTLED, Told
from tests.adversary.crashes.operations import NAMES, quiet
from tests.adversary.crashes.runs import PLACE, Action, load, step, there
from tests.adversary.crashes.tape import Tape
from tests.adversary.histories.places import after, empty, fill
from tests.adversary.histories.stage import KILLED, Actor, Stage

WRITERS = ("saver", "cleaner")
CHAIN = re.compile(r"which is itself a delta to .*give the full save")
GONE = re.compile(r"[Nn]o such file|is missing|metadata is None|no \.metadata|where there is no checkpoint|not there")


@dataclass(frozen=True)
class Seen:
    """What an actor tells of a load, in words that a pipe takes."""

    number: int  # 0: there was none
    error: str = ""


class _Run:
    """The directory of a run, in epochs that a power loss or the end of all processes ends."""

    def __init__(self, draw: random.Random, base: Path) -> None:
        self.draw, self.root, self.recipes = draw, base / "root", [draw.choice(NAMES)]
        self.runs = self.root / PLACE
        self.tape, self.left = Tape(self.root), Tree()
        self.number = 0  # of the last save that began
        self.sure = 0  # the newest save that was surely there when the epoch began

    def next_save(self) -> Action:
        """A full save, a delta to one that is complete, or now and then to a delta, which is refused."""
        self.number += 1
        bases = checkpoint_bases(self.runs) if self.runs.exists() else {}
        full = [name for name, base in bases.items() if base is None]
        deltas = [name for name, base in bases.items() if base is not None]
        kind = self.draw.random()
        base = None
        if deltas and kind < 0.1:
            base = self.draw.choice(deltas)
        elif full and kind < 0.75:
            base = self.draw.choice(full)
        return Action(self.number, None if base is None else int(base.removeprefix("step-")))

    def look(self) -> Seen:
        """The newest save that verifies, loaded."""
        try:
            with quiet():
                found = latest_verified(self.runs, newest="number") if self.runs.exists() else None
            if found is None or found.path is None:
                return Seen(0, "" if found is None else "; ".join(map(str, found.skipped)))
            return Seen(load(found.path, self.recipes, safe=self.draw.random() < 0.5))
        except Found:
            raise
        except BaseException as error:  # CheckpointException is no Exception
            return Seen(-1, f"{type(error).__name__}: {error}"[-2000:])


def scenario(draw: random.Random, base: Path) -> Told:
    """Some epochs of one run."""
    run, told = _Run(draw, base), Told("a run of saves and deltas")
    for _ in range(draw.choice((1, 2, 3))):
        _epoch(run, draw, told)
    return told


def _epoch(run: _Run, draw: random.Random, told: Told) -> None:
    empty(run.root)
    with run.tape.watching():
        fill(run.root, run.left)
        run.tape.mark(SETTLED)
        with Stage(draw) as stage:
            entries = draw.randint(3, 8)
            cut = draw.randrange(50, 500) if draw.random() < 0.5 else None
            stage.play(lambda: _enter(run, stage, draw), entries, comes=0.01, dies=0.003, until=cut)
            told.add("killed", len(stage.killed))
            for actor in stage.actors:
                told.add(actor.kind)
                if actor.done and actor.outcome != KILLED:
                    _judge(run, stage, actor)
            told.add("steps", stage.step)
            told.add("power losses", int(stage.step == cut))
            for actor in stage.acting:
                stage.kill(actor)
        run.left = after(run.tape, draw, lost=stage.step == cut)
    empty(run.root)
    fill(run.root, run.left)
    run.sure = max(run.sure, *(_sure(stage.actors, stage.step + 1), 0))
    _whole(run, stage)


def _enter(run: _Run, stage: Stage, draw: random.Random) -> None:
    """The next actor, if the rules let one in."""
    if stage.full:
        return
    kind = draw.choices(("saver", "cleaner", "loader"), (4, 3, 3))[0]
    if kind in WRITERS and any(actor.kind in WRITERS for actor in stage.acting):
        return
    if kind == "saver":
        action = run.next_save()
        stage.enter(kind, lambda: action.save(run.runs, run.recipes), action)
    elif kind == "cleaner":
        action = Action(run.number, None, draw.choice(("latest", "latest", "named")), draw.choice((1, 1, 2)))
        stage.enter(kind, lambda: _tidied(run, action), action)
    else:
        stage.enter(kind, run.look)


def _tidied(run: _Run, action: Action) -> None:
    if run.runs.exists():
        with quiet():
            action.tidy(run.runs)


def _judge(run: _Run, stage: Stage, actor: Actor) -> None:
    """Of an actor that came to its end."""
    if actor.kind != "loader":
        chained = actor.kind == "saver" and actor.raised is not None and CHAIN.search(actor.raised)
        if actor.raised is not None and not chained:
            raise Found(_history(run, stage, f"{actor.kind} {actor.number} raised {actor.raised}"))
        return
    if actor.raised is not None:
        raise Found(_history(run, stage, f"loader {actor.number} raised {actor.raised}"))
    assert actor.ended is not None
    least, most = max(run.sure, _sure(stage.actors, actor.begun)), _begun(run, stage.actors, actor.ended)
    seen: Seen = actor.outcome
    if least <= seen.number <= most:
        return
    replaced = any(one.kind == "saver" and not _before(one, actor.begun) for one in stage.actors)
    cleaned = any(one.kind == "cleaner" and not _before(one, actor.begun) for one in stage.actors)
    if seen.number <= most and replaced and cleaned and (GONE.search(seen.error) or not seen.error):
        return
    raise Found(_history(run, stage, f"loader {actor.number}: {least} to {most} may be seen, found {seen}"))


def _before(actor: Actor, moment: int) -> bool:
    return actor.ended is not None and actor.ended < moment


def _sure(actors: Iterable[Actor], moment: int) -> int:
    """The newest save that had surely been made at a moment."""
    return max(
        (one.value.number for one in actors if one.kind == "saver" and one.well and _before(one, moment)), default=0
    )


def _begun(run: _Run, actors: Iterable[Actor], moment: int) -> int:
    """The newest save that may be there at a moment."""
    own = (one.value.number for one in actors if one.kind == "saver" and one.begun <= moment)
    return max((run.sure, *own, *there_in(run.left)))


def there_in(tree: Tree) -> list[int]:
    """The numbers of the saves of a tree that have a `.metadata`."""
    return [int(path.split("/")[1].removeprefix("step-")) for path in tree if path.endswith("/.metadata")]


def _whole(run: _Run, stage: Stage) -> None:
    """When nobody acts any more: all that is complete loads, and the newest is new enough."""
    numbers = there(run.runs) if run.runs.exists() else []
    for number in numbers:
        try:
            load(step(run.runs, number), run.recipes, safe=True)
        except BaseException as error:
            raise Found(_history(run, stage, f"in the end save {number} does not load: {error}")) from error
    found = run.look()
    if found.number != max(numbers, default=0) or found.number < run.sure:
        raise Found(_history(run, stage, f"in the end {numbers} are there, {run.sure} for sure, and {found} is found"))


def _history(run: _Run, stage: Stage, what: str) -> str:
    return f"{what}\nbefore: {sorted(there_in(run.left))}, {run.sure} for sure\n" + "\n".join(stage.told)
