"""Asks a GPU one question after the other, each in a process of its own within a time box, and writes the answers.

    results/<date>-<gpu>.log     all that was printed, as it came
    results/<date>-<gpu>.json    rows, aims, machine and versions; written again after each question
    results/<date>-<gpu>.md      the same to read
    results/<date>-<gpu>.png     every aim and how near it is; not where matplotlib is missing

A process that dies, hangs or runs out of time leaves the rows that it had measured, and a row that says so; the others
are asked all the same. What is left of LONGEST bounds each time box, so the whole takes no longer, whatever happens.
"""

import contextlib
import datetime as dt
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import table
from benchmarks.gpu.question import Row, Scale, as_row, first_line
from benchmarks.machine import machine_and_versions

QUESTIONS = ("gpu_tests", "kernels", "step", "optimizer", "memory", "linear", "staging", "checkpoint", "calibration")
LONGEST = 8 * 60 - 15  # seconds, for all; starting and drawing take the rest
GRACE = 10  # seconds that a question may take beyond its box to stop by itself
ALL_WELL, FAILED, NO_GPU, MISSED = 0, 1, 2, 3  # exit statuses
ROOT = Path(__file__).resolve().parents[2]
Command = Callable[[str, Path, float], list[str]]


@dataclass
class Log:
    """What is printed goes to a file, too, at once."""

    path: Path
    began: float = field(default_factory=time.monotonic)

    def say(self, line: str) -> None:
        """A line."""
        print(line, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def left(self) -> float:
        """Seconds of all questions together."""
        return LONGEST - (time.monotonic() - self.began)


def module_of(question: str) -> Any:
    """The file of a question."""
    return importlib.import_module(f"benchmarks.gpu.{question}")


def main(names: Sequence[str], results: Path) -> int:
    """Ask all questions or some; 1: something failed, 2: no GPU, 3: an aim is missed, or was not measured."""
    if not torch.cuda.is_available():
        print(
            f"python -m benchmarks --gpu needs a GPU, and torch {torch.__version__} finds none; see `nvidia-smi` for "
            "the driver, and install a torch that is built for CUDA",
            file=sys.stderr,
        )
        return NO_GPU
    gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    stem = results / "-".join([dt.date.today().isoformat(), gpu, *names])
    return ask(names or QUESTIONS, stem, " ".join(["python -m benchmarks --gpu", *names]))


def ask(names: Sequence[str], stem: Path, said: str, command: Command | None = None) -> int:
    """Ask these questions; `command` makes the command line of the process that answers one."""
    stem.parent.mkdir(exist_ok=True)
    log = Log(stem.with_suffix(".log"))
    log.path.write_text("", encoding="utf-8")
    modules = {name: module_of(name) for name in names}
    about = {"command": said, "commit": _commit(), **machine_and_versions()}
    answers: dict[str, list[Row]] = {}
    seconds: dict[str, float] = {}
    for number, name in enumerate(names):
        box = min(float(modules[name].SECONDS), log.left() - GRACE)
        log.say(f"[{number + 1}/{len(names)}] {name}: {box:.0f} s at most, {log.left():.0f} s left for all")
        began = time.monotonic()
        answers[name] = answer(name, box, log, command or _command)
        seconds[name] = round(time.monotonic() - began, 1)
        log.say(f"[{number + 1}/{len(names)}] {name}: {seconds[name]:.0f} s")
        _write(stem, {**about, "seconds": seconds}, answers, {name: modules[name].AIMS for name in answers})
    return _conclude(stem, answers, {name: module.AIMS for name, module in modules.items()}, log)


def _commit() -> str:
    """What is measured, with "-dirty" where files differ from it; "unknown" where git or its folder is missing."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    return "unknown"


def _command(name: str, into: Path, box: float) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", name, "--into", str(into), "--seconds", str(box)]


def answer(name: str, box: float, log: Log, command: Command) -> list[Row]:
    """The rows of one question, which ends with its time box."""
    if box <= 0:
        return [Row("what is left", skipped="no time was left to ask it")]
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "rows.jsonl"
        ended = _run(name, command(name, into, box), box + GRACE, log)
        rows = [as_row(json.loads(line)) for line in into.read_text().splitlines()] if into.exists() else []
    return [*rows, Row(f"what is left of {name}", error=ended)] if ended else rows


def _run(name: str, command: list[str], most: float, log: Log) -> str:
    """Run a process for so many seconds at most, and say how it ended; "" if well."""
    environment = dict(os.environ)
    if name != "gpu_tests":
        environment.pop("OMP_NUM_THREADS", None)  # make's, for tests
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that it can be stopped with all that it started
    ) as process:
        reader = threading.Thread(target=_pass_on, args=(process, log))
        reader.start()
        try:
            code = process.wait(most)
        except subprocess.TimeoutExpired:
            return f"stopped after {most:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(process.pid, signal.SIGKILL)
            reader.join()
    return f"the process ended with {code}" if code else ""


def _pass_on(process: "subprocess.Popen[str]", log: Log) -> None:
    """Say what a process prints, until it and all that it started have ended."""
    for line in process.stdout or ():
        log.say(f"  {line.rstrip()}")


def _write(stem: Path, about: Mapping[str, Any], answers: table.Answers, aims: table.Aims) -> None:
    shown = {
        name: ", ".join(f"{k} {v}" for k, v in of.items()) if isinstance(of, dict) else of for name, of in about.items()
    }
    records = {name: [asdict(row) for row in rows] for name, rows in answers.items()}
    wanted = {name: [asdict(aim) for aim in of] for name, of in aims.items()}
    found = {**about, "answers": records, "aims": wanted, "missed": table.missed(answers, aims)}
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    picture = stem.with_suffix(".png").name if importlib.util.find_spec("matplotlib") else ""
    stem.with_suffix(".md").write_text(table.document(shown, answers, aims, picture))


def _conclude(stem: Path, answers: table.Answers, aims: table.Aims, log: Log) -> int:
    """Draw, print the tables, the aims last, and say how it went."""
    if importlib.util.find_spec("matplotlib"):
        table.draw(answers, aims, stem.with_suffix(".png"))
    else:
        log.say("no picture: matplotlib is not installed")
    for name, rows in answers.items():
        log.say("\n".join(["", f"## {name}", "", *table.of_question(rows)]))
    failed, missed = table.failed(answers), table.missed(answers, aims)
    log.say("\n".join(["", "## aims", "", *table.of_aims(answers, aims), ""]))
    log.say("\n".join(f"failed: {each}" for each in failed) or "nothing failed")
    log.say(f"{len(missed)} aims are missed; written to {stem.with_suffix('.json')}, .md and .log")
    return FAILED if failed else MISSED if missed else ALL_WELL


def rows_within(question: Any, scale: Scale, seconds: float, take: Callable[[Row], object]) -> None:
    """Give each row as it comes, until there are no more, or no more time."""
    began = time.monotonic()
    try:
        for row in question.rows(scale):
            take(row)
            if time.monotonic() - began > seconds:
                take(Row("what is left", skipped=f"no time: the box is {seconds:.0f} s"))
                return
    except Exception as error:  # noqa: BLE001 - outside of any row: what was measured before stays
        traceback.print_exc()
        take(Row("what is left", error=first_line(error)))
