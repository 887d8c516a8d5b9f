"""`python -m tests.adversary.mutation [--seed 0] [--count 300] [--results FILE] [--only MODULE] [--part 1/2]`.

`--survivors` prints those of the file.
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
    warm()
    began = time.monotonic()
    with copy_of(ROOT) as tree, results.open("a", encoding="utf-8") as stream:
        baseline = _Baseline(tree, stream, known, options.limit)
        for mutant in left:
            if time.monotonic() - began > options.budget:
                break
            record = _judged(tree, mutant, baseline, options.limit)
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


def _judged(tree: Tree, mutant: Mutant, baseline: _Baseline, limit: float) -> dict[str, Any]:
    """Asks its files, a few at a time, until a test fails that passes without the change."""
    tried: list[str] = []
    seconds, by = 0.0, ""
    waiting = files_for(ROOT, mutant.module)
    while waiting and not by:
        files, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
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
    for record in known.values():
        if record["outcome"] == "survived":
            print(f"{record['module']}:{record['line']} {record['operator']}  [{record['key']}]")
            print(f"    {record['before']}\n    {record['after']}\n    after {', '.join(record['files'])}")
    _print_score(known)


def _print_score(known: dict[str, dict[str, Any]]) -> None:
    outcomes = [record["outcome"] for record in known.values() if record["outcome"] not in ("baseline", "unasked")]
    caught = sum(outcome != "survived" for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} mutants killed ({outcomes.count('timeout')} by taking too long)")


if __name__ == "__main__":
    sys.exit(main())
