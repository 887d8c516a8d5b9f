"""Which tests run which line of the product: told by one run of them under coverage, and kept in a file.

    record(root, path)        runs the tests, about three times as long as without it; writes the file
    Reach.read(path)          the file
    reach.groups(mutant)      tests that run its line, the quickest of each test file first, a few at a time

Tests are functions without their parameters: what one case does not notice, another may. The file holds for its tree:
after a change, lines and tests are others.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.adversary.mutation.relevant import PLACES

if TYPE_CHECKING:
    from tests.adversary.mutation.mutants import Mutant

PLUGIN = "tests.adversary.mutation.reach_plugin"
KEPT = 40  # tests a line: what runs in more of them is noticed in these or in none
STEPS = (10.0, 30.0, 80.0)  # seconds of tests that are asked at once: few at first, then more


@dataclass(frozen=True)
class Reach:
    """seconds: of each test. lines: module -> line -> the tests that run it."""

    seconds: dict[str, float]
    lines: dict[str, dict[int, list[str]]]

    @classmethod
    def read(cls, path: Path) -> Reach:
        """What `record` wrote."""
        told = json.loads(path.read_text(encoding="utf-8"))
        names = [name for name, _ in told["tests"]]
        lines = {
            module: {int(line): [names[index] for index in indices] for line, indices in of.items()}
            for module, of in told["lines"].items()
        }
        return cls(dict(map(tuple, told["tests"])), lines)

    def groups(self, mutant: Mutant, source: str) -> list[list[str]]:
        """Tests to ask, group by group; none where only an import runs the line, or a process of its own."""
        of = self.lines.get(mutant.module, {})
        found = {test for line in statement_at(source, mutant.line) for test in of.get(line, [])}
        return in_steps(by_file_in_turn(found, self.seconds), self.seconds)


def statement_at(source: str, line: int) -> range:
    """The lines of the smallest statement around a line; of one that has others inside, those in front of them."""
    around = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            inside: list[ast.stmt] = getattr(node, "body", [])
            last = min((each.lineno - 1 for each in inside), default=node.end_lineno or node.lineno)
            own = range(node.lineno, max(last, node.lineno) + 1)
            if line in own and (len(around) == 1 or len(own) < len(around)):
                around = own
    return around


def by_file_in_turn(tests: Iterable[str], seconds: dict[str, float]) -> list[str]:
    """The quickest test of each file, then the second of each: neighbours tend to notice the same."""
    files: dict[str, list[str]] = defaultdict(list)
    for test in sorted(tests, key=lambda each: (seconds[each], each)):
        files[test.partition("::")[0]].append(test)
    placed = [(place, seconds[test], test) for own in files.values() for place, test in enumerate(own)]
    return [test for *_, test in sorted(placed)]


def in_steps(tests: Sequence[str], seconds: dict[str, float]) -> list[list[str]]:
    """Groups that take about `STEPS`; what does not fit is left out, but never a line's only tests."""
    groups: list[list[str]] = [[]]
    spent = 0.0
    for test in tests:
        if groups[-1] and spent + seconds[test] > STEPS[len(groups) - 1]:
            if len(groups) == len(STEPS):
                break
            groups.append([])
            spent = 0.0
        groups[-1].append(test)
        spent += seconds[test]
    return [group for group in groups if group]


def record(root: Path, path: Path, tests: Sequence[str] = (), jobs: int = 2) -> None:
    """Run the tests (all that mutants are asked of by default), and write who ran what."""
    places = sorted({place for places in PLACES.values() for place in places})
    with tempfile.TemporaryDirectory(prefix="reach-") as directory:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            PLUGIN,
            "--reach-data",
            directory,
            "-p",
            "no:cacheprovider",
        ]
        command += ["-n", str(jobs), "--dist", "loadfile"] if jobs > 1 else []
        subprocess.run([*command, *(tests or places)], cwd=root, check=False)  # who failed has run its lines, too
        path.write_text(json.dumps(_merged(root, Path(directory))), encoding="utf-8")


def _merged(root: Path, directory: Path) -> dict[str, Any]:
    """What all processes left there."""
    from coverage import CoverageData

    seconds: dict[str, float] = json.loads((directory / "seconds.json").read_text(encoding="utf-8"))
    names = sorted(seconds)
    index = {name: number for number, name in enumerate(names)}
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for file in sorted(directory.glob(".coverage.*")):
        data = CoverageData(str(file))
        data.read()
        for module in data.measured_files():
            for line, tests in data.contexts_by_lineno(module).items():
                found[str(Path(module).relative_to(root))][line].update(test for test in tests if test in index)
    lines = {
        module: {
            line: [index[test] for test in by_file_in_turn(tests, seconds)[:KEPT]]
            for line, tests in of.items()
            if tests
        }
        for module, of in found.items()
    }
    return {"tests": [(name, round(seconds[name], 3)) for name in names], "lines": lines}
