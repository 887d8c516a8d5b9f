"""All that is read, and which of it a seed chooses."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Protocol

from tests.adversary.bytes_read.checkpoints import Checkpoints
from tests.adversary.bytes_read.delta_checkpoints import DeltaCheckpoints
from tests.adversary.bytes_read.deltas import Deltas
from tests.adversary.bytes_read.directories import Directories
from tests.adversary.bytes_read.progress import Progresses, Reports
from tests.adversary.bytes_read.streams import Streams


class Subject(Protocol):
    """Originals of one kind, and what is done to them."""

    def scenario(self, rng: Random) -> str:
        """One mutant, read in one way; the word for what came of it."""


class Subjects:
    """One of each kind, in directories of their own."""

    def __init__(self, root: Path) -> None:
        self.all: dict[str, Subject] = {}
        for kind in (Checkpoints, DeltaCheckpoints, Deltas, Directories, Progresses, Reports, Streams):
            name = kind.__name__.lower()
            (root / name).mkdir()
            self.all[name] = kind(root / name)

    def scenario(self, rng: Random) -> str:
        """A mutant of one of them."""
        name = rng.choice(sorted(self.all))
        return f"{name} {self.all[name].scenario(rng)}"
