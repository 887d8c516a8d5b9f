"""Does a checkpoint's metadata make sense? Pure checks over DCP's records.

Everything that a reader takes from `.metadata` is checked here before it is used: names, sizes, places of the bytes.
What passes claims no more elements than its files hold bytes (they are looked at in places.py), and names no file
outside of the checkpoint.
Each check returns `Fault`s, which name file or entry, what was found and what was expected; an empty list means sound.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_adapters.plain.tiling import is_inside, tiling_fault
from dcp_adapters.plain.words import LEAVES, short
from dcp_adapters.stored.reading.metadata_names import FIELDS, LARGEST
from dcp_adapters.torch_private import StorageInfo, is_marked, unmarked

METADATA = ".metadata"
DEEPEST = 64  # levels of planner data
DIMS = {1: "one dim", 2: "two dims"}


@dataclass(frozen=True)
class Fault:
    """Something wrong: the file and the entry (a tensor's name) at fault, "" if there is none, and a sentence."""

    file: str
    entry: str
    message: str

    def __str__(self) -> str:
        """One line for people."""
        return ": ".join(part for part in (self.file, self.entry, self.message) if part)


def chunk_in_words(index: MetadataIndex) -> str:
    """Name a chunk in words: its tensor, and its offset if it has one."""
    return index.fqn if index.offset is None else f"{index.fqn} at {tuple(index.offset)}"


def record_faults(metadata: Any, *, extent: int, transforms: bool = False) -> list[Fault]:
    """Find faults of the records in themselves: types, names, sizes, places. The other checks need records without any.

    Args:
        metadata: what stood in the file.
        extent: length of the file in bytes; planner data may not describe more values than that allows.
        transforms: chunks may have been transformed (compressed) on their way into the file.
    """
    if type(metadata) is not Metadata:
        return [_metadata_fault("", f"it holds {short(metadata)}, expected DCP's Metadata")]
    # vars(), not attributes: a record was built without its class's constructor, and may lack any field.
    tensors = vars(metadata).get("state_dict_metadata")
    storage = vars(metadata).get("storage_data")
    faults = [*_planner_data_faults(metadata.planner_data, 16 * extent), *_storage_meta_faults(metadata)]
    if type(tensors) is not dict or type(storage) is not dict:
        return [*faults, _metadata_fault("", "its state_dict_metadata or storage_data is no dict")]
    for name, record in tensors.items():
        faults += _entry_faults(name, record)
    faults += _path_faults(metadata.planner_data, tensors)
    stray: dict[str, bool] = {}  # file -> whether it is outside; a file holds many chunks
    for index, info in storage.items():
        faults += _storage_faults(index, info, stray, transforms=transforms)
    return faults


def holding_faults(metadata: Metadata, *, whole: bool = True) -> list[Fault]:
    """Find faults between sound records: chunks that do not cover their tensor once, or have no file.

    `whole`: the metadata describes full tensors (a rank that saves for itself describes its own chunks).
    """
    faults = []
    for name, record in metadata.state_dict_metadata.items():
        if whole and isinstance(record, TensorStorageMetadata):
            boxes = [(chunk.offsets, chunk.sizes) for chunk in record.chunks]
            if (message := tiling_fault(record.size, boxes)) is not None:
                faults.append(_metadata_fault(name, f"{message} (shape {tuple(record.size)})"))
        faults += [
            _metadata_fault(chunk_in_words(index), "no file holds it: storage_data has no such chunk")
            for index in chunks_of(name, record)
            if index not in metadata.storage_data
        ]
    return faults


def length_faults(metadata: Metadata) -> dict[MetadataIndex, Fault]:
    """Find chunks with fewer bytes than a plain tensor of their size has."""
    faults = {}
    for name, record in metadata.state_dict_metadata.items():
        if not isinstance(record, TensorStorageMetadata):
            continue
        for index, shape in chunks_of(name, record).items():
            info, size = metadata.storage_data.get(index), record.properties.dtype.itemsize * math.prod(shape)
            if info is not None and info.length < size and not info.transform_descriptors:
                message = (
                    f"{METADATA} gives {info.length} bytes to a chunk that needs at least {size}, unless it is of a "
                    "class of its own, which takes stock's reader"
                )
                faults[index] = Fault(info.relative_path, chunk_in_words(index), message)
    return faults


def chunks_of(name: str, record: Any) -> dict[MetadataIndex, tuple[int, ...]]:
    """Return the chunks of a sound entry, with their shapes; a byte entry is one chunk, without dims."""
    if type(record) is BytesStorageMetadata:
        return {MetadataIndex(name): ()}
    return {MetadataIndex(name, chunk.offsets): tuple(chunk.sizes) for chunk in record.chunks}


def stored_chunk(entry: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    """Find the chunk that an index names; its number is tried first, since each rank that saved may have one."""
    # The number is a hint of DCP's, and may be missing or of another list; offsets decide.
    at = index.index
    if at is not None and at < len(entry.chunks) and entry.chunks[at].offsets == index.offset:
        return entry.chunks[at]
    return next(chunk for chunk in entry.chunks if chunk.offsets == index.offset)


def stored_chunks(
    metadata: Metadata, indices: Iterable[MetadataIndex]
) -> dict[MetadataIndex, tuple[torch.dtype, ChunkStorageMetadata]]:
    """Those of the indices that name chunks of tensors, with the tensor's dtype and the chunk."""
    found = {}
    for index in indices:
        entry = metadata.state_dict_metadata[index.fqn]
        if isinstance(entry, TensorStorageMetadata):
            found[index] = entry.properties.dtype, stored_chunk(entry, index)
    return found


def own_buffer(name: str, metadata: Metadata, dims: int, where: str = "the checkpoint") -> Tensor | None:
    """Make an uninitialised uint8 tensor to read an entry into; None if the checkpoint has no such entry.

    Raises:
        ValueError: the entry is no uint8 tensor with so many dims, or claims to be larger than what is stored of it.
    """
    entry = metadata.state_dict_metadata.get(name)
    if not isinstance(entry, TensorStorageMetadata):
        return None
    stored = [info for index, info in (metadata.storage_data or {}).items() if index.fqn == name]
    most = sum(getattr(info, "length", math.inf) for info in stored)
    # Before memory is taken: stored bytes bound it, whatever size a damaged or hostile entry claims.
    fits = len(entry.size) == dims and min(entry.size, default=0) >= 0 and math.prod(entry.size) <= most
    if entry.properties.dtype != torch.uint8 or not fits:
        raise ValueError(
            f"{where}: the entry {name} claims to be {entry.properties.dtype} {tuple(entry.size)} and {most} bytes of "
            f"it are stored, expected {DIMS[dims]} of torch.uint8; the checkpoint is damaged, use another one"
        )
    try:
        return torch.empty(entry.size, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:  # a reader that does not look at its files has not checked what is stored
        raise ValueError(
            f"{where}: the entry {name} claims to be {tuple(entry.size)}, more than there is room for; the checkpoint "
            "is damaged, use another one"
        ) from error


def is_stray_path(path: str) -> bool:
    """Tell whether a relative path is empty, absolute, or leads outside, as POSIX or as Windows reads it."""
    views: tuple[PurePath, ...] = (PurePosixPath(path), PureWindowsPath(path))
    return (
        "\0" in path
        or not views[0].parts
        or any(view.is_absolute() or view.anchor or ".." in view.parts for view in views)
    )


def _metadata_fault(entry: str, message: str) -> Fault:
    return Fault(METADATA, entry, message)


def _is_complete(record: Any, kind: type) -> bool:
    """Tell whether this is a record of that class with the fields that have no default."""
    return type(record) is kind and all(hasattr(record, field) for field in FIELDS[kind])


def _is_count(value: Any) -> bool:
    # Not isinstance: True is an int, and would pass for a size of 1.
    return type(value) is int and 0 <= value <= LARGEST


def _is_size(value: Any) -> bool:
    return type(value) is torch.Size and all(_is_count(extent) for extent in value)


def _are_strides(value: Any) -> bool:
    """Tell whether torch may have stored this as strides of a tensor, as it does from 2.15 on. Nothing reads them."""
    return value is None or (isinstance(value, tuple) and all(type(step) is int for step in value))


def _storage_meta_faults(metadata: Metadata) -> Iterator[Fault]:
    meta = metadata.storage_meta
    if metadata.version is not None and type(metadata.version) is not str:
        yield _metadata_fault("", f"its version is {short(metadata.version)}, expected a string")
    if meta is None:
        return
    if type(meta) is not StorageMeta:
        yield _metadata_fault("", f"its storage_meta is a {type(meta).__name__}, expected DCP's StorageMeta")
        return
    texts = (meta.save_id, meta.load_id)
    modules = vars(meta).get("modules", [])
    if (
        not isinstance(meta.checkpoint_id, str | PurePath | None)
        or any(type(text) not in (str, type(None)) for text in texts)
        or type(modules) is not list
        or any(type(module) is not str for module in modules)
    ):
        yield _metadata_fault("", "its storage_meta holds values that are neither strings nor paths")


def _planner_data_faults(data: Any, most: int) -> Iterator[Fault]:
    """Find faults of planner data: it must be a tree of at most `most` plain values, with shared branches unfolded."""
    known: dict[int, tuple[int, int]] = {}  # id -> (values below, levels below)

    def weigh(value: Any, depth: int) -> tuple[int, int]:
        if isinstance(value, LEAVES):
            return 1, 0
        if type(value) not in (dict, list, tuple):
            raise ValueError(f"a {type(value).__name__}, expected plain values")
        # A few bytes can name one list a thousand times, and nest that: each list is weighed once, and counted each
        # time. Whoever walks over the data later walks over all of that.
        weight, height = known.get(id(value), (0, 0))
        if not weight and depth <= DEEPEST:
            below = [weigh(item, depth + 1) for item in (value.values() if type(value) is dict else value)]
            if type(value) is dict and any(type(key) is not str for key in value):
                raise ValueError("a dict whose keys are no strings")
            weight, height = 1 + sum(size for size, _ in below), 1 + max((level for _, level in below), default=0)
            known[id(value)] = weight, height
        if depth + height > DEEPEST or weight > most:
            raise ValueError(f"values nested in more than {DEEPEST} levels, or repeating each other without end")
        return weight, height

    try:
        weigh(data, 0)
    except ValueError as error:
        yield _metadata_fault("", f"its planner_data holds {error}")


def _path_faults(data: Any, tensors: Mapping[Any, Any]) -> Iterator[Fault]:
    """Find faults of paths: what planner data has under an entry's name is its path in the nested state dict."""
    for name, path in data.items() if type(data) is dict else ():
        if name in tensors and type(path) not in (list, tuple):
            message = f"its path in planner_data is {short(path)}, expected a sequence of keys"
            yield _metadata_fault(str(name), message)


def _entry_faults(name: Any, record: Any) -> Iterator[Fault]:
    if type(name) is not str:
        yield _metadata_fault("", f"an entry is named {short(name)}, expected a string")
        return
    if type(record) is BytesStorageMetadata:
        return
    if not _is_complete(record, TensorStorageMetadata):
        yield _metadata_fault(name, f"a {type(record).__name__}, expected a complete TensorStorageMetadata")
        return
    properties = record.properties
    if (
        not _is_complete(properties, TensorProperties)
        or not isinstance(properties.dtype, torch.dtype)
        or not isinstance(properties.layout, torch.layout)
        or not isinstance(properties.memory_format, torch.memory_format)
        or type(properties.requires_grad) is not bool
        or type(properties.pin_memory) is not bool
    ):
        yield _metadata_fault(name, "its properties are no dtype, layout, requires_grad, memory_format and pin_memory")
    elif not _are_strides(vars(properties).get("strides")):
        yield _metadata_fault(name, f"its strides are {short(properties.strides)}, expected None or integers")
    elif not _is_size(record.size) or type(record.chunks) is not list:
        yield _metadata_fault(
            name, f"its size is {short(record.size)}, expected counts below 2**63, and a list of chunks"
        )
    else:
        yield from _chunk_faults(name, record)


def _chunk_faults(name: str, record: TensorStorageMetadata) -> Iterator[Fault]:
    size = tuple(record.size)
    for chunk in record.chunks:
        if not _is_complete(chunk, ChunkStorageMetadata) or not _is_size(chunk.offsets) or not _is_size(chunk.sizes):
            yield _metadata_fault(
                name, f"a chunk is {short(chunk)}, expected offsets and sizes that are counts below 2**63"
            )
            return
        if not is_inside(size, (chunk.offsets, chunk.sizes)):
            yield _metadata_fault(
                name,
                f"a chunk of {tuple(chunk.sizes)} at {tuple(chunk.offsets)} is not inside of the tensor's {size}",
            )
            return


def _storage_faults(index: Any, info: Any, stray: dict[str, bool], *, transforms: bool) -> Iterator[Fault]:
    if not _is_complete(index, MetadataIndex) or type(index.fqn) is not str:
        yield _metadata_fault("", f"storage_data has the key {short(index)}, expected a MetadataIndex")
        return
    if not (index.offset is None or _is_size(index.offset)) or not (index.index is None or type(index.index) is int):
        yield _metadata_fault(index.fqn, f"its offset is {short(index.offset)}, expected counts below 2**63")
        return
    if not _is_complete(info, StorageInfo) or type(info.relative_path) is not str:
        yield _metadata_fault(
            chunk_in_words(index), f"it is stored in {short(info)}, expected a file, an offset and a length"
        )
        return
    if info.relative_path not in stray:
        stray[info.relative_path] = is_stray_path(info.relative_path)
    if stray[info.relative_path]:
        message = f"it is stored in {short(info.relative_path)}, expected a file inside of the checkpoint"
        yield _metadata_fault(chunk_in_words(index), message)
    elif not _is_count(info.offset) or not _is_count(info.length):
        message = f"offset {short(info.offset)} and length {short(info.length)}, expected counts below 2**63"
        yield Fault(info.relative_path, chunk_in_words(index), message)
    elif info.transform_descriptors:
        given = info.transform_descriptors
        # A mark says that the chunk is stored as what changed since a base: that is read without a registry.
        if type(given) in (list, tuple) and is_marked(info):
            given = unmarked(info).transform_descriptors or []
            transforms = transforms or not given
        if type(given) not in (list, tuple) or any(type(word) is not str for word in given) or not transforms:
            words = ", ".join(map(short, given)) if type(given) in (list, tuple) else short(given)
            message = f"it is transformed by {words}, which is read only with an _extension_registry that knows it"
            yield Fault(info.relative_path, chunk_in_words(index), message)
