"""What comes over a socket or a process group: announcements, words of the sender and of receivers, buckets, deltas."""

from __future__ import annotations

import datetime as dt
import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import torch
import xxhash
from torch import Tensor

from dcp_adapters import GroupReceiver, SharedMemoryReceiver, SharedMemorySender
from dcp_adapters.delta.make import delta_between
from dcp_adapters.delta.stored_states import InMemory
from dcp_adapters.streams.announcement import Announcement
from dcp_adapters.streams.buckets import TensorRecord, bucket_sizes, buckets_of, fill, room_of
from dcp_adapters.streams.transport import bytes_digest, digest_of_all, send_delta
from tests.adversary.bytes_read.changes import EXTREMES, as_text, changed_bytes, changed_json
from tests.adversary.bytes_read.outcomes import Case, facts
from tests.dcp_adapters.cases import values

HEAD = struct.Struct("<QQ")
JSON = {"config.json": {"model_type": "tiny", "layers": [1, 2]}}
SOON = 0.5  # seconds
Message = tuple[Any, bytes]  # JSON, the bytes behind it
BEGIN, BUCKET, END = range(3)


def tensors() -> dict[str, Tensor]:
    """What is sent."""
    return {
        "a.weight": values((8, 32), 1).to(torch.float8_e4m3fn),
        "a.weight_scale": values((8, 1), 2, torch.float32),
        "b.bias": values((33,), 3),
        "count": torch.tensor(7),
    }


class Streams:
    """One version of four tensors in several buckets, as both transports send it."""

    def __init__(self, root: Path) -> None:
        self.address = root / "weights"
        self.tensors = tensors()
        self.records = tuple(
            TensorRecord(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()
        )
        self.sizes = bucket_sizes(self.records, 300)
        self.announcement = Announcement(1, self.records, self.sizes, JSON)
        self.buckets = []
        for records in buckets_of(self.records, self.sizes):
            memory = torch.zeros(room_of(records), dtype=torch.uint8)
            fill(records, self.tensors, memory)
            self.buckets.append(memory)
        self.expected = facts(self.tensors)

    def scenario(self, rng: Random) -> str:
        """One mutant of what one side hears."""
        kinds: dict[str, Callable[[Random], str]] = {
            "announcement": self._announced,
            "receiver": self._received,
            "sender": self._sent,
            "group": self._in_a_group,
            "delta": self._delta_in_a_group,
        }
        kind = rng.choice(list(kinds))
        return f"{kind} {kinds[kind](rng)}"

    def _changed_announcement(self, rng: Random, told: list[str]) -> bytes:
        data = self.announcement.to_bytes()
        if rng.random() < 0.3:
            return changed_bytes(rng, data, told)
        return as_text(changed_json(rng, json.loads(data), told)).encode(errors="surrogatepass")

    def _announced(self, rng: Random) -> str:
        case = Case([], ("announcement",), forged=True)
        data = self._changed_announcement(rng, case.told)

        def read() -> Any:
            found = Announcement.from_bytes(data)
            assert found.nbytes >= 0
            assert found.largest >= 0
            return Announcement.from_bytes(found.to_bytes()) == found

        return case.read("Announcement", read, None)

    # -- shared memory -------------------------------------------------------------------------------------------------

    def _received(self, rng: Random) -> str:
        """A receiver hears a sender whose words are not those of the protocol."""
        case = Case([], ("weights",))
        slot = max(memory.numel() for memory in self.buckets)
        digests = [bytes_digest(memory) for memory in self.buckets]
        begin = {"kind": "begin", "slots": len(self.buckets), "slot": slot}
        announcement = self.announcement.to_bytes()
        messages: list[Message] = [(begin | {"digest": _digest(announcement)}, announcement)]
        messages += [({"kind": "bucket", "number": at, "digest": digest}, b"") for at, digest in enumerate(digests)]
        messages.append(({"kind": "end", "buckets": len(digests), "digest": digest_of_all(digests)}, b""))
        if rng.random() < 0.3:
            case.forged = True  # nothing but the sender says what the tensors are
            announcement = self._changed_announcement(rng, case.told)
            messages[0] = (begin | {"digest": _digest(announcement)}, announcement)
        else:
            _change(rng, messages, case.told)
        data = _written(rng, messages, case.told)
        file = os.memfd_create("mutant")
        held = b"".join(memory.numpy().tobytes().ljust(slot, b"\0") for memory in self.buckets)
        if rng.random() < 0.1:
            held = changed_bytes(rng, held, case.told)
        os.write(file, held)
        files = [] if rng.random() < 0.03 else [file]
        try:
            with _listener(self.address) as listener, _in_thread(lambda: _tell(listener, data, files)):
                return case.read("SharedMemoryReceiver", self._take, self.expected)
        finally:
            os.close(file)

    def _take(self) -> dict[str, Any]:
        with SharedMemoryReceiver(self.address, timeout=SOON, patience=SOON) as receiver:
            return _taken(receiver)

    def _sent(self, rng: Random) -> str:
        """A sender hears receivers whose words are not those of the protocol."""
        case = Case([], ("weights",))
        messages: list[Message] = [({"kind": "hello"}, b"")]
        messages += [({"kind": "free", "done": at}, b"") for at in range(1, len(self.buckets) + 1)]
        messages.append(({"kind": "accepted"}, b""))
        _change(rng, messages, case.told)
        data = _written(rng, messages, case.told)
        case.forged = True  # a receiver that says that it accepts is believed

        def send() -> None:
            with (
                SharedMemorySender(self.address, timeout=SOON) as sender,
                closing(socket.socket(socket.AF_UNIX)) as receiver,
            ):
                receiver.connect(os.fspath(self.address))
                receiver.sendall(data)
                receiver.shutdown(socket.SHUT_WR)
                sender.begin(self.announcement)
                for records in self.announcement.buckets:
                    sender.bucket({record.name: self.tensors[record.name] for record in records})
                sender.end()

        return case.read("SharedMemorySender", send, None)

    # -- a process group -----------------------------------------------------------------------------------------------

    def _in_a_group(self, rng: Random) -> str:
        """A receiver of a group hears other numbers and bytes."""
        case = Case([], ("weights", "announce"))
        digests = [bytes_digest(memory) for memory in self.buckets]
        announcement = self.announcement.to_bytes()
        if rng.random() < 0.4:
            case.forged = True
            announcement = self._changed_announcement(rng, case.told)
        said: list[Any] = [[BEGIN, len(announcement), _digest(announcement)], announcement]
        for at, (digest, memory) in enumerate(zip(digests, self.buckets, strict=True)):
            said += [[BUCKET, at, digest], memory.numpy().tobytes()]
        said.append([END, len(digests), digest_of_all(digests)])
        for _ in range(0 if case.forged else rng.choice((1, 1, 2))):
            at = rng.randrange(len(said))
            kind = rng.choice(("numbers", "numbers", "bytes", "left out", "twice"))
            case.told.append(f"{kind} of message {at}")
            if kind == "left out":
                del said[at]
            elif kind == "twice":
                said.insert(at, said[at])
            elif isinstance(said[at], list):
                place = rng.randrange(3)
                now = said[at][place]
                told = (*(kind for kind in range(-1, 5)), now + 1, now - 1, rng.choice(EXTREMES))
                said[at] = [*said[at][:place], rng.choice(told) % 2**63, *said[at][place + 1 :]]
            else:
                said[at] = changed_bytes(rng, said[at], case.told)
        return case.read("GroupReceiver", lambda: _taken(GroupReceiver(_Group(said), timeout=SOON)), self.expected)

    def _delta_in_a_group(self, rng: Random) -> str:
        """A delta comes, and its bytes are others, with a digest that fits."""
        case = Case([], ("delta", "weights"), forged=True)
        sent = _Sent()
        old, new = InMemory({"w": values((33,), 1)}), InMemory({"w": values((33,), 2)})
        send_delta(sent, delta_between(old, new, versions=(3, 4)))
        assert sent.announcement is not None
        data = changed_bytes(rng, sent.data, case.told)
        announcement = Announcement.of_delta(4, 3, len(data)).to_bytes()
        memory = torch.zeros(-(-len(data) // 64) * 64, dtype=torch.uint8)
        memory[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else memory[:0]
        digest = bytes_digest(memory) if memory.numel() else 0
        said: list[Any] = [[BEGIN, len(announcement), _digest(announcement)], announcement]
        said += [[BUCKET, 0, digest], memory.numpy().tobytes(), [END, 1, digest_of_all([digest])]]

        def take() -> Any:
            with GroupReceiver(_Group(said), timeout=SOON).receive() as weights:
                found = weights.delta()
            found.check()
            return found

        return case.read("Incoming.delta", take, None)


class _Sent:
    """A sender that keeps what it is to send."""

    announcement: Announcement | None = None
    data = b""

    def begin(self, announcement: Announcement) -> None:
        self.announcement = announcement

    def bucket(self, tensors: Any) -> None:
        self.data = tensors["delta"].numpy().tobytes()

    def end(self) -> None:
        """That was all."""


class _Group:
    """A group of two in which the other rank says what it was told to say; then it is gone."""

    def __init__(self, said: list[Any]) -> None:
        self.said = list(said)

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2

    def name(self) -> str:
        return "gloo"

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        assert options.timeout <= dt.timedelta(days=30)
        tensor = tensors[0]
        if options.rootRank == self.rank():
            return self
        if tensor.numel() == 1024 and not self.said:  # the sender's answer
            tensor.zero_()
            return self
        if not self.said:
            raise RuntimeError("Connection closed by peer")
        said = self.said.pop(0)
        data = (
            torch.tensor(said)
            if isinstance(said, list)
            else torch.frombuffer(bytearray(said or b"\0"), dtype=torch.uint8)
        )
        if data.numel() * data.itemsize != tensor.numel() * tensor.itemsize:
            raise RuntimeError("op.preamble.length <= op.nbytes: a message of another size")
        tensor.copy_(data.view(tensor.dtype) if data.dtype != tensor.dtype else data)
        return self

    def wait(self) -> None:
        """Done already."""


def _digest(data: bytes) -> int:
    """As the wire has it."""
    return int(xxhash.xxh3_64_intdigest(data)) & (2**63 - 1)


def _taken(receiver: Any) -> dict[str, Any]:
    found: dict[str, Tensor] = {}
    with receiver.receive() as weights:
        for bucket in weights:
            found |= {name: tensor.clone() for name, tensor in bucket.items()}
    return facts(found)


def _change(rng: Random, messages: list[Message], told: list[str]) -> None:
    """Other words, or words in another order."""
    at = rng.randrange(len(messages))
    kind = rng.choice(("words", "words", "words", "left out", "twice", "swapped", "abort", "bytes behind it"))
    told.append(f"{kind} of message {at}")
    words, data = messages[at]
    if kind == "words":
        messages[at] = (changed_json(rng, words, told), data)
    elif kind == "left out":
        del messages[at]
    elif kind == "twice":
        messages.insert(at, messages[at])
    elif kind == "swapped":
        other = rng.randrange(len(messages))
        messages[at], messages[other] = messages[other], messages[at]
    elif kind == "abort":
        messages[at] = (changed_json(rng, {"kind": "abort", "why": "x"}, told), b"")
    else:
        messages[at] = (words, rng.randbytes(9))


def _written(rng: Random, messages: list[Message], told: list[str]) -> bytes:
    """As the socket carries it; sometimes with other lengths or bytes."""
    data = b""
    for words, behind in messages:
        text = as_text(words).encode(errors="surrogatepass")
        data += HEAD.pack(len(text), len(behind)) + text + behind
    return changed_bytes(rng, data, told) if rng.random() < 0.2 else data


def _listener(address: Path) -> Any:
    listener = socket.socket(socket.AF_UNIX)
    address.unlink(missing_ok=True)
    listener.bind(os.fspath(address))
    listener.listen(1)
    listener.settimeout(10)
    return closing(listener)


def _tell(listener: socket.socket, data: bytes, files: list[int]) -> None:
    with suppress(OSError):
        connected, _ = listener.accept()
        with closing(connected):
            sent = socket.send_fds(connected, [data[:16]], files) if data else 0
            connected.sendall(data[sent:])
            connected.shutdown(socket.SHUT_WR)
            connected.settimeout(10)
            while connected.recv(4096):
                pass


class _in_thread:  # noqa: N801 - used like a function
    def __init__(self, step: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=step)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join(30)
