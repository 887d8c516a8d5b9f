"""The part of reach.py that runs inside pytest and inside its ranks: `pytest -p` this, `--reach-data DIRECTORY`."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from coverage import Coverage

    from tests._rank_worker import Body

ROOT = Path(__file__).resolve().parents[3]


@functools.cache
def _coverage(directory: str) -> Coverage:
    """Of this process, which it starts."""
    from coverage import Coverage

    made = Coverage(
        data_file=str(Path(directory) / ".coverage"),
        data_suffix=True,
        config_file=False,
        include=[f"{ROOT}/{package}/*" for package in ("qtensor", "fsdp_hooks", "dcp_adapters")],
        messages=False,
    )
    made.set_option("run:disable_warnings", ["no-data-collected", "module-not-imported"])
    made.start()
    return made


def in_rank(directory: str, test: str, body: Body) -> Any:
    """In a rank: the call, as a part of the test."""
    coverage = _coverage(directory)
    coverage.switch_context(test)
    function, arguments, named = body
    try:
        return function(*arguments, **named)
    finally:
        coverage.save()  # nobody tells a rank that it was the last one


class _Recorder:
    """Tells coverage which test runs, here and in ranks, and adds up how long each takes."""

    def __init__(self, directory: str, *, leads: bool) -> None:
        self._directory, self._leads = directory, leads
        self._test = ""
        self._seconds: Counter[str] = Counter()
        self._coverage = _coverage(directory)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._test = _function(item.nodeid)
        self._coverage.switch_context(self._test)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[_function(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        if self._leads:
            Path(self._directory, "seconds.json").write_text(json.dumps(self._seconds), encoding="utf-8")

    def around(self, body: Body) -> Body:
        return in_rank, (self._directory, self._test, body), {}


def _function(test: str) -> str:
    return test.partition("[")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reach-data", default=None, help="the directory in which each process leaves what it saw")


def pytest_configure(config: pytest.Config) -> None:
    directory = config.getoption("--reach-data")
    if directory is None:
        raise pytest.UsageError("--reach-data DIRECTORY is missing")
    os.environ.setdefault("QTENSOR_KERNELS", "eager")
    recorder = _Recorder(directory, leads=not hasattr(config, "workerinput"))
    config.pluginmanager.register(recorder)
    from tests import ranks

    ranks.AROUND.append(recorder.around)
