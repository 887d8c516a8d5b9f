"""SafeFileSystemReader: DCP checkpoints from strangers.

Stock FileSystemReader unpickles `.metadata`, so whoever wrote the file runs code in the process that reads it. This one
differs in two places, and reads the same checkpoints:

    read_metadata   interprets the few records DCP writes (plain_pickle.py), then checks that they make sense
                    (metadata_checks.py) before anything uses them
    read_data       asks the system for what it is going to read (read_ahead.py); reads what the archives of all chunks
                    say they hold (tensor_archive.py) before the first tensor is written: plain tensors, of the dtype
                    and size in the metadata, not compressed; then reads the rows that are wanted from the file into
                    the target (direct_read.py); tells the planner when reading fails

Stock's code reads what remains: byte entries, transformed chunks, and tensors whose elements are not contiguous in the
file (with torch.load(weights_only=True)).
"""

import logging
import os
import pickle
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.futures import Future

from dcp_adapters.plain.logged_work import log_work
from dcp_adapters.plain.words import in_lines
from dcp_adapters.stored.reading.direct_read import Elements
from dcp_adapters.stored.reading.metadata_checks import (
    METADATA,
    Fault,
    chunk_in_words,
    holding_faults,
    length_faults,
    record_faults,
    stored_chunk,
)
from dcp_adapters.stored.reading.order import PROBE, original_index
from dcp_adapters.stored.reading.places import THIS_RANK, contradiction, file_faults, unreadable_message
from dcp_adapters.stored.reading.plain_pickle import read_plain
from dcp_adapters.stored.reading.read_ahead import Need, ReadAhead
from dcp_adapters.stored.reading.tensor_archive import Header, Headers
from dcp_adapters.torch_private import Unreadable

LOG = logging.getLogger(__name__)
Place = tuple[str, int, int]  # file, offset, length of a chunk
Placed = tuple[ReadItem, Any]  # with DCP's record of where its chunk is stored


class SafeFileSystemReader(FileSystemReader):
    """Reads DCP checkpoints of the local file system without executing anything that a file says.

    Takes the place of `torch.distributed.checkpoint.FileSystemReader`, with the same arguments, in `dcp.load`
    (`storage_reader=`) and `read_manifest`.

    Args:
        path: the checkpoint's directory.
        _extension_registry: as stock's. Chunks that were transformed (compressed) when they were saved are read only
            if it is given: their size is not known before they are unpacked.

    Raises:
        FileNotFoundError: there is no `.metadata`, so the directory is no checkpoint or one whose saving never
            finished; or, while loading, a file is missing.
        ValueError: `.metadata` holds anything but DCP's records, contradicts itself, names files outside of the
            directory or bytes that its files do not have; a chunk is no plain tensor archive. Every fault is named,
            and nothing has been executed or loaded.

    Example:
        ```python
        >>> state = {"weight": quantize(torch.randn(64, 64), MXFP8BlockScaling())}
        >>> dcp.save(state, checkpoint_id="step-1000", planner=QuantizedSavePlanner())
        >>> dcp.load(state, storage_reader=SafeFileSystemReader("step-1000"), planner=QuantizedLoadPlanner())
        ```
    """

    def __init__(self, path: str | os.PathLike[str], _extension_registry: Any = None) -> None:
        super().__init__(path, _extension_registry)
        self.reads_transforms = _extension_registry is not None
        self._unread: Exception | None = None  # why the metadata of all ranks could not be read

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the checkpoint's metadata, sound in itself and in the files it names.

        Args:
            *args: unused.
            **kwargs: `rank`: read the metadata which that rank saved for itself alone.
        """
        # dcp.load catches an error of this call, asks again for the metadata of the rank alone, and would then complain
        # of that. So the second call hands on the first one's error, which is raised when the metadata is used.
        rank = kwargs.get("rank")
        try:
            return self._sound_metadata(rank)
        except Exception as error:
            if rank is None:
                self._unread = error
            if rank is None or self._unread is None:
                raise
            return Unreadable(self._unread)

    def _sound_metadata(self, rank: int | None) -> Metadata:
        file = Path(self.path, METADATA if rank is None else f"__{rank}{METADATA}")
        metadata, faults = read_metadata_file(file, transforms=self.reads_transforms)
        if not faults:
            faults = [*holding_faults(metadata, whole=rank is None), *length_faults(metadata).values()]
            faults += file_faults(self.path, metadata.storage_data)
            if rank is None:
                faults += _stray_faults(metadata)
        if faults:
            raise ValueError(
                f"{file}: the checkpoint is damaged or not what it claims to be. Nothing has been loaded; use another "
                "checkpoint:" + in_lines(faults)
            )
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata  # type: ignore[no-any-return]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for.

        A planner with a method `archives_checked()` is told when every chunk has been looked at; one with a method
        `read_failed(error)` is told of an error before it is raised.
        """
        with log_work(LOG, "reading %d pieces from %s", len(plan.items), self.path), tell_failures(planner):
            placed = [(item, self.storage_data[item.storage_index]) for item in plan.items]
            per_path: dict[str, list[Placed]] = {}
            # As stock groups them: probes and conversions have paths of their own for that (order.py).
            for item, info in placed:
                per_path.setdefault(info.relative_path, []).append((item, info))
            for items in per_path.values():
                items.sort(key=lambda one: one[1].offset)  # as the file lies
            needs = [need for items in per_path.values() for need in self._needs(items)]
            with ReadAhead(needs) as ahead:
                headers = self._check_archives(placed)
                if (checked := getattr(planner, "archives_checked", None)) is not None:
                    checked()
                done = iter(needs)
                for items in per_path.values():
                    for _ in self._read(items, headers, planner):
                        ahead.has_read(next(done).count)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _needs(self, items: list["Placed"]) -> Iterator[Need]:
        """Yield what is read of one file, for items in their order."""
        path = str(Path(self.path, str(items[0][1].relative_path)))
        for item, info in items:
            rows = None
            if item.type is not LoadItemType.BYTE_IO and item.lengths and not info.transform_descriptors:
                index = original_index(item.storage_index)
                record: Any = self.records[index.fqn]
                first = item.storage_offsets[0]
                rows = first, first + item.lengths[0], stored_chunk(record, index).sizes[0]
            yield Need.of(path, info.offset, info.length, rows)

    def _read(
        self, items: list["Placed"], headers: Mapping["Place", Header], planner: LoadPlanner
    ) -> Iterator[ReadItem]:
        """Read items of one file, in their order; yield each when it has been read."""
        name = str(items[0][1].relative_path)
        path = Path(self.path, name)
        with path.open("rb", buffering=0) as stream:
            for item, info in items:
                header = headers.get((name, info.offset, info.length))
                if item.type is LoadItemType.BYTE_IO:
                    super().read_data(LoadPlan([item]), planner)
                # Transformed, or not contiguous: stock's reader unpacks it. Its errors are those of zip and pickle.
                elif header is None or header.first is None:
                    try:
                        super().read_data(LoadPlan([item]), planner)
                    except (IndexError, KeyError, EOFError, pickle.UnpicklingError) as error:
                        raise _read_error(path, item, error) from error
                else:
                    target = planner.resolve_tensor(item).detach()
                    if target.shape != item.lengths:
                        raise AssertionError(f"{item.storage_index}: {tuple(item.lengths)} into {tuple(target.shape)}")
                    try:
                        Elements.of(stream, info.offset, header).read(item.storage_offsets, item.lengths, target)
                    except (ValueError, EOFError, OSError) as error:
                        raise _read_error(path, item, error) from error
                    planner.commit_tensor(item, target)
                yield item

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - DCP's signature
        """Keep the metadata."""
        Unreadable.refuse(metadata)
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self.records = metadata.state_dict_metadata

    def _check_there(self, name: str, index: MetadataIndex) -> None:
        """Raise FileNotFoundError for a file that is not there."""
        path = Path(self.path, name)
        if not path.exists():
            held = "" if index.fqn == PROBE else f", where {chunk_in_words(index)} is stored"
            raise FileNotFoundError(f"No such file or directory: '{path}'{held}. {THIS_RANK}")

    def _check_archives(self, placed: list["Placed"]) -> dict["Place", Header]:
        """Look into every tensor's archive that will be read, once each, before anything is loaded."""
        headers: dict[Place, Header] = {}
        wanted: dict[str, dict[tuple[int, int], MetadataIndex]] = {}
        # Probes last, so that an error names a tensor.
        for item, info in sorted(placed, key=lambda one: one[0].storage_index.fqn == PROBE):
            index = original_index(item.storage_index)
            name = str(info.relative_path)
            if name not in wanted:
                self._check_there(name, index)
                wanted[name] = {}
            if item.type is not LoadItemType.BYTE_IO and not info.transform_descriptors:
                wanted[name][info.offset, info.length] = index
        known = Headers()
        for name, slices in wanted.items():
            path = Path(self.path, name)
            with path.open("rb", buffering=0) as stream:
                for (offset, length), index in sorted(slices.items(), key=lambda held: held[0]):
                    header = known.read(stream, offset, length, f"{path}: {chunk_in_words(index)}")
                    record: Any = self.records[index.fqn]
                    held, sizes = (header.dtype, header.shape), stored_chunk(record, index).sizes
                    message = contradiction(held, record.properties.dtype, sizes)
                    if message is not None:
                        raise ValueError(f"{path}: {chunk_in_words(index)}: {message}; use another checkpoint")
                    headers[name, offset, length] = header
        return headers


def _stray_faults(metadata: Metadata) -> list[Fault]:
    """Find chunks of entries that are not there: a load would be without them, and say nothing."""
    records, message = metadata.state_dict_metadata, "bytes are stored for a chunk that no tensor has"
    indices = metadata.storage_data or {}
    return [Fault(METADATA, chunk_in_words(index), message) for index in indices if index.fqn not in records]


@contextmanager
def tell_failures(planner: LoadPlanner) -> Iterator[None]:
    """Pass an error of the block to the planner's `read_failed(error)`, if it has that method, before it is raised.

    Other ranks may be waiting for this one, and the planner is what can tell them.
    """
    try:
        yield
    # DCP's CheckpointException is a BaseException, and no Exception.
    except BaseException as error:
        failed = getattr(planner, "read_failed", None)
        if failed is not None:
            failed(error)
        raise


def _read_error(path: Path, item: ReadItem, error: Exception) -> Exception:
    """Make the error of a chunk that could not be read: which one, and what has become of the target."""
    state = "Some tensors of the target may be loaded already: load another checkpoint"
    kind = OSError if isinstance(error, OSError) else EOFError if isinstance(error, EOFError) else ValueError
    return kind(unreadable_message(path, original_index(item.storage_index), error, state))


def read_metadata_file(file: Path, *, transforms: bool = False) -> tuple[Any, list[Fault]]:
    """Return what the file holds, and the faults of its records; what it holds is sound only if there are none.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is no ordinary file, or holds anything but DCP's records.
    """
    # To open a fifo would wait for a writer.
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError(f"{file}: no ordinary file; use another checkpoint")
    data = file.read_bytes()
    metadata = read_plain(data, str(file))
    return metadata, record_faults(metadata, extent=len(data), transforms=transforms)
