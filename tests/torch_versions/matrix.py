"""`make matrix`: the tests under one torch after another, and the table of docs/compatibility.md.

    python -m tests.torch_versions.matrix              every proven version
    python -m tests.torch_versions.matrix 2.15.0       this one; the others keep the rows that they have
    python -m tests.torch_versions.matrix --failed     of every version what failed, after it was mended

Each version has an environment of its own (`make test TORCH=<version>`), so this needs no torch itself. What a run
came to stands in results.json, from which the table is made.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
RESULTS = HERE / "results.json"
PAGE = REPO / "docs" / "compatibility.md"
TABLE = "tests/torch_versions/test_matrix.py::test_no_version_in_the_table_has_a_failure"  # it judges the other rows
BEGIN, END = "<!-- made by `make matrix` -->", "<!-- end -->"

# What torch touches: sharding, planners, staging, readers, and the checkpoints of calibrations.
TOUCHED = (
    "tests/fsdp_hooks",
    "tests/dcp_adapters",
    "tests/layerwise/resume",
    "tests/layerwise/test_resume.py",
    "tests/torch_versions",
    "tests/test_torch_private.py",
)
PROVEN: dict[str, tuple[str, ...]] = {"2.11.0": (), "2.12.1": TOUCHED, "2.13.0": (), "2.14.1": TOUCHED, "2.15.0": ()}


def run(version: str, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """The tests of one version, counted; with the row of a run before, those that failed there."""
    chosen = PROVEN.get(version, ())
    if before is not None:
        found = counted(version, before["failing"])
        passed = before["passed"] + found["passed"]
        return {**before, "passed": passed, "failed": found["failed"], "failing": found["failing"]}
    return {
        "tests": "touched" if chosen else "all",
        **counted(version, chosen),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def commit() -> str:
    """The commit that is checked out, with a plus where files differ from it."""
    git = ("git", "-C", str(REPO))
    head = subprocess.run([*git, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=True)
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    return head.stdout.strip() + "+" * bool(changed.stdout.strip())


def counted(version: str, chosen: Sequence[str]) -> dict[str, Any]:
    """What running these tests came to."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        arguments = f"PYTEST_ARGS=-m '' --junitxml={report} --deselect {TABLE} {' '.join(map(shlex.quote, chosen))}"
        subprocess.run(["make", "test", f"TORCH={version}", arguments], cwd=REPO, check=False)
        suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    count = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    failing = [case for case in suite.iter("testcase") if case.find("failure") is not None]
    failing += [case for case in suite.iter("testcase") if case.find("error") is not None]
    return {
        "passed": count["tests"] - failed - count["skipped"],
        "failed": failed,
        "failing": [f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}" for case in failing],
        "skipped": count["skipped"],
        "minutes": round(float(suite.attrib["time"]) / 60, 1),
    }


def table(results: dict[str, Any]) -> str:
    """The rows of the page."""
    head = "| torch | Python | tests | passed | failed | skipped | date | commit |"
    lines = [head, "|---|---|---|---:|---:|---:|---|---|"]
    for version, row in sorted(results.items()):
        scope = {"all": "all", "touched": "what torch touches"}[row["tests"]]
        counts = " | ".join(str(row[name]) for name in ("passed", "failed", "skipped"))
        lines.append(f"| {version} | {row['python']} | {scope} | {counts} | {row['date']} | {row['commit']} |")
    return "\n".join(lines)


def page(text: str, results: dict[str, Any]) -> str:
    """The text of the page with the table of these results."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{table(results)}\n\n{END}{rest.partition(END)[2]}"


def main(versions: list[str]) -> int:
    """Run the tests of these versions, and write down what they came to."""
    again = "--failed" in versions
    chosen = [version for version in versions if version != "--failed"] or list(PROVEN)
    for version in chosen:
        results = json.loads(RESULTS.read_text())
        if again and not results.get(version, {}).get("failing"):
            continue
        results[version] = run(version, results[version] if again else None)
        RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
        PAGE.write_text(page(PAGE.read_text(), results))
        print(f"torch {version}: {results[version]}")
    return int(any(row["failed"] for row in json.loads(RESULTS.read_text()).values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
