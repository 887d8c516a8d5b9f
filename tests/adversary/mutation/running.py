"""A copy of the tree in which one module is changed at a time, and pytest in forks of a process that has torch.

    here      imports torch, pytest and what else tests take long to import, but nothing of this repository
    a fork    imports the product with the change, runs the test files, and ends

Bytecode of everything but the changed module stays valid in the copy: a module's time of change is never given twice.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.adversary.mutation.mutants import Mutant

WARM = (
    *("torch", "torch.distributed", "torch.distributed.tensor", "torch.distributed.fsdp"),
    *("torch.distributed.checkpoint", "numpy", "ml_dtypes", "safetensors.torch", "pytest", "xxhash"),
)
OURS = ("tests", "qtensor", "fsdp_hooks", "dcp_adapters", "layerwise")
COPIED = (*OURS, "benchmarks", "examples", "docs", "pyproject.toml", "README.md", "Makefile", "CHANGELOG.md")
LEFT = shutil.ignore_patterns("__pycache__", "results", "*.log")


@dataclass(frozen=True)
class Ran:
    """How tests ended. by: the test that failed, "" where none did; "timeout" where they took too long."""

    by: str
    seconds: float


class Tree:
    """The copy."""

    def __init__(self, root: Path, path: Path) -> None:
        self.root, self.path = root, path
        for name in COPIED:
            source = root / name
            if source.is_dir():
                shutil.copytree(source, path / name, ignore=LEFT, symlinks=True)
            elif source.exists():
                shutil.copy2(source, path / name)
        self._times = itertools.count(10**9)

    @contextlib.contextmanager
    def changed(self, mutant: Mutant | None) -> Iterator[None]:
        """The mutant in place of its module."""
        if mutant is None:
            yield
            return
        file = self.path / mutant.module
        source = file.read_text(encoding="utf-8")
        try:
            self._write(file, mutant.applied(source))
            yield
        finally:
            self._write(file, source)

    def _write(self, file: Path, source: str) -> None:
        file.write_text(source, encoding="utf-8")
        now = next(self._times)
        os.utime(file, (now, now))


def warm() -> None:
    """Import what all forks need."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("QTENSOR_KERNELS", "eager")
    for name in WARM:
        importlib.import_module(name)


@contextlib.contextmanager
def copy_of(root: Path) -> Iterator[Tree]:
    """A copy of the tree, which is removed at the end."""
    os.environ.setdefault("QTENSOR_GOLDEN", str(root.parent / "shared" / "golden"))
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        yield Tree(root, Path(directory))


def run(tree: Tree, mutant: Mutant | None, files: Sequence[str], limit: float) -> Ran:
    """The files in one fork, until a test fails."""
    began = time.monotonic()
    with tree.changed(mutant):
        by = _forked(tree, files, limit)
    return Ran(by, time.monotonic() - began)


def _forked(tree: Tree, files: Sequence[str], limit: float) -> str:
    """What fails first in a fork that runs these files."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _end(writing, tree, files)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        ready, _, _ = select.select([stream], [], [], limit)
        told = stream.read() if ready else b""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and the ranks that it started
    os.waitpid(child, 0)
    if not ready:
        return "timeout"
    return str(json.loads(told)) if told else "the process died"


def _tests(tree: Tree, files: Sequence[str]) -> str:
    """In the fork: run pytest in the copy."""
    os.chdir(tree.path)
    os.environ["PYTHONPATH"] = str(tree.path)
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.path[:] = [str(tree.path), *(each for each in sys.path if each and Path(each).resolve() != tree.root)]
    sink = os.open("pytest.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    import pytest

    first = _First()
    imported = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"  # by what was imported beforehand
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", imported, *files], plugins=[first])
    return first.failed or ("" if status in (0, 5) else f"pytest ended with {int(status)}")


class _First:
    """Remembers the first test that fails."""

    failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = str(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = f"collecting {report.nodeid}"


def _end(writing: int, tree: Tree, files: Sequence[str]) -> None:
    """The whole life of a fork: it never returns to what its parent was doing."""
    told = "the process died"
    try:
        os.setsid()
        told = _tests(tree, files)
    except BaseException as error:  # told, whatever it is
        told = f"{type(error).__name__}: {error}"
    finally:
        os.write(writing, json.dumps(told).encode())
        os._exit(0)
