"""A process that does calibration jobs, one at a time: JSON lines in, JSON lines out.

    python -m benchmarks.calibration_worker THREADS

Each side has a process of its own, because importing ModelOpt patches classes of transformers. The process stays alive,
so that contenders can take turns without loading the model each time. While one works, the others wait for a line.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.calibration_sides import ROOT, Job, perform

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1",
}


class Worker:
    """The parent's end of one such process; its messages go to the file `log`."""

    def __init__(self, log: Path, *, threads: int) -> None:
        self.log = log
        environment = {**os.environ, **QUIET, "OMP_NUM_THREADS": str(threads)}
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.calibration_worker", str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env=environment,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # closes its input, which ends it

    def __call__(self, job: Job) -> dict[str, Any]:
        """What `perform` says of a job."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{job} ended its process; the last of what it said:\n{self.log.read_text()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def serve(threads: int) -> None:
    """Answers every line of standard input; whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(threads)
    for line in sys.stdin:
        answers.write(json.dumps(perform(Job(**json.loads(line)))) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
