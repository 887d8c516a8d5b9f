"""Does a checkpoint survive `kill -9`, and a weight stream? Kills ranks over and over, and looks at what is left.

    python -m benchmarks.soak --kills 200

One round, with a process for each rank, all of them forked from one that has imported torch:

    save checkpoint N                                     2 or 3 ranks; kept
    start to save N+1: dcp.save or dcp.async_save,        into a new directory, over an older checkpoint, or over what
    in full, or as a delta to N                           the last kill left
    SIGKILL one rank or all                               after a random delay, or at a named moment of the save
    the other ranks must end by themselves                within the timeout of their group
    load N and the interrupted one                        1 to 3 new ranks

What the state holds is a function of the step alone, so every loaded byte is checked. N must load. The interrupted one
must load as N+1, or as what the directory held before; where it held no checkpoint it may be refused, on every rank and
with the name of the missing `.metadata`. Other bytes are a loss. Prints a summary as JSON; the exit status is 1 if
anything was lost.

One round in 5 is that of a weight stream (soak_streams.py). In one in 60 asynchronous saves are written by processes of
their own, which import torch first, and die with their ranks or alone.
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
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.soak_jobs import (
    ASYNC_ONLY,
    COORDINATOR,
    EVERY_RANK,
    GROUP_TIMEOUT,
    MODES,
    PROCESS,
    WRITE,
    Job,
    Load,
    Save,
)
from benchmarks.soak_processes import MARGIN, PRELOAD, START_TIMEOUT, Rank, begun, done, gone, ranks_of, until
from benchmarks.soak_streams import Streams

STREAM_EVERY, PROCESS_EVERY, FIRST = 5, 60, 31  # rounds
DELTAS = 0.4  # of the saves
KEPT = 4  # complete checkpoints, and the bases that they need
WRITES = 10  # a rank's items; a moment during writing is before one of them
TARGETS = ("new", "over an older one", "over the last interrupted one")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Which ranks die, and when: at a moment of the first victim, or after a share of a usual save's duration.

    uploader: the process dies that writes for them, and they are left.
    """

    victims: tuple[int, ...]
    moment: tuple[str, int] | None = None
    share: float = 0.0
    uploader: bool = False


@dataclass
class Soak:
    """The rounds; `summary` is what came out of them."""

    directory: Path
    seed: int
    random: random.Random = field(init=False)
    steps: int = 1
    rounds: int = 0
    stores: int = 0
    usual: float = 0.2  # seconds of a save that nobody interrupts, a running mean
    held: dict[Path, int] = field(default_factory=dict)  # complete checkpoints, newest last
    bases: dict[Path, Path] = field(default_factory=dict)  # of those that are deltas
    interrupted: Path | None = None
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.streams = Streams(self.context, self.directory, self.random, self._count, self._fail)

    # -- a round -------------------------------------------------------------------------------------------------------

    def round(self) -> str:
        """One round; what was interrupted: "save", "stream", or "" where all was done before the kill."""
        self.rounds += 1
        if self.rounds % STREAM_EVERY == 0:
            return "stream" if self.streams.round() else ""
        return "save" if self.save(PROCESS if self.rounds % PROCESS_EVERY == FIRST else "") else ""

    def save(self, mode: str = "") -> int:
        """One save with a fault, and the loads after it. Returns how many ranks were killed in time: 0 or more."""
        world = 2 if mode else self.random.choice((2, 3))
        mode, target = mode or self.random.choice(MODES), self.random.choice(TARGETS)
        fault = self._fault(world, mode)
        good, path = self.directory / f"step-{self.steps}", self.directory / f"step-{self.steps + 1}"
        older = [held for held in self.held if held not in self.bases.values()]
        if target == TARGETS[1] and len(self.held) > 1 and older:
            path = older[0]
        elif target == TARGETS[2] and self.interrupted is not None:
            path = self.interrupted
        before = self.held.get(path)
        delta = self.random.random() < DELTAS
        job = Save(
            good=good,
            good_step=self.steps,
            path=path,
            step=self.steps + 1,
            mode=mode,
            delta=delta,
            moment=fault.moment,
        )
        self.steps += 2
        kind = "a delta" if delta else "a full checkpoint"
        name = f"{target}, {mode}, {kind}, {world} ranks, steps {job.good_step} and {job.step}, {fault}"
        killed, phase = self._interrupt(world, job, fault, name)
        self.held[good] = job.good_step
        self._judge(job, before, name, killed)
        if killed:
            self._count("mode", mode)
            self._count("saved as", kind)
            self._count("directory", target)
            who = "all ranks" if killed == world else "one rank"
            self._count("killed", f"the processes that write for {who}" if fault.uploader else who)
            self._count("last phase of a killed rank", phase)
        else:
            self._count("saves", "done before the kill")
        return killed

    def _fault(self, world: int, mode: str) -> Fault:
        everyone = self.random.random() < 0.4
        if mode == PROCESS or self.random.random() < 0.5:
            victims = tuple(range(world)) if everyone else (self.random.randrange(world),)
            alone = mode == PROCESS and self.random.random() < 0.5
            return Fault(victims=victims, share=self.random.random(), uploader=alone)
        phase = self.random.choice((*EVERY_RANK, *COORDINATOR, *(ASYNC_ONLY if mode != "sync" else ())))
        first = 0 if phase in COORDINATOR else self.random.randrange(world)
        count = self.random.randint(1, WRITES) if phase == WRITE else 1
        others = tuple(rank for rank in range(world) if rank != first) if everyone else ()
        return Fault(victims=(first, *others), moment=(phase, count))

    def _interrupt(self, world: int, job: Save, fault: Fault, name: str) -> tuple[int, str]:
        """Save, kill, and wait for the others. Returns how many were killed, and the first victim's last phase."""
        jobs = [job if rank == fault.victims[0] else _without_moment(job) for rank in range(world)]
        with ranks_of(self.context, jobs, self._store()) as ranks:
            victims = [ranks[rank] for rank in fault.victims]
            if not until(ranks, lambda rank: begun(rank) or rank.ended, START_TIMEOUT):
                self._fail(name, "the ranks did not get to the save")
                return 0, ""
            if fault.moment is None:
                until(ranks, done, fault.share * self.usual)
            else:
                until(victims[:1], done, START_TIMEOUT)
            for rank in ranks:
                rank.read()
            killed = [rank for rank in victims if rank.ended or not done(rank)]
            for rank in killed:
                rank.kill_uploader() if fault.uploader else rank.kill()
            if not until(ranks, gone, GROUP_TIMEOUT + MARGIN):
                hung = [str(number) for number, rank in enumerate(ranks) if not rank.ended]
                self._fail(name, f"rank {', '.join(hung)} hung")
            for number, rank in enumerate(ranks):
                left = rank not in killed or fault.uploader
                if rank.outcome is None or (left and not done(rank)):
                    self._fail(name, f"rank {number} died unasked: {rank.outcome}")
                elif rank not in killed:
                    self._count("other ranks", rank.outcome[0])
            came = _saved if fault.uploader else done
            killed = [rank for rank in killed if not came(rank)]  # a last message may have been on its way
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
        loads: list[Job] = [Load(paths=(job.good, job.path))] * world
        with ranks_of(self.context, loads, self._store()) as ranks:
            if not until(ranks, gone, START_TIMEOUT):
                self._fail(name, "loading hung")
            answers = [rank.said for rank in ranks]
        good = {repr(said[0]) if said else "died" for said in answers}
        if good != {repr(("holds", job.good_step))}:
            self._fail(name, f"checkpoint {job.good_step} on {world} ranks: {good}")
        last = [said[1] if len(said) > 1 else ("died", "") for said in answers]
        self.held.pop(job.path, None)
        base = self.bases.pop(job.path, None)
        self.interrupted = None if complete else job.path
        allowed = {("holds", job.step)} | ({("holds", before)} if before is not None and killed else set())
        if complete and set(last) <= allowed and len(set(last)) == 1:
            self.held[job.path] = last[0][1]
            base = (job.good if job.delta else None) if last[0][1] == job.step else base
            if base is not None:
                self.bases[job.path] = base
            self._count(
                "interrupted directory", "holds the new step" if last[0][1] == job.step else "holds the old step"
            )
        elif not complete and before is None and killed and all(_names_metadata(answer, job.path) for answer in last):
            self._count("interrupted directory", "refused: no .metadata")
        else:
            self._fail(name, f"the interrupted one on {world} ranks, .metadata {complete}: {last}")
        self._tidy()

    def _tidy(self) -> None:
        """Remove the oldest that no delta needs."""
        while len(self.held) > KEPT:
            oldest = next(path for path in self.held if path not in self.bases.values())
            del self.held[oldest]
            self.bases.pop(oldest, None)
            shutil.rmtree(oldest)

    def _store(self) -> Path:
        self.stores += 1
        return self.directory / f"store-{self.stores}"

    # -- results -------------------------------------------------------------------------------------------------------

    def _count(self, what: str, value: str, number: int = 1) -> None:
        self.counts.setdefault(what, Counter())[value] += number

    def _fail(self, name: str, what: str) -> None:
        self.failures.append(f"[{name}] {what}")

    def summary(self) -> dict[str, Any]:
        """Everything counted, as plain values."""
        return {what: dict(sorted(counter.items())) for what, counter in sorted(self.counts.items())}


def soak(
    kills: int, directory: Path, seed: int = 0, *, limit: float = float("inf"), progress: bool = False
) -> dict[str, Any]:
    """Rounds until `kills` saves and streams were interrupted, `limit` seconds are over or something was lost."""
    rounds = Soak(directory, seed)
    started = time.perf_counter()
    interrupted = {"": 0, "save": 0, "stream": 0}
    with _bar(kills, progress) as advance:
        while (
            interrupted["save"] + interrupted["stream"] < kills
            and not rounds.failures
            and time.perf_counter() - started < limit
        ):
            what = rounds.round()
            interrupted[what] += 1
            advance(int(what != ""))
    return {
        "interrupted saves": interrupted["save"],
        "interrupted streams": interrupted["stream"],
        "losses": len(rounds.failures),
        "failures": rounds.failures,
        **rounds.summary(),
        "seed": seed,
        "seconds": round(time.perf_counter() - started, 1),
    }


def _saved(rank: Rank) -> bool:
    return rank.outcome is not None and rank.outcome[0] == "saved"


def _without_moment(job: Save) -> Save:
    return replace(job, moment=None)


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
    parser.add_argument("--kills", type=int, default=200, help="interrupted saves and streams (default: 200)")
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
