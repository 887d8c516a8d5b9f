"""Does a checkpoint survive `kill -9`? Kills ranks during saves, over and over, and loads what is left.

    python -m benchmarks.soak --kills 200

One round, with a process for each rank, all of them forked from one that has imported torch:

    save checkpoint N                                     2 or 3 ranks; kept
    start to save N+1: dcp.save or dcp.async_save,        into a new directory, over an older checkpoint, or over what
                                                          the last kill left
    SIGKILL one rank or all                               after a random delay, or at a named moment of the save
    the other ranks must end by themselves                within the timeout of their group
    load N and the interrupted one                        1 to 3 new ranks

What the state holds is a function of the step alone, so every loaded byte is checked. N must load. The interrupted one
must load as N+1, or as what the directory held before; where it held no checkpoint it may be refused, on every rank and
with the name of the missing `.metadata`. Other bytes are a loss. Prints a summary as JSON; the exit status is 1 if
anything was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.soak_jobs import ASYNC_ONLY, COORDINATOR, EVERY_RANK, GROUP_TIMEOUT, MODES, WRITE, Load, Place, Save

PRELOAD = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor", "benchmarks.soak_rank"]
START_TIMEOUT = 180.0  # seconds until all ranks stand before the save, on a busy machine
MARGIN = 30.0  # seconds beside the group's timeout until a rank counts as hung
WRITES = 10  # a rank's items; a moment during writing is before one of them
TARGETS = ("new", "over an older one", "over the last interrupted one")


@dataclass
class Rank:
    """A rank as the soak sees it. outcome: what it said last; None if it was killed before."""

    process: BaseProcess
    conn: Connection
    phase: str = ""
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
                else:
                    self.outcome = (kind, value)
                    self.said.append(self.outcome)
        except (EOFError, ConnectionError):
            self.ended = True

    def kill(self) -> None:
        """SIGKILL."""
        if self.process.is_alive():
            self.process.kill()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Which ranks die, and when: at a moment of the first victim, or after a share of a usual save's duration."""

    victims: tuple[int, ...]
    moment: tuple[str, int] | None = None
    share: float = 0.0


@dataclass
class Soak:
    """The rounds; `summary` is what came out of them."""

    directory: Path
    seed: int
    random: random.Random = field(init=False)
    steps: int = 1
    calls: int = 0
    usual: float = 0.2  # seconds of a save that nobody interrupts, a running mean
    held: dict[Path, int] = field(default_factory=dict)  # complete checkpoints, newest last
    interrupted: Path | None = None
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)

    # -- a round -------------------------------------------------------------------------------------------------------

    def round(self) -> int:
        """One save with a fault, and the loads after it. Returns how many ranks were killed in time: 0 or more."""
        world = self.random.choice((2, 3))
        mode, target = self.random.choice(MODES), self.random.choice(TARGETS)
        fault = self._fault(world, mode)
        good, path = self.directory / f"step-{self.steps}", self.directory / f"step-{self.steps + 1}"
        if target == TARGETS[1] and len(self.held) > 1:
            path = next(iter(self.held))
        elif target == TARGETS[2] and self.interrupted is not None:
            path = self.interrupted
        before = self.held.get(path)
        job = Save(good=good, good_step=self.steps, path=path, step=self.steps + 1, mode=mode, moment=fault.moment)
        self.steps += 2
        name = f"{target}, {mode}, {world} ranks, steps {job.good_step} and {job.step}, {fault}"
        killed, phase = self._interrupt(world, job, fault, name)
        self.held[good] = job.good_step
        self._judge(job, before, name, killed)
        if killed:
            self._count("mode", mode)
            self._count("directory", target)
            self._count("killed", "all ranks" if killed == world else "one rank")
            self._count("last phase of a killed rank", phase)
        else:
            self._count("saves", "done before the kill")
        return killed

    def _fault(self, world: int, mode: str) -> Fault:
        everyone = self.random.random() < 0.4
        if self.random.random() < 0.5:
            victims = tuple(range(world)) if everyone else (self.random.randrange(world),)
            return Fault(victims=victims, share=self.random.random())
        phase = self.random.choice((*EVERY_RANK, *COORDINATOR, *(ASYNC_ONLY if mode != "sync" else ())))
        first = 0 if phase in COORDINATOR else self.random.randrange(world)
        count = self.random.randint(1, WRITES) if phase == WRITE else 1
        others = tuple(rank for rank in range(world) if rank != first) if everyone else ()
        return Fault(victims=(first, *others), moment=(phase, count))

    def _interrupt(self, world: int, job: Save, fault: Fault, name: str) -> tuple[int, str]:
        """Save, kill, and wait for the others. Returns how many were killed, and the first victim's last phase."""
        jobs = [job if rank == fault.victims[0] else _without_moment(job) for rank in range(world)]
        with self._ranks(jobs) as ranks:
            victims = [ranks[rank] for rank in fault.victims]
            if not self._until(ranks, lambda rank: bool(rank.said) or rank.ended, START_TIMEOUT):
                self._fail(name, "the ranks did not get to the save")
                return 0, ""
            if fault.moment is None:
                self._until(ranks, _done, fault.share * self.usual)
            else:
                self._until(victims[:1], _done, START_TIMEOUT)
            for rank in ranks:
                rank.read()
            killed = [rank for rank in victims if rank.ended or not _done(rank)]
            for rank in killed:
                rank.kill()
            if not self._until(ranks, lambda rank: rank.ended, GROUP_TIMEOUT + MARGIN):
                hung = [str(number) for number, rank in enumerate(ranks) if not rank.ended]
                self._fail(name, f"rank {', '.join(hung)} hung")
            for number, rank in enumerate(ranks):
                if rank.outcome is None or (rank not in killed and not _done(rank)):
                    self._fail(name, f"rank {number} died unasked: {rank.outcome}")
                elif rank not in killed:
                    self._count("other ranks", rank.outcome[0])
            killed = [rank for rank in killed if not _done(rank)]  # a last message may have been on its way
            if not killed:
                errors = [rank.outcome[1] for rank in ranks if rank.outcome and rank.outcome[0] == "raised"]
                if errors:
                    self._fail(name, f"the save failed by itself: {errors[0]}")
                    return 0, ""
                saved = [float(rank.outcome[1]) for rank in ranks if rank.outcome]
                self.usual += (max(saved, default=self.usual) - self.usual) / 4
            return len(killed), victims[0].phase

    def _judge(self, job: Save, before: int | None, name: str, killed: int) -> None:
        """Load both checkpoints in new processes, and compare with what may be there."""
        world = self.random.choice((1, 2, 3))
        complete = (job.path / ".metadata").exists()
        with self._ranks([Load(paths=(job.good, job.path))] * world) as ranks:
            if not self._until(ranks, lambda rank: rank.ended, START_TIMEOUT):
                self._fail(name, "loading hung")
            answers = [rank.said for rank in ranks]
        good = {repr(said[0]) if said else "died" for said in answers}
        if good != {repr(("holds", job.good_step))}:
            self._fail(name, f"checkpoint {job.good_step} on {world} ranks: {good}")
        last = [said[1] if len(said) > 1 else ("died", "") for said in answers]
        self.held.pop(job.path, None)
        self.interrupted = None if complete else job.path
        allowed = {("holds", job.step)} | ({("holds", before)} if before is not None and killed else set())
        if complete and set(last) <= allowed and len(set(last)) == 1:
            self.held[job.path] = last[0][1]
            self._count(
                "interrupted directory", "holds the new step" if last[0][1] == job.step else "holds the old step"
            )
        elif not complete and before is None and killed and all(_names_metadata(answer, job.path) for answer in last):
            self._count("interrupted directory", "refused: no .metadata")
        else:
            self._fail(name, f"the interrupted one on {world} ranks, .metadata {complete}: {last}")
        while len(self.held) > 3:
            oldest = next(iter(self.held))
            del self.held[oldest]
            shutil.rmtree(oldest)

    # -- processes -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _ranks(self, jobs: Sequence[Save | Load]) -> Iterator[list[Rank]]:
        """A process for each job; none is left behind."""
        self.calls += 1
        ranks = []
        try:
            for number, job in enumerate(jobs):
                ours, theirs = self.context.Pipe(duplex=False)
                place = Place(store=self.directory / f"store-{self.calls}", rank=number, world=len(jobs))
                process = self.context.Process(target=_run, args=(theirs, place, job), daemon=True)
                process.start()
                theirs.close()  # so that the rank's death closes the pipe
                ranks.append(Rank(process, ours))
            yield ranks
        finally:
            for rank in ranks:
                rank.kill()
                rank.process.join()
                rank.conn.close()
            (self.directory / f"store-{self.calls}").unlink(missing_ok=True)

    @staticmethod
    def _until(ranks: Sequence[Rank], reached: Any, timeout: float) -> bool:
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

    # -- results -------------------------------------------------------------------------------------------------------

    def _count(self, what: str, value: str) -> None:
        self.counts.setdefault(what, Counter())[value] += 1

    def _fail(self, name: str, what: str) -> None:
        self.failures.append(f"[{name}] {what}")

    def summary(self) -> dict[str, Any]:
        """Everything counted, as plain values."""
        return {what: dict(sorted(counter.items())) for what, counter in sorted(self.counts.items())}


def soak(
    kills: int, directory: Path, seed: int = 0, *, limit: float = float("inf"), progress: bool = False
) -> dict[str, Any]:
    """Rounds until `kills` saves were interrupted, `limit` seconds have passed or something was lost; the summary."""
    rounds = Soak(directory, seed)
    started = time.perf_counter()
    done = 0
    with _bar(kills, progress) as advance:
        while done < kills and not rounds.failures and time.perf_counter() - started < limit:
            if rounds.round():
                done += 1
                advance(1)
    return {
        "interrupted saves": done,
        "losses": len(rounds.failures),
        "failures": rounds.failures,
        **rounds.summary(),
        "seed": seed,
        "seconds": round(time.perf_counter() - started, 1),
    }


def _run(conn: Connection, place: Place, job: Save | Load) -> None:
    from benchmarks.soak_rank import run  # imports torch, which the process that forks the ranks has done already

    run(conn, place, job)


def _done(rank: Rank) -> bool:
    return rank.outcome is not None and rank.outcome[0] in ("saved", "raised")


def _without_moment(job: Save) -> Save:
    return Save(good=job.good, good_step=job.good_step, path=job.path, step=job.step, mode=job.mode)


def _names_metadata(answer: tuple[str, Any], path: Path) -> bool:
    """Whether dcp.load and read_manifest both say which file is missing; dcp.load of torch 2.11 does not name it."""
    kind, text = answer
    missing = f"{path}: no .metadata, so this is no checkpoint or one whose saving never finished"
    loading = f"No such file or directory: '{path / '.metadata'}'" in text or "metadata is None" in text
    return kind == "refused" and loading and missing in text


@contextlib.contextmanager
def _bar(total: int, progress: bool) -> Iterator[Any]:  # noqa: FBT001 - of this file alone
    try:
        from tqdm import tqdm
    except ImportError:
        progress = False
    if not progress:
        yield lambda count: None
        return
    with tqdm(total=total, unit="kill", file=sys.stderr) as bar:
        yield bar.update


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="interrupted saves (default: 200)")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which to stop with fewer")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices (default: 0)")
    parser.add_argument("--directory", type=Path, help="where the checkpoints go (default: a temporary directory)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-", dir=arguments.directory) as directory:
        result = soak(arguments.kills, Path(directory), arguments.seed, limit=arguments.limit, progress=True)
    print(json.dumps(result, indent=2))
    sys.exit(bool(result["losses"]))


if __name__ == "__main__":
    main()
