"""What is interrupted: saves, exports, conversions, deltas and calibrations, each with the states that may be seen.

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
    export_hf,
    remove_replaced,
)
from dcp_adapters.cli.convert_checkpoint import convert_checkpoint, plan_conversion
from dcp_adapters.cli.deltas import patched_copy, write_delta
from dcp_adapters.digests.stored import source_digests, stored_source
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from layerwise.resume.checkpoints import CalibrationCheckpoint
from layerwise.resume.fingerprint import Fingerprint
from qtensor import quantize
from tests.adversary.attack import Found
from tests.dcp_adapters.cases import RECIPES, ROW, assert_holds, placed, values

Mark = Callable[[int], None]
NOTHING = None  # what is seen where there is none, and all that reads says so
NONE = re.compile(r"No such file or directory: '?[^']*\.metadata|metadata is None|no such directory|No such file")
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

    def allowed(self, marked: int) -> list[Any]:
        """What may be seen after that many steps, while the next one may be under way."""
        gap = [NOTHING] if marked in self.gaps else []
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
        if NONE.search(str(error)) and not (path / ".metadata").exists():
            return NOTHING
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

    def prepare(self, root: Path) -> None:
        for seed in range(98, 101) if self.prepared else ():
            self._save(root / self.place, seed, self.options[0], overwrite="keep")

    def act(self, root: Path, mark: Mark) -> None:
        if self.ranks == 1:
            self._steps(root, mark)
            return
        forked(self.ranks, root.parent / "store", lambda: self._steps(root, mark if dist.get_rank() == 0 else None))

    def _steps(self, root: Path, mark: Mark | None) -> None:
        planner = QuantizedSavePlanner(enable_plan_caching=True) if self.caching else None
        for step, options in enumerate(self.options):
            overwrite = "delete_first" if step in self.deleting else "keep"
            self._save(root / self.place, step + 1, options, overwrite=overwrite, planner=planner)
            if self.ranks > 1:
                dist.barrier()  # until then not every rank has returned
            if mark is not None:
                mark(step + 1)
                if step in self.tidied:
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
        return loaded(root / self.place, self.recipes, safe=self.draw.random() < 0.5)


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

    def _window(self, checkpoint: CalibrationCheckpoint, number: int) -> None:
        with quiet():
            checkpoint.save_window(number, number, self._tensors(number), {"number": number})

    def _tensors(self, number: int) -> dict[str, Any]:
        return {name: value for name, value in full(self.recipes, number).items() if name != "step"}

    def seen(self, root: Path) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoint = CalibrationCheckpoint(root / self.place)
            found = checkpoint.open(RUN)
            for number, window in enumerate(found.windows if found else ()):
                target = self._tensors(99)
                checkpoint.load_window(window, target)
                assert_holds(target, self._tensors(number))
        if found is None:
            return 0
        return "finished" if found.finished else len(found.windows)


class Appearing(Operation):
    """Something that appears when it is complete, and is then as one that nothing has interrupted."""

    def build(self) -> None:
        self.recipes = [self.draw.choice([name for name in NAMES if "delayed" not in name]) for _ in range(2)]
        self.states = [NOTHING, "whole"]
        self.wanted: Any = None

    def prepare(self, root: Path) -> None:
        for name, seed in (("old", 1), ("new", 2)):
            with quiet():
                dcp.save(self.weights(seed), checkpoint_id=root / name, planner=QuantizedSavePlanner(), no_dist=True)

    def weights(self, seed: int) -> dict[str, Any]:
        return {name: value for name, value in full(self.recipes, seed).items() if name != "step"}

    def act(self, root: Path, mark: Mark) -> None:
        self.make(root, root / "out")
        mark(1)

    def make(self, root: Path, out: Path) -> None:
        raise NotImplementedError

    def held(self, out: Path) -> Any:
        """What tells two of them apart."""
        return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}

    def seen(self, root: Path) -> Any:
        if self.wanted is None:
            other = root / "reference"
            self.make(root, other)
            self.wanted = self.held(other)
            shutil.rmtree(other) if other.is_dir() else other.unlink()
        out = root / "out"
        if not os.path.lexists(out):
            return NOTHING
        if (found := self.held(out)) != self.wanted:
            raise Found(f"{out} is there and not what was written: {_difference(found, self.wanted)}")
        return "whole"


class Export(Appearing):
    name = "export"

    def build(self) -> None:
        super().build()
        recipe = self.draw.choice([name for name in NAMES if name.startswith(("nvfp4", "float8_row"))])
        self.recipes = [recipe, recipe]
        self.size = self.draw.choice(("5GB", 4000))

    def make(self, root: Path, out: Path) -> None:
        config = {"model_type": "llama", "architectures": ["X"]}
        export_hf(root / "old", out, config=config, max_shard_size=self.size, progress=False)

    def weights(self, seed: int) -> dict[str, Any]:
        held = super().weights(seed)
        return {f"model.layers.{i}.mlp.down_proj.weight": held[f"w{i}"] for i in range(len(self.recipes))}


class Convert(Appearing):
    name = "convert"

    def build(self) -> None:
        super().build()
        self.to: Any = self.draw.choice((torch.bfloat16, *(RECIPES[name] for name in NAMES)))

    def make(self, root: Path, out: Path) -> None:
        source = StoredCheckpoint(root / "old", check=True)
        convert_checkpoint(source, out, plan_conversion(source.entries, self.to))

    def held(self, out: Path) -> Any:
        return source_digests(stored_source(out, None))


class MakeDelta(Appearing):
    name = "delta"

    def make(self, root: Path, out: Path) -> None:
        write_delta(root / "old", root / "new", out)

    def held(self, out: Path) -> Any:
        return {"": out.read_bytes()}


class Apply(Convert):
    name = "apply"

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        write_delta(root / "old", root / "new", root / "delta")

    def make(self, root: Path, out: Path) -> None:
        patched_copy(root / "old", [root / "delta"], out)


class ApplyFiles(Export):
    name = "apply to files"

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        for name in ("old", "new"):
            export_hf(root / name, root / f"{name}-files", max_shard_size=self.size, progress=False)
        write_delta(root / "old-files", root / "new-files", root / "delta")

    def make(self, root: Path, out: Path) -> None:
        patched_copy(root / "old-files", [root / "delta"], out)


OPERATIONS: tuple[type[Operation], ...] = (Saves, Calibration, Export, Convert, MakeDelta, Apply, ApplyFiles)
WEIGHTS = (6, 3, 1, 1, 1, 1, 1)


def drawn(draw: random.Random) -> Operation:
    return draw.choices(OPERATIONS, WEIGHTS)[0](draw)


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


def _difference(found: Any, wanted: Any) -> str:
    names = sorted({*found, *wanted})
    return ", ".join(name for name in names if found.get(name) != wanted.get(name)) or "nothing"
