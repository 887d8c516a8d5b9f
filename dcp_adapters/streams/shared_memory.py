"""Weights to engines on the same host: the trainer copies a bucket into memory that the engines have mapped.

    ring       a few slots in anonymous shared memory; its file descriptor travels over a socket, so it has no name that
               a crash could leave behind, and is freed with the last process that has it mapped
    socket     a Unix domain socket at `address`: who says what is in transport.py, one message of JSON each

    sender                                        receiver
    fills slot i % slots, "bucket i, digest"  ->  tensors that are views of the slot, no copy
    waits before it fills the slot again      <-  "free i", when the next bucket is asked for          back-pressure
    "end, digest of all"                      ->  compares
    waits                                     <-  "accepted"

The kernel closes the socket of a process that dies, however it dies, so the other side knows at once. After any error
the connection is closed; the next `receive` makes another.
"""

import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from dcp_adapters.streams.announcement import Announcement
from dcp_adapters.streams.buckets import ALIGNED, fill, room_of, views
from dcp_adapters.streams.transport import (
    Incoming,
    Receiver,
    WeightStreamError,
    bytes_digest,
    digest_of_all,
    message_digest,
)
from dcp_adapters.streams.wires import Ring, Wire

LONGEST_PATH = 100  # bytes; the kernel's limit is 108


class SharedMemorySender:
    """Sends to engines on this host; see `Sender` for the order of calls, which `WeightStream.send` keeps.

    Args:
        address: where to listen: the path of a socket that does not exist yet, in a directory that only trusted users
            can enter.
        receivers: how many engine processes take every version.
        slots: of the ring; with two, one bucket is filled while the other is read.
        timeout: seconds that a receiver may take to connect, to free a slot, and to accept a version.

    Raises:
        FileExistsError: somebody listens there, or it is no socket.
        FileNotFoundError: there is no such directory.
        ValueError: the path is too long for a socket; a number that is not positive.

    Example:
        ```python
        >>> state = {"up.weight": quantize(torch.ones(4, 64), MXFP8BlockScaling())}
        >>> stream = WeightStream(state, config={"model_type": "mine"})
        >>> with SharedMemorySender("weights.socket") as sender:  # an engine receives from there
        ...     stream.send(sender)
        ```
    """

    def __init__(
        self, address: str | os.PathLike[str], *, receivers: int = 1, slots: int = 2, timeout: float = 300.0
    ) -> None:
        for name, value in {"receivers": receivers, "slots": slots, "timeout": timeout}.items():
            if not value > 0:
                raise ValueError(f"SharedMemorySender: {name}={value!r}, expected a positive number")
        self._address, self._receivers, self._slots, self._timeout = Path(address), receivers, slots, timeout
        self._listener = _listen(self._address, receivers)
        self._wires: list[Wire] = []
        self._ring: Ring | None = None
        self._announcement: Announcement | None = None
        self._digests: list[int] = []

    def begin(self, announcement: Announcement) -> None:
        """Wait for the receivers, give them the ring, and tell them what comes."""
        deadline = time.monotonic() + self._timeout
        while len(self._wires) < self._receivers:
            self._wires.append(self._accept_receiver(deadline, announcement.version))
        if self._ring is None or self._ring.slot < announcement.largest:
            self._ring = Ring.make(max(announcement.largest, ALIGNED), self._slots)
        data = announcement.to_bytes()
        told = {"kind": "begin", "slots": self._slots, "slot": self._ring.slot, "digest": message_digest(data)}
        self._announcement, self._digests = announcement, []
        for wire in self._wires:
            wire.done, wire.accepted = 0, False
            self._tell(wire, told, data, [self._ring.file])

    def bucket(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a bucket into the ring once all receivers are done with what was there."""
        assert self._announcement is not None
        assert self._ring is not None
        number = len(self._digests)
        self._wait(lambda wire: wire.done > number - self._slots, f"did not free a slot for bucket {number + 1}")
        records = self._announcement.buckets[number]
        memory = self._ring.memory(number % self._slots)[: room_of(records)]
        fill(records, tensors, memory)
        self._digests.append(bytes_digest(memory))
        for wire in self._wires:
            self._tell(wire, {"kind": "bucket", "number": number, "digest": self._digests[-1]})

    def end(self) -> None:
        """Wait until all receivers have compared everything."""
        for wire in self._wires:
            self._tell(wire, {"kind": "end", "buckets": len(self._digests), "digest": digest_of_all(self._digests)})
        self._wait(lambda wire: wire.accepted, "did not accept the version")

    def abort(self, error: BaseException) -> None:
        """Tell the receivers why no more comes, and let go of them."""
        for wire in self._wires:
            with suppress(OSError):
                wire.send({"kind": "abort", "why": f"{type(error).__name__}: {error}"})
            wire.close()
        self._wires = []

    def close(self) -> None:
        """Stop listening, and let go of the receivers and the ring."""
        for wire in self._wires:
            wire.close()
        self._wires, self._ring = [], None
        self._listener.close()
        self._address.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept_receiver(self, deadline: float, version: int) -> Wire:
        try:
            while True:
                self._listener.settimeout(max(deadline - time.monotonic(), 0.001))
                wire = Wire(self._listener.accept()[0], self._timeout)
                with suppress(OSError):
                    if wire.receive()[0]["kind"] == "hello":
                        return wire
                wire.close()
        except TimeoutError:
            raise WeightStreamError(
                f"version {version} of the weights: {len(self._wires)} of {self._receivers} receivers connected to "
                f"{self._address} within {self._timeout} s; start the others, or give the number that there are"
            ) from None

    def _tell(self, wire: Wire, told: Mapping[str, Any], data: bytes = b"", files: list[int] | None = None) -> None:
        try:
            wire.send(told, data, files or [])
        except OSError as error:
            raise self._lost(wire, error) from None

    def _wait(self, done: Callable[[Wire], bool], what: str) -> None:
        """Read what receivers say until `done` of all of them."""
        deadline = time.monotonic() + self._timeout
        while waiting := [wire for wire in self._wires if not done(wire)]:
            with selectors.DefaultSelector() as selector:
                for wire in waiting:
                    selector.register(wire.socket, selectors.EVENT_READ, wire)
                ready = selector.select(max(deadline - time.monotonic(), 0))
            if not ready:
                raise self._error(f"{len(waiting)} of {len(self._wires)} receivers {what} within {self._timeout} s")
            for key, _ in ready:
                self._hear(key.data)

    def _hear(self, wire: Wire) -> None:
        try:
            told, _, _ = wire.receive()
        except OSError as error:
            raise self._lost(wire, error) from None
        if told["kind"] == "refused":
            raise self._error(f"a receiver failed ({told['why']})")
        if told["kind"] == "free":
            wire.done = told["done"]
        else:
            wire.accepted = told["kind"] == "accepted"

    def _lost(self, wire: Wire, error: OSError) -> WeightStreamError:
        with suppress(OSError, ValueError, KeyError):  # it may have said why before it went
            told, _, _ = wire.receive()
            if told["kind"] == "refused":
                return self._error(f"a receiver failed ({told['why']})")
        return self._error(f"a receiver is gone ({error})")

    def _error(self, why: str) -> WeightStreamError:
        assert self._announcement is not None
        return WeightStreamError(
            f"version {self._announcement.version} of the weights: {why}, after {len(self._digests)} of "
            f"{len(self._announcement.buckets)} buckets; the model is as it was. Start the receiver again and send anew"
        )


class SharedMemoryReceiver(Receiver):
    """Receives in an engine's process on the sender's host; see `Receiver`. Its tensors are views of shared memory.

    Args:
        address: where the sender listens, or will listen.
        timeout: seconds that the sender may take for a bucket, once it has begun.
        patience: seconds that it may take to announce the next version; None: as long as it likes.

    Example:
        ```python
        >>> with SharedMemoryReceiver("weights.socket") as receiver, receiver.receive() as weights:
        ...     for tensors in weights:  # valid until the next bucket is asked for
        ...         for name, tensor in tensors.items():
        ...             print(name, tuple(tensor.shape))
        up.weight (4, 64)
        up.weight_scale (4, 2)
        ```
    """

    def __init__(
        self, address: str | os.PathLike[str], *, timeout: float = 300.0, patience: float | None = None
    ) -> None:
        self._address, self._timeout, self._patience = Path(address), timeout, patience
        self._wire: Wire | None = None

    def close(self) -> None:
        """Let go of the sender."""
        if self._wire is not None:
            self._wire.close()
        self._wire = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> Incoming:
        deadline = None if self._patience is None else time.monotonic() + self._patience
        wire = self._wire = self._wire or _connect(self._address, deadline, self._timeout)
        try:
            wire.socket.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
            told, data, files = wire.receive()
            wire.socket.settimeout(self._timeout)
            if told["kind"] != "begin":
                raise OSError(told.get("why", f"it said {told['kind']!r}"))
            if told["digest"] != message_digest(data):
                raise ValueError("its announcement is not the one that was sent")
            announcement = Announcement.from_bytes(data)
            if not files or told["slots"] < 1 or told["slot"] < announcement.largest:
                raise ValueError(
                    f"{told['slots']} slots of {told['slot']} bytes in {len(files)} files, for buckets of "
                    f"{announcement.largest}"
                )
            return _IncomingViews(announcement, wire, Ring.attach(files[0], told["slot"], told["slots"]))
        except (OSError, ValueError, OverflowError) as error:
            self.close()
            raise WeightStreamError(
                f"{self._address}: the sender did not announce a version ({_text(error)}); see whether the trainer "
                "runs, and receive again"
            ) from None

    def _accept(self, incoming: Incoming) -> None:
        assert self._wire is not None
        try:
            self._wire.send({"kind": "accepted"})
        except OSError as error:
            self.close()
            raise incoming.broken(f"the sender is gone ({_text(error)}) before it heard that all came") from None

    def _refuse(self, incoming: Incoming, error: BaseException) -> None:
        if self._wire is not None:
            with suppress(OSError):
                self._wire.send({"kind": "refused", "why": f"{type(error).__name__}: {error}"})
        self.close()


class _IncomingViews(Incoming):
    def __init__(self, announcement: Announcement, wire: Wire, ring: Ring) -> None:
        super().__init__(announcement)
        self._wire, self._ring = wire, ring
        self._digests: list[int] = []

    def _next(self) -> dict[str, Tensor]:
        told = self._hear("bucket")
        records = self.announcement.buckets[self.came]
        memory = self._ring.memory(self.came % self._ring.slots)[: room_of(records)]
        digest = bytes_digest(memory)
        if (told["number"], told["digest"]) != (self.came, digest):
            raise self.broken(f"the bytes of bucket {self.came + 1} are not those that were sent")
        self._digests.append(digest)
        return dict(views(records, memory))

    def _finish(self) -> None:
        told = self._hear("end")
        if (told["buckets"], told["digest"]) != (self.came, digest_of_all(self._digests)):
            raise self.broken(f"the sender says that it sent {told['buckets']} buckets, or others")

    def _hear(self, kind: str) -> dict[str, Any]:
        """The sender's next word; what came before it is done with."""
        try:
            if self.came:
                with suppress(BrokenPipeError):  # what it said before it went can still be read
                    self._wire.send({"kind": "free", "done": self.came})
            told, _, _ = self._wire.receive()
        except OSError as error:
            raise self.broken(f"the sender is gone or late ({_text(error)})") from None
        if told["kind"] == "abort":
            raise self.broken(f"the sender gave up ({told['why']})")
        if told["kind"] != kind:
            raise self.broken(f"the sender said {told['kind']!r} instead of {kind!r}")
        return told


def _listen(address: Path, receivers: int) -> socket.socket:
    if len(os.fsencode(address)) > LONGEST_PATH:
        raise ValueError(f"{address}: longer than the {LONGEST_PATH} bytes that a socket's path may have")
    if not address.absolute().parent.is_dir():
        raise FileNotFoundError(f"{address.absolute().parent}: no such directory; create it first")
    if address.is_socket():  # of a sender that died, unless somebody answers
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(os.fspath(address)) == 0:
                raise FileExistsError(f"{address}: another sender listens there; choose another address")
        address.unlink()
    elif address.exists():
        raise FileExistsError(f"{address} exists already, and is no socket; choose another address")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(address))
    listener.listen(receivers)
    return listener


def _connect(address: Path, deadline: float | None, timeout: float) -> Wire:
    """A connection to the sender, as soon as it listens."""
    while True:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.connect(os.fspath(address))
        except (FileNotFoundError, ConnectionRefusedError):
            connected.close()
        else:
            wire = Wire(connected, timeout)
            wire.send({"kind": "hello"})
            return wire
        if deadline is not None and time.monotonic() > deadline:
            raise WeightStreamError(f"{address}: no sender listens there; start the trainer first, or wait for longer")
        time.sleep(0.02)


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
