"""Ask the kernel for the bytes of a load before they are read, so that Python and the disk work at the same time.

A load looks at both ends of every chunk, then reads the chunks. Each of these reads would wait for the disk, which then
waits for the next one. So `WINDOW` bytes are asked for before the first look; whenever some have been read, as many
more are asked for. The ends of chunks that lie beyond the window, or of which only some rows are wanted, are asked for
at the beginning, too.

These are hints. If a system takes none, or a file cannot be opened, reading is as it was and says what is wrong.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

WINDOW = 256 << 20  # bytes that are asked for and not read yet
STEP = 512 << 10  # bytes of one hint; kernels forget what exceeds the largest request of a device
NEAR = 64 << 10  # bytes between two reads that are not worth a hint of their own
END = 4096  # bytes at either end of a chunk that say what it holds; they are a kilobyte each


@dataclass(frozen=True)
class Need:
    """A chunk to be read: its place in a file, and the bytes from `first` to `last` of the file that are read."""

    path: str
    offset: int
    length: int
    first: int
    last: int

    @staticmethod
    def of(path: str, offset: int, length: int, rows: tuple[int, int, int] | None) -> "Need":
        """Need all of a chunk, or `rows`: the first one wanted, the one behind the last, and how many the chunk has.

        The bytes of rows are guessed without a look at the chunk, so they are a few kilobytes too many.
        """
        if rows is None or rows[2] < 1:
            return Need(path, offset, length, offset, offset + length)
        first, last, count = rows
        begin, end = offset + length * first // count - END, offset + length * last // count + END
        return Need(path, offset, length, max(offset, begin), min(offset + length, end))

    @property
    def count(self) -> int:
        """Count the bytes that are read."""
        return self.last - self.first


@dataclass(frozen=True)
class Hint:
    """Bytes of a file to ask for, and how many bytes of `Need`s they stand for."""

    path: str
    begin: int
    end: int
    count: int


def hints(needs: Sequence[Need]) -> Iterator[Hint]:
    """Yield hints for all needs, in their order: of one STEP at most; small ones that lie close together are one."""
    held: Hint | None = None
    for need in needs:
        for begin in range(need.first, need.last, STEP):
            end = min(begin + STEP, need.last)
            if held is not None:
                follows = held.path == need.path and held.begin <= begin <= held.end + NEAR
                if follows and max(end, held.end) - held.begin <= STEP:
                    held = Hint(held.path, held.begin, max(end, held.end), held.count + end - begin)
                    continue
                yield held
            held = Hint(need.path, begin, end, end - begin)
    if held is not None:
        yield held


class ReadAhead:
    """Hints for one load, which reads in this order. A context: it closes the file that it has open."""

    def __init__(self, needs: Sequence[Need]) -> None:
        self.needs = needs
        self._hints = hints(needs)
        self._ahead = 0  # bytes asked for and not read yet
        self._path, self._descriptor = "", -1

    def __enter__(self) -> "ReadAhead":
        """Ask for the first bytes, and for the ends of the chunks that are not among them."""
        self.has_read(0)
        total = 0
        for need in self.needs:
            total += need.count
            if total > WINDOW or need.count < need.length:
                self._ask(need.path, need.offset, min(END, need.length))
                self._ask(need.path, max(need.offset, need.offset + need.length - END), min(END, need.length))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the file."""
        self._close()

    def has_read(self, count: int) -> None:
        """Take note that so many bytes of the needs have been read: ask for as many more."""
        self._ahead -= count
        while self._ahead < WINDOW and (hint := next(self._hints, None)) is not None:
            self._ahead += hint.count
            self._ask(hint.path, hint.begin, hint.end - hint.begin)

    def _ask(self, path: str, begin: int, count: int) -> None:
        if not hasattr(os, "posix_fadvise"):
            return
        with suppress(OSError):
            if path != self._path:
                self._close()
                # O_NONBLOCK: to open a fifo would wait for a writer
                self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                self._path = path
            os.posix_fadvise(self._descriptor, begin, count, os.POSIX_FADV_WILLNEED)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._path, self._descriptor = "", -1
