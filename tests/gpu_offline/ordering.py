"""Are the uses of memory by the streams of a GPU ordered? A log of what a program asked for, in; faults, out.

Work on one stream runs in order; work on two streams only where an event, or a wait of the CPU, puts one before the
other. With a vector clock for each stream, one access is before another if the clock of the later one has seen it:

    Ran         an operation takes the next tick of its stream
    Recorded    an event keeps the clock of a stream
    Waited      a stream's clock takes in that of an event; an event that was never recorded has none
    HostWaited  the CPU's clock takes in that of a stream or an event; whatever is asked for later comes after it

Two accesses to a storage by different streams, one of them a write, are a fault where neither is before the other. The
allocator gives memory that is freed to whoever asks next on the stream that allocated it, be it still in use by another
stream. So an access is a fault, too, where it is not before the next storage that begins on the stream of the freed
one; unless the allocator was told of the other stream (Lent, which is record_stream) and waits itself.

torch makes streams that do not wait for the default stream by themselves, so it is a stream as any other here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

HOST = -1  # accesses by the CPU itself, which a stream orders as it does another stream's


@dataclass(frozen=True)
class Allocated:
    """A storage begins, on this stream. One that is freed and filled again is another storage."""

    storage: int
    stream: int
    what: str


@dataclass(frozen=True)
class Ran:
    """An operation on a stream: the storages that it reads and writes."""

    stream: int
    what: str
    reads: frozenset[int]
    writes: frozenset[int]


@dataclass(frozen=True)
class Recorded:
    """An event stands for all that its stream has been asked for."""

    event: int
    stream: int


@dataclass(frozen=True)
class Waited:
    """What a stream is asked for from here on comes after the event."""

    stream: int
    event: int


@dataclass(frozen=True)
class HostWaited:
    """The CPU waits for all that a stream has been asked for (`event` is None), or for an event."""

    what: str
    stream: int | None = None
    event: int | None = None


@dataclass(frozen=True)
class Lent:
    """The allocator knows that another stream uses a storage."""

    storage: int
    stream: int


@dataclass(frozen=True)
class Freed:
    """The memory of a storage goes back to the allocator."""

    storage: int


Entry = Allocated | Ran | Recorded | Waited | HostWaited | Lent | Freed
Clock = dict[int, int]  # stream -> how many of its operations are known to have ended


@dataclass(frozen=True)
class Fault:
    """Two uses of a storage's memory that nothing orders; `second` may be that another storage gets the memory."""

    storage: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.storage}: {self.first} and {self.second} are not ordered"


@dataclass(frozen=True)
class _Access:
    tick: int
    what: str


@dataclass
class _Storage:
    stream: int
    what: str
    reads: dict[int, _Access] = field(default_factory=dict)  # the last of each stream
    writes: dict[int, _Access] = field(default_factory=dict)
    lent: set[int] = field(default_factory=set)


class _Checker:
    def __init__(self) -> None:
        self.clocks: dict[int, Clock] = {}
        self.events: dict[int, Clock] = {}
        self.storages: dict[int, _Storage] = {}
        self.freed: dict[int, list[_Storage]] = {}  # stream -> those that another stream may still use
        self.faults: list[Fault] = []

    def follow(self, entry: Entry) -> None:
        match entry:
            case Allocated(storage, stream, what):
                self._reuse(stream, what)
                self.storages[storage] = _Storage(stream, what)
            case Ran():
                self._run(entry)
            case Recorded(event, stream):
                self.events[event] = dict(self._now(stream))
            case Waited(stream, event):
                _take_in(self._now(stream), self.events.get(event, {}))
            case HostWaited(_, stream, event):
                of = self._now(stream) if stream is not None else self.events.get(event or 0, {})
                _take_in(self._now(HOST), of)
            case Lent(storage, stream):
                self.storages[storage].lent.add(stream)
            case Freed(storage):
                self._free(self.storages.pop(storage))

    def _now(self, stream: int) -> Clock:
        """The clock of a stream; what the CPU waited for is before anything that it asks for now."""
        clock = self.clocks.setdefault(stream, {})
        if stream != HOST:
            _take_in(clock, self.clocks.setdefault(HOST, {}))
        return clock

    def _run(self, op: Ran) -> None:
        clock = self._now(op.stream)
        tick = clock[op.stream] = clock.get(op.stream, 0) + 1
        for number in sorted(op.reads | op.writes):
            used, writes = self.storages[number], number in op.writes
            kind = "write" if writes else "read"
            here = f"{kind} by {_on(op.what, op.stream)}"
            self._compare(used, "write", op.stream, here)
            if writes:
                self._compare(used, "read", op.stream, here)
            (used.writes if writes else used.reads)[op.stream] = _Access(tick, op.what)

    def _free(self, used: _Storage) -> None:
        used.reads = {stream: one for stream, one in used.reads.items() if stream not in used.lent}
        used.writes = {stream: one for stream, one in used.writes.items() if stream not in used.lent}
        self.freed.setdefault(used.stream, []).append(used)

    def _reuse(self, stream: int, what: str) -> None:
        """A new storage may get the memory of any that was freed on its stream."""
        for used in self.freed.pop(stream, []):
            here = f"its memory going to {what}"
            self._compare(used, "write", stream, here)
            self._compare(used, "read", stream, here)

    def _compare(self, used: _Storage, kind: str, stream: int, here: str) -> None:
        """Faults, where accesses of this kind by other streams are not before what is here."""
        clock = self._now(stream)
        for other, access in (used.writes if kind == "write" else used.reads).items():
            if other != stream and clock.get(other, 0) < access.tick:
                fault = Fault(used.what, f"{kind} by {_on(access.what, other)}", here)
                if fault not in self.faults:
                    self.faults.append(fault)


def _on(what: str, stream: int) -> str:
    return f"{what} on {'the CPU' if stream == HOST else f'stream {stream}'}"


def _take_in(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if tick > clock.get(stream, 0):
            clock[stream] = tick


def faults_of(log: Iterable[Entry]) -> list[Fault]:
    """What is not ordered in a log, each fault once, in the order in which the later of its two uses was asked for."""
    checker = _Checker()
    for entry in log:
        checker.follow(entry)
    return checker.faults


def waits_of_host(log: Iterable[Entry]) -> list[str]:
    """Where the CPU waited for the GPU."""
    return [entry.what for entry in log if isinstance(entry, HostWaited)]


def copies_to_host(log: Iterable[Entry]) -> list[str]:
    """What a stream writes into memory of the CPU."""
    entries = list(log)
    of_host = {entry.storage for entry in entries if isinstance(entry, Allocated) and entry.stream == HOST}
    ran = [entry for entry in entries if isinstance(entry, Ran) and entry.stream != HOST]
    return [entry.what for entry in ran if entry.writes & of_host]
