"""How long the tests take: measured by a run of them, and the table of CONTRIBUTING.md.

    QTENSOR_DURATIONS=build/durations.json make test     a run writes what each of its files took
    python -m tests.durations build/durations.json       that run becomes one of the table's

The table has one run for each machine and command; `.ci/run` writes both of its runs. A run that chooses tests by name
says nothing of the whole, and is refused here.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pytest

VARIABLE = "QTENSOR_DURATIONS"
KNOWN = Path(__file__).with_name("durations.json")
PAGE = Path(__file__).resolve().parent.parent / "CONTRIBUTING.md"
BEGIN, END = "<!-- made by `python -m tests.durations` -->", "<!-- end -->"
SLOWEST = 8  # files in the table


class Durations:
    """A plugin of pytest, of the process that hears of all tests."""

    def __init__(self, path: Path) -> None:
        self.path, self.began = path, time.perf_counter()
        self.seconds: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.seconds[file] += report.duration
        self.tests[file] += report.when == "call"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        config = session.config
        names = [argument for argument in config.args if argument not in config.getini("testpaths")]
        record = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
            "python": platform.python_version(),
            "torch": torch.__version__.partition("+")[0],
            "marks": config.option.markexpr,
            "whole": not names and not config.option.keyword,
            "minutes": round((time.perf_counter() - self.began) / 60, 1),
            "tests": sum(self.tests.values()),
            "files": {file: round(seconds, 1) for file, seconds in self.seconds.most_common()},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def record_durations(config: pytest.Config) -> None:
    """Write what a run takes to the file that the variable names, if it is set; not in other workers or ranks."""
    path = os.environ.get(VARIABLE)
    if path and not hasattr(config, "workerinput") and os.environ.get("RANK", "0") == "0":
        config.pluginmanager.register(Durations(Path(path)), "durations")


def command_of(record: dict[str, Any]) -> str:
    """The command whose run this was."""
    return "make test-all" if record["marks"] == "full" else "make test"


def table(runs: dict[str, dict[str, Any]]) -> str:
    """The runs, and the files that took longest in each."""
    lines = ["| run | machine | torch | tests | minutes | files that take longest (seconds of one core) |"]
    lines.append("|---|---|---|---:|---:|---|")
    for _, run in sorted(runs.items()):
        slowest = ", ".join(f"{file.removeprefix('tests/')} {seconds:.0f}" for file, seconds in run["files"].items())
        head = f"| `{command_of(run)}`, {run['date']} | {run['machine']} | {run['torch']} | {run['tests']}"
        lines.append(f"{head} | {run['minutes']} | {slowest} |")
    return "\n".join(lines)


def page(text: str, runs: dict[str, dict[str, Any]]) -> str:
    """The text of the page with the table of these runs."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{table(runs)}\n\n{END}{rest.partition(END)[2]}"


def main(paths: list[str]) -> None:
    """Take these runs into the table."""
    runs = json.loads(KNOWN.read_text())
    for path in paths:
        record = json.loads(Path(path).read_text())
        if not record.pop("whole"):
            raise SystemExit(f"{path}: a run of chosen tests, which tells nothing of the whole")
        record["files"] = dict([*record["files"].items()][:SLOWEST])
        runs[f"{command_of(record)}, {record['machine']}"] = record
    KNOWN.write_text(json.dumps(runs, indent=1, sort_keys=False) + "\n")
    PAGE.write_text(page(PAGE.read_text(), runs))


if __name__ == "__main__":
    main(sys.argv[1:])
