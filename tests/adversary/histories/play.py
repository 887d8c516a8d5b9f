"""One history of a seed."""

from __future__ import annotations

import random
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp

from dcp_adapters import AtomicFileSystemWriter, QuantizedSavePlanner, remove_replaced
from layerwise.resume.checkpoints import CalibrationCheckpoint
from tests.adversary.attack import Found
from tests.adversary.crashes.explore import SETTLED, Told
from tests.adversary.crashes.making import Appearing, Convert, Export, MakeDelta
from tests.adversary.crashes.operations import NAMES, NOTHING, RUN, full, loaded, quiet
from tests.adversary.crashes.tape import Tape
from tests.adversary.histories import runs
from tests.adversary.histories.model import may_be_seen, may_fail, write_of
from tests.adversary.histories.places import after, empty, fill
from tests.adversary.histories.stage import KILLED, Actor, Stage
from tests.dcp_adapters.cases import assert_holds

if TYPE_CHECKING:
    from tests.adversary.crashes.disk import Tree

MISSING = re.compile(
    "another save into the same directory has removed it|"
    "No such file|no such file|is missing|metadata is None|does not exist|not there"
)
SAVERS = ("saver", "clearing saver")


def scenario(seed: int, base: Path) -> Told:
    draw = random.Random(seed)
    shutil.rmtree(base, ignore_errors=True)
    try:
        kind = draw.choices((_saves, runs.scenario, _makers, _calibrations), (6, 4, 2, 2))[0]
        return kind(draw, base)
    finally:
        shutil.rmtree(base, ignore_errors=True)


# -- saves, loads and cleaning of one directory ------------------------------------------------------------------------


class _Directory:
    """The directory that all use, in epochs that a power loss ends."""

    def __init__(self, draw: random.Random, base: Path) -> None:
        self.draw, self.root, self.beside = draw, base / "root", base / "state"
        self.path = self.root / "runs" / "latest"
        self.recipes = [draw.choice(NAMES)]
        self.alone = draw.random() < 0.6  # one save at a time, as the docs ask for
        self.tape = Tape(self.root)
        self.value: Any = NOTHING
        self.left: Tree = {}
        self.broken = False  # two saves at once may have left metadata whose files are gone
        self.saves = 0

    def save(self, value: int, *, clearing: bool) -> None:
        with quiet():
            dcp.save(
                full(self.recipes, value),
                storage_writer=AtomicFileSystemWriter(self.path),
                planner=QuantizedSavePlanner(overwrite="delete_first" if clearing else "keep"),
                no_dist=True,
            )

    def load(self, path: Path) -> Any:
        return loaded(path, self.recipes, safe=self.draw.random() < 0.5)


def _saves(draw: random.Random, base: Path) -> Told:
    place, told = _Directory(draw, base), Told("saves, one at a time")
    if not place.alone:
        told.word = "saves at once"
    for _ in range(draw.choice((1, 2, 3))):
        _epoch(place, draw, told)
    return told


def _epoch(place: _Directory, draw: random.Random, told: Told) -> None:
    empty(place.root)
    with place.tape.watching():
        fill(place.root, place.left)
        place.tape.mark(SETTLED)
        with Stage(draw) as stage:
            entries = draw.randint(2, 7)
            cut = draw.randrange(20, 300) if draw.random() < 0.5 else None
            stage.play(lambda: _enter(place, stage, draw), entries, comes=0.03, dies=0.004, until=cut)
            told.add("killed", len(stage.killed))
            for actor in stage.actors:
                _judge(place, stage, actor)
                told.add(actor.kind)
            told.add("steps", stage.step)
            told.add("power losses", int(stage.step == cut))
            for actor in stage.acting:
                stage.kill(actor)
        place.left = after(place.tape, draw, lost=stage.step == cut)
        empty(place.root)
        fill(place.root, place.left)
    now = stage.step + 1
    place.value = _seen(place, stage, lambda: place.load(place.path), now, now)


def _enter(place: _Directory, stage: Stage, draw: random.Random) -> None:
    """The next actor, if the rules let one in."""
    if stage.full:
        return
    saving = [actor for actor in stage.acting if actor.kind in SAVERS]
    cleaning = [actor for actor in stage.acting if actor.kind == "cleaner"]
    kind = draw.choices(("saver", "clearing saver", "loader", "cleaner"), (5, 1 if place.alone else 0, 5, 2))[0]
    if (kind in SAVERS and (cleaning or (saving and place.alone))) or (kind == "cleaner" and saving):
        return
    if kind in SAVERS:
        place.saves += 1
        value = place.saves
        place.broken = place.broken or bool(saving)
        stage.enter(kind, lambda: place.save(value, clearing=kind != "saver"), value)
    elif kind == "loader":
        stage.enter(kind, lambda: place.load(place.path))
    else:
        stage.enter(kind, lambda: remove_replaced(place.path))


def _judge(place: _Directory, stage: Stage, actor: Actor) -> None:
    if not actor.done or actor.outcome == KILLED:
        return
    if actor.kind == "loader":
        assert actor.ended is not None

        def outcome() -> Any:
            if actor.raised is not None:
                raise RuntimeError(actor.raised)
            return actor.outcome

        _seen(place, stage, outcome, actor.begun, actor.ended)
    elif actor.raised is not None:
        others = any(other.kind in SAVERS and other is not actor for other in stage.actors)
        if place.alone or not others or not MISSING.search(actor.raised):
            raise Found(_history(place, stage, f"{actor.kind} {actor.number} raised {actor.raised}"))


def _seen(place: _Directory, stage: Stage, see: Callable[[], Any], begun: int, ended: int) -> Any:
    """What is seen, if it may be; NOTHING where files may be missing and are."""
    writes = [write_of(actor) for actor in stage.actors if actor.kind in SAVERS]
    allowed = may_be_seen(place.value, writes, begun, ended)
    removers = [(actor.begun, actor.ended) for actor in stage.actors if actor.kind != "loader"]
    try:
        found = see()
    except Exception as error:
        fits = MISSING.search(str(error)) and (place.broken or may_fail(writes, removers, begun, ended))
        if fits and not isinstance(error, Found):
            return NOTHING
        raise Found(_history(place, stage, f"from {begun} to {ended} expected {allowed}, raised {error!r}")) from error
    except BaseException as error:  # CheckpointException
        if MISSING.search(str(error)) and (place.broken or may_fail(writes, removers, begun, ended)):
            return NOTHING
        raise Found(_history(place, stage, f"from {begun} to {ended} expected {allowed}, raised {error!r}")) from error
    if found not in allowed:
        raise Found(_history(place, stage, f"from {begun} to {ended} expected {allowed}, saw {found}"))
    return found


def _history(place: _Directory, stage: Stage, what: str) -> str:
    return f"{what}\nbefore: {place.value}, {'one save at a time' if place.alone else 'saves at once'}\n" + "\n".join(
        stage.told
    )


# -- several who make the same thing -----------------------------------------------------------------------------------


def _makers(draw: random.Random, base: Path) -> Told:
    """Of several who write the same export, conversion or delta, one or more succeed, and it is whole."""
    operation: Appearing = draw.choice((Export, Convert, MakeDelta))(draw)
    told, root = Told(f"makers of one {operation.name}"), base / "root"
    root.mkdir(parents=True)
    operation.prepare(root)
    operation.seen(root)
    with Tape(root).watching(), Stage(draw) as stage:
        for _ in range(draw.choice((2, 3))):
            stage.enter("maker", lambda: operation.make(root, root / "out"))
        stage.play(lambda: None, dies=0.002)
        told.add("steps", stage.step)
        told.add("maker", len(stage.actors))
    text = "\n".join(stage.told)
    found = operation.seen(root)
    well = [actor for actor in stage.actors if actor.well]
    if len(well) > 1 or (not well and not stage.killed) or (well and found != "whole"):
        raise Found(f"{operation.name}: {len(well)} makers succeeded, {found} is there\n{text}")
    for actor in stage.actors:
        if actor.raised is not None and not re.search(r"nothing is overwritten", actor.raised):
            raise Found(f"{operation.name}: maker {actor.number} raised {actor.raised}\n{text}")
    return told


def _calibrations(draw: random.Random, base: Path) -> Told:
    """Of several runs in one directory, whoever opens it later goes on behind whole windows."""
    told, root = Told("calibrations at once"), base / "root"
    root.mkdir(parents=True)
    path, recipes, count = root / "run", [draw.choice(NAMES)], draw.choice((2, 3))

    def tensors(number: int) -> dict[str, Any]:
        return {name: value for name, value in full(recipes, number).items() if name != "step"}

    def run() -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint = CalibrationCheckpoint(path)
            found = checkpoint.open(RUN)
            begun = found.windows if found else ()
            for number, window in enumerate(begun):
                target = tensors(99)
                checkpoint.load_window(window, target)
                assert_holds(target, tensors(number))
            for number in range(len(begun), count):
                checkpoint.save_window(number, number, tensors(number))
        return count

    with Tape(root).watching(), Stage(draw) as stage:
        entries = draw.randint(2, 4)
        stage.play(lambda: stage.enter("run", run), entries, comes=0.01, dies=0.003)
        told.add("steps", stage.step)
        told.add("run", len(stage.actors))
    text = "\n".join(stage.told)
    for actor in stage.actors:
        taken = actor.raised is not None and re.search(
            "taken over|damaged|No such file|start again|one run at a time", actor.raised
        )
        if actor.raised is not None and (not taken or "AssertionError" in actor.raised or len(stage.actors) == 1):
            raise Found(f"calibration run {actor.number} raised {actor.raised}\n{text}")
    try:
        run()
    except BaseException as error:
        raise Found(f"calibration: nobody runs any more, and a run raises {error!r}\n{text}") from error
    return told
