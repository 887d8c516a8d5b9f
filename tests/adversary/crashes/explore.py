"""One scenario: an operation is recorded, and every state that a crash may leave, up to a bound, is opened.

Or it is run again with errors: one call fails, does half of its work, or all fail from one on. Then what it left is
opened, and it is run once more without errors. Or what it made is read with errors.
"""

from __future__ import annotations

import errno
import hashlib
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.adversary.attack import Found
from tests.adversary.crashes.disk import ORDERS, Disk, Tree
from tests.adversary.crashes.making import Apply, ApplyFiles, Convert, Export, MakeDelta
from tests.adversary.crashes.operations import Calibration, Operation, Saves
from tests.adversary.crashes.runs import Run
from tests.adversary.crashes.tape import Break, Op, Record, Tape

SETTLED = "settled"
OPENED = 160  # states that one scenario opens, at most
AT_ONCE = 24  # states drawn at one point, for each order
ERRORS = {
    Break.ONCE: (errno.EIO, errno.ENOSPC, errno.EINTR, errno.EINVAL, errno.EROFS, errno.EDQUOT, errno.ESTALE),
    Break.HALF_ONCE: (0,),
    Break.HALF_ALWAYS: (0,),
    Break.FULL: (errno.ENOSPC,),
    Break.DEAD: (errno.EIO,),
}
TRIES = 10
OPERATIONS: tuple[type[Operation], ...] = (Saves, Run, Calibration, Export, Convert, MakeDelta, Apply, ApplyFiles)
WEIGHTS = (6, 4, 3, 1, 1, 1, 1, 1)


@dataclass
class Told:
    """Counts of a scenario, and the word for it."""

    word: str
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number


class Scene:
    """A directory for one scenario: `root` is watched, `beside` is where states are opened."""

    def __init__(self, base: Path, operation: Operation) -> None:
        self.root, self.beside, self.operation = base / "root", base / "state", operation
        self.tape = Tape(self.root)

    def fresh(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)

    def recorded(self, breaking: tuple[Break, int, int] | None = None) -> tuple[list[Record], BaseException | None]:
        """The records of one run, from an empty root on; and its error, if it may have one."""
        self.fresh()
        error = None
        with self.tape.watching():
            self.operation.prepare(self.root)
            self.tape.mark(SETTLED)
            if breaking is None:
                self.operation.act(self.root, self._mark)
            else:
                self.tape.broken_by(*breaking)
                try:
                    self.operation.act(self.root, self._mark)
                except BaseException as raised:
                    error = raised
                self.tape.broken_by(Break.NEVER)
            records = self.tape.records()
        return records, error

    def _mark(self, number: int) -> None:
        self.tape.mark(str(number))

    def seen(self, tree: Tree) -> Any:
        """What a tree shows."""
        shutil.rmtree(self.beside, ignore_errors=True)
        self.beside.mkdir(parents=True)
        for path, content in tree.items():
            if content is None:
                (self.beside / path).mkdir()
            else:
                (self.beside / path).write_bytes(content)
        return self.operation.seen(self.beside)


def scenario(seed: int, base: Path) -> Told:
    """Of a seed; the directory is emptied first."""
    draw = random.Random(seed)
    shutil.rmtree(base, ignore_errors=True)
    scene = Scene(base, draw.choices(OPERATIONS, WEIGHTS)[0](draw))
    try:
        return draw.choices((crashes, errors, _reads), (6, 3, 1))[0](scene, draw)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def crashes(scene: Scene, draw: random.Random) -> Told:
    """Record the operation, and open what a crash may leave at each point."""
    operation, told = scene.operation, Told(f"crash of {scene.operation.name}")
    records, _ = scene.recorded()
    points = [place for place, record in enumerate(records) if record.op is not Op.WRITE or draw.random() < 0.3]
    begin = next(place for place, record in enumerate(records) if (record.op, record.path) == (Op.MARK, SETTLED))
    points = [place for place in points if place >= begin]
    told.add("points", len(points))
    states: dict[bytes, tuple[Tree, list[Any], str]] = {}
    disk, marked = Disk(), 0
    for place, record in enumerate(records):
        if record.op is Op.MARK:
            if record.path == SETTLED:
                disk.settle()
            else:
                marked = int(record.path)
        else:
            disk.play(record)
        if place not in points:
            continue
        where = f"after call {place} of {len(records)} ({record.op.name} {record.path}"
        where += f" -> {record.other})" if record.other else ")"
        for order in ORDERS:
            allowed = operation.allowed(marked, renames=order != "two_step")
            for tree in disk.states(order, AT_ONCE, draw):
                told.add("states")
                states.setdefault(_key(tree, allowed), (tree, allowed, f"{where}, {order}"))
    _check_replayed(scene, disk)
    chosen = list(states.values())
    told.add("different", len(chosen))
    if len(chosen) > OPENED:
        chosen = draw.sample(chosen, OPENED)
    for tree, allowed, where in chosen:
        told.add("opened")
        judge(scene, lambda tree=tree: scene.seen(tree), allowed, where, tree)
    return told


def judge(scene: Scene, see: Callable[[], Any], allowed: list[Any], where: str, tree: Tree | None = None) -> Any:
    """Raise Found unless what is seen is allowed."""
    files = "" if tree is None else "\n  " + "\n  ".join(_line(path, held) for path, held in sorted(tree.items()))
    options = {key: value for key, value in vars(scene.operation).items() if key not in ("draw", "wanted")}
    told = f"{scene.operation.name} {options}\n{where}{files}"
    try:
        found = see()
    except BaseException as error:
        raise Found(f"{told}\nexpected {allowed}, opening raised {type(error).__name__}: {error}") from error
    if found not in allowed:
        raise Found(f"{told}\nexpected {allowed}, found {found}")
    return found


def errors(scene: Scene, draw: random.Random) -> Told:
    operation, told = scene.operation, Told(f"errors in {scene.operation.name}")
    scene.recorded()
    before = scene.tape.calls  # with those of preparing: some errors come too late
    for _ in range(TRIES):
        kind = draw.choice(list(ERRORS))
        error = draw.choice(ERRORS[kind])
        at = draw.randrange(max(1, before))
        where = f"{kind.name} {errno.errorcode.get(error, '')} at call {at} of at most {before}"
        records, raised = scene.recorded((kind, at, error))
        told.add("runs")
        told.add("errors injected", scene.tape.broken)
        marks = [int(record.path) for record in records if record.op is Op.MARK and record.path != SETTLED]
        marked = max(marks, default=0)
        done = len(operation.states) - 1
        if raised is None and marked != done:
            raise Found(f"{operation.name}: {where}: it returned, and only {marked} of {done} steps were done")
        if raised is not None:
            told.add("runs that raised")
            _check_error(operation, raised, where)
        allowed = operation.allowed(marked)
        found = judge(scene, lambda: operation.seen(scene.root), allowed, f"{where}: {raised!r}")
        if raised is not None and found != operation.states[-1] and kind is not Break.NEVER:
            _again(scene, where, found)
    return told


def _reads(scene: Scene, draw: random.Random) -> Told:
    """Errors while something whole is read: it is read, or that raises."""
    operation, told = scene.operation, Told(f"reading {scene.operation.name}")
    scene.recorded()
    operation.seen(scene.root)
    before = 0
    for number in range(TRIES):
        kind = draw.choice([kind for kind in ERRORS if kind is not Break.FULL])
        error, at = draw.choice(ERRORS[kind]), draw.randrange(max(1, before))
        where = f"read with {kind.name} {errno.errorcode.get(error, '')} at call {at} of about {before}"
        with scene.tape.watching():
            if number:  # the first one counts
                scene.tape.broken_by(kind, at, error)
            try:
                found = operation.seen(scene.root)
            except (Found, AssertionError) as wrong:
                raise Found(f"{operation.name}: {where}: {wrong}") from wrong
            except BaseException as raised:
                found = operation.states[-1]
                told.add("reads that raised")
                _check_error(operation, raised, where)
            before = max(before, scene.tape.calls)
        told.add("reads")
        told.add("errors injected", scene.tape.broken)
        if found != operation.states[-1]:
            raise Found(f"{operation.name}: {where}: expected {operation.states[-1]}, found {found}")
    return told


def _again(scene: Scene, where: str, found: Any) -> None:
    """Without errors it goes through."""
    operation = scene.operation
    try:
        operation.act(scene.root, lambda number: None)
    except BaseException as error:
        raise Found(f"{operation.name}: {where}: left {found}, and run again it raises {error!r}") from error
    judge(scene, lambda: operation.seen(scene.root), [operation.states[-1]], f"{where}: run again")


def _check_error(operation: Operation, error: BaseException, where: str) -> None:
    if not str(error).strip():
        raise Found(f"{operation.name}: {where}: an error without words: {error!r}") from error


def _check_replayed(scene: Scene, disk: Disk) -> None:
    """The records tell all that was done."""
    there = {
        str(path.relative_to(scene.root)): None if path.is_dir() else path.read_bytes()
        for path in scene.root.rglob("*")
    }
    told = disk.visible()
    wrong = sorted(name for name in {*there, *told} if there.get(name, "") != told.get(name, ""))
    if wrong:
        raise RuntimeError(f"{scene.operation.name}: the recorder has missed something: {wrong}")


def _key(tree: Tree, allowed: list[Any]) -> bytes:
    state = hashlib.blake2b(repr(allowed).encode(), digest_size=16)
    for path, content in sorted(tree.items()):
        state.update(repr((path, None if content is None else len(content))).encode())
        state.update(content or b"")
    return state.digest()


def _line(path: str, held: bytes | None) -> str:
    if held is None:
        return f"{path}/"
    return f"{path} {len(held)} bytes{', zeros' if held and not any(held) else ''}"
