"""`python -m tests.adversary.mutation [--seed 0] [--count 300] [--results FILE] [--only MODULE] [--part 1/2]`.

`--reach FILE` asks the tests that run the changed line; without it, tests are chosen by the names that they say. The
file is made first if it is not there, by a run of all tests. `--survivors` prints those of the results.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.adversary.__main__ import duration
from tests.adversary.mutation.mutants import Mutant, drawn
from tests.adversary.mutation.reach import Reach, record
from tests.adversary.mutation.relevant import files_for, modules
from tests.adversary.mutation.running import Tree, copy_of, run, warm

ROOT = Path(__file__).resolve().parents[3]
AT_ONCE = 2  # test files in one fork: what later ones import, and how long they take, most mutants do not need


def main(argv: Sequence[str] | None = None) -> int:
    """0, also where mutants survive: whether they should is for people to say."""
    options = _options(argv)
    results = Path(options.results)
    known = _known(results)
    if options.survivors:
        _print_survivors(known)
        return 0
    chosen = drawn(ROOT, [name for name in modules(ROOT) if options.only in name], options.seed, options.count)
    left = [mutant for mutant in options.part(chosen) if mutant.key not in known]
    print(f"{len(chosen)} mutants, {len(left)} of them to run here", file=sys.stderr)
    reach = _reach(Path(options.reach)) if options.reach else None
    warm()
    began = time.monotonic()
    with copy_of(ROOT) as tree, results.open("a", encoding="utf-8") as stream:
        baseline = _Baseline(tree, stream, known, options.limit)
        for mutant in left:
            if time.monotonic() - began > options.budget:
                break
            record = _judged(tree, mutant, baseline, _groups(mutant, reach), options.limit)
            _write(stream, record)
            print(f"{record['outcome']:9} {record['seconds']:6.1f} s {mutant.module}:{mutant.line} {mutant.operator}")
    _print_score(_known(results))
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.adversary.mutation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300, help="how many mutants the seed draws")
    parser.add_argument("--results", default="mutants.jsonl", help="lines of JSON; what is there is not run again")
    parser.add_argument("--only", default="", help="only modules whose path holds this text")
    parser.add_argument("--part", type=_part, default="1/1", help="1/2: each second mutant, for two runs at once")
    parser.add_argument("--reach", metavar="FILE", help="which tests run which line; made where it is not there")
    parser.add_argument("--limit", type=duration, default=300.0, help=f"for {AT_ONCE} test files of a mutant (5m)")
    parser.add_argument("--budget", type=duration, default=float("inf"), help="begin no mutant after this time")
    parser.add_argument("--survivors", action="store_true", help="print those of the file, and run nothing")
    return parser.parse_args(argv)


def _part(text: str) -> Callable[[Sequence[Mutant]], Sequence[Mutant]]:
    number, of = (int(part) for part in text.split("/"))
    if not 1 <= number <= of:
        raise ValueError(text)
    return lambda chosen: chosen[number - 1 :: of]


class _Baseline:
    """What passes without a change: asked once of each test that failed with one, and of files that took too long."""

    def __init__(self, tree: Tree, stream: Any, known: dict[str, dict[str, Any]], limit: float) -> None:
        self._tree, self._stream, self._known, self._limit = tree, stream, known, limit

    def passes(self, tests: Sequence[str]) -> bool:
        """Whether these do, in the same time."""
        key = " ".join(tests)
        if key not in self._known:
            ran = run(self._tree, None, tests, self._limit)
            self._known[key] = {"key": key, "outcome": "baseline", "by": ran.by, "seconds": round(ran.seconds, 2)}
            _write(self._stream, self._known[key])
        return not self._known[key]["by"]


def _reach(path: Path) -> Reach:
    if not path.exists():
        print(f"running all tests to see what they reach, for {path}", file=sys.stderr)
        record(ROOT, path)
    return Reach.read(path)


def _groups(mutant: Mutant, reach: Reach | None) -> list[list[str]]:
    """Whom to ask: tests that run the line, or the files that say names of its module."""
    source = (ROOT / mutant.module).read_text(encoding="utf-8")
    if reach is not None and (groups := reach.groups(mutant, source)):
        return groups
    files = files_for(ROOT, mutant.module)
    return [files[first : first + AT_ONCE] for first in range(0, len(files), AT_ONCE)]


def _judged(
    tree: Tree, mutant: Mutant, baseline: _Baseline, groups: Sequence[list[str]], limit: float
) -> dict[str, Any]:
    """Asks its tests, a group at a time, until one fails that passes without the change."""
    tried: list[str] = []
    seconds, by = 0.0, ""
    for files in groups:
        if by:
            break
        failing: list[str] = []  # whatever the product is
        while True:
            ran = run(tree, mutant, [*files, *(f"--deselect={test}" for test in failing)], limit)
            seconds += ran.seconds
            blamed = files if ran.by == "timeout" or ".py" not in ran.by else [ran.by.removeprefix("collecting ")]
            if not ran.by or baseline.passes(blamed):
                by = ran.by
                tried += files
                break
            if blamed == files or blamed[0] in failing:
                break  # they tell nothing here
            failing += blamed
    outcome = "unasked" if not tried else "survived" if not by else "timeout" if by == "timeout" else "killed"
    return {**mutant.to_json(), "outcome": outcome, "by": by, "files": tried, "seconds": round(seconds, 2)}


def _known(results: Path) -> dict[str, dict[str, Any]]:
    if not results.exists():
        return {}
    lines = results.read_text(encoding="utf-8").splitlines()
    return {record["key"]: record for record in map(json.loads, lines)}


def _write(stream: Any, record: dict[str, Any]) -> None:
    stream.write(json.dumps(record) + "\n")
    stream.flush()


def _print_survivors(known: dict[str, dict[str, Any]]) -> None:
    for told in known.values():
        if told["outcome"] == "survived":
            print(f"{told['module']}:{told['line']} {told['operator']}  [{told['key']}]")
            print(f"    {told['before']}\n    {told['after']}\n    after {', '.join(told['files'])}")
    _print_score(known)


def _print_score(known: dict[str, dict[str, Any]]) -> None:
    outcomes = [record["outcome"] for record in known.values() if record["outcome"] not in ("baseline", "unasked")]
    caught = sum(outcome != "survived" for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} mutants killed ({outcomes.count('timeout')} by taking too long)")


if __name__ == "__main__":
    sys.exit(main())
