"""Ranks in one process: a thread each, of which exactly one runs, and collectives that complete as a seed says.

A rank that calls a collective hands the baton to a rank that the seed chooses, and gets it back when the collective
is complete, or cannot be any more. Nothing waits for a clock:

    complete     the ranks whose data are needed have called; who needs whose data depends on the collective
    dead         a rank with a `Fault` calls nothing any more. Who needs it gets the error of a connection that
                 broke, once nothing else can happen
    hanging      all ranks that live wait, and nobody has died: they would wait for the timeout of the group, and for
                 nothing. That is `Hang`, a finding
    beside       a rank may start threads beside its own, as asynchronous saves do; they take turns like ranks
    mixed up     ranks call different collectives, or the same with other sizes, at the same place: `Hang`, too
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

if TYPE_CHECKING:
    from random import Random

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
class Call:
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


class Beside(Future[Any]):
    """What a thread beside a rank's own comes to; who waits for it lets others run."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def result(self, timeout: float | None = None) -> Any:
        self._world.until(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._world.until(self)
        return super().exception(timeout)


class World:
    """The ranks of one scenario. An actor is a thread of a rank; the first ones, numbered as the ranks, are their own.

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
        self._ranks = list(range(size))  # of each actor
        self._batons = [threading.Semaphore(0) for _ in range(size)]
        self._ended = threading.Semaphore(0)
        self._waiting: dict[int, tuple[Call, int] | Beside | None] = dict.fromkeys(range(size))
        self._live = set(range(size))  # actors
        self._dead: set[int] = set()  # actors
        self._groups: dict[str, list[Call]] = {}
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
        self._threads = list(threads)
        for thread in threads:
            thread.start()
        self._batons[self.random.randrange(self.size)].release()
        self._ended.acquire()
        sys.excepthook = hook  # torch puts one of its own around it for each rank
        return self.outcomes

    def close(self) -> None:
        """End the threads of ranks that died; what they do while they unwind is nobody's result."""
        self.judged = True
        for actor in sorted(self._dead):
            self._batons[actor].release()
            self._threads[actor].join()
        for thread in self._threads:
            thread.join()

    def pause(self) -> None:
        """Let others run."""
        self._hand_on(None)

    def beside(self, work: Callable[[], Any]) -> Beside:
        """Start a thread beside this one, of the same rank, with its groups."""
        _, rank = self.here()
        actor, found = len(self._ranks), Beside(self)
        self._ranks.append(rank)
        self._batons.append(threading.Semaphore(0))
        self._waiting[actor] = None
        self._live.add(actor)
        own = ThreadLocalWorld._world.world
        thread = threading.Thread(target=self._work, args=(actor, own, work, found), daemon=True)
        self._threads.append(thread)
        thread.start()
        return found

    def until(self, beside: Beside) -> None:
        """Let others run until a thread beside has ended."""
        if not beside.done():
            self._hand_on(beside)
            self._waiting[self._here.actor] = None

    def _work(self, actor: int, own: Any, work: Callable[[], Any], found: Beside) -> None:
        self._here.world, self._here.rank, self._here.actor = self, self._ranks[actor], actor
        ThreadLocalWorld._world.world = own
        for group, name in own.pg_names.items():
            torch._C._distributed_c10d._register_process_group(name, group)
        self._batons[actor].acquire()
        if self.judged:
            return
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)
        finally:
            self._over(actor)

    def _over(self, actor: int) -> None:
        """A thread has ended."""
        if not self.judged:
            self._live.discard(actor)
            self._next()
        if self.judged or not any(self._ranks[other] == self._ranks[actor] for other in self._live):
            c10d._world.pg_map.clear()

    def _rank(self, rank: int, body: Callable[[int], Any]) -> None:
        self._here.world, self._here.rank, self._here.actor = self, rank, rank
        self._batons[rank].acquire()
        outcome = self.outcomes[rank]
        try:
            dist.init_process_group(NAME, rank=rank, world_size=self.size, store=self._store)
            outcome.value = body(rank)
        except BaseException as error:
            outcome.error = error
        finally:
            self._over(rank)

    # the baton

    def _hand_on(self, waits: tuple[Call, int] | Beside | None) -> None:
        """Let another thread run until this one is chosen, and can go on."""
        if self.judged:
            raise Gone
        actor = self._here.actor
        self._waiting[actor] = waits
        self._next()
        self._batons[actor].acquire()
        if self.judged:
            raise Gone
        if self.hang:
            raise Hang(self.hang)

    def _next(self) -> None:
        if not self._live - self._dead:
            self._ended.release()
            return
        ready = [actor for actor in sorted(self._live - self._dead) if self._can(actor)]
        if len(ready) > 1 and self._slow in ready:
            ready.remove(self._slow)
        if not ready:
            ready = self._stuck()
        self._batons[self.random.choice(ready)].release()

    def _can(self, actor: int) -> bool:
        waits = self._waiting[actor]
        if isinstance(waits, Beside):
            return waits.done() or self.hang != ""
        return waits is None or self.hang != "" or self._done(*waits)

    def _done(self, call: Call, place: int) -> bool:
        return all(needed in call.given for needed in call.needs(place))

    def _stuck(self) -> list[int]:
        """Nobody can go on: those who wait for the dead get an error, or else it is a hang."""
        actors = sorted(self._live - self._dead)
        calling = {actor: waits for actor in actors if isinstance(waits := self._waiting[actor], tuple)}
        late = [actor for actor, waits in calling.items() if not waits[0].waits]
        if self._dead or late:
            return late or list(calling)  # who waits for a thread beside waits on
        told = "; ".join(f"rank {self._ranks[actor]} in {self._told(*waits)}" for actor, waits in calling.items())
        ended = [
            f"rank {rank}: {one.words or 'returned'}" for rank, one in enumerate(self.outcomes) if rank not in actors
        ]
        self.hang = f"all wait for ever: {told}. Ended: {'; '.join(ended) or 'none'}"
        return actors

    @staticmethod
    def _told(call: Call, place: int) -> str:
        return f"{call.kind} {call.signs.get(place)} ({len(call.given)} of {call.size} there)"

    # collectives

    def join(self, call: Call, place: int, number: int, given: Any, sign: Any) -> Call:
        """This rank's part of the collective of a number in its group; it has to `wait` for it."""
        _, rank = self.here()
        if self.judged:
            raise Gone
        if (call.group, rank) in self._broken:
            raise BrokenGroup(CLOSED)
        self._hand_on(None)
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

    def wait(self, call: Call, place: int) -> None:
        """Until this rank has what it gets of a collective."""
        _, rank = self.here()
        if self.judged:
            raise Gone
        if not self._done(call, place):
            self._hand_on((call, place))
            self._waiting[self._here.actor] = None
        if not self._done(call, place):
            self._broken.add((call.group, rank))
            raise BrokenGroup(CLOSED)
        if call.whole:
            for each in range(call.size):
                self._move(call, each)
        else:
            self._move(call, place)

    def _move(self, call: Call, place: int) -> None:
        if place not in call.moved:
            call.moved.add(place)
            with torch.no_grad():
                call.move(call.given, place)

    def _die(self, rank: int) -> None:
        self._dead |= {actor for actor, own in enumerate(self._ranks) if own == rank}
        self.outcomes[rank].died = True
        self._next()
        self._batons[self._here.actor].acquire()
        raise Gone
