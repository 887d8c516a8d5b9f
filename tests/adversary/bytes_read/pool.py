"""The process that reads mutants: bounded in memory and time; it is replaced when a mutant kills it.

    here             a seed, one line            ->
    the process                                  <-  {"end": word} or {"found": text}, one line of JSON

Memory: RLIMIT_AS, so much above what the process has when it is ready. Time: a timer of CPU time, whose signal kills,
since C code cannot be interrupted in a better way; wall-clock time says little on a busy machine.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import IO

from tests.adversary.attack import Found

REPO = Path(__file__).resolve().parents[3]
ROOM = 2**30  # bytes that reading small mutants may take; claims of more must be refused before they are believed
CPU = 20.0  # seconds of CPU time a mutant, after which the process is killed
SLOW = 5.0  # seconds after which a mutant is a finding
LATE = 600.0  # seconds of wall-clock time for an answer
READY = "ready"


class Pool:
    """The process, started when the first scenario needs it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around all scenarios."""
        try:
            yield
        finally:
            self._stop()

    def scenario(self, seed: int) -> str:
        """One mutant, read."""
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(f"{seed}\n".encode())
            process.stdin.flush()
            answer = json.loads(self._line(process))
        except (OSError, EOFError):
            raise Found(f"the process that read the mutant of {seed} {self._death()}") from None
        if "found" in answer:
            raise Found(answer["found"])
        return str(answer["end"])

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, "-c", f"from {__name__} import main; main()"]
            self._process = subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            if json.loads(self._line(self._process)) != READY:
                raise AssertionError("the process that reads mutants did not start")
        return self._process

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], LATE)
        line: bytes = process.stdout.readline() if ready else b""
        if not line.endswith(b"\n"):
            raise EOFError
        return line

    def _death(self) -> str:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(5)
            self._process = None
            return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        self._stop()
        return f"did not answer within {LATE:g} s"

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


POOL = Pool()


# -- in the process ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Read mutants until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints
    logging.disable(logging.CRITICAL)  # DCP logs each refusal
    with tempfile.TemporaryDirectory(dir=_in_memory(), prefix="mutants-") as directory:
        from tests.adversary.bytes_read.subjects import Subjects

        subjects = Subjects(Path(directory))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
        _answer(answers, READY)
        for line in sys.stdin:
            _answer(answers, _read(subjects, int(line)))


def _read(subjects: object, seed: int) -> dict[str, str]:
    began = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, CPU)
    try:
        end = subjects.scenario(Random(seed))  # type: ignore[attr-defined]
        taken = time.process_time() - began
        if taken > SLOW:
            raise Found(f"{end} after {taken:.1f} s of CPU time")
        return {"end": end}
    except Found as found:
        return {"found": str(found)}
    except Exception:
        return {"found": traceback.format_exc()}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _answer(answers: IO[str], answer: object) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _in_memory() -> str | None:
    """A file system in memory, where there is one: mutants are many and short-lived."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
