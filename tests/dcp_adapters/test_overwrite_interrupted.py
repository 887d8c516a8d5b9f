"""At every file operation of a save over an older checkpoint: what is there then, and what an error there leaves.

A process that is killed leaves the files as they are at that moment. So a copy of the directory in front of each
operation is what a kill there leaves, to the byte: what a process still buffers is not in it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_adapters import AtomicFileSystemWriter, QuantizedLoadPlanner, QuantizedSavePlanner
from tests.dcp_adapters.cases import assert_holds
from tests.dcp_adapters.faulty import full, save_state, state
from tests.ranks import run_ranks

OPERATIONS = ("open", "os.remove", "os.rename")
COMMIT = "os.rename .metadata.tmp"
OWN = re.compile(r"\.metadata\.[0-9a-f]{8}\.tmp")  # what AtomicFileSystemWriter calls it
OLDER, OLD, NEW = 0, 1, 5  # the checkpoint before the one in place is there for its files to be removed

Observer = Callable[[str], None]
_watched: tuple[Path, Observer] | None = None
_hooked: list[bool] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    global _watched
    if _watched is None or event not in OPERATIONS or not isinstance(arguments[0], (str, os.PathLike)):
        return
    directory, observer = _watched
    path = Path(arguments[0])
    if directory in (path, *path.parents):
        _watched = None
        try:
            observer(f"{event} {OWN.sub('.metadata.tmp', path.name)}")
        finally:
            _watched = (directory, observer)


@contextmanager
def watched(directory: Path, observer: Observer) -> Iterator[None]:
    """Calls the observer in front of each operation on the directory and what is in it, on any thread."""
    global _watched
    if not _hooked:
        sys.addaudithook(_audit)  # for the life of the process: nothing takes it off again
        _hooked.append(True)
    _watched = (directory, observer)
    try:
        yield
    finally:
        _watched = None


class Copies:
    """Copies of a directory as it is when asked for one; its metadata first, since a new one names finished files."""

    def __init__(self, directory: Path, into: Path) -> None:
        self.directory, self.into, self.made = directory, into, list[tuple[Path, str]]()

    def __call__(self, operation: str) -> None:
        copy = self.into / f"{dist.get_rank()}-{len(self.made):03}"
        copy.mkdir(parents=True)
        for path in sorted(self.directory.iterdir(), key=lambda path: path.suffix == ".distcp"):
            try:
                shutil.copyfile(path, copy / path.name)
            except FileNotFoundError:  # another rank removes what is not needed
                assert path.suffix == ".distcp"
        self.made.append((copy, operation))


def load_alone(path: Path) -> dict[str, Any]:
    """The whole of a checkpoint, on this rank."""
    target = full(99)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(target, checkpoint_id=path, planner=QuantizedLoadPlanner(), no_dist=True)
    return target


def seed_of(path: Path) -> int:
    """Which save a directory loads as, bit for bit."""
    target = load_alone(path)
    assert_holds(target, full(target["step"]))
    return int(target["step"])


def refused(path: Path) -> None:
    with pytest.raises(BaseException, match=rf"No such file or directory: '{path}/\.metadata'|metadata is None"):
        load_alone(path)


Options = Callable[[Path], dict[str, Any]]


def stock(path: Path) -> dict[str, Any]:
    return {"planner": QuantizedSavePlanner(), "storage_writer": dcp.FileSystemWriter(path, thread_count=2)}


def atomic(path: Path) -> dict[str, Any]:
    return {"planner": QuantizedSavePlanner(), "storage_writer": AtomicFileSystemWriter(path)}


def deleting(path: Path) -> dict[str, Any]:
    planner = QuantizedSavePlanner(overwrite="delete_first")
    return {"planner": planner, "storage_writer": AtomicFileSystemWriter(path)}


def save_new(path: Path, options: dict[str, Any], *, asynchronous: bool = False) -> None:
    if not asynchronous:
        save_state(path, NEW, **options)
        return
    group = dist.new_group(backend="gloo")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        dcp.async_save(state(NEW), checkpoint_id=path, process_group=group, **options).result()


def kill_everywhere(base: Path, options: Options, *, asynchronous: bool) -> None:
    path = base / "checkpoint"
    for seed in (OLDER, OLD):
        save_state(path, seed)
    dist.barrier()
    copies = Copies(path, base / "copies")
    with watched(path, copies):
        save_new(path, options(path), asynchronous=asynchronous)
    assert seed_of(path) == NEW
    operations, committed, between = [operation for _, operation in copies.made], False, 0
    for copy, operation in copies.made:
        if options is deleting and not (copy / ".metadata").exists():
            refused(copy)
        elif options is stock and operation == COMMIT:  # has removed the one in place
            between += 1
            refused(copy)
            (copy / ".metadata.tmp").rename(copy / ".metadata")
            assert seed_of(copy) == NEW
        else:
            assert seed_of(copy) == (NEW if committed else OLD), operation
        committed = committed or operation == COMMIT
    assert any(operation.startswith("open __") for operation in operations)
    if dist.get_rank() == 0:
        assert committed
        assert sum(operation.startswith("os.remove __") for operation in operations) >= 2
        assert between == (options is stock)


@pytest.mark.parametrize(
    ("options", "asynchronous"), [(atomic, False), (atomic, True), (stock, False), (stock, True), (deleting, False)]
)
def test_killed_anywhere_the_old_one_loads_or_the_new_one(
    options: Options, *, asynchronous: bool, shared_tmp_path: Path
) -> None:
    run_ranks(2, kill_everywhere, shared_tmp_path, options, asynchronous=asynchronous)


class Breaks:
    """An error in front of one operation."""

    def __init__(self, at: int) -> None:
        self.left, self.operation, self.committed = at, "", False

    def __call__(self, operation: str) -> None:
        self.left -= 1
        if self.left == -1:
            self.operation = operation
            raise OSError(5, f"the disk is on fire at {operation}")
        self.committed = self.committed or operation == COMMIT


def break_everywhere(base: Path) -> None:
    for victim in range(2):
        for at in range(100):
            path = base / f"{victim}-{at}"
            for seed in (OLDER, OLD):
                save_state(path, seed)
            dist.barrier()
            breaks = Breaks(at if dist.get_rank() == victim else 10**6)
            raised = ""
            with watched(path, breaks):
                try:
                    save_new(path, atomic(path))
                except BaseException as error:
                    raised = str(error)
            told: list[Any] = [None, None]
            dist.all_gather_object(told, (breaks.operation, breaks.committed, raised))
            operation, committed, _ = told[victim]
            if not operation:
                break
            assert all(f"the disk is on fire at {operation}" in raised for *_, raised in told), told
            assert seed_of(path) == (NEW if committed else OLD), operation
            dist.barrier()
            save_new(path, atomic(path))
            assert seed_of(path) == NEW
        assert (1 if victim else 6) <= at < 99, "operations seen"
        assert seed_of(path) == NEW


def test_an_error_anywhere_fails_the_save_and_leaves_the_old_one(shared_tmp_path: Path) -> None:
    run_ranks(2, break_everywhere, shared_tmp_path)
