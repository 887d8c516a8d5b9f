"""What processes of one host share: slots of memory without a name, and a socket for messages of JSON."""

import json
import mmap
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

HEADER = struct.Struct("<QQ")  # bytes of JSON, bytes that follow it
WORDS: Mapping[str, Mapping[str, type]] = {  # kind of message -> what it says
    "hello": {},
    "begin": {"slots": int, "slot": int, "digest": int},
    "bucket": {"number": int, "digest": int},
    "end": {"buckets": int, "digest": int},
    "abort": {"why": str},
    "free": {"done": int},
    "accepted": {},
    "refused": {"why": str},
}


@dataclass
class Ring:
    """Slots in shared memory that both sides have mapped. file: its descriptor."""

    file: int
    slot: int
    slots: int
    _bytes: Tensor = field(repr=False)

    @staticmethod
    def make(slot: int, slots: int) -> "Ring":
        """A new one."""
        if sys.platform == "linux":
            file = os.memfd_create("weights")
        else:
            with tempfile.TemporaryFile() as opened:  # without a name
                file = os.dup(opened.fileno())
        os.ftruncate(file, slot * slots)
        return Ring.attach(file, slot, slots)

    @staticmethod
    def attach(file: int, slot: int, slots: int) -> "Ring":
        """One that the sender made."""
        mapping = mmap.mmap(file, slot * slots)
        return Ring(file, slot, slots, torch.frombuffer(mapping, dtype=torch.uint8))

    def memory(self, number: int) -> Tensor:
        """uint8 [slot], a view."""
        return self._bytes[number * self.slot : (number + 1) * self.slot]

    def __del__(self) -> None:
        os.close(self.file)


class Wire:
    """A connected socket and what its other end has said. done: buckets it is done with."""

    def __init__(self, connected: socket.socket, timeout: float) -> None:
        self.socket = connected
        self.socket.settimeout(timeout)
        self.done, self.accepted = 0, False

    def send(self, told: Mapping[str, Any], data: bytes = b"", files: list[int] | None = None) -> None:
        """One message, with descriptors of files. Raises OSError."""
        text = json.dumps(told).encode()
        head = HEADER.pack(len(text), len(data))
        sent = socket.send_fds(self.socket, [head], files or [])
        self.socket.sendall(head[sent:] + text + data)

    def receive(self) -> tuple[dict[str, Any], bytes, list[int]]:
        """One message, of a kind in WORDS. Raises OSError where the other side is gone, late, or says anything else."""
        head, files, _, _ = socket.recv_fds(self.socket, HEADER.size, 1)
        if not head:
            raise ConnectionResetError("it closed the connection")
        size, more = HEADER.unpack(head + self._receive_exactly(HEADER.size - len(head)))
        told = _parse(self._receive_exactly(size))
        return told, self._receive_exactly(more), files

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _receive_exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self.socket.recv(min(size - len(data), 2**20))
            if not piece:
                raise ConnectionResetError("it closed the connection in the middle of a message")
            data += piece
        return bytes(data)


def _parse(data: bytes) -> dict[str, Any]:
    """The JSON of a message. Raises OSError where it is none: that connection is of no use any more."""
    try:
        told = json.loads(data)
    except (ValueError, RecursionError):
        told = None
    expected = WORDS.get(str(told.get("kind"))) if isinstance(told, dict) else None
    if expected is None or any(type(told.get(name)) is not kind for name, kind in expected.items()):
        raise OSError("it said what no sender or receiver of this version says; let both have the same version")
    return told  # type: ignore[no-any-return]
