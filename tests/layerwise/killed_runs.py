"""Runs that are killed at chosen events and at random writes: `python -m tests.layerwise.killed_runs DIRECTORY`.

For each point: a forked run that is killed there, then the same run again, to its end. Prints a JSON list: where it was
killed, how many layers the second run found, and whether it came to the bytes of an uninterrupted run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerwise import GPTQ, Event, Max
from tests.layerwise.resume.killed_saves import killed_at
from tests.layerwise.small_runs import LAYERS, Case, found, model_of, run

EVENTS = [
    ("layer_start", 0),
    ("metrics", 0),
    ("checkpoint", 0),
    ("write", 2),
    ("metrics", LAYERS),
    ("checkpoint", LAYERS),
]
STEPS = 100  # that touch a file in a whole run, or nearly
CASES = {Case(algorithm=Max()): [*EVENTS, *range(4, STEPS, 24)], Case(algorithm=GPTQ()): [EVENTS[3]]}
WRITES = 2  # how many random steps are tried beside those


def at_event(kind: str, index: int) -> Callable[[Event], None]:
    """A callback that kills this process."""

    def on_event(event: Event) -> None:
        if (event.kind, event.index) == (kind, index):
            os.kill(os.getpid(), signal.SIGKILL)

    return on_event


def killed(case: Case, directory: Path, point: Any) -> bool:
    """Whether a run of its own process was killed at the point."""
    child = os.fork()
    if not child:
        if isinstance(point, int):
            killed_at(point)
        on_event = None if isinstance(point, int) else at_event(*point)
        run(model_of(case), case, checkpoint_dir=directory, on_event=on_event)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
    return status != 0


def main(base: Path) -> None:
    warnings.simplefilter("error")
    told: list[dict[str, Any]] = []
    for case, points in CASES.items():
        whole = found(run(model := model_of(case), case), model)
        for point in [*points, *random.SystemRandom().sample(range(1, STEPS), WRITES)]:
            directory = base / f"{case.name}-{point}"
            was = killed(case, directory, point)
            result = run(model := model_of(case), case, checkpoint_dir=directory)
            here = found(result, model)
            same = here.same() == whole.same() and here.records == whole.records
            told.append({"point": point, "killed": was, "resumed": len(here.resumed), "same": same})
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
