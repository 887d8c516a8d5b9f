"""Headers of many archives: those that are written alike are read once, and recognised by their bytes.

What `read_header` makes of a chunk depends on the chunk's length and on the bytes that it looked at: zip directory,
the small records and the headers of records, a kilobyte at both ends. Weights of repeated layers differ in their
elements alone, at which it does not look. So these bytes are kept, and a chunk of the same length that has the same
ones at the same places has the same header; each end is read once for that. (Archives with CRC32s of their elements
differ in the directory, and each is read.)
"""

from typing import IO, Any

from dcp_adapters.stored.reading.tensor_archive import FileSlice, Header, read_header

MOST = 4  # of one length; archives that are all different would be compared with all of them

NEAR = 4096  # bytes between pieces that are read along with them

Pieces = list[tuple[int, bytes]]  # where in the chunk, and what is there
Reads = list[tuple[int, int, Pieces]]  # where in the chunk and how much to read, and pieces, counted from there


class Headers:
    """The headers that one reader has read."""

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[Reads, Header]]] = {}  # by the length of the chunk

    def read(self, stream: IO[bytes], offset: int, length: int, what: str) -> Header:
        """What the chunk of an open file holds. Raises ValueError as `read_header`."""
        known = self._known.setdefault(length, [])
        for reads, header in known:
            if _has_pieces(stream, offset, reads):
                return header
        chunk = _Watched(stream, offset, length)
        header = read_header(chunk, what)
        if len(known) < MOST:
            known.append((_reads(chunk.pieces()), header))
        return header


class _Watched(FileSlice):
    """A slice that keeps what is read of it."""

    def __init__(self, stream: IO[bytes], offset: int, length: int) -> None:
        super().__init__(stream, offset, length)
        self.seen: dict[int, bytes] = {}

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer from the position, up to the end of the slice."""
        at = self.at
        count = super().readinto(buffer)
        if count > len(self.seen.get(at, b"")):
            self.seen[at] = bytes(memoryview(buffer)[:count])
        return count

    def pieces(self) -> Pieces:
        """All that was read, in order; what follows each other is one piece."""
        found: Pieces = []
        for at, data in sorted(self.seen.items()):
            start, held = found[-1] if found else (0, b"")
            if found and at <= start + len(held):
                found[-1] = start, held[: at - start] + data + held[at - start + len(data) :]
            else:
                found.append((at, data))
        return found


def _reads(pieces: Pieces) -> Reads:
    """The reads that give all pieces, the last first: most differ in the directory."""
    found: Reads = []
    for at, data in pieces:
        if found and at - sum(found[-1][:2]) <= NEAR:
            start, _, near = found[-1]
            found[-1] = start, at + len(data) - start, [*near, (at - start, data)]
        else:
            found.append((at, len(data), [(0, data)]))
    return found[::-1]


def _has_pieces(stream: IO[bytes], offset: int, reads: Reads) -> bool:
    """Whether these pieces stand in the chunk at `offset`."""
    for start, count, pieces in reads:
        stream.seek(offset + start)
        held = stream.read(count)
        if any(held[at : at + len(data)] != data for at, data in pieces):
            return False
    return True
