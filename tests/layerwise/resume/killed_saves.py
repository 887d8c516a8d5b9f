"""A run that is killed at every step that touches a file: `python -m tests.layerwise.resume.killed_saves DIRECTORY`.

For k = 1, 2, ...: a copy of a directory with one window; a forked run in it that opens it, saves another window and
finishes, and is killed at its k-th step; then a look at what is left. Prints a JSON list of what was found each time.
Killed at an fsync, the file first loses the second half of what was not synced.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from layerwise.resume.checkpoints import CalibrationCheckpoint
from layerwise.resume.fingerprint import Fingerprint

RUN = Fingerprint(weights={"w": 1}, data=2, batches=3, recipe={}, algorithm={})
FINISHED = {"w": 5}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = frozenset({"os.mkdir", "os.rename", "os.remove", "os.rmdir"})


def window(number: int) -> dict[str, Any]:
    return {"w": torch.arange(64.0) + 100 * number}


def killed_at(step: int) -> None:
    """From now on this process counts its steps, and does not take the one with this number."""
    left = [step]

    def count() -> bool:
        left[0] -= 1
        return not left[0]

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if (event in CHANGES or (event == "open" and args[2] & WRITES)) and count():
            os.kill(os.getpid(), signal.SIGKILL)

    def torn(descriptor: int) -> None:
        if count():
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode):
                os.ftruncate(descriptor, status.st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = torn
    sys.addaudithook(audit)


def run(directory: Path, step: int) -> bool:
    """Whether the run got to its end before its step `step`."""
    child = os.fork()
    if not child:
        killed_at(step)
        checkpoint = CalibrationCheckpoint(directory)
        checkpoint.open(RUN)
        checkpoint.save_window(1, 1, window(1), {"layer": 1})
        checkpoint.mark_finished(FINISHED)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
    return status == 0


def look(directory: Path) -> dict[str, Any]:
    """What the next run finds; it loads all of it, and goes on to the end."""
    checkpoint = CalibrationCheckpoint(directory)
    resumed = checkpoint.open(RUN)
    assert resumed is not None
    found = {"windows": len(resumed.windows), "finished": resumed.finished}
    if resumed.next_layer == 1:
        checkpoint.save_window(1, 1, window(1), {"layer": 1})
    if not resumed.finished:
        checkpoint.mark_finished(FINISHED)
    again = CalibrationCheckpoint(directory).open(RUN)
    assert again is not None
    assert again.finished
    for number, saved in enumerate(again.windows):
        target = {"w": torch.zeros(64)}
        checkpoint.load_window(saved, target)
        assert torch.equal(target["w"], window(number)["w"])
        assert saved.extra == {"layer": number}
    names = {saved.directory for saved in again.windows} | {"progress.json", "progress.backup.json"}
    return {**found, "left_over": sorted({path.name for path in directory.iterdir()} - names)}


def main(base: Path) -> None:
    warnings.simplefilter("error")
    os.fsync = lambda _: None  # thousands of them: a killed process loses nothing of what it has written, a disk might
    first = CalibrationCheckpoint(base / "first")
    assert first.open(RUN) is None
    first.save_window(0, 0, window(0), {"layer": 0})
    found: list[dict[str, Any]] = []
    done = False
    while not done:
        directory = base / f"killed-{len(found) + 1}"
        shutil.copytree(base / "first", directory)
        (directory / "layers-00001-00001").mkdir()  # of a run that was killed before
        done = run(directory, len(found) + 1)
        found.append(look(directory))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
