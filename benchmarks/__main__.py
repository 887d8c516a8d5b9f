"""Asks questions and writes the answers, with machine, versions and command beside the figures.

    python -m benchmarks                      # all questions, within 28 minutes on two quiet cores
    python -m benchmarks numerics linear      # some; the files' names end with theirs
    python -m benchmarks calibration --full   # the longer version, for questions that have one
    python -m benchmarks --gpu                # those of a GPU instead, where there is one: gpu/asking.py

    results/<date>-<machine>-cpu.json             figures
    results/<date>-<machine>-cpu.md               the same to read, and a table of all targets
    results/<date>-<machine>-cpu-<question>.png   a picture of each

A question is a module of this package:

    run() -> dict                       figures; prints progress; "targets" says what was aimed at and met
    markdown(figures) -> str            tables
    draw(figures, path) -> None         the picture

If a question raises, its error takes the place of its answer, the others are still asked, and the exit status is 1.
Files are written again after each question, so an interrupted run loses only the question that was being asked.
"""

import argparse
import dataclasses
import datetime as dt
import importlib
import json
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import asking
from benchmarks.machine import machine_and_versions
from benchmarks.report import of_run, table_of_targets

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Question:
    """How long a question may take on two quiet cores, in seconds, and whether there is a longer run(full=True)."""

    budget: int
    full: bool = False


QUESTIONS = {  # cheap ones first
    "numerics": Question(60),
    "linear": Question(20),
    "staging": Question(25),
    "exports": Question(25),
    "deltas": Question(15, full=True),
    "overhead": Question(100),
    "optimizer": Question(45),
    "memory": Question(350, full=True),
    "sync": Question(60, full=True),
    "plan_scaling": Question(50, full=True),
    "checkpoints": Question(160),
    "gather": Question(145),
    "growth": Question(295),
    "calibration": Question(300, full=True),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask all questions, or those named on the command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Asks questions, writes answers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(QUESTIONS)}; none: all of them")
    parser.add_argument("--full", action="store_true", help="at length, for questions that have a longer version")
    parser.add_argument("--gpu", action="store_true", help=f"those of a GPU instead: {', '.join(asking.QUESTIONS)}")
    options = parser.parse_args(arguments)
    known = asking.QUESTIONS if options.gpu else tuple(QUESTIONS)
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no question {', '.join(unknown)}; there are {', '.join(known)}")
    if options.gpu:
        if options.full:
            parser.error("a GPU's questions have no longer version; leave out --full")
        return asking.main(options.names, RESULTS)
    words = [*options.names, *(["--full"] if options.full else [])]
    label = [
        dt.date.today().isoformat(),
        platform.machine(),
        "cpu",
        *options.names,
        *(["full"] if options.full else []),
    ]
    command = " ".join(["python -m benchmarks", *words])
    return ask_all(options.names or list(QUESTIONS), RESULTS / "-".join(label), command, full=options.full)


def ask_all(names: Sequence[str], stem: Path, command: str, *, full: bool = False) -> int:
    """Ask, write `stem`.json and `stem`.md and pictures beside them; 1 if any question failed, else 0."""
    results: dict[str, Any] = {"command": command, **machine_and_versions(), "time": {}}
    answers: dict[str, str] = {}
    pictures: dict[str, str] = {}
    stem.parent.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        left = sum(QUESTIONS[other].budget for other in names[number:])
        at_length = ", at length" if full and QUESTIONS[name].full else ""
        print(f"[{number + 1}/{len(names)}] {name}{at_length} ... (all that is left: {left} s)", flush=True)
        picture = stem.with_name(f"{stem.name}-{name}.png")
        began = time.perf_counter()
        results[name] = {}
        try:
            _ask(name, results, answers, picture, full=full)
            pictures[name] = picture.name
        except Exception as error:  # noqa: BLE001 - whatever it is, the other questions have answers
            traceback.print_exc()
            results[name]["error"] = f"{type(error).__name__}: {error}"
        seconds = round(time.perf_counter() - began, 1)
        results["time"][name] = {"seconds": seconds, "budget": QUESTIONS[name].budget}
        if name in answers:
            print(answers[name])
        print(f"[{number + 1}/{len(names)}] {name}: {seconds:.0f} s of {QUESTIONS[name].budget} s", flush=True)
        stem.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
        stem.with_suffix(".md").write_text(of_run(results, answers, pictures))
    print("\n".join(["", *table_of_targets(results, names), ""]))
    print(f"written to {stem.with_suffix('.json')} and .md")
    return int(any("error" in results[name] for name in names))


def _ask(name: str, results: dict[str, Any], answers: dict[str, str], picture: Path, *, full: bool) -> None:
    """Ask a question and fill in what it gives; figures that came before an error stay."""
    threads = torch.get_num_threads()
    try:
        question = importlib.import_module(f"benchmarks.{name}")
        figures = question.run(full=True) if full and QUESTIONS[name].full else question.run()
        json.dumps(figures)  # so that figures that are not JSON raise here, not when files are written
        results[name] = figures
        answers[name] = question.markdown(results[name])
        question.draw(results[name], picture)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(main())
