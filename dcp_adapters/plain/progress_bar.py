"""Show on the terminal how far a long step has come: a tqdm bar with the stage and the time left.

Nothing is shown if stderr is no terminal. The work reports bytes to a plain function and knows nothing of bars.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

Advance = Callable[[int], object]  # told the number of bytes that have been dealt with


def ignore_progress(_: int) -> None:
    """Take progress that nobody watches."""


@contextmanager
def progress_bar(stage: str, total: int, *, enabled: bool = True) -> Iterator[Advance]:
    """Show a bar of `total` bytes for the time of the block; yields the function to report to."""
    if not (enabled and sys.stderr.isatty()):
        yield ignore_progress
        return
    with tqdm(total=total, desc=stage, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr) as bar:
        yield bar.update
