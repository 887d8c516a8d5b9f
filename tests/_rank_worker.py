"""One rank of a distributed test: the code that runs where `fn` runs.

A rank is a worker of the pool (`serve`) or, under torchrun, this very process (`TorchrunRank`). A
call reaches it as a `Call` and leaves it as an `Outcome`, in four steps that are the same in both:

    load     unpickle fn and its arguments; imports happen here, outside the warnings rule
    join     make the DEFAULT process group over exactly the call's ranks
    run      fn(*args, **kwargs), seeded, every warning an error
    leave    destroy the group and drop what torch cached about it, when told to

`leave` is a step of its own because a rank that closes its connections early makes its peers fail
with "connection closed" instead of with their own error: ranks leave when all of them have an
outcome.

In the pool a group outlives a call that used it as it found it: every rank returned, after the same
number of collectives, and none made groups of its own, exchanged the group or left a thread running.
The next call then finds the group joined, and DTensor still knows the ops that it has met, which
costs the first steps of a training more than all that follows. After any other call, and under
torchrun after each, the ranks leave: no test sees the groups or the random state of another.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from tests.crash_reports import allow_core

T = TypeVar("T")
Body = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # fn, args, kwargs

GROUP_TIMEOUT = timedelta(seconds=60)
UNBLOCK_AFTER = 2.0  # seconds that a failed rank stays in its group for the others' sake
CHUNK = 1 << 20  # bytes; TCPStore refuses values over 8 MB

READY = b"ready"  # worker -> pool: imports done, connected to the store
LEAVE = b"leave"  # pool -> worker: all outcomes are in, or a peer must be unblocked
STAY = b"stay"  # pool -> worker: all ranks returned, keep the group if this call left it as it was
LEFT = b"left"  # worker -> pool: the group is gone, the next call may come
STAYED = b"stayed"  # worker -> pool, and with it the number of the group's collectives: likewise, in this group
RETIRED = b"retired"  # worker -> pool: the group is gone, and so is the worker
# torch 2.11 and 2.12 keep each mesh that fully_shard saw, and with it gloo's threads, which poll: a thousand of them
# take all of a core. A worker with so many ends, and the next call gets a new one.
MOST_THREADS = 60


@dataclass(frozen=True, kw_only=True)
class TolerateWarning:
    """An upstream warning that is no error; `message` is a regex without ':' (pytest splits at it)."""

    message: str
    category: type[Warning]


# The one list of exceptions to "a warning is an error": it holds in the ranks, and tests/conftest.py
# hands it to pytest. Each entry says who warns and why we cannot help it.
TOLERATED_WARNINGS: tuple[TolerateWarning, ...] = (
    # torch 2.13: its own compiler, when it is imported
    TolerateWarning(message=r".torch\.jit\.script_method. is deprecated", category=DeprecationWarning),
    # ours, once a process, of an ordinary optimizer's small steps; tests/qtensor/test_lost_updates.py asks for it
    TolerateWarning(message=r".*rounding to nearest lost the update", category=UserWarning),
    # our own, on a GPU without the kernels: tests there are about what is computed, and those of the warning see it
    TolerateWarning(message=r".*activations=.dynamic.. is emulated on this device", category=UserWarning),
    # torch 2.15: its file writer, of each file in storage that knows no fsync, such as fsspec's
    TolerateWarning(message=r"fsync not supported for this stream", category=UserWarning),
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """What one rank is asked to do."""

    key: str  # names the group, which may have been joined by an earlier call; prefixes its keys in the store
    rank: int
    world_size: int
    backend: str
    body: bytes  # pickle of (fn, args, kwargs)
    sys_path: tuple[str, ...]  # where the test modules are found


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one rank: a value, or an error with its traceback.

    lost = the rank did not answer by itself (it died, hung or was stopped)
    """

    rank: int
    value: bytes = b""  # pickle of fn's return value
    error: str = ""  # "TypeName: message"
    trace: str = ""
    lost: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.error)


@contextmanager
def warnings_as_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tolerated in TOLERATED_WARNINGS:
            warnings.filterwarnings("ignore", tolerated.message, tolerated.category)
        yield


def run_call(call: Call, store: dist.Store) -> Outcome:
    """Load, join and run; the caller must call `leave_group` once every rank has an outcome."""
    try:
        sys.path.extend(entry for entry in call.sys_path if entry not in sys.path)
        fn, args, kwargs = pickle.loads(call.body)
        _join_group(call, store)
        torch.manual_seed(0)
        with warnings_as_errors():
            value = fn(*args, **kwargs)
        return Outcome(rank=call.rank, value=pickle.dumps(value))
    except BaseException as error:  # SystemExit and pytest's own outcomes are a test's failure too
        # The first frame is this function: of no use to a reader.
        frames = error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)
        return Outcome(
            rank=call.rank,
            error=f"{type(error).__name__}: {error}",
            trace="".join(traceback.format_exception(type(error), error, frames)).rstrip(),
        )


def in_turn(cases: Sequence[Any], fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[T]:
    """fn of every case, seeded alike; an error says in which one it was."""
    values = []
    for case in cases:
        torch.manual_seed(0)
        try:
            values.append(fn(case, *args, **kwargs))
        except BaseException as error:
            error.add_note(f"in the case {case!r}")
            raise
    return values


@dataclass(frozen=True)
class _Joined:
    """The group that this process is in, and the threads that were there before its last call."""

    key: str
    group: dist.ProcessGroup
    threads: frozenset[threading.Thread]


_joined: _Joined | None = None


def _join_group(call: Call, store: dist.Store) -> None:
    global _joined
    threads = frozenset(threading.enumerate())
    if _joined is not None and _joined.key == call.key:
        _joined = replace(_joined, threads=threads)
        return
    if _joined is not None:  # a call over another backend, or another rank had to be replaced
        leave_group()
    # torchrun sets this too; DeviceMesh reads it to choose a GPU.
    os.environ["LOCAL_RANK"] = str(call.rank)
    on_gpu = call.backend == "nccl"
    if on_gpu:
        torch.cuda.set_device(call.rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else call.backend,
        store=dist.PrefixStore(call.key, store),
        rank=call.rank,
        world_size=call.world_size,
        timeout=GROUP_TIMEOUT,
        device_id=torch.device("cuda", call.rank) if on_gpu else None,
    )
    assert dist.group.WORLD is not None
    _joined = _Joined(call.key, dist.group.WORLD, threads)


def stay_in_group() -> int | None:
    """The number of the group's collectives so far; None where the last call did not leave it as it found it.

    A thread that is still running may use the group. Groups of a call's own make meshes that DTensor's cache (see
    `leave_group`) must not hand on, while all meshes on the default group alone are as good as one another.
    """
    gc.collect()
    if _joined is None or dist.group.WORLD is not _joined.group or _threads() > MOST_THREADS:
        return None
    made_none = dist.distributed_c10d._world.group_count == 1  # there is no public count
    if not made_none or not _joined.threads.issuperset(threading.enumerate()):
        return None
    return _joined.group._get_sequence_number_for_group()


def leave_group() -> None:
    global _joined
    _joined = None
    # A group that a failing fn broke may well complain; its rank has reported by now.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dist.is_initialized():
            dist.destroy_process_group()
        from torch.distributed.tensor import debug

        # DTensor keeps the output of each sharding rule it has run, mesh included, and finds it
        # again by the mesh's SHAPE: without this, an op in the next call returns a DTensor on this
        # call's mesh, whose group names mean other groups by then. There is no public way to clear
        # it; tests/test_ranks.py fails when this one goes.
        debug._clear_sharding_prop_cache()
        gc.collect()


def serve(conn: Connection, store_port: int, stacks_path: str) -> None:
    """A pool worker's life: one call after the other, until the pool closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's to handle
    # From this file the pool reads where a rank hangs (on SIGUSR1), or what it did when C code crashed.
    stacks = Path(stacks_path).open("w", encoding="utf-8")  # noqa: SIM115 - open as long as the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks, all_threads=True)
    allow_core()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=GROUP_TIMEOUT)
    imported = _freeze_imports()
    try:
        conn.send_bytes(READY)
        while True:
            message = conn.recv_bytes()
            if message not in (STAY, LEAVE):
                conn.send_bytes(pickle.dumps(run_call(pickle.loads(message), store)))
                continue
            collectives = stay_in_group() if message == STAY else None
            if collectives is None:
                leave_group()
            if len(sys.modules) != imported:
                imported = _freeze_imports()
            if _threads() > MOST_THREADS:
                conn.send_bytes(RETIRED)
                return
            conn.send_bytes(LEFT if collectives is None else STAYED + str(collectives).encode())
    except (EOFError, ConnectionError):
        return  # the pool is gone


def _threads() -> int:
    """How many threads this process has, torch's own among them; 0 where the system does not tell."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


def _freeze_imports() -> int:
    """What imports left is here to stay: not looking at it again makes a collection 1 ms, not 70."""
    gc.collect()
    gc.freeze()
    return len(sys.modules)


class TorchrunRank:
    """This process as one of torchrun's ranks.

    Every exchange has a key made of the running test's id and a count within it, so a test that
    goes astray on one rank (an import that fails there, say) costs that test, not those after it.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=self.rank == 0 and not agent_serves,
            timeout=GROUP_TIMEOUT,
            wait_for_workers=False,
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"tests.ranks/{attempt}", store)
        self._exchanges: Counter[str] = Counter()

    def agreed(self, value: T) -> T:
        key = self._next_key()
        if self.rank == 0:
            self._put(key, pickle.dumps(value))
            return value
        return pickle.loads(self._get(key, GROUP_TIMEOUT.total_seconds()))  # type: ignore[no-any-return]

    def run(self, world_size: int, backend: str, timeout: float, body: Body) -> list[Outcome]:
        if world_size > self.world_size:
            pytest.skip(f"needs {world_size} ranks, torchrun gave {self.world_size}")
        # Rank 0's arguments count: paths and random values differ between pytest processes.
        pickled = self.agreed(pickle.dumps(body))
        key = self._next_key()
        mine = None
        if self.rank < world_size:
            call = Call(
                key=f"{key}/group",
                rank=self.rank,
                world_size=world_size,
                backend=backend,
                body=pickled,
                sys_path=(),
            )
            mine = run_call(call, self._store)
            self._put(f"{key}/{self.rank}", pickle.dumps(mine))
        keys = [f"{key}/{rank}" for rank in range(world_size)]
        if mine is not None:
            # As in the pool: stay in the group until all have an outcome, unless this one failed.
            self._wait(keys, UNBLOCK_AFTER if mine.failed else timeout)
            leave_group()
        # A rank that hangs in a collective fails by itself when its group times out.
        self._wait(keys, timeout + GROUP_TIMEOUT.total_seconds())
        return [self._outcome(rank, keys[rank], timeout) for rank in range(world_size)]

    def _outcome(self, rank: int, key: str, timeout: float) -> Outcome:
        if not self._store.check([key]):
            return Outcome(rank=rank, error=f"hung for {timeout:g} s", lost=True)
        outcome: Outcome = pickle.loads(self._get(key, GROUP_TIMEOUT.total_seconds()))
        return outcome

    def _next_key(self) -> str:
        test = os.environ.get("PYTEST_CURRENT_TEST", "no test")
        self._exchanges[test] += 1
        return f"{test}/{self._exchanges[test]}"

    def _put(self, key: str, data: bytes) -> None:
        chunks = range(0, len(data), CHUNK)
        for start in chunks:
            self._store.set(f"{key}/{start // CHUNK}", data[start : start + CHUNK])
        self._store.set(key, str(len(chunks)))  # last: whoever sees it may read the chunks

    def _get(self, key: str, timeout: float) -> bytes:
        self._store.wait([key], timedelta(seconds=timeout))
        return b"".join(self._store.get(f"{key}/{i}") for i in range(int(self._store.get(key))))

    def _wait(self, keys: list[str], timeout: float) -> None:
        """Until all keys are there or the time is up; the caller finds out which."""
        with suppress(dist.DistStoreError):
            self._store.wait(keys, timedelta(seconds=timeout))


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "MASTER_PORT" in os.environ


@cache
def torchrun_rank() -> TorchrunRank:
    return TorchrunRank()
