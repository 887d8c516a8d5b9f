"""Asks questions and writes the answers, with machine, versions and command beside the figures.

    python -m benchmarks                      # all questions, within 25 minutes on two quiet cores
    python -m benchmarks numerics linear      # some; the files' names end with theirs
    python -m benchmarks calibration --full   # the longer version, for questions that have one
    python -m benchmarks --gpu                # the question of a GPU, where there is one

    results/<date>-<machine>-cpu.json             figures
    results/<date>-<machine>-cpu.md               the same to read, and a table of all targets
    results/<date>-<machine>-cpu-<question>.png   a picture of each
    results/<date>-<gpu>.*                        of --gpu, where a target that is missed makes the exit status 1

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
import re
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

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
    "overhead": Question(55),
    "optimizer": Question(45),
    "sync": Question(60, full=True),
    "plan_scaling": Question(50, full=True),
    "checkpoints": Question(160),
    "gather": Question(145),
    "growth": Question(295),
    "calibration": Question(300, full=True),
}
ON_GPU = {"gpu": Question(240)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask all questions, or those named on the command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Asks questions, writes answers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(QUESTIONS)}; none: all of them")
    parser.add_argument("--full", action="store_true", help="at length, for questions that have a longer version")
    parser.add_argument("--gpu", action="store_true", help="the question of a GPU instead")
    options = parser.parse_args(arguments)
    if options.gpu:
        if options.names or options.full:
            parser.error("--gpu asks a question of its own; leave out names and --full")
        return _ask_gpu()
    if unknown := [name for name in options.names if name not in QUESTIONS]:
        parser.error(f"no question {', '.join(unknown)}; there are {', '.join(QUESTIONS)}")
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


def _ask_gpu() -> int:
    """Ask the question of a GPU; 1 if it failed or missed a target, 2 where there is no GPU."""
    if not torch.cuda.is_available():
        print(
            f"python -m benchmarks --gpu needs a GPU, and torch {torch.__version__} finds none; see `nvidia-smi` for "
            "the driver, and install a torch that is built for CUDA",
            file=sys.stderr,
        )
        return 2
    gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    stem = RESULTS / f"{dt.date.today().isoformat()}-{gpu}"
    status = ask_all(list(ON_GPU), stem, "python -m benchmarks --gpu")
    answers = json.loads(stem.with_suffix(".json").read_text())
    lost = [target for name in ON_GPU for target, of in answers[name].get("targets", {}).items() if not of["met"]]
    for target in lost:
        print(f"missed: {target}", file=sys.stderr)
    return int(bool(status or lost))


def _question(name: str) -> Question:
    return (QUESTIONS | ON_GPU)[name]


def ask_all(names: Sequence[str], stem: Path, command: str, *, full: bool = False) -> int:
    """Ask, write `stem`.json and `stem`.md and pictures beside them; 1 if any question failed, else 0."""
    results: dict[str, Any] = {"command": command, **machine_and_versions(), "time": {}}
    answers: dict[str, str] = {}
    pictures: dict[str, str] = {}
    stem.parent.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        left = sum(_question(other).budget for other in names[number:])
        at_length = ", at length" if full and _question(name).full else ""
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
        results["time"][name] = {"seconds": seconds, "budget": _question(name).budget}
        if name in answers:
            print(answers[name])
        print(f"[{number + 1}/{len(names)}] {name}: {seconds:.0f} s of {_question(name).budget} s", flush=True)
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
        figures = question.run(full=True) if full and _question(name).full else question.run()
        json.dumps(figures)  # so that figures that are not JSON raise here, not when files are written
        results[name] = figures
        answers[name] = question.markdown(results[name])
        question.draw(results[name], picture)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(main())
