"""`python -m tests.adversary.mutation [--seed 0] [--count 300] [--results FILE] [--only MODULE] [--survivors]`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.adversary.__main__ import duration
from tests.adversary.mutation.mutants import Mutant, drawn
from tests.adversary.mutation.relevant import files_for, modules
from tests.adversary.mutation.running import Tree, copy_of, run, warm

ROOT = Path(__file__).resolve().parents[3]
SLOWER = 6  # times as long as without the change is too long
LEAST = 120.0  # seconds that are never too long


def main(argv: Sequence[str] | None = None) -> int:
    """0, also where mutants survive: whether they should is for people to say."""
    options = _options(argv)
    results = Path(options.results)
    known = _known(results)
    if options.survivors:
        _print_survivors(known)
        return 0
    chosen = drawn(ROOT, [name for name in modules(ROOT) if options.only in name], options.seed, options.count)
    left = [mutant for mutant in chosen if mutant.key not in known]
    print(f"{len(chosen)} mutants, {len(chosen) - len(left)} of them known", file=sys.stderr)
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
    parser.add_argument("--limit", type=duration, default=600.0, help="for the tests of one mutant (10m)")
    parser.add_argument("--budget", type=duration, default=float("inf"), help="begin no mutant after this time")
    parser.add_argument("--survivors", action="store_true", help="print those of the file, and run nothing")
    return parser.parse_args(argv)


class _Baseline:
    """Test files without a change: how long they take, and which of them fail on this machine anyway."""

    def __init__(self, tree: Tree, stream: Any, known: dict[str, dict[str, Any]], limit: float) -> None:
        self._tree, self._stream, self._known, self._limit = tree, stream, known, limit

    def sound(self, files: Sequence[str]) -> tuple[list[str], float]:
        """The files that pass, and how long they take together."""
        taken = 0.0
        passing = []
        for file in files:
            record = self._known.get(file)
            if record is None:
                ran = run(self._tree, None, [file], self._limit)
                record = {"key": file, "outcome": "baseline", "by": ran.by, "seconds": round(ran.seconds, 2)}
                self._known[file] = record
                _write(self._stream, record)
            if not record["by"]:
                passing.append(file)
                taken += record["seconds"]
        return passing, taken


def _judged(tree: Tree, mutant: Mutant, baseline: _Baseline, limit: float) -> dict[str, Any]:
    """Its files two by two: what later ones import, and how long they take otherwise, most mutants do not need."""
    tried: list[str] = []
    seconds, by = 0.0, ""
    waiting = files_for(ROOT, mutant.module)
    while waiting and not by and seconds < limit:
        batch, waiting = waiting[:2], waiting[2:]
        files, usual = baseline.sound(batch)
        ran = run(tree, mutant, files, max(SLOWER * usual, LEAST)) if files else None
        if ran is not None:
            by, seconds = ran.by, seconds + ran.seconds
            tried += files
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
