"""SafeFileSystemReader: DCP checkpoints from strangers.

Stock FileSystemReader unpickles `.metadata`, so whoever wrote the file runs code in the process that reads it. This one
differs in three places and reads the same checkpoints otherwise:

    read_metadata   interprets the few records DCP writes (plain_pickle.py), then checks that they make sense
                    (metadata_checks.py) before anything uses them
    read_data       looks at a chunk's archive before it is opened: nothing compressed, so that no chunk unfolds into
                    more memory than it has bytes; tells the planner when reading fails
    tensors         are read with torch.load(weights_only=True), as stock does
"""

import io
import os
import stat
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from dcp_adapters.metadata_checks import METADATA, Fault, file_faults, holding_faults, record_faults
from dcp_adapters.plain_pickle import read_plain

__all__ = ["FileSlice", "SafeFileSystemReader", "check_archive", "read_metadata_file"]

MOST_TOLD = 20


class SafeFileSystemReader(FileSystemReader):
    """Reads DCP checkpoints of the local file system without executing anything that a file says.

    Takes the place of `torch.distributed.checkpoint.FileSystemReader`, with the same arguments, in `dcp.load`
    (`storage_reader=`) and `read_manifest`.

    Args:
        path: the checkpoint's directory.
        _extension_registry: as stock's. Chunks that were transformed (compressed) when they were saved are read only
            where it is given: their size is not known before they are unpacked.

    Raises:
        FileNotFoundError: there is no `.metadata`, so the directory is no checkpoint or one whose saving never
            finished; or, while loading, a file is missing.
        ValueError: `.metadata` holds anything but DCP's records, contradicts itself, names files outside of the
            directory or bytes that its files do not have; a chunk is no plain tensor archive. Every fault is named,
            and nothing has been executed or loaded.
    """

    def __init__(self, path: str | os.PathLike[str], _extension_registry: Any = None) -> None:
        super().__init__(path, _extension_registry)
        self.reads_transforms = _extension_registry is not None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata, sound in itself and in the files it names.

        Args:
            *args: none that is used.
            **kwargs: `rank`: read the metadata which that rank saved for itself alone.
        """
        rank = kwargs.get("rank")
        file = Path(self.path, METADATA if rank is None else f"__{rank}{METADATA}")
        metadata, faults = read_metadata_file(file, transforms=self.reads_transforms)
        if not faults:
            faults = holding_faults(metadata, whole=rank is None) + file_faults(self.path, metadata.storage_data)
        if faults:
            raise _refusal(file, faults)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata  # type: ignore[no-any-return]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for; a planner with a method `read_failed(error)` is told of an error first."""
        try:
            self._check_archives(plan)
            return super().read_data(plan, planner)
        except Exception as error:
            failed = getattr(planner, "read_failed", None)
            if failed is not None:
                failed(error)
            raise

    def _check_archives(self, plan: LoadPlan) -> None:
        """Look at the archive of every tensor that will be read, once each, before the first is opened."""
        wanted: dict[str, dict[tuple[int, int], str]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            if item.type is not LoadItemType.BYTE_IO and not info.transform_descriptors:
                wanted.setdefault(info.relative_path, {})[info.offset, info.length] = item.storage_index.fqn
        for name, slices in wanted.items():
            with Path(self.path, name).open("rb") as stream:
                for (offset, length), fqn in sorted(slices.items()):
                    check_archive(FileSlice(stream, offset, length), length, f"{Path(self.path, name)}: {fqn}")


class FileSlice(io.RawIOBase):
    """`length` bytes of an open file from `offset` on, as a read-only file of its own (which does not close it)."""

    def __init__(self, stream: IO[bytes], offset: int, length: int) -> None:
        self.stream, self.start, self.length, self.at = stream, offset, length, 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The position, from the beginning of the slice."""
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position in the slice (or behind its end, where nothing is read)."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}, before the beginning")
        self.at = base + offset
        return self.at

    def read(self, size: int | None = -1) -> bytes:
        """At most `size` bytes from the position, without making room for more than there are."""
        left = max(0, self.length - self.at)
        return super().read(left if size is None or size < 0 else min(size, left)) or b""

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer from the position, up to the end of the slice."""
        room = memoryview(buffer)[: max(0, self.length - self.at)]
        self.stream.seek(self.start + self.at)
        count: int = self.stream.readinto(room)  # type: ignore[attr-defined]
        self.at += count
        return count


def read_metadata_file(file: Path, *, transforms: bool = False) -> tuple[Any, list[Fault]]:
    """What the file holds, and the faults of its records (the first is sound only where there is none of the second).

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is no ordinary file, or holds anything but DCP's records.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError(f"{file}: no ordinary file; use another checkpoint")
    data = file.read_bytes()
    metadata = read_plain(data, str(file))
    return metadata, record_faults(metadata, extent=len(data), transforms=transforms)


def _refusal(file: Path, faults: Sequence[Fault]) -> ValueError:
    """One error for all faults."""
    told = [f"  {fault}" for fault in faults[:MOST_TOLD]]
    if len(faults) > MOST_TOLD:
        told.append(f"  and {len(faults) - MOST_TOLD} more")
    return ValueError(
        f"{file}: the checkpoint is damaged or not what it claims to be. Nothing has been loaded; use another "
        "checkpoint:\n" + "\n".join(told)
    )


def check_archive(chunk: IO[bytes] | FileSlice, length: int, what: str) -> None:
    """Raise ValueError unless a chunk is an archive as torch.save writes it, whose records lie in it as they are."""
    try:
        with zipfile.ZipFile(chunk) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, EOFError, OSError, ValueError) as error:
        raise ValueError(
            f"{what}: no archive of a tensor: {error}; the file is damaged, use another checkpoint"
        ) from error
    if any(record.compress_type != zipfile.ZIP_STORED for record in records) or length < sum(
        record.file_size for record in records
    ):
        raise ValueError(
            f"{what}: its archive is compressed, or claims more than its {length} bytes; DCP stores tensors as they "
            "are. Use another checkpoint"
        )
