"""What all tests share: the environment, the warnings rule, markers' skips and the common paths.

Every warning is an error (pyproject's `filterwarnings`); the upstream ones we have to live with are
listed once, in tests/_rank_worker.py, and hold in this process and in the ranks alike.
"""

from __future__ import annotations

import contextlib
import gc
import getpass
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

# Before torch is imported, and inherited by the rank workers: several ranks share few cores, and no
# test may depend on a network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A compilation takes seconds, and kernels are compiled for large tensors by default: the tests that are about that say
# so. The bytes are the same, which is what those tests prove.
os.environ.setdefault("QTENSOR_KERNELS", "eager")
# Those compile in their own process: a pool of compilers is more processes that import torch than cores to run them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch

from tests import ranks
from tests._rank_worker import TOLERATED_WARNINGS
from tests.durations import record_durations

# torch leaves the width of the CPU's vectors out of the keys of its cache on disk, and a machine may find what another
# one has left there. In a directory for each width; inherited by the rank workers.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    str(Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}", torch.backends.cpu.get_cpu_capability())),
)

# A machine that is lent for its GPU may have pytest and nothing beside it; tests marked gpu need no more.
with contextlib.suppress(ImportError):
    import hypothesis

    # How long an example takes depends on what else the machine does, and says nothing about what is tested.
    hypothesis.settings.register_profile("qtensor", deadline=None)
    hypothesis.settings.load_profile("qtensor")

REPO = Path(__file__).resolve().parent.parent
GOLDEN = Path(os.environ.get("QTENSOR_GOLDEN", REPO.parent / "shared" / "golden"))


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.has_plugin("timeout"):  # pyproject's setting would be unknown, which is an error
        parser.addini("timeout", "seconds that a test may take; pytest-timeout alone minds it")


def pytest_configure(config: pytest.Config) -> None:
    record_durations(config)
    for tolerated in TOLERATED_WARNINGS:
        category = f"{tolerated.category.__module__}.{tolerated.category.__name__}"
        config.addinivalue_line("filterwarnings", f"ignore:{tolerated.message}:{category}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # Thousands of items and what they import live as long as the process: a full collection of garbage that looks at
    # them takes most of a second, one that does not a millisecond, and tests about memory make many.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    ranks.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked_for = "budget" in config.option.markexpr or any("::" in argument for argument in config.args)
    if not asked_for:
        left_out = [item for item in items if item.get_closest_marker("budget") and item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    # Files with slow tests first: at the end they would keep one of pytest-xdist's workers while the others wait.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def shared_tmp_path(tmp_path: Path) -> Path:
    """A `tmp_path` that is the same directory on every rank, under torchrun too."""
    return ranks.agreed(tmp_path)


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The directory of golden files, which is no part of the repository."""
    if not GOLDEN.is_dir():
        pytest.skip(f"no golden files at {GOLDEN} (set QTENSOR_GOLDEN)")
    return GOLDEN
