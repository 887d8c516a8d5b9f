"""Run a function on several ranks: `run_ranks(world_size, fn, *args, **kwargs)`.

    def sums(n):                       # module level: ranks find it by import
        x = torch.ones(n)
        dist.all_reduce(x)             # the default group spans exactly these ranks
        return x

    def test_sums():
        for x in run_ranks(2, sums, 3):    # values in rank order
            ...

`run_ranks_each(world_size, cases, fn, *args)` runs one case after the other in a single call.

The ranks are processes of one pool for each world size. A pool starts on first use and lives as long
as the pytest process (each pytest-xdist worker has its own), and so does its group, as long as calls
leave it as they found it. Nothing is spawned per test. What happens inside a rank is in
tests/_rank_worker.py.

A call ends in one of three ways:

    every rank returned         -> the list of values
    some rank raised            -> RankFailure with every failing rank's traceback
    some rank died or hung      -> RankFailure with its exit code, or the stack it hung in

No call outlasts its `timeout` by more than seconds. Once a rank has failed, the others are told to
leave their group after UNBLOCK_AFTER seconds (which breaks the collectives that wait for them) and
are stopped GRACE seconds after the failure. Stopped workers are replaced at the next call.

Under torchrun the processes exist already: every torchrun rank runs the same pytest session, runs
its own part of each call in-process, and shares outcomes through torchrun's store, so that all of
them see the same values or the same failure and stay in step.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from tests._rank_worker import (
    LEAVE,
    READY,
    RETIRED,
    STAY,
    STAYED,
    UNBLOCK_AFTER,
    Body,
    Call,
    Outcome,
    in_turn,
    serve,
    torchrun_rank,
    under_torchrun,
)
from tests.crash_reports import crash_report, directory_of

T = TypeVar("T")

MAX_RANKS = 8
START_TIMEOUT = 180.0  # importing torch in 8 processes at once on a busy machine
GRACE = 30.0  # seconds; a healthy rank on an overloaded machine was seen to need more than 8
# What nearly every test imports; slow, so not within a test's time, nor in the pytest process unasked.
PRELOAD = [
    "torch._dynamo",  # an op on a DTensor imports it
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "layerwise",  # and with it the packages below
    "tests._rank_worker",
]
# The same for what takes seconds and some tests need: where this process has it, because such tests were collected.
PRELOAD_WHERE_IMPORTED = ["transformers.modeling_utils"]
LINE = 400  # characters; faulthandler ends with one line of all extension modules
# What a tool puts around fn in every rank, such as one that measures coverage.
AROUND: list[Callable[[Body], Body]] = []


class RankFailure(AssertionError):  # a test outcome, named as pytest names its own
    """Ranks of one call failed; the message holds what each of them had to say."""


def run_ranks(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    timeout: float = 120,
    backend: str = "gloo",
    **kwargs: Any,
) -> list[T]:
    """Call `fn(*args, **kwargs)` on `world_size` ranks; returns their values in rank order."""
    __tracebackhide__ = True
    outcomes = _outcomes(world_size, backend, timeout, (fn, args, kwargs))
    if any(outcome.failed for outcome in outcomes):
        raise _failure(fn, outcomes)
    return [pickle.loads(outcome.value) for outcome in outcomes]


def run_ranks_each(
    world_size: int,
    cases: Iterable[Any],
    fn: Callable[..., T],
    *args: Any,
    timeout: float = 240,
    backend: str = "gloo",
    **kwargs: Any,
) -> list[list[T]]:
    """`fn(case, *args, **kwargs)` for one case after the other, in one call; each rank's values, a case each.

    For cases that differ in their bytes and hardly in their ops: what DTensor has worked out about an op, a third of
    the time of a test that trains, serves all cases of a call, also where they make groups of their own. A failure
    names its case, and the cases after it are not run: its ranks are no longer in step.
    """
    __tracebackhide__ = True
    outcomes = _outcomes(world_size, backend, timeout, (in_turn, (list(cases), fn, args, kwargs), {}))
    if any(outcome.failed for outcome in outcomes):
        raise _failure(fn, outcomes)
    return [pickle.loads(outcome.value) for outcome in outcomes]


def run_ranks_catching(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    backend: str = "gloo",
    **kwargs: Any,
) -> list[str]:
    """Like `run_ranks`, but returns for each rank "" or its error as "TypeName: message".

    A rank that died, hung or had to be stopped has no error to return: RankFailure, as above.
    """
    __tracebackhide__ = True
    outcomes = _outcomes(world_size, backend, timeout, (fn, args, kwargs))
    if any(outcome.lost for outcome in outcomes):
        raise _failure(fn, outcomes)
    return [outcome.error for outcome in outcomes]


def agreed(value: T) -> T:
    """Rank 0's `value` on every torchrun rank; `value` itself where there is no torchrun."""
    return torchrun_rank().agreed(value) if under_torchrun() else value


@contextmanager
def own_group(*args: Any, **kwargs: Any) -> Iterator[Any]:
    """`dist.new_group` of the same arguments, inside a rank; it is destroyed behind the block, before the call ends.

    A rank comes out of new_group when its own connections stand, and another one may still wait for the news of them:
    where the first destroys the group at once, the other fails with "Connection closed by peer". So all ranks meet in
    the default group before one of them destroys anything. A block that raises leaves the group to the pool.
    """
    group = dist.new_group(*args, **kwargs)
    yield group
    dist.barrier()
    dist.destroy_process_group(group)


def close() -> None:
    """Stop the workers; a later call would start new ones."""
    while _POOLS:
        _POOLS.popitem()[1].close()


def _outcomes(world_size: int, backend: str, timeout: float, body: Body) -> list[Outcome]:
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"world_size must be 1..{MAX_RANKS}, got {world_size}")
    if backend == "nccl" and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices, there are {torch.cuda.device_count()}")
    for wrap in AROUND:
        body = wrap(body)
    if under_torchrun():
        return torchrun_rank().run(world_size, backend, timeout, body)
    if world_size not in _POOLS:
        _POOLS[world_size] = _Pool(world_size)
    return _POOLS[world_size].run(backend, timeout, body)


def _failure(fn: Callable[..., Any], outcomes: Sequence[Outcome]) -> RankFailure:
    failed = [outcome for outcome in outcomes if outcome.failed]
    name = getattr(fn, "__qualname__", repr(fn))
    parts = [f"{len(failed)} of {len(outcomes)} ranks failed in {name}"]
    for outcome in failed:
        head = f"rank {outcome.rank} of {len(outcomes)}:"
        parts.append(f"{head} {outcome.error}\n{outcome.trace}" if outcome.lost else f"{head}\n{outcome.trace}")
    return RankFailure("\n\n".join(part.rstrip() for part in parts))


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    conn: Connection
    stacks: Path  # where its stack appears on SIGUSR1, and when it crashes
    started: float  # by the clock of files
    directory: Path  # in which it started

    def answer(self) -> bytes | None:
        """The next message, None if the process died. Call when `wait` says there is something."""
        try:
            if self.conn.poll():
                return self.conn.recv_bytes()
        except (EOFError, ConnectionError):
            pass
        self.process.join(5)  # its connection closed before it ended
        return None

    def death(self) -> str:
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"died, killed by {signal.Signals(-code).name}"
        return f"died with exit code {code}"

    def last_words(self) -> str:
        """The stacks of a process that has died of a crash in C code, python's and C's; "" if it ended otherwise."""
        said = self.stacks.read_text(encoding="utf-8", errors="replace")
        python = "\n".join(line[:LINE] for line in said.splitlines())
        code, pid = self.process.exitcode, self.process.pid
        if code is None or code >= 0 or pid is None:
            return python
        return f"{python}\n{crash_report(code, pid, self.started, self.directory)}".lstrip()

    def stack(self) -> str:
        """Its python stack, asked for with a signal: works while it hangs in C code, too."""
        pid = self.process.pid
        if pid is None or not self.process.is_alive():
            return ""
        os.kill(pid, signal.SIGUSR1)
        text, before = "", None
        for _ in range(40):  # until the file has something and no longer grows
            time.sleep(0.05)
            before, text = text, self.stacks.read_text(encoding="utf-8", errors="replace")
            if text and text == before:
                break
        return text

    def kill(self) -> None:
        if self.process.is_alive():  # else its pid may be another process by now
            self.process.kill()
        self.process.join()
        self.conn.close()


@dataclass
class _Watch:
    """One call as the pool sees it: who has answered, and since when a failure is known."""

    workers: list[_Worker]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)  # to leave their group or to stay in it
    failed_at: float | None = None

    def pending(self) -> list[int]:
        return [rank for rank in range(len(self.workers)) if rank not in self.outcomes]

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.rank] = outcome
        if outcome.failed and self.failed_at is None:
            self.failed_at = time.monotonic()

    def tell(self, message: bytes) -> None:
        """Tell the ranks that have answered to leave their group, or to stay in it, each once."""
        for rank, outcome in self.outcomes.items():
            if rank not in self.told and not outcome.lost:
                self.told.add(rank)
                with suppress(ConnectionError):  # died just now; the wait for the answer notices
                    self.workers[rank].conn.send_bytes(message)


class _Pool:
    """The workers of one world size and the store through which their groups find each other."""

    def __init__(self, world_size: int) -> None:
        self._workers: list[_Worker | None] = [None] * world_size
        self._kept = ""  # key of the group that all workers are in
        self._calls = 0
        self._started = 0

    @cached_property
    def _store(self) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    @cached_property
    def _stacks(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="ranks-")

    def run(self, backend: str, timeout: float, body: Body) -> list[Outcome]:
        pickled = pickle.dumps(body)
        workers = self._ready()
        self._calls += 1
        may_stay = backend == "gloo"
        key = self._kept if self._kept and may_stay else f"group{self._calls}"
        self._kept = ""
        try:
            for rank, worker in enumerate(workers):
                call = Call(
                    key=key,
                    rank=rank,
                    world_size=len(workers),
                    backend=backend,
                    body=pickled,
                    sys_path=tuple(sys.path),
                )
                worker.conn.send_bytes(pickle.dumps(call))
            watch = _Watch(workers)
            self._collect(watch, timeout)
            if self._settle(watch, may_stay=may_stay):
                self._kept = key
        except BaseException:  # Ctrl-C, pytest-timeout: the workers are in the middle of something
            for worker in workers:
                worker.kill()
            raise
        return [watch.outcomes[rank] for rank in range(len(workers))]

    def close(self) -> None:
        workers = [worker for worker in self._workers if worker is not None]
        for worker in workers:
            worker.conn.close()  # which a waiting worker takes as the end
        deadline = time.monotonic() + 5
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            worker.kill()
        self._stacks.cleanup()

    def _ready(self) -> list[_Worker]:
        """The workers; starts those that are not there (or no longer)."""
        started = []
        for slot in range(len(self._workers)):
            worker = self._workers[slot]
            if worker is None or not worker.process.is_alive():
                if worker is not None:
                    worker.kill()  # dead already; closes its connection
                self._kept = ""
                self._workers[slot] = worker = self._start(slot)
                started.append(worker)
        try:
            self._await_ready(started)
        except BaseException:
            for worker in started:
                worker.kill()
            raise
        return [worker for worker in self._workers if worker is not None]

    @staticmethod
    def _await_ready(started: Sequence[_Worker]) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        for worker in started:
            if not worker.conn.poll(max(0.0, deadline - time.monotonic())):
                raise RankFailure(f"a worker started for over {START_TIMEOUT:g} s\n{worker.stack()}")
            if worker.answer() != READY:
                raise RankFailure(f"a worker {worker.death()} while it started")

    def _start(self, slot: int) -> _Worker:
        # A clean process imports torch once and forks the workers, which makes one in 20 ms. spawn
        # would import torch in each of them: 2.5 s of CPU time a worker.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD + [name for name in PRELOAD_WHERE_IMPORTED if name in sys.modules])
        ours, theirs = context.Pipe()
        self._started += 1
        stacks = Path(self._stacks.name, f"{self._started}.txt")
        process = context.Process(
            target=serve,
            args=(theirs, self._store.port, str(stacks)),
            name=f"rank-{slot}",
            daemon=True,
        )
        started = time.time() - 1.0  # clocks of files are coarse
        process.start()
        theirs.close()  # so that the worker's death closes the pipe
        return _Worker(process, ours, stacks, started, directory_of(process.pid))

    def _collect(self, watch: _Watch, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while pending := watch.pending():
            now = time.monotonic()
            limit, wake = deadline, deadline
            if watch.failed_at is not None:
                limit = min(deadline, watch.failed_at + GRACE)
                wake = min(limit, watch.failed_at + UNBLOCK_AFTER)
                if now >= watch.failed_at + UNBLOCK_AFTER:
                    watch.tell(LEAVE)
                    wake = limit
            if now >= limit:
                why = f"hung for {timeout:g} s"
                if now < deadline:
                    why = f"still busy {GRACE:g} s after another rank failed"
                self._stop(watch, pending, why)
                break
            self._receive(watch, pending, wake - now)

    @staticmethod
    def _receive(watch: _Watch, pending: Sequence[int], timeout: float) -> None:
        waiting: dict[Any, int] = {}
        for rank in pending:
            worker = watch.workers[rank]
            waiting |= {worker.conn: rank, worker.process.sentinel: rank}
        for rank in sorted({waiting[ready] for ready in wait(list(waiting), timeout)}):
            worker = watch.workers[rank]
            answer = worker.answer()
            if answer is None:
                watch.add(Outcome(rank=rank, error=worker.death(), trace=worker.last_words(), lost=True))
            else:
                watch.add(pickle.loads(answer))

    @staticmethod
    def _stop(watch: _Watch, ranks: Sequence[int], why: str) -> None:
        stacks = {rank: watch.workers[rank].stack() for rank in ranks}  # all before the first kill
        for rank, stack in stacks.items():
            watch.workers[rank].kill()
            watch.add(Outcome(rank=rank, error=f"{why}, stopped in", trace=stack, lost=True))

    def _settle(self, watch: _Watch, *, may_stay: bool) -> bool:
        """Let the ranks leave their group, unless all of them can stay in it; whether they do."""
        watch.tell(STAY if may_stay and watch.failed_at is None else LEAVE)
        answers = self._answers(watch, watch.told)
        stayed = [rank for rank, answer in answers.items() if answer.startswith(STAYED)]
        if len(stayed) == len(watch.workers) and len(set(answers.values())) == 1:
            return True
        watch.told.difference_update(stayed)  # some cannot, or they have not met in the same collectives
        watch.tell(LEAVE)
        self._answers(watch, stayed)
        return False

    def _answers(self, watch: _Watch, ranks: Collection[int]) -> dict[int, bytes]:
        """What these ranks, told to leave their group or to stay in it, did.

        A group that cannot be left (say, an async collective is pending) fails its rank.
        """
        deadline = time.monotonic() + GRACE
        answers = {}
        for rank in sorted(ranks):
            worker = watch.workers[rank]
            if not worker.conn.poll(max(0.0, deadline - time.monotonic())):
                outcome = watch.outcomes[rank]
                if outcome.failed:  # it has said what is wrong; this is a consequence
                    worker.kill()
                else:
                    self._stop(watch, [rank], f"could not leave its group within {GRACE:g} s")
                continue
            answer = worker.answer()
            if answer is None:
                error = f"{worker.death()} on leaving its group"
                watch.add(Outcome(rank=rank, error=error, trace=worker.last_words(), lost=True))
                continue
            if answer == RETIRED:
                worker.kill()  # which has ended, or is about to
            answers[rank] = answer
        return answers


_POOLS: dict[int, _Pool] = {}  # by world size
