"""The ranks of the soak as it sees them: processes, what they say over their pipes, and how they are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.soak_jobs import Job, Place, Receive

PRELOAD = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "benchmarks.soak_rank",
    "benchmarks.soak_streaming",
]
START_TIMEOUT = 180.0  # seconds until all ranks stand before the save, on a busy machine
MARGIN = 30.0  # seconds beside the group's timeout until a rank counts as hung


@dataclass
class Rank:
    """A rank as the soak sees it. outcome: what it said last; None if it was killed before.

    uploader: the process in which its asynchronous saves are written, where it has one.
    """

    process: BaseProcess
    conn: Connection
    phase: str = ""
    uploader: int | None = None
    outcome: tuple[str, Any] | None = None
    said: list[tuple[str, Any]] = field(default_factory=list)
    ended: bool = False

    def read(self) -> None:
        """Take in what is there; notice the end."""
        try:
            while self.conn.poll():
                kind, value = self.conn.recv()
                if kind == "at":
                    self.phase = value
                elif kind == "uploader":
                    self.uploader = value
                else:
                    self.outcome = (kind, value)
                    self.said.append(self.outcome)
        except (EOFError, ConnectionError):
            self.ended = True

    def kill(self) -> None:
        """SIGKILL, to all that it is."""
        self.kill_uploader()
        if self.process.is_alive():
            self.process.kill()

    def kill_uploader(self) -> None:
        """SIGKILL to the process that writes, if there is one."""
        if self.uploader is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.uploader, signal.SIGKILL)


@contextlib.contextmanager
def ranks_of(context: Any, jobs: Sequence[Job], store: Path) -> Iterator[list[Rank]]:
    """A process for each job, forked from one that has imported torch; none is left behind."""
    ranks = []
    world = sum(not isinstance(job, Receive) for job in jobs)  # an engine belongs to no group
    try:
        for number, job in enumerate(jobs):
            ours, theirs = context.Pipe(duplex=False)
            place = Place(store=store, rank=number, world=world)
            process = context.Process(target=_run, args=(theirs, place, job), daemon=True)
            process.start()
            theirs.close()  # so that the rank's death closes the pipe
            ranks.append(Rank(process, ours))
        yield ranks
    finally:
        for rank in ranks:
            rank.read()
            rank.kill()
            rank.process.join()
            rank.conn.close()
        store.unlink(missing_ok=True)


def until(ranks: Sequence[Rank], reached: Callable[[Rank], bool], timeout: float) -> bool:
    """Read from the ranks until `reached` holds for each of them; False if the time is up before."""
    deadline = time.monotonic() + timeout
    while pending := [rank for rank in ranks if not rank.ended and not reached(rank)]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return False
        ready = wait([rank.conn for rank in pending], remaining)
        for rank in pending:
            if rank.conn in ready:
                rank.read()
    return True


def begun(rank: Rank) -> bool:
    """Whether it has said something."""
    return bool(rank.said)


def done(rank: Rank) -> bool:
    """Whether it has come to the end of its job, well or not."""
    return rank.outcome is not None and rank.outcome[0] in ("saved", "streamed", "raised")


def gone(rank: Rank) -> bool:
    """Whether its pipe is closed."""
    return rank.ended


def _run(conn: Connection, place: Place, job: Job) -> None:
    from benchmarks.soak_rank import run  # imports torch, which the process that forks the ranks has done already

    run(conn, place, job)
