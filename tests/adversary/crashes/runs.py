"""A run: full saves and deltas to them, each in a directory of its own, and in between what is not needed goes.

    runs/step-001    full
    runs/step-002    delta to ../step-001
    runs/step-003    delta to ../step-001          keep_latest, remove_checkpoints: step-002 may go, step-001 stays

At every moment the newest save that was completed is there and loads, and so does every other directory that has a
`.metadata`: no delta without its base. What a save holds is a function of its number.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp

from dcp_adapters import (
    AtomicFileSystemWriter,
    QuantizedLoadPlanner,
    QuantizedSavePlanner,
    SafeFileSystemReader,
    checkpoint_bases,
    keep_latest,
    latest_verified,
    remove_checkpoints,
)
from qtensor import quantize
from tests.adversary.attack import Found
from tests.adversary.crashes.operations import NAMES, NOTHING, Mark, Operation, quiet
from tests.dcp_adapters.cases import RECIPES, assert_holds, values

PLACE = "runs"
NAME = re.compile(r"step-(\d{3})")
Tidying = Literal["none", "latest", "named"]


@dataclass(frozen=True)
class Action:
    """A save, and what becomes of older ones after it: "latest" keeps the newest `keep`, "named" the last `keep`."""

    number: int
    base: int | None = None
    tidying: Tidying = "none"
    keep: int = 1

    def save(self, runs: Path, recipes: Sequence[str], **options: Any) -> None:
        """Into a directory of its own."""
        base = None if self.base is None else step(runs, self.base)
        with quiet():
            dcp.save(
                state_of(recipes, self.number),
                storage_writer=AtomicFileSystemWriter(step(runs, self.number), **options),
                planner=QuantizedSavePlanner(delta_to=base),
                no_dist=True,
            )

    def tidy(self, runs: Path) -> None:
        """Remove what is not needed."""
        if self.tidying == "latest":
            keep_latest(runs, self.keep, newest="number")
        elif self.tidying == "named":
            remove_checkpoints(runs, sorted(checkpoint_bases(runs))[-self.keep :])


def step(runs: Path, number: int) -> Path:
    return runs / f"step-{number:03}"


def actions(draw: random.Random, count: int) -> list[Action]:
    """Of a run: the first save is full, each delta one to the full save before it."""
    found: list[Action] = []
    full = 0
    for number in range(1, count + 1):
        delta = bool(full) and draw.random() < 0.7
        base = full if delta else None
        found.append(Action(number, base, draw.choice(("none", "latest", "latest", "named")), draw.choice((1, 1, 2))))
        full = full if delta else number
    return found


def state_of(recipes: Sequence[str], number: int) -> dict[str, Any]:
    """What save `number` holds: that of its neighbours, but for a few rows."""
    held = _state_of(tuple(recipes), number)
    return {name: value.clone() if hasattr(value, "clone") else value for name, value in held.items()}


@functools.lru_cache(maxsize=64)
def _state_of(recipes: tuple[str, ...], number: int) -> dict[str, Any]:
    found: dict[str, Any] = {"dense": values((7, 3), 5, torch.float32), "step": number}
    found["dense"][number % 7] = number
    for at, name in enumerate(recipes):
        x = values((40, 64), at, torch.float32)
        x[number % 40] *= -0.5
        found[f"w{at}"] = quantize(x.bfloat16(), RECIPES[name])
    return found


def there(runs: Path) -> list[int]:
    """The numbers of the saves that are complete."""
    return sorted(int(NAME.fullmatch(path.parent.name)[1]) for path in runs.glob("step-*/.metadata"))  # type: ignore[index]


def load(path: Path, recipes: Sequence[str], *, safe: bool) -> int:
    """The number of the save in a directory, which must be the one that the directory is named after, bit for bit."""
    target = state_of(recipes, 0)
    reader = SafeFileSystemReader(path) if safe else dcp.FileSystemReader(path)
    with quiet():
        dcp.load(target, storage_reader=reader, planner=QuantizedLoadPlanner(), no_dist=True)
    number = int(NAME.fullmatch(path.name)[1])  # type: ignore[index]
    try:
        assert target["step"] == number, "step"
        assert_holds(target, state_of(recipes, number))
    except AssertionError as error:
        raise Found(f"{path} loads as {target['step']}, and differs in {error}") from error
    return number


class Run(Operation):
    """State n: n saves are complete, and the newest of them is the n-th."""

    name = "run"

    def build(self) -> None:
        draw = self.draw
        self.recipes = [draw.choice(NAMES)]
        self.actions = actions(draw, draw.choice((2, 3, 4)))
        self.options = {"thread_count": draw.choice((1, 2)), "single_file_per_rank": draw.random() < 0.8}
        self.prepared = draw.choice((0, 0, 1, 2)) % len(self.actions)
        self.states = [number or NOTHING for number in range(self.prepared, len(self.actions) + 1)]

    def prepare(self, root: Path) -> None:
        for action in self.actions[: self.prepared]:
            action.save(root / PLACE, self.recipes, **self.options)

    def act(self, root: Path, mark: Mark) -> None:
        """Go on behind the newest save."""
        runs = root / PLACE
        for action in self.actions[max(there(runs), default=0) :]:
            action.save(runs, self.recipes, **self.options)
            mark(action.number - self.prepared)
            self.tidy(action, runs)

    def tidy(self, action: Action, runs: Path) -> None:
        with quiet():
            action.tidy(runs)

    def allowed(self, marked: int, *, renames: bool = True) -> list[Any]:
        del renames  # no save replaces another
        return self.states[marked : marked + 2]

    def seen(self, root: Path) -> Any:
        """The newest save; all that are complete load."""
        runs = root / PLACE
        numbers = there(runs)
        for number in numbers:
            load(step(runs, number), self.recipes, safe=self.draw.random() < 0.5)
        if not numbers:
            return NOTHING
        with quiet():
            found = latest_verified(runs, newest="number")
        if found.path != step(runs, numbers[-1]):
            raise RuntimeError(f"latest_verified passed over a complete save: {', '.join(map(str, found.skipped))}")
        return numbers[-1]
