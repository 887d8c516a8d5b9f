"""The recorder (tape.c) from Python: what was done to files, errors on demand, and processes held at each call.

Works in a process that was started with the compiled library in LD_PRELOAD (`environment`), and in its forks.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import hashlib
import os
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("tape.c")
ROOM = 1 << 28  # bytes of the log; taken when they are written
RECORD = struct.Struct("4i2q")  # as in tape.c
ACTORS = 8


class Op(enum.IntEnum):
    """What is written down; the order of tape.c."""

    CREATE = 0
    TRUNCATE = 1
    WRITE = 2
    SYNC = 3
    RENAME = 4
    LINK = 5
    UNLINK = 6
    MKDIR = 7
    RMDIR = 8
    MARK = 9
    STRANGE = 10


class Break(enum.IntEnum):
    """How calls fail, from call `at` on or only there. Reads and writes may also do half of what they are asked for."""

    NEVER = 0
    ONCE = 1
    HALF_ONCE = 2
    HALF_ALWAYS = 3
    FULL = 4  # from then on whatever takes room
    DEAD = 5  # from then on everything


class State(enum.IntEnum):
    FREE = 0
    RUNNING = 1
    WAITING = 2
    DONE = 3


@dataclass(frozen=True)
class Record:
    """One call. path: of the file, the old name, or the text of a mark. other: the new name. inode: of a file."""

    op: Op
    path: str
    other: str = ""
    inode: int = 0
    offset: int = 0  # of a write; the new size of a truncation
    data: bytes = b""


def compiled() -> Path:
    """The library, compiled once for this source and user."""
    name = hashlib.blake2b(SOURCE.read_bytes(), digest_size=8).hexdigest()
    directory = Path(tempfile.gettempdir()) / f"tape-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    library = directory / f"{name}.so"
    if not library.exists():
        begun = library.with_suffix(f".{os.getpid()}")
        command = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(begun), str(SOURCE), "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
        begun.replace(library)
    return library


def environment() -> dict[str, str]:
    """For a process that is to have the recorder."""
    return os.environ | {"LD_PRELOAD": str(compiled()), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)  # what is preloaded
    library.tape_begin.restype = ctypes.c_void_p
    library.tape_begin.argtypes = [ctypes.c_char_p, ctypes.c_long]
    library.tape_seed.argtypes = [ctypes.c_long]
    library.tape_break.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_int]
    library.tape_path.restype = ctypes.c_char_p
    for name in ("used", "calls", "broken"):
        getattr(library, f"tape_{name}").restype = ctypes.c_long
    return library


def seed_names(seed: int) -> None:
    """While a tape is watching, random names follow from this."""
    _library().tape_seed(seed)


class Tape:
    """What happens below a directory, as long as `watching` is open. One at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record, from nothing on, what this process and its forks do."""
        self._log = _library().tape_begin(os.fsencode(self.root), ROOM)
        assert self._log, "no memory for the log"
        try:
            yield
        finally:
            _library().tape_end()

    def mark(self, text: str) -> None:
        _library().tape_mark(text.encode())

    def broken_by(self, kind: Break, at: int = 0, error: int = 0) -> None:
        """From now on; `at` counts from here."""
        _library().tape_break(kind, at, error)

    @property
    def calls(self) -> int:
        return int(_library().tape_calls())

    @property
    def broken(self) -> int:
        """How many calls were broken."""
        return int(_library().tape_broken())

    def records(self) -> list[Record]:
        """All so far; paths relative to the root."""
        raw, found, at = ctypes.string_at(self._log, _library().tape_used()), [], 0
        prefix = len(os.fsencode(self.root)) + 1
        while at < len(raw):
            op, first, second, whole, inode, offset = RECORD.unpack_from(raw, at)
            begin, op = at + RECORD.size, Op(op)
            texts = raw[begin : begin + first], raw[begin + first : begin + first + second]
            at += whole
            if op is Op.WRITE:
                found.append(Record(op, "", inode=inode, offset=offset, data=texts[0]))
                continue
            cut = 0 if op in (Op.MARK, Op.STRANGE) else prefix
            path, other = (os.fsdecode(text[cut:]) for text in texts)
            found.append(Record(op, path, other, inode, offset))
        return found


# -- actors: forks that wait at each call ------------------------------------------------------------------------------


def become_actor(number: int) -> None:
    """In a fork: from now on it waits for `grant` in front of each call."""
    _library().tape_actor(number)


def leave_stage() -> None:
    """In a fork: its part is over."""
    _library().tape_done()


def gate(*, on: bool) -> None:
    """Whether actors wait."""
    _library().tape_gate(int(on))


def state(number: int) -> State:
    return State(_library().tape_state(number))


def asked(number: int) -> str:
    """The file whose call an actor waits with."""
    return os.fsdecode(_library().tape_path(number))


def grant(number: int, seconds: int = 120) -> None:
    """Let an actor make its call, and wait until it comes to the next one or is done."""
    _library().tape_go(number)
    arrived(seconds)


def arrived(seconds: int = 120) -> None:
    """Wait until one actor more is at the gate or done."""
    if _library().tape_wait(seconds):
        raise TimeoutError(f"no actor came to a file operation within {seconds} s")
