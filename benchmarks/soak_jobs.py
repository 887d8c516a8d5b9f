"""What the soak asks of its ranks, and the words in which they answer. Plain records: no torch in the soak itself.

A rank sends pairs: ("at", phase) whenever a save passes one, ("go", "") before the save that is to be interrupted, and
one outcome for each thing it did: ("saved", seconds), ("raised", error), ("holds", step), ("wrong", names),
("refused", error).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GROUP_TIMEOUT = 20.0  # seconds
MODES = ("sync", "async", "async with a stager")

# The phases of a save, in the order in which it passes them; "write" once for every item.
STAGING, STAGED = "staging", "staged"
SET_UP, LOCAL_PLAN, GLOBAL_PLAN, PLANNED = "set up", "local plan", "global plan", "plans agreed"
FINISH_PLAN, WRITE, WRITTEN = "plan received", "write", "data written"
COMMIT, RENAME, COMMITTED = "commit", "rename of .metadata", "committed"
ASYNC_ONLY = (STAGING, STAGED)
EVERY_RANK = (SET_UP, LOCAL_PLAN, FINISH_PLAN, WRITE, WRITTEN)
COORDINATOR = (GLOBAL_PLAN, PLANNED, COMMIT, RENAME, COMMITTED)  # passed by rank 0 alone


@dataclass(frozen=True, kw_only=True)
class Save:
    """Save the good checkpoint, report "go", then save the one during which ranks are killed.

    moment: (phase, how often it must have been passed) at which the rank kills itself; None: it waits to be killed.
    """

    good: Path
    good_step: int
    path: Path
    step: int
    mode: str
    moment: tuple[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load each directory and report what it holds."""

    paths: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank finds the others: a file that all of them open."""

    store: Path
    rank: int
    world: int
