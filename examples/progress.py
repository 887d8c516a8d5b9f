"""How far a run is: a bar and messages in a terminal, elsewhere a line a step, too; OUT/log.txt has all lines.

Messages are calls of a `Log`; `steps` counts the steps of a loop, which says by `step` what became of each:

    log = Log(out / "log.txt", shown=rank == 0)
    log("the weights are read")
    for step in log.steps(range(12)):
        ...
        log.step(f"loss {loss:.3f}")
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm


class Log:
    """Lines that begin with the seconds since the start. Where not `shown` (on ranks other than 0), nothing."""

    def __init__(self, path: Path, *, shown: bool) -> None:
        self._began, self._shown = time.monotonic(), shown
        self._in_terminal = sys.stderr.isatty() and sys.stdout.isatty()
        self._path, self._of = path, ""
        self._bar: Any = None
        if shown:
            path.write_text("", encoding="utf-8")

    def __call__(self, text: str) -> None:
        """One line, at once: a pipe would keep it."""
        self._line(text, bar=False)

    def steps(self, steps: range) -> Iterator[int]:
        """Each of the steps; the loop says what became of one by `step`."""
        self._bar = tqdm(steps, unit="step", disable=not (self._shown and self._in_terminal))
        for step in self._bar:
            self._of = f"step {step + 1}/{steps.stop}"
            yield step

    def step(self, text: str) -> None:
        """What became of the step that `steps` gave last."""
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        self._line(f"{self._of}: {text}", bar=True)

    def _line(self, text: str, *, bar: bool) -> None:
        """`bar`: a bar in a terminal says so, too."""
        if not self._shown:
            return
        line = f"{time.monotonic() - self._began:6.1f} s  {text}"
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        if not self._in_terminal:
            print(line, flush=True)
        elif not bar:
            tqdm.write(line)  # above a bar that is there
