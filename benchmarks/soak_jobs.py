"""What the soak asks of its ranks, and the words in which they answer. Plain records: no torch in the soak itself.

A rank sends pairs: ("at", phase) whenever a save passes one, ("go", "") before the save that is to be interrupted, and
one outcome for each thing it did: ("saved", seconds), ("raised", error), ("holds", step), ("wrong", names),
("refused", error). One whose asynchronous saves are written by another process says ("uploader", its pid). Those of a
stream say ("version", number) for each version that was sent or received, and ("streamed", seconds) at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GROUP_TIMEOUT = 20.0  # seconds
MODES = ("sync", "async", "async with a stager")
PROCESS = "async in a process"  # beside MODES: each rank starts a process that imports torch, which takes seconds

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

    delta: the second is saved as a delta to the good one. moment: (phase, how often it must have been passed) at which
    the rank kills itself; None: it waits to be killed.
    """

    good: Path
    good_step: int
    path: Path
    step: int
    mode: str
    delta: bool = False
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


@dataclass(frozen=True, kw_only=True)
class Send:
    """Stream versions 1 to `versions` of the weights to a receiver: the first whole, the others as deltas.

    address: of a socket; rank 0 sends.
    """

    address: Path
    versions: int


@dataclass(frozen=True, kw_only=True)
class Receive:
    """Take versions until all have come or the sender is gone, and compare each with what it must be."""

    address: Path
    versions: int


Job = Save | Load | Send | Receive
