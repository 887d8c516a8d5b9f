"""Do the tests marked gpu pass? Shared out to processes, by pytest alone: no plugin has to be installed.

Every process collects the files that hold such tests, and keeps every n-th test (this module is its plugin); as each
ends, it writes a line. So what a process that dies or is stopped has not run is known, and which test it died in.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.question import Aim, Row, Scale

SECONDS = 160
AIMS = (Aim(row="tests marked gpu", figure="failed", most=0), Aim(row="tests marked gpu", figure="not run", most=0))
ROOT = Path(__file__).resolve().parents[2]
MARKS = ("mark.gpu", "every_device")
SHARE, FILE = "QTENSOR_GPU_TESTS_SHARE", "QTENSOR_GPU_TESTS_FILE"
PYTEST = (
    "-m",
    "pytest",
    "-m",
    "gpu",
    "-q",
    "--continue-on-collection-errors",
    "-p",
    "no:cacheprovider",
    "-p",
    __name__,
)
SHOWN = 20  # failures in the answer; the log has all


def files() -> list[Path]:
    """Those that hold tests marked gpu; others may import what is not installed on a machine with a GPU."""
    found = (ROOT / "tests").rglob("test_*.py")
    return sorted(path for path in found if any(mark in path.read_text(encoding="utf-8") for mark in MARKS))


def rows(scale: Scale) -> Iterator[Row]:
    """One of all tests together, and one for each that failed."""
    processes = max(1, min(scale.processes, (os.cpu_count() or 1) - 2))
    with tempfile.TemporaryDirectory() as folder:
        codes = _run(processes, Path(folder), [str(path) for path in files()])
        records = [_records(Path(folder) / f"{number}.jsonl") for number in range(processes)]
    outcomes: Counter[str] = Counter()
    failures: list[Row] = []
    for number, (code, of) in enumerate(zip(codes, records, strict=True)):
        ended = {record["test"]: record for record in of if "outcome" in record}
        asked = [record["test"] for record in of if "outcome" not in record]
        outcomes.update(record["outcome"] for record in ended.values())
        outcomes["not run"] += len(asked) - len(ended)
        failures += [Row(test, error=each["why"]) for test, each in ended.items() if each["outcome"] == "failed"]
        if len(asked) > len(ended) or not of:
            first = next((test for test in asked if test not in ended), "before the first test")
            failures.append(Row(first, error=f"process {number} of {processes} {code}"))
    figures = {name: float(outcomes[name]) for name in ("passed", "failed", "skipped", "not run")}
    yield Row("tests marked gpu", figures)
    yield from failures[:SHOWN]


def _run(processes: int, folder: Path, paths: list[str]) -> list[str]:
    """Share the files' tests out, and say how each process ended; what they print comes out behind that."""
    began = time.monotonic()
    running = []
    with contextlib.ExitStack() as stack:
        for number in range(processes):
            out = stack.enter_context((folder / f"{number}.log").open("w", encoding="utf-8"))
            environment = {
                "OMP_NUM_THREADS": "1",
                **os.environ,
                SHARE: f"{number}/{processes}",
                FILE: str(folder / f"{number}.jsonl"),
            }
            command = [sys.executable, *PYTEST, *paths]
            running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT))
        codes = [_ended(process, SECONDS - (time.monotonic() - began)) for process in running]
    for number in range(processes):
        print((folder / f"{number}.log").read_text(encoding="utf-8"), flush=True)
    return codes


def _ended(process: "subprocess.Popen[bytes]", left: float) -> str:
    """How a process ended, which has so many seconds left."""
    try:
        return f"ended with {process.wait(max(left, 0))}"
    except subprocess.TimeoutExpired:
        process.kill()  # its ranks end with it
        process.wait()
        return f"was stopped after {SECONDS} s"


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


# -- in each of the processes, as a plugin of pytest -------------------------------------------------------------------


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep this process's share of the tests that -m has left, which stand in the file."""
    number, processes = (int(part) for part in os.environ[SHARE].split("/"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    share = marked[number::processes]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(share)])
    items[:] = share
    for item in share:
        _write(test=item.nodeid)


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported is a failure, once; the others are run."""
    if report.failed and os.environ[SHARE].startswith("0/"):
        _write(test=report.nodeid)
        _write(test=report.nodeid, outcome="failed", why=_last(report))


def pytest_runtest_logreport(report: Any) -> None:
    """Write what became of a test: of its call, or of what was before or behind it where that did not pass."""
    if report.when == "call" or report.outcome != "passed":
        why = "" if report.outcome != "failed" else _reason(report)
        _write(test=report.nodeid, outcome=report.outcome, why=why)


def _reason(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash is not None else report.longrepr).strip().splitlines()
    return lines[0][:200] if lines else "failed"


def _last(report: Any) -> str:
    """What was raised, the last line of a traceback."""
    lines = [line.removeprefix("E").strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
    return lines[-1][:200] if lines else _reason(report)


def _write(**record: str) -> None:
    with Path(os.environ[FILE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
