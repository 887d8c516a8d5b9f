"""A run on simulated ranks: full saves and deltas to them, in the background or not; what removes old ones; loads.

Each save goes into a directory of its own, in a layout of its own, and so does each load. In one save a rank may die,
fail, or give another base than the others: then all ranks raise, alike, and the save is not there. At every end each
complete save holds what it was given, and every delta among them has its base.
"""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from dcp_adapters import (
    QuantizedLoadPlanner,
    QuantizedStager,
    SafeFileSystemReader,
    checkpoint_bases,
    keep_latest,
    remove_checkpoints,
)
from qtensor import QuantizedTensor, quantize
from tests.adversary.attack import Found
from tests.adversary.ranks.cases import (
    Layout,
    Weight,
    bits,
    death,
    directory,
    layout,
    refused,
    simulated,
    weights,
    words,
)
from tests.adversary.ranks.saving import AtomicWriter, Planner, Writer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SIZES = (2, 2, 3, 4)
TROUBLE = (*["none"] * 5, *["death"] * 4, "before", "after", "finish", "resolve", "base", "in full", "base gone")
HOW = ("sync", "sync", "async", "stager")


@dataclass(frozen=True)
class _Action:
    """What all ranks do next.

    kind: "save", "load", "named", "latest". number: of the save, or how many are kept. base: of a save, or None.
    """

    kind: str
    number: int
    layout: Layout
    base: int | None = None
    how: str = "sync"
    options: dict[str, Any] = field(default_factory=dict)
    trouble: str = "none"
    who: int = 0
    seed: int = 0


def scenario(random: Random) -> str:
    """A run; trouble in one of its saves."""
    size = random.choice(SIZES)
    given = weights(random, 3)
    actions = _actions(random, size, given)
    trouble = next((each.trouble for each in actions if each.trouble != "none"), "none")
    with directory() as runs:

        def body(rank: int) -> list[str]:
            run = _Run(rank, runs, given)
            return [run.take(action) for action in actions]

        fault = death(random, size, 10 * len(actions)) if trouble == "death" else None
        with simulated(size, random, body, fault) as outcomes:
            died = any(one.died for one in outcomes)
            if not died and (error := next((one.error for one in outcomes if one.error), None)) is not None:
                raise error
        _whole(runs, given, {each.number: each.base for each in actions if each.kind == "save"})
        return "death" if died else _verdict([one.value for one in outcomes], actions)


def _actions(random: Random, size: int, given: list[Weight]) -> list[_Action]:
    """Saves, each full or a delta to the last full one, with loads and removals in between."""
    found: list[_Action] = []
    full, trouble, count = 0, random.choice(TROUBLE), random.randint(2, 4)
    at = random.randint(2, count)
    for number in range(1, count + 1):
        base = full if full and (random.random() < 0.75 or number == at) else None
        options = {
            "digest": random.random() < 0.3,
            "enable_plan_caching": random.random() < 0.3,
            "overwrite": random.choice(("keep", "delete_first")),
        }
        own = trouble if number == at else "none"
        who, seed, how = random.randrange(size), random.randrange(2**32), random.choice(HOW)
        found.append(_Action("save", number, layout(random, size, given), base, how, options, own, who, seed))
        full = full if base else number
        kinds = random.choice(((), ("load",), ("named", "load"), ("latest", "load"), ("latest",)))
        found += [_Action(kind, random.choice((1, 1, 2)), layout(random, size, given), seed=seed) for kind in kinds]
    return found


class _Run:
    """A rank of a run. there: number -> base of the saves that are complete."""

    def __init__(self, rank: int, runs: Path, given: list[Weight]) -> None:
        self.rank, self.runs, self.given = rank, runs, given
        self.uploads = dist.new_group()
        self.there: dict[int, int | None] = {}
        self.meshes: dict[tuple[int, ...], DeviceMesh] = {}

    def take(self, action: _Action) -> str:
        """One action; its error, or ""."""
        if action.kind == "save":
            return self._save(action)
        if action.kind == "load":
            self._load(action)
        else:
            self._tidy(action)
        dist.barrier()
        return ""

    def _mesh(self, placed: Layout) -> DeviceMesh:
        if placed.mesh not in self.meshes:
            self.meshes[placed.mesh] = placed.device_mesh()
        return self.meshes[placed.mesh]

    def _state(self, placed: Layout, version: int) -> dict[str, Tensor]:
        return {each.name: placed.piece(each, stepped(each, version), self._mesh(placed)) for each in self.given}

    def _save(self, action: _Action) -> str:
        trouble = action.trouble if self.rank == action.who else "none"
        state = self._state(action.layout, action.number)
        base = None if action.base is None else step(self.runs, action.base)
        if trouble == "base":
            base = step(self.runs, 99)
        elif trouble == "in full":
            base = None
        elif trouble == "base gone" and base is not None:
            (base / ".metadata").rename(base / "away")
        writer = (Writer, AtomicWriter)[action.seed % 2](step(self.runs, action.number), trouble)
        planner = Planner(trouble, delta_to=base, **action.options)
        error = ""
        try:
            if action.how == "sync":
                dcp.save(state, storage_writer=writer, planner=planner)
            else:
                self._in_background(state, writer, planner, action)
        except (Exception, CheckpointException) as raised:
            error = words(raised)
        dist.barrier()  # until then not every rank has seen what there is
        if trouble == "base gone" and base is not None:
            (base / "away").rename(base / ".metadata")
        dist.barrier()
        if not error:
            self.there[action.number] = action.base
        return error

    def _in_background(self, state: dict[str, Tensor], writer: Any, planner: Any, action: _Action) -> None:
        """Training goes on: weights change, ranks meet, and at times an older save is loaded."""
        stager = QuantizedStager() if action.how == "stager" else None
        future: Any = dcp.async_save(
            state, storage_writer=writer, planner=planner, process_group=self.uploads, async_stager=stager
        )
        try:
            for value in state.values():
                _overwrite(value)
            for _ in range(action.seed // 2 % 4):
                dist.all_reduce(torch.ones(1))
            if self.there and action.seed // 8 % 2 and action.trouble != "base gone":
                self._load(action)
            future.result()
        finally:
            if stager is not None:
                stager.close()

    def _load(self, action: _Action) -> None:
        """One of the saves, in another layout."""
        if not self.there:
            return
        number = sorted(self.there)[action.seed % len(self.there)]
        state = self._state(action.layout, 0)
        path = step(self.runs, number)
        reader = (dcp.FileSystemReader, SafeFileSystemReader)[action.seed // 3 % 2](path)
        dcp.load(state, storage_reader=reader, planner=QuantizedLoadPlanner(verify_checksums=action.seed % 5 == 0))
        for name, wanted in self._state(action.layout, number).items():
            if bits(state[name]) != bits(wanted):
                raise Found(f"{name} of save {number} on rank {self.rank}: other bytes than were saved")

    def _tidy(self, action: _Action) -> None:
        """Remove what is old, and compare what is left with what is needed."""
        newest = sorted(self.there)[-action.number :]
        enough = len(newest) == action.number
        if action.kind == "latest":
            keep_latest(self.runs, action.number, newest="number")
        elif self.rank == 0 and newest:
            remove_checkpoints(self.runs, [step(self.runs, number).name for number in newest])
        dist.barrier()
        if action.kind == "latest" and not enough:
            newest = list(self.there)
        kept = {*newest, *(base for number in newest if (base := self.there[number]) is not None)}
        self.there = {number: base for number, base in self.there.items() if number in kept}
        found = checkpoint_bases(self.runs)
        wanted = {
            step(self.runs, n).name: None if base is None else step(self.runs, base).name
            for n, base in self.there.items()
        }
        if found != wanted:
            raise Found(f"after {action.kind} {action.number}: {found}, expected {wanted}")


def step(runs: Path, number: int) -> Path:
    return runs / f"step-{number:03}"


def stepped(weight: Weight, version: int) -> Tensor:
    """Its value at a version: that of the others, but for some elements."""
    x = weight.dense()
    x.view(-1)[version :: 37 + version].mul_(-2)
    return x if weight.facts is None else quantize(x, weight.facts.recipe)


def _overwrite(value: Tensor) -> None:
    """Other bytes in what this rank holds of a tensor."""
    local: Any = value.to_local() if isinstance(value, DTensor) else value
    for part in local.parts().values() if isinstance(local, QuantizedTensor) else (local,):
        part.view(-1).view(torch.uint8).fill_(0xA5)


def _whole(runs: Path, given: list[Weight], bases: dict[int, int | None]) -> None:
    """Each complete save holds, in one process, what was saved; a delta names its base, which is there."""
    for path in sorted(runs.glob("step-*/.metadata")):
        number = int(path.parent.name.removeprefix("step-"))
        link = pickle.loads(path.read_bytes()).planner_data["qtensor.manifest.json"].get("base")
        base = bases[number]
        if (link and link["path"]) != (base and f"../{step(runs, base).name}"):
            raise Found(f"save {number} is a delta to {link}, expected {base}")
        state = {each.name: stepped(each, 0) for each in given}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(
                state, storage_reader=SafeFileSystemReader(path.parent), planner=QuantizedLoadPlanner(), no_dist=True
            )
        wrong = [each.name for each in given if bits(state[each.name]) != bits(stepped(each, number))]
        if wrong:
            raise Found(f"save {number} holds other bytes of {', '.join(wrong)} than were saved")


def _verdict(errors: list[list[str]], actions: list[_Action]) -> str:
    raised = False
    for number, action in enumerate(actions):
        told = [each[number] for each in errors]
        failed = refused(told, f"{action.kind} {action.number} with {action.trouble}")
        if failed and action.trouble in ("none", "death"):
            raise Found(f"{action.kind} {action.number} failed without a reason: {told[0]}")
        if not failed and action.trouble in ("base", "in full", "base gone") and action.base is not None:
            raise Found(f"save {action.number} went through with {action.trouble}")
        raised |= failed
    return "refused" if raised else "saved"
