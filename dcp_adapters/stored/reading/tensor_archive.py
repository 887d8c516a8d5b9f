"""Read what the archive of a stored tensor says it holds, before its elements are read.

A chunk is what torch.save writes: a zip file with a small pickle that describes the tensor, and its bytes as a record.
torch.load(weights_only=True) runs nothing, but it unpacks compressed records and builds whatever the pickle describes.
Here the description alone is read: a plain strided tensor whose elements all lie in one uncompressed record.

What `read_header` makes of a chunk depends on the chunk's length and on the bytes that it looked at: zip directory,
the small records and the headers of records, a kilobyte at both ends. Weights of repeated layers differ in their
elements alone, at which it does not look. So `Headers` keeps these bytes, and a chunk of the same length that has the
same ones at the same places has the same header; each end is read once for that. (Archives with CRC32s of their
elements differ in the directory, and each is read; but what describes the tensor is interpreted once.)
"""

import io
import math
import os
import struct
import sys
import zipfile
from dataclasses import dataclass, replace
from typing import IO, Any

import torch

from dcp_adapters.stored.reading.metadata_names import DTYPES, Function
from dcp_adapters.stored.reading.plain_pickle import read_plain

LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, .., lengths of the name and of the extra field
MOST = 4  # headers that are kept of one length; archives that are all different would be compared with all of them
NEAR = 4096  # bytes between pieces that are read along with them
MOST_DESCRIPTION = 65536  # bytes; a tensor of 64 dims takes a tenth of it
# The classes that stand for a storage of one dtype; other dtypes have an UntypedStorage and name themselves.
STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,  # counted in bytes
}

Pieces = list[tuple[int, bytes]]  # where in the chunk, and what is there
Reads = list[tuple[int, int, Pieces]]  # where in the chunk and how much to read, and pieces, counted from there


@dataclass(frozen=True)
class Header:
    """A plain tensor.

    Attributes:
        record, stored: the record in which its elements lie, and its length in bytes.
        first: the byte of the record where they begin, if they lie there contiguously; None otherwise.
        record_start: the byte of the archive where the record begins.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    record: str
    stored: int
    first: int | None
    record_start: int = 0

    def __str__(self) -> str:
        """Dtype and shape."""
        return f"{self.dtype} {self.shape}"


class FileSlice(io.RawIOBase):
    """`length` bytes of an open file from `offset` on, as a read-only file of its own (which does not close it)."""

    def __init__(self, stream: IO[bytes], offset: int, length: int) -> None:
        self.stream, self.start, self.length, self.at = stream, offset, length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position in the slice (or behind its end, where nothing is read)."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}, before the beginning")
        self.at = base + offset
        return self.at

    def read(self, size: int | None = -1) -> bytes:
        """Read at most `size` bytes from the position, without making room for more than there are."""
        left = max(0, self.length - self.at)
        return super().read(left if size is None or size < 0 else min(size, left)) or b""

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer from the position, up to the end of the slice or of the file."""
        room = memoryview(buffer)[: max(0, self.length - self.at)]
        self.stream.seek(self.start + self.at)
        filled = 0
        # A file without a buffer may give less than it is asked for.
        while filled < len(room):
            count: int = self.stream.readinto(room[filled:])  # type: ignore[attr-defined]
            if not count:
                break
            filled += count
        self.at += filled
        return filled


def read_header(chunk: FileSlice, what: str, described: dict[bytes, Header] | None = None) -> Header:
    """What a chunk holds. Leaves the chunk at its beginning. `described`: what is known of descriptions, kept in it.

    Raises:
        ValueError: it is no archive as torch.save writes it, is compressed, or describes anything but one plain tensor
            that its bytes make up. `what` names it.
    """
    try:
        with zipfile.ZipFile(chunk) as archive:
            records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
            _check_records(archive.infolist(), records, chunk.length)
            data, order = _contents(archive, records["data.pkl"]), _contents(archive, records.get("byteorder"))
            # torch.load would turn the bytes around; direct reads take them as they are.
            if order not in (b"", sys.byteorder.encode()):
                raise ValueError(f"its bytes are in the order {order[:20]!r}, expected {sys.byteorder.encode()!r}")
    except Exception as error:  # damaged archives raise errors of all kinds
        kind = "" if type(error) in (ValueError, zipfile.BadZipFile) else f"{type(error).__name__}: "
        raise ValueError(f"{what}: no archive of a tensor: {kind}{error}; use another checkpoint") from error
    header = None if described is None else described.get(data)
    if header is None:
        header = read_plain(data, what, names=NAMES, storage=_storage)
    if type(header) is not Header:
        raise ValueError(f"{what}: it holds a {type(header).__name__}, expected a tensor; use another checkpoint")
    if described is not None:
        described[data] = header
    record = records.get(f"data/{header.record}")
    if record is None or record.file_size < header.stored:
        held = 0 if record is None else record.file_size
        raise ValueError(f"{what}: a tensor of {header.stored} bytes in a record of {held}; use another checkpoint")
    try:
        start = record_start(chunk, record)
    except ValueError as error:
        raise ValueError(f"{what}: no archive of a tensor: {error}; use another checkpoint") from error
    chunk.seek(0)
    return replace(header, record_start=start)


class Headers:
    """The headers that one reader has read."""

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[Reads, Header]]] = {}  # by the length of the chunk
        self._described: dict[bytes, Header] = {}  # by the pickle that describes the tensor

    def read(self, stream: IO[bytes], offset: int, length: int, what: str) -> Header:
        """What the chunk of an open file holds. Raises ValueError as `read_header`."""
        known = self._known.setdefault(length, [])
        for reads, header in known:
            if _has(stream, offset, reads):
                return header
        chunk = _Watched(stream, offset, length)
        header = read_header(chunk, what, self._described)
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


def _has(stream: IO[bytes], offset: int, reads: Reads) -> bool:
    """Whether these pieces stand in the chunk at `offset`."""
    for start, count, pieces in reads:
        stream.seek(offset + start)
        held = stream.read(count)
        if any(held[at : at + len(data)] != data for at, data in pieces):
            return False
    return True


def record_start(chunk: FileSlice, record: zipfile.ZipInfo) -> int:
    """Find where in a chunk an uncompressed record's bytes begin.

    The directory of a zip file says where a record's header is; only the header itself says how long it is.

    Raises:
        ValueError: there is no header, or the record ends behind the chunk.
    """
    chunk.seek(record.header_offset)
    raw = chunk.read(LOCAL_HEADER.size)
    if len(raw) != LOCAL_HEADER.size or not raw.startswith(b"PK\x03\x04"):
        raise ValueError("a record without a header")
    _, name, extra = LOCAL_HEADER.unpack(raw)
    start = record.header_offset + LOCAL_HEADER.size + int(name) + int(extra)
    if start + record.file_size > chunk.length:
        raise ValueError(f"a record of {record.file_size} bytes from {start} on, in a chunk of {chunk.length}")
    return start


def _contents(archive: zipfile.ZipFile, record: zipfile.ZipInfo | None) -> bytes:
    """Read the bytes of a small record; b"" if there is none."""
    if record is None:
        return b""
    # torch.serialization.set_crc32_options(False) writes 0 for all of them, and zipfile would take that for damage.
    if record.CRC == 0:
        record.CRC = None  # type: ignore[assignment] # zipfile then compares nothing
    return archive.read(record)


def _check_records(records: list[zipfile.ZipInfo], by_name: dict[str, zipfile.ZipInfo], length: int) -> None:
    """Raise unless the records lie in one directory, uncompressed, and take no more bytes than the archive."""
    if len(by_name) != len(records) or len({record.filename.partition("/")[0] for record in records}) != 1:
        raise ValueError("records are listed twice, or lie in several directories")
    if "constants.pkl" in by_name:
        raise ValueError("it is a TorchScript program")
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError("records are compressed; DCP stores tensors as they are")
    small = [by_name["data.pkl"].file_size, *(by_name[name].file_size for name in {"byteorder"} & by_name.keys())]
    if sum(record.file_size for record in records) > length or max(small) > MOST_DESCRIPTION:
        raise ValueError(f"records claim more than the {length} bytes that there are")


# -- the description ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    record: str
    count: int


def _storage(reference: Any) -> _Storage:
    """Parse a persistent id: ("storage", class, record, device, number of elements)."""
    if type(reference) is not tuple or len(reference) != 5 or reference[0] != "storage":
        raise ValueError("a persistent id that is no storage")
    _, kind, record, device, count = reference
    if type(kind) is not _StorageClass or type(record) is not str or type(device) is not str:
        raise ValueError("a storage without class, record and device")
    if type(count) is not int or not 0 <= count < 2**63:
        raise ValueError("a storage whose length is no count")
    return _Storage(kind.dtype, record, count)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Header:
    """Stand for torch's _rebuild_tensor_v2 and _v3; only _v3 takes a dtype, after requires_grad and hooks."""
    dtypes = [value for value in rest if isinstance(value, torch.dtype)]
    if type(storage) is not _Storage or type(shape) is not tuple or type(strides) is not tuple:
        raise ValueError("a tensor without storage, shape and strides")
    if len(shape) != len(strides) or any(type(n) is not int or not 0 <= n < 2**63 for n in (offset, *shape, *strides)):
        raise ValueError("a tensor whose shape, strides and offset are no counts")
    dtype = dtypes[0] if dtypes else storage.dtype
    stored, elements = storage.count * storage.dtype.itemsize, math.prod(shape)
    last = offset + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    # `elements`, too: strides of 0 would make a tensor of any size from one element, and loads take memory for it.
    if elements and (max(last + 1, elements) * dtype.itemsize > stored):
        raise ValueError(f"a tensor of {elements} elements of {dtype} in a storage of {stored} bytes")
    marked = any(isinstance(value, dict) and value for value in rest)  # conjugate or negative bits
    contiguous = not marked and (not elements or _is_contiguous(shape, strides))
    return Header(dtype, shape, storage.record, stored, offset * dtype.itemsize if contiguous else None)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Tell whether elements follow each other in logical order; the stride of a dim of one element says nothing."""
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def _refuse_hooks(*arguments: Any) -> dict[str, Any]:
    """Stand for the OrderedDict of backward hooks, which must be empty."""
    if arguments:
        raise ValueError("backward hooks")
    return {}


@dataclass(frozen=True)
class _StorageClass:
    dtype: torch.dtype


NAMES: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): Function(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): Function(_tensor),
    ("collections", "OrderedDict"): Function(_refuse_hooks),
    **{("torch", name): _StorageClass(dtype) for name, dtype in STORAGES.items()},
    ("torch.storage", "UntypedStorage"): _StorageClass(STORAGES["UntypedStorage"]),
    **DTYPES,
}
