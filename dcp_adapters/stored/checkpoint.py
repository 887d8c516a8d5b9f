"""A checkpoint on disk as logical tensors, read one at a time.

    keys w.payload, w.scale + manifest   ->   one entry w, quantized
    key b                                ->   one entry b, dense
    a key of bytes                       ->   its name; the bytes are handed out as they are, never unpickled

What is known without touching data (names, recipes, shapes, sizes) is there after opening; `read` joins the chunks of
one tensor, however many ranks wrote them. No process group and no model are needed.
"""

import dataclasses
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan, Metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_adapters.records.checksums import CHECKSUMS, ROW, chunk_key, digest_of, rows_of
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.manifest import MANIFEST, Manifest, converted_names, manifest_of
from dcp_adapters.records.source import Stored
from dcp_adapters.stored.reading.reader import SafeFileSystemReader
from dcp_adapters.stored.reading.rebuilding import Rebuilding
from fsdp_hooks.kernels.byte_sums import TensorPiece

BOOKKEEPING = frozenset({MANIFEST, CHECKSUMS})  # entries about the other entries, no data of the user


class CheckpointUnusable(ValueError):  # noqa: N818 - what it says about the checkpoint
    """There is no checkpoint, or it cannot be read."""


class StoredCheckpoint(Stored):
    """A checkpoint directory, opened for reading.

    Attributes:
        metadata: DCP's own description of it.
        manifest: None if it was not saved with QuantizedSavePlanner.

    Args:
        path: the directory.
        check: compare what is read with the checkpoint's checksums, if it has some. What is rebuilt from a delta
            and its base is compared in any case.

    Raises:
        CheckpointUnusable: no such directory, no checkpoint, or one whose description cannot be read or contradicts
            itself. While reading: data that is missing, damaged or other than the description says.
    """

    def __init__(self, path: str | os.PathLike[str], *, check: bool = False) -> None:
        self.path = checkpoint_directory(path)
        self._reader = SafeFileSystemReader(self.path)
        self.metadata = self._read_metadata()
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        self._saved: dict[bytes, bytes] = {}  # digest of a chunk's name and offset -> digest of its bytes
        self._checksums: dict[bytes, bytes] = {}  # those with which all that is read is compared
        # a stand-in: the manifest says which base there is, and may be an entry that is read like others
        self._rebuilding = Rebuilding(None, self.metadata)
        self.manifest = self._read_manifest()
        if self.manifest is not None and self.manifest.base is not None:
            self._rebuilding = Rebuilding(self.manifest.base, self.metadata)
            self.base = self.manifest.base.path
        self.format_version = None if self.manifest is None else self.manifest.format_version
        self.entries = self._find_entries()
        self.converted = converted_names(self.metadata)
        self.digests = {} if self.manifest is None else self.manifest.digests
        self.blobs = [
            name
            for name, entry in self.metadata.state_dict_metadata.items()
            if not isinstance(entry, TensorStorageMetadata)
        ]
        self.has_checksums = isinstance(self.metadata.state_dict_metadata.get(CHECKSUMS), TensorStorageMetadata)
        if self.has_checksums and (check or self.base is not None):
            self._saved = self._read_checksums()
            self._checksums = self._saved if check else {}
        data = self.metadata.planner_data if isinstance(self.metadata.planner_data, Mapping) else {}
        keys = self.metadata.state_dict_metadata.keys() - BOOKKEEPING
        self.paths = {key: tuple(path) for key, path in data.items() if key in keys}

    @property
    def names(self) -> list[str]:
        """The names of all tensors and entries of bytes, in the order in which they were saved."""
        owners = {key: entry.name for entry in self.entries.values() for key in entry.part_keys()}
        keys = (key for key in self.metadata.state_dict_metadata if key not in BOOKKEEPING)
        return list(dict.fromkeys(owners.get(key, key) for key in keys))

    def chunks(self, name: str) -> int:
        """Return the number of pieces in which a tensor (its payload) was written."""
        entry = self.entries[name]
        record = self.metadata.state_dict_metadata[entry.part_keys()[0]]
        return len(record.chunks) if isinstance(record, TensorStorageMetadata) else 0

    def file_bytes(self) -> dict[str, int]:
        """Return the stored bytes of the entries in each data file, as far as the storage tells."""
        sizes: dict[str, int] = {}
        for info in self._locations().values():
            if hasattr(info, "relative_path"):
                name = str(info.relative_path)
                sizes[name] = sizes.get(name, 0) + int(getattr(info, "length", 0))
        return sizes

    def blob_size(self, name: str) -> int:
        """Return the stored bytes of an entry of bytes."""
        return int(getattr(self._locations().get(MetadataIndex(name)), "length", 0))

    def parts(self, name: str) -> dict[str, Tensor]:
        """Read from disk, and join all chunks."""
        return {part: self.part(name, part) for part in self.entries[name].parts()}

    def part(self, name: str, part: str) -> Tensor:
        """Read from disk, and join all chunks."""
        return self.read_key(self.entries[name].key(part))

    def pieces(self, name: str, part: str) -> Iterator[TensorPiece]:
        """Read a part from disk, chunk by chunk."""
        key = self.entries[name].key(part)
        record = self.metadata.state_dict_metadata[key]
        assert isinstance(record, TensorStorageMetadata)
        start = torch.Size([0] * len(record.size))
        for number, chunk in enumerate(record.chunks):
            if not chunk.sizes.numel():
                continue
            target = torch.empty(chunk.sizes, dtype=record.properties.dtype, device="cpu")
            # each chunk by itself: a tensor of many chunks need not fit into memory
            into, stored = MetadataIndex(key, start, 0), MetadataIndex(key, chunk.offsets, number)
            self._read(key, [ReadItem(LoadItemType.TENSOR, into, start, stored, start, chunk.sizes)], {key: target})
            yield TensorPiece(target, tuple(record.size), tuple(chunk.offsets))

    def read_key(self, key: str) -> Tensor:
        """Read one stored tensor, a part or a dense one, and join its chunks."""
        record = self.metadata.state_dict_metadata[key]
        assert isinstance(record, TensorStorageMetadata)
        whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(record.size)), sizes=record.size)
        target = torch.empty(record.size, dtype=record.properties.dtype, device="cpu")
        self._read(key, create_read_items_for_chunk_list(key, record, [whole]), {key: target})
        return target

    def rows(self, key: str, piece: slice) -> Tensor:
        """Read some of a tensor along dim 0; not compared with checksums, which are those of whole chunks."""
        record = self.metadata.state_dict_metadata[key]
        assert isinstance(record, TensorStorageMetadata)
        if not record.size:
            return self.read_key(key)
        start, stop, _ = piece.indices(record.size[0])
        box = ChunkStorageMetadata(
            offsets=torch.Size([start] + [0] * (len(record.size) - 1)),
            sizes=torch.Size([stop - start, *record.size[1:]]),
        )
        target = torch.empty(box.sizes, dtype=record.properties.dtype, device="cpu")
        # the target has these rows alone, so its piece begins at 0
        into = MetadataIndex(key, torch.Size([0] * len(record.size)), 0)
        items = create_read_items_for_chunk_list(key, record, [box])
        self._read(key, [dataclasses.replace(item, dest_index=into) for item in items], {key: target}, partial=True)
        return target

    def read_blob(self, name: str) -> bytes:
        """Read an entry of bytes, as it is stored."""
        zero, index = torch.Size([0]), MetadataIndex(name)
        item = ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero)
        return self._read(name, [item], {}).getvalue()

    # -- below the surface ---------------------------------------------------------------------------------------------

    def _read(
        self, entry: str, items: list[ReadItem], targets: dict[str, Tensor], *, partial: bool = False
    ) -> io.BytesIO:
        """Read items; chunks that are read in part (`partial`) are not compared with checksums."""
        planner = _ReadInto(targets, {} if partial else self._checksums, self._rebuilding, self._saved)
        try:
            items = self._rebuilding.replace_items(items)
            self._rebuilding.open(self.path)
            self._reader.read_data(LoadPlan(items), planner).wait()
        # the planner, which compares, does not know the path
        except CheckpointUnusable as error:
            raise CheckpointUnusable(f"{self.path}: {error}") from None
        # damaged archives raise errors of all kinds; callers get one
        except Exception as error:
            raise self._unusable(f"{entry} can not be read: {type(error).__name__}: {error}") from error
        return planner.blob

    def _read_metadata(self) -> Metadata:
        try:
            metadata = self._reader.read_metadata()
        except ValueError as error:  # the reader's own words
            raise CheckpointUnusable(str(error)) from error
        except Exception as error:
            raise self._unusable(f".metadata can not be read: {type(error).__name__}: {error}") from error
        if not isinstance(metadata, Metadata):
            raise self._unusable(f".metadata holds a {type(metadata).__name__}, not a checkpoint's")
        return metadata

    def _read_manifest(self) -> Manifest | None:
        """Read the manifest from the planner data, or from its entry if the storage dropped these."""
        try:
            manifest = manifest_of(self.metadata)
            entry = self.metadata.state_dict_metadata.get(MANIFEST)
            if manifest is None and isinstance(entry, TensorStorageMetadata):
                manifest = Manifest.from_tensor(self.read_key(MANIFEST))
        except CheckpointUnusable:
            raise
        except ValueError as error:
            raise CheckpointUnusable(f"{self.path}: {error}") from error
        return manifest

    def _read_checksums(self) -> dict[bytes, bytes]:
        """Read the table: digest of a chunk's name and offset -> digest of its bytes."""
        rows = self.read_key(CHECKSUMS)
        if rows.dtype != torch.uint8 or rows.ndim != 2 or rows.shape[1] != ROW:
            raise self._unusable(
                f"{CHECKSUMS} is {rows.dtype} {tuple(rows.shape)}, expected torch.uint8 (chunks, {ROW})"
            )
        return dict(rows_of(rows))

    def _find_entries(self) -> dict[str, Entry]:
        """Return the entries of all tensors, in the order of the metadata."""
        quantized = self.manifest.tensors if self.manifest is not None else {}
        owners = {key: entry for entry in quantized.values() for key in entry.part_keys()}
        found: dict[str, Entry] = {}
        for key, record in self.metadata.state_dict_metadata.items():
            owner = owners.get(key)
            if owner is not None:
                if owner.name not in found:
                    found[owner.name] = self._check_parts(owner)
            elif isinstance(record, TensorStorageMetadata) and key not in BOOKKEEPING:
                found[key] = Entry(key, None, tuple(record.size), record.properties.dtype)
        missing = sorted(quantized.keys() - found.keys())
        if missing:
            raise self._unusable(f"in the manifest but not stored: {', '.join(missing)}")
        return found

    def _check_parts(self, entry: Entry) -> Entry:
        """Return a quantized entry; raise unless its parts are stored as it says."""
        for part, (dtype, shape) in entry.parts().items():
            record = self.metadata.state_dict_metadata.get(entry.key(part))
            if not isinstance(record, TensorStorageMetadata):
                raise self._unusable(f"{entry.name} lacks its {part}")
            held = (record.properties.dtype, tuple(record.size))
            if held != (dtype, shape):
                raise self._unusable(
                    f"{entry.key(part)} is stored as {held[0]} {held[1]}, the manifest says {dtype} {shape}"
                )
        return entry

    def _unusable(self, why: str) -> CheckpointUnusable:
        return CheckpointUnusable(f"{self.path}: {why}; use another checkpoint")

    def _locations(self) -> Mapping[Any, Any]:
        data = self.metadata.storage_data
        return data if isinstance(data, Mapping) else {}


def checkpoint_directory(path: str | os.PathLike[str]) -> Path:
    """Return the path of a checkpoint. Raises CheckpointUnusable if there is none."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointUnusable(f"{directory}: no such directory")
    if not (directory / ".metadata").is_file():
        raise CheckpointUnusable(
            f"{directory}: no .metadata, so this is no checkpoint or one whose saving never finished"
        )
    return directory


class _ReadInto(DefaultLoadPlanner):
    """Reads into given tensors, keeps bytes as bytes, and compares each chunk with its checksum."""

    def __init__(
        self,
        targets: dict[str, Tensor],
        checksums: Mapping[bytes, bytes],
        rebuilding: Rebuilding,
        saved: Mapping[bytes, bytes],
    ) -> None:
        super().__init__()
        self.state_dict = targets
        self.checksums, self.rebuilding, self.saved = checksums, rebuilding, saved
        self.blob = io.BytesIO()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        if Rebuilding.is_for(read_item):
            checksum = self.saved.get(chunk_key(self.rebuilding.chunk_of(read_item)))
            for item, piece in self.rebuilding.pieces(read_item, value, checksum):
                self.resolve_tensor(item).copy_(piece)
            return
        # handed out as it is: stock's planner would unpickle it
        self.blob = value
        self._compare(read_item, value)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self._compare(read_item, tensor)

    def _compare(self, read_item: ReadItem, data: Tensor | io.BytesIO) -> None:
        index = read_item.storage_index
        if self.checksums:
            stored = self.checksums.get(chunk_key(index))
            where = f"{index.fqn} at {tuple(index.offset)}" if index.offset else index.fqn
            if stored is None:
                raise CheckpointUnusable(
                    f"{where} has no row in {CHECKSUMS}: it is not what was saved; use another checkpoint"
                )
            if stored != digest_of(data):
                raise CheckpointUnusable(
                    f"{where} is damaged: its bytes do not have the checksum stored; use another checkpoint"
                )
