"""Ranks in one process: a thread each, of which exactly one runs, and collectives that complete as a seed says.

A rank that calls a collective hands the baton to a rank that the seed chooses, and gets it back when the collective
is complete, or cannot be any more. Nothing waits for a clock:

    complete     the ranks whose data are needed have called; who needs whose data depends on the collective
    dead         a rank with the fault Die calls nothing any more. Who needs it gets the error of a connection that
                 broke, once nothing else can happen
    hanging      all ranks that live wait, and nobody has died: they would wait for the timeout of the group, and for
                 nothing. That is `Hang`, a finding
    mixed up     ranks call different collectives, or the same with other sizes, at the same place: `Hang`, too

torch's own group for threads (multi_threaded_pg) keeps the state of torch.distributed apart for each thread; its
collectives know no faults, and wait for real.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

NAME = "threaded"  # torch's own name: under it DeviceMesh tells meshes of threads apart


CLOSED = "Connection closed by peer"


class Hang(BaseException):
    """Raised in ranks that would wait for ever, so that their threads end."""


class Gone(BaseException):
    """Raised in the thread of a rank that died, once all is judged."""


class BrokenGroup(RuntimeError):
    """What gloo raises where a peer is gone."""


@dataclass(frozen=True)
class Fault:
    """A rank dies at its collective of this number, before or after it has given its data."""

    rank: int
    number: int
    after: bool


@dataclass
class Outcome:
    """How a rank ended: a value, an error, or a death."""

    value: Any = None
    error: BaseException | None = None
    died: bool = False

    @property
    def words(self) -> str:
        """The error as "TypeName: message"; "" where there is none."""
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"


@dataclass
class _Call:
    """One collective: what each rank gave, and which ranks need whose data."""

    group: str
    kind: str
    size: int
    move: Callable[[dict[int, Any], int], None]  # fills what this rank gets
    needs: Callable[[int], range | tuple[int, ...]]  # whose data a rank needs to be done
    given: dict[int, Any] = field(default_factory=dict)
    signs: dict[int, Any] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)
    whole: bool = False  # data move to all ranks at once
    waits: bool = True  # else its group has a timeout of its own, and what cannot come is an error


class World:
    """The ranks of one scenario.

    Args:
        size: how many.
        random: decides who runs next, and all else that is left open.
        fault: a death, or None.
    """

    _here = threading.local()

    def __init__(self, size: int, random: Random, fault: Fault | None = None) -> None:
        self.size, self.random, self.fault = size, random, fault
        self.calls = [0] * size  # collectives of each rank
        self._slow = random.choice([None, None, random.randrange(size)])
        self._batons = [threading.Semaphore(0) for _ in range(size)]
        self._ended = threading.Semaphore(0)
        self._waiting: dict[int, tuple[_Call, int] | None] = dict.fromkeys(range(size))
        self._live = set(range(size))
        self._dead: set[int] = set()
        self._groups: dict[str, list[_Call]] = {}
        self._broken: set[tuple[str, int]] = set()  # a group in which a rank got an error is of no use to it any more
        self.outcomes = [Outcome() for _ in range(size)]
        self.hang = ""
        self.kept: dict[Any, Any] = {}  # what stands for the memory of each rank's process
        self.judged = False

    @staticmethod
    def here() -> tuple[World, int]:
        """The world of this thread, and its rank."""
        return World._here.world, World._here.rank

    def run(self, body: Callable[[int], Any]) -> list[Outcome]:
        """`body(rank)` on all ranks, which have a default group; how each ended."""
        self._store, hook = dist.HashStore(), sys.excepthook
        threads = [threading.Thread(target=self._rank, args=(rank, body), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._batons[self.random.randrange(self.size)].release()
        self._ended.acquire()
        self._threads = threads
        sys.excepthook = hook  # torch puts one of its own around it for each rank
        return self.outcomes

    def close(self) -> None:
        """End the threads of ranks that died; what they do while they unwind is nobody's result."""
        self.judged = True
        for rank in sorted(self._dead):
            self._batons[rank].release()
            self._threads[rank].join()
        for thread in self._threads:
            thread.join()

    def pause(self) -> None:
        """Let others run."""
        _, rank = self.here()
        self._hand_on(rank, None)

    def _rank(self, rank: int, body: Callable[[int], Any]) -> None:
        self._here.world, self._here.rank = self, rank
        self._batons[rank].acquire()
        outcome = self.outcomes[rank]
        try:
            dist.init_process_group(NAME, rank=rank, world_size=self.size, store=self._store)
            outcome.value = body(rank)
        except BaseException as error:
            outcome.error = error
        finally:
            if not self.judged:
                self._live.discard(rank)
                self._next()
            c10d._world.pg_map.clear()

    # the baton

    def _hand_on(self, rank: int, waits: tuple[_Call, int] | None) -> None:
        """Let another rank run until this one is chosen, and can go on."""
        self._waiting[rank] = waits
        self._next()
        self._batons[rank].acquire()
        if self.judged:
            raise Gone
        if self.hang:
            raise Hang(self.hang)

    def _next(self) -> None:
        if not self._live - self._dead:
            self._ended.release()
            return
        ready = [rank for rank in sorted(self._live - self._dead) if self._can(rank)]
        if len(ready) > 1 and self._slow in ready:
            ready.remove(self._slow)
        if not ready:
            ready = self._stuck()
        self._batons[self.random.choice(ready)].release()

    def _can(self, rank: int) -> bool:
        waits = self._waiting[rank]
        return waits is None or self.hang != "" or self._done(*waits)

    def _done(self, call: _Call, place: int) -> bool:
        return all(needed in call.given for needed in call.needs(place))

    def _stuck(self) -> list[int]:
        """Nobody can go on: those who wait for the dead get an error, or else it is a hang."""
        ranks = sorted(self._live - self._dead)
        late = [rank for rank in ranks if (waits := self._waiting[rank]) is not None and not waits[0].waits]
        if self._dead or late:
            return late or ranks
        told = "; ".join(f"rank {rank} in {self._told(rank)}" for rank in ranks)
        ended = [
            f"rank {rank}: {one.words or 'returned'}" for rank, one in enumerate(self.outcomes) if rank not in ranks
        ]
        self.hang = f"all wait for ever: {told}. Ended: {'; '.join(ended) or 'none'}"
        return ranks

    def _told(self, rank: int) -> str:
        waits = self._waiting[rank]
        assert waits is not None
        call, _ = waits
        return f"{call.kind} {call.signs.get(waits[1])} ({len(call.given)} of {call.size} there)"

    # collectives

    def join(self, call: _Call, place: int, number: int, given: Any, sign: Any) -> _Call:
        """This rank's part of the collective of a number in its group; it has to `wait` for it."""
        _, rank = self.here()
        if self.judged:
            raise Gone
        if (call.group, rank) in self._broken:
            raise BrokenGroup(CLOSED)
        self._hand_on(rank, None)
        count, self.calls[rank] = self.calls[rank], self.calls[rank] + 1
        dies = self.fault is not None and (self.fault.rank, self.fault.number) == (rank, count)
        if dies and not self.fault.after:  # type: ignore[union-attr]
            self._die(rank)
        calls = self._groups.setdefault(call.group, [])
        if number == len(calls):
            calls.append(call)
        call = calls[number]
        if call.given and (sign, call.kind) != (next(iter(call.signs.values())), call.kind):
            self.hang = f"different collectives meet: {call.kind} {next(iter(call.signs.values()))}, rank {rank} {sign}"
            raise Hang(self.hang)
        call.given[place], call.signs[place] = given, sign
        if dies:
            self._die(rank)
        return call

    def wait(self, call: _Call, place: int) -> None:
        """Until this rank has what it gets of a collective."""
        _, rank = self.here()
        if self.judged:
            raise Gone
        if not self._done(call, place):
            self._hand_on(rank, (call, place))
            self._waiting[rank] = None
        if not self._done(call, place):
            self._broken.add((call.group, rank))
            raise BrokenGroup(CLOSED)
        if call.whole:
            for each in range(call.size):
                self._move(call, each)
        else:
            self._move(call, place)

    def _move(self, call: _Call, place: int) -> None:
        if place not in call.moved:
            call.moved.add(place)
            with torch.no_grad():
                call.move(call.given, place)

    def _die(self, rank: int) -> None:
        self._dead.add(rank)
        self.outcomes[rank].died = True
        self._next()
        self._batons[rank].acquire()
        raise Gone


class Work(dist._Work):  # type: ignore[name-defined,misc]
    """A collective under way."""

    def __init__(self, world: World, call: _Call, place: int) -> None:
        super().__init__()
        self._parts = world, call, place

    def wait(self, timeout: Any = None) -> bool:
        del timeout
        world, call, place = self._parts
        world.wait(call, place)
        return True

    def is_completed(self) -> bool:
        world, call, place = self._parts
        return world._done(call, place)


class _All(dist._Work):  # type: ignore[name-defined,misc]
    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        return all(work.wait(timeout) for work in self._works)


class Group(dist.ProcessGroup):
    """A process group of a world; only the methods that are used."""

    def __init__(self, key: str, place: int, size: int, *, waits: bool = True) -> None:
        super().__init__(place, size)
        self._waits = waits
        self._key, self._place, self._size, self._number = key, place, size, 0
        self._world, _ = World.here()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._place

    @property
    def pg_name(self) -> str:
        return str(c10d._world.pg_names[self])

    @property
    def group_name(self) -> str:
        return self.pg_name

    def _call(self, kind: str, given: Any, sign: Any, move: Any, root: int | None = None, *, to: bool = False) -> Work:
        everybody = range(self._size)

        def needs(place: int) -> Any:
            if root is None:
                return everybody
            if to:
                return everybody if place == root else (place,)
            return (root, place)

        number, self._number = self._number, self._number + 1
        call = _Call(self._key, kind, self._size, move, needs, whole=root is None, waits=self._waits)
        sign = (kind, root, sign)
        call = self._world.join(call, self._place, number, given, sign)
        return Work(self._world, call, self._place)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.AllreduceOptions()
        (tensor,) = tensors
        reduce = _REDUCES[_op(opts)]
        found: list[Tensor] = []

        def move(given: dict[int, Tensor], place: int) -> None:
            if not found:
                found.append(reduce(torch.stack([given[each].detach() for each in sorted(given)])))
            given[place].detach().copy_(found[0])

        return self._call("all_reduce", tensor, (tuple(tensor.shape), tensor.dtype, _op(opts)), move)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        works = [self.allreduce([tensor], opts) for tensor in tensors]
        return works[-1] if len(works) == 1 else _All(works)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        del opts
        (out,), (own,) = outputs, inputs
        found: list[Tensor] = []

        def move(given: dict[int, Any], place: int) -> None:
            if not found:
                found.extend(given[each][1].detach().clone() for each in sorted(given))
            for into, value in zip(given[place][0], found, strict=True):
                into.detach().copy_(value)

        return self._call("all_gather", (out, own), (tuple(own.shape), own.dtype), move)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Work:
        return self.allgather([list(torch.chunk(output, self._size))], [own], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        works = [self.all_gather_single(out, own, opts) for out, own in zip(outputs, inputs, strict=True)]
        return works[-1] if len(works) == 1 else _All(works)

    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.BroadcastOptions()
        (tensor,) = tensors
        held = tensor.detach().clone() if self._place == opts.rootRank else None

        def move(given: dict[int, Any], place: int) -> None:
            if place != opts.rootRank:
                given[place][0].detach().copy_(given[opts.rootRank][1])

        return self._call("broadcast", (tensor, held), (tensor.numel(), tensor.dtype), move, opts.rootRank)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        opts = opts or dist.ScatterOptions()
        held = [one.detach().clone() for one in inputs[0]] if self._place == opts.rootRank else None
        (out,) = outputs

        def move(given: dict[int, Any], place: int) -> None:
            given[place][0].detach().copy_(given[opts.rootRank][1][place])

        return self._call("scatter", (out, held), (tuple(out.shape), out.dtype), move, opts.rootRank)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = opts or dist.GatherOptions()
        (own,) = inputs
        out = outputs[0] if self._place == opts.rootRank else None

        def move(given: dict[int, Any], place: int) -> None:
            if place == opts.rootRank:
                for number, into in enumerate(given[place][0]):
                    into.detach().copy_(given[number][1])

        return self._call(
            "gather",
            (out, own.detach().clone() if out is None else own),
            (tuple(own.shape), own.dtype),
            move,
            opts.rootRank,
            to=True,
        )

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        opts = opts or dist.ReduceScatterOptions()
        (out,), (own,) = outputs, inputs
        reduce = _REDUCES[_op(opts)]

        def move(given: dict[int, Any], place: int) -> None:
            stacked = torch.stack([given[each][1][place].detach() for each in sorted(given)])
            given[place][0].detach().copy_(reduce(stacked))

        sign = tuple(tuple(one.shape) for one in own), out.dtype, _op(opts)
        return self._call("reduce_scatter", (out, own), sign, move)

    def reduce_scatter_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter([output], [list(torch.chunk(own, self._size))], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        works = [self.reduce_scatter_single(out, own, opts) for out, own in zip(outputs, inputs, strict=True)]
        return works[-1] if len(works) == 1 else _All(works)

    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None) -> Work:
        del opts
        return self._call("barrier", None, (), lambda given, place: None)


def _op(options: Any) -> str:
    return str(getattr(options.reduceOp, "op", options.reduceOp)).removeprefix("RedOpType.")


_REDUCES: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "AVG": lambda stacked: stacked.mean(0),
    "MAX": lambda stacked: stacked.amax(0),
    "MIN": lambda stacked: stacked.amin(0),
}


def _made(options: Any, _: Any) -> Group:
    """The group of these ranks; its name tells it among those of its world."""
    ranks = options.global_ranks_in_group
    return Group(f"{options.group_id} of {ranks}", options.group_rank, options.group_size)


@contextmanager
def threads_as_ranks() -> Iterator[None]:
    """torch.distributed keeps its state apart for each thread."""
    before = c10d._world
    c10d._world = ThreadLocalWorld()
    plugin = dist.Backend._BackendPlugin(_made, True)  # torch's extended options
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        plugins = mock.patch.dict(dist.Backend._plugins, {NAME.upper(): plugin})
        logging.disable()  # torch's traces of errors that are meant
        with plugins, torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        logging.disable(logging.NOTSET)
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        c10d._world = before
        debug._clear_sharding_prop_cache()
