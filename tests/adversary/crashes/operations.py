"""What is interrupted: saves and calibrations (and what making.py has), each with the states that may be seen.

An operation goes through states 0, 1, ...: it is in state 0 before `act`, and whenever `act` has come to the next one
for good, it marks that. At any moment the last state that was marked may be seen, or the one after it, or, where a step
says so, nothing. All is a function of the seed.
"""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from dcp_adapters import (
    AtomicFileSystemWriter,
    QuantizedLoadPlanner,
    QuantizedSavePlanner,
    SafeFileSystemReader,
    remove_replaced,
)
from layerwise.resume.checkpoints import CalibrationCheckpoint
from layerwise.resume.fingerprint import Fingerprint
from qtensor import quantize
from tests.adversary.attack import Found
from tests.dcp_adapters.cases import RECIPES, ROW, assert_holds, placed, values

Mark = Callable[[int], None]
NOTHING = None  # what is seen where there is none, and all that reads says so
NONE = re.compile(r"No such file or directory: '[^']*/\.metadata'")
NAMES = sorted(ROW)
RUN = Fingerprint(weights={"w": 1}, data=3, batches=4, recipe={"type": "R"}, algorithm={"type": "Max"}, threads=1)


class Operation:
    """Of a seed. `states`: what may be seen, in order; `gaps`: steps in which nothing may be seen meanwhile."""

    name = ""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.states: list[Any] = []
        self.gaps: set[int] = set()
        self.build()

    def build(self) -> None:
        """Draw the options."""

    def prepare(self, root: Path) -> None:
        """What is there before, on the disk for sure."""

    def act(self, root: Path, mark: Mark) -> None:
        """Go through the states."""
        raise NotImplementedError

    def seen(self, root: Path) -> Any:
        """Which state a directory shows. Raises Found for none of them, and what reading raises."""
        raise NotImplementedError

    def allowed(self, marked: int, *, renames: bool = True) -> list[Any]:
        """What may be seen after that many steps, while the next one may be under way.

        renames: whether the file system renames in one step; else nothing may be seen, but never anything wrong.
        """
        gap = [] if renames and marked not in self.gaps else [NOTHING]
        return [*self.states[marked : marked + 2], *gap]


def full(names: Sequence[str], seed: int) -> dict[str, Any]:
    """A state dict of one process, of tensors of its own."""
    held = _full(tuple(names), seed)
    return {name: value if name == "step" else value.clone() for name, value in held.items()}


@functools.lru_cache(maxsize=64)
def _full(names: tuple[str, ...], seed: int) -> dict[str, Any]:
    weights = {f"w{i}": quantize(values((40, 64), seed + i), RECIPES[name]) for i, name in enumerate(names)}
    return weights | {"dense": values((7, 3), seed, torch.float32), "step": seed}


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        yield


def loaded(path: Path, names: Sequence[str], *, safe: bool) -> Any:
    """Which save a directory loads as, bit for bit; NOTHING where the loader says that there is none."""
    target = full(names, 99)
    reader = SafeFileSystemReader(path) if safe else dcp.FileSystemReader(path)
    try:
        with quiet():
            dcp.load(target, storage_reader=reader, planner=QuantizedLoadPlanner(), no_dist=True)
    except BaseException as error:
        if NONE.search(str(error)) or ("metadata is None" in str(error) and not (path / ".metadata").exists()):
            return NOTHING  # torch 2.11 says less
        raise
    try:
        assert_holds(target, full(names, target["step"]))
    except AssertionError as error:
        raise Found(f"{path} loads as {target['step']}, and differs in {error}") from error
    return target["step"]


class Saves(Operation):
    """Several saves into one directory, or each into its own below a new one."""

    name = "save"

    def build(self) -> None:
        draw = self.draw
        self.recipes = [draw.choice(NAMES) for _ in range(draw.choice((1, 2)))]
        self.count = draw.choice((1, 2, 3))
        self.options = [
            {"thread_count": draw.choice((1, 2)), "single_file_per_rank": draw.random() < 0.8}
            for _ in range(self.count)
        ]
        self.deleting = {step for step in range(self.count) if draw.random() < 0.15}
        self.tidied = {step for step in range(self.count) if draw.random() < 0.3}
        self.caching = draw.random() < 0.2
        self.ranks = 2 if draw.random() < 0.25 else 1
        self.prepared = draw.random() < 0.4
        self.states = [100 if self.prepared else NOTHING, *range(1, self.count + 1)]
        self.gaps = self.deleting
        self.place = draw.choice(("latest", "runs/latest", "a/b/latest"))
        self.apart = not self.deleting and draw.random() < 0.3  # each in a directory of its own, the last two kept

    def path(self, root: Path, seed: int) -> Path:
        return root / self.place / f"step-{seed % 100:03}" if self.apart else root / self.place

    def prepare(self, root: Path) -> None:
        for seed in range(98, 101) if self.prepared else ():
            self._save(self.path(root, seed), seed, self.options[0], overwrite="keep")
            if self.apart and seed < 100:
                shutil.rmtree(self.path(root, seed))

    def act(self, root: Path, mark: Mark) -> None:
        if self.ranks == 1:
            self._steps(root, mark)
            return
        forked(self.ranks, root.parent / "store", lambda: self._steps(root, mark if dist.get_rank() == 0 else None))

    def _steps(self, root: Path, mark: Mark | None) -> None:
        planner = QuantizedSavePlanner(enable_plan_caching=True) if self.caching else None
        for step, options in enumerate(self.options):
            overwrite = "delete_first" if step in self.deleting else "keep"
            self._save(self.path(root, step + 1), step + 1, options, overwrite=overwrite, planner=planner)
            if self.ranks > 1:
                dist.barrier()  # until then not every rank has returned
            if mark is not None:
                mark(step + 1)
                if self.apart:
                    shutil.rmtree(self.path(root, step - 1), ignore_errors=True)
                elif step in self.tidied:
                    remove_replaced(root / self.place)
            if self.ranks > 1:
                dist.barrier()

    def _save(self, path: Path, seed: int, options: Any, *, overwrite: Any, planner: Any = None) -> None:
        state = full(self.recipes, seed)
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            state = {name: value if name == "step" else placed(value, mesh, Shard(0)) for name, value in state.items()}
        with quiet():
            dcp.save(
                state,
                storage_writer=AtomicFileSystemWriter(path, **options),
                planner=planner or QuantizedSavePlanner(overwrite=overwrite),
                no_dist=not dist.is_initialized(),
            )

    def seen(self, root: Path) -> Any:
        path = root / self.place
        if self.apart:  # the newest that has metadata
            path = max(path.glob("step-*/.metadata"), default=path / ".metadata").parent
        return loaded(path, self.recipes, safe=self.draw.random() < 0.5)


class Calibration(Operation):
    """Windows of a calibration: state n has n of them."""

    name = "calibration"

    def build(self) -> None:
        self.recipes = [self.draw.choice(NAMES)]
        self.windows = self.draw.choice((1, 2, 3))
        self.begun = self.draw.choice((0, 1)) if self.windows > 1 else 0
        self.finishes = self.draw.random() < 0.5
        self.states = [*range(self.begun, self.windows + 1), *(["finished"] if self.finishes else [])]
        self.place = self.draw.choice(("run", "runs/a/run"))

    def prepare(self, root: Path) -> None:
        if self.begun:
            checkpoint = CalibrationCheckpoint(root / self.place)
            checkpoint.open(RUN)
            self._window(checkpoint, 0)

    def act(self, root: Path, mark: Mark) -> None:
        with quiet():
            checkpoint = CalibrationCheckpoint(root / self.place)
            found = checkpoint.open(RUN)
            begun = len(found.windows) if found else 0
            for number in range(begun, self.windows):
                self._window(checkpoint, number)
                mark(number + 1 - self.begun)
            if self.finishes and not (found and found.finished):
                checkpoint.finish({"w": 2})
                mark(len(self.states) - 1)

    def allowed(self, marked: int, *, renames: bool = True) -> list[Any]:
        # the record has a copy that is one window behind
        return super().allowed(marked) if renames else [*self.states[max(marked - 1, 0) : marked + 2], 0]

    def _window(self, checkpoint: CalibrationCheckpoint, number: int) -> None:
        with quiet():
            checkpoint.save_window(number, number, self._tensors(number), {"number": number})

    def _tensors(self, number: int) -> dict[str, Any]:
        return {name: value for name, value in full(self.recipes, number).items() if name != "step"}

    def seen(self, root: Path) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "checkpoint_dir=.*progress.json is missing. Its copy is used")
            checkpoint = CalibrationCheckpoint(root / self.place)
            found = checkpoint.open(RUN)
            for number, window in enumerate(found.windows if found else ()):
                target = self._tensors(99)
                checkpoint.load_window(window, target)
                assert_holds(target, self._tensors(number))
        if found is None:
            return 0
        return "finished" if found.finished else len(found.windows)


def forked(ranks: int, store: Path, part: Callable[[], None]) -> None:
    """Run `part` in as many forks, which are the ranks of a group. Raises what rank 0 or another one raised."""
    store.unlink(missing_ok=True)
    children, reader = [], store.with_name("errors")
    reader.unlink(missing_ok=True)
    for rank in range(ranks):
        child = os.fork()
        if child:
            children.append(child)
            continue
        status = 1
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
            part()
            dist.destroy_process_group()
            status = 0
        except BaseException:
            with reader.open("a") as stream:
                stream.write(f"rank {rank}: {traceback.format_exc()}\n")
        finally:
            os._exit(status)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        raise RuntimeError(reader.read_text() if reader.exists() else f"ranks ended with {statuses}")
