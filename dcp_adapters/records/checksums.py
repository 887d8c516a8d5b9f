"""Checksums of what a checkpoint stores, made by the ranks that write, while they write (save/steps/checksum_table.py).

    qtensor.checksums: uint8 [chunks, 16]    a row: xxh3_64("name@offset") | xxh3_64(the chunk's bytes)

Every stored chunk of a tensor and every byte entry has a row, except for the table itself; a rank's rows are one chunk
of the table. Digests are canonical (big-endian). "name@offset" is `model.w.payload@128,0`: the entry, and where
its chunk begins in the global tensor; nothing follows the @ of a 0-dim tensor or of a byte entry. For a tensor
chunk the bytes are those of the contiguous tensor, for a byte entry those in the file. A tensor of another library's
class, whose elements only that class knows, is stored as the archive that torch.save writes: its row digests the
archive, under the key "name@offset as archive". Only `verify` compares such a row, since readers hand out what the
class makes of the archive.

xxh3 runs at the speed of memory, several times faster than the CRC32 which zip files carry beside it.
"""

import io
import threading
from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_adapters.plain.plain_memory import elements_of, is_plain, memory_of

CHECKSUMS = "qtensor.checksums"
ROW = 16  # bytes: 8 that say which chunk, 8 of its data


def chunk_key(index: MetadataIndex, *, archive: bool = False) -> bytes:
    """Digest what names a chunk: its entry, its offset, and whether it is stored as an archive; 8 bytes."""
    offset = ",".join(map(str, index.offset or ()))
    return xxhash.xxh3_64_digest(f"{index.fqn}@{offset}{' as archive' if archive else ''}".encode())


def digest_of(data: Tensor | io.BytesIO) -> bytes:
    """Digest a plain CPU tensor's elements in logical order, or a byte entry: 8 bytes.

    Raises:
        ValueError: it is no plain tensor, or its storage was freed.
    """
    if isinstance(data, io.BytesIO):
        return xxhash.xxh3_64_digest(data.getbuffer())
    found = elements_of(data)
    return xxhash.xxh3_64_digest(memory_of(data) if found is None else found[1])


def row_of(index: MetadataIndex, data: Tensor | io.BytesIO) -> tuple[bytes, bytes] | None:
    """The row of a chunk: of a CPU tensor, or a byte entry; None for a tensor that is not plain.

    Raises:
        ValueError: its storage was freed.
    """
    if isinstance(data, io.BytesIO):
        return chunk_key(index), digest_of(data)
    try:
        found = elements_of(data)
    except ValueError as error:
        raise ValueError(f"{index.fqn}: {error}") from error
    return None if found is None else (chunk_key(index), xxhash.xxh3_64_digest(found[1]))


def archive_row_of(index: MetadataIndex, data: Tensor) -> tuple[bytes, bytes]:
    """The row of a tensor that is not plain: the digest of what torch.save writes of it, which is not kept."""
    sink = _Sink()
    torch.save(data, sink)  # type: ignore[arg-type] # all it takes is write()
    return chunk_key(index, archive=True), sink.hash.digest()


class _Sink:
    """A file that digests what is written, and forgets it."""

    def __init__(self) -> None:
        self.hash = xxhash.xxh3_64()

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is kept back."""


def checksum_table(rows: Iterable[tuple[bytes, bytes]]) -> Tensor:
    """Make the table, uint8 [chunks, 16], of (chunk_key, digest_of) pairs."""
    data = bytearray(b"".join(key + digest for key, digest in rows))
    if not data:
        return torch.empty(0, ROW, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).view(-1, ROW)


def rows_of(table: Tensor) -> Iterator[tuple[bytes, bytes]]:
    """Yield the (chunk_key, digest) pairs of a table, uint8 [chunks, 16]."""
    data = memory_of(table).raw if table.numel() else b""
    for at in range(0, len(data), ROW):
        yield data[at : at + 8], data[at + 8 : at + ROW]


class Verification:
    """Compares chunks that a load reads whole with the checkpoint's table, in whatever order the two arrive."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # readers commit from several threads
        self.outstanding = 0
        self.rows: dict[bytes, bytes] | None = None
        self.waiting: list[tuple[str, MetadataIndex, bytes]] = []

    def expect(self, pieces: int) -> None:
        """Expect a table in this many pieces; 0 if it is empty, and has a row for no chunk."""
        self.outstanding = pieces
        if not pieces:
            self.rows = {}

    def arrived(self, table: Tensor) -> None:
        """Take note that a piece of the table has been read; with the last one, the waiting chunks are compared."""
        with self.lock:
            self.outstanding -= 1
            if self.outstanding:
                return
            self.rows = dict(rows_of(table))
            waiting, self.waiting = self.waiting, []
        for chunk in waiting:
            self._compare(*chunk)

    def saved_checksum(self, index: MetadataIndex) -> bytes | None:
        """Return the checksum of a chunk from the whole table, which must be there; None if it has no row."""
        if self.rows is None:
            raise RuntimeError(
                f"{index.fqn}: the reader read it before the checksums, and a delta needs these first; load with "
                "FileSystemReader or SafeFileSystemReader"
            )
        return self.rows.get(chunk_key(index))

    def see(self, name: str, index: MetadataIndex, data: Tensor | io.BytesIO) -> None:
        """Compare a whole chunk of an entry. Raises RuntimeError if it is not what was saved, or has no row.

        A tensor of another library's class is not compared: what it holds is not what was stored.
        """
        if isinstance(data, Tensor) and not is_plain(data):
            return
        chunk = (name, index, digest_of(data))
        # DCP reads entries in any order, so the table may come after the chunks that it is about.
        with self.lock:
            if self.rows is None:
                self.waiting.append(chunk)
                return
        self._compare(*chunk)

    def _compare(self, name: str, index: MetadataIndex, digest: bytes) -> None:
        assert self.rows is not None
        saved = self.rows.get(chunk_key(index))
        # An archive's row digests the archive, and this is what a class has made of it: only `verify` compares that.
        if saved == digest or (saved is None and chunk_key(index, archive=True) in self.rows):
            return
        where = f" at {tuple(index.offset)}" if index.offset else ""
        held = (
            "has no row in the checksum table" if saved is None else f"has checksum {digest.hex()}, saved {saved.hex()}"
        )
        raise RuntimeError(
            f"{name}: its chunk{where} in the checkpoint {held}; the file is damaged. Some tensors of the target are "
            "loaded already: load another checkpoint, and run `python -m dcp_adapters verify` on this one"
        )
