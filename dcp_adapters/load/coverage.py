"""Does what a load reads make up what it writes? Asked before anything is written.

Stock DCP intersects the chunks that `.metadata` lists with the target and reads what it finds: a chunk that is
missing leaves the target's old values, of two that overlap the later one wins, and a chunk whose place in the storage
is that of another brings the other's values; all of this without an error. So every rank checks what it reads:

    pieces    of each tensor of the target, the pieces to be read cover this rank's part exactly once
    chunks    each lies inside of its tensor, and has a place
    places    no other chunk is stored there

The first looks only at a rank's own read items, which are few, so it also works with the metadata of a single rank; the
last sorts the chunks of the files that are read.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from dcp_adapters.load.read_items import PLAIN
from dcp_adapters.plain.described import CHUNKS
from dcp_adapters.plain.tiling import is_inside, tiling_fault
from dcp_adapters.records.part_places import PartPiece
from dcp_adapters.stored.reading.metadata_checks import chunk_in_words, stored_chunks
from dcp_adapters.stored.reading.order import OWN, has_files
from dcp_adapters.stored.reading.places import shared_places, sharing_message
from fsdp_hooks.torch_private import local_of

Parts = dict[MetadataIndex | str, tuple[int, ...]]
UNKNOWN = object()


def parts_of_target(
    state_dict: Mapping[str, Any],
    metadata: Metadata,
    boxes: Collection[str] = (),
    several: Mapping[str, Sequence[PartPiece]] = MappingProxyType({}),
) -> Parts:
    """Return the shapes of what this rank reads into, for all tensors that the checkpoint has.

    The key is the name if a tensor is one piece, else (name, offset). `boxes` are known to be one, `several` not to.
    """
    parts: Parts = {}
    for name, value in state_dict.items():
        entry = metadata.state_dict_metadata.get(name)
        if not isinstance(value, Tensor) or not isinstance(entry, TensorStorageMetadata):
            continue
        if name in several:
            parts |= {MetadataIndex(name, torch.Size(piece.box[0])): piece.box[1] for piece in several[name]}
        elif isinstance(value, DTensor):
            # a rank outside of the mesh holds nothing, and reads nothing
            if value.device_mesh.get_coordinate() is not None:
                parts[name] = tuple(local_of(value).shape)
        elif name in boxes or (type(value) in PLAIN and not hasattr(value, CHUNKS)):
            parts[name] = tuple(value.shape)
        elif hasattr(value, "__create_chunk_list__") or hasattr(value, "local_shards"):
            # several local pieces: what stock would read into them if the tensor were stored as one chunk
            whole = ChunkStorageMetadata(torch.Size([0] * len(entry.size)), entry.size)
            one = Metadata({name: TensorStorageMetadata(entry.properties, entry.size, [whole])})
            for item in create_default_local_load_plan({name: value}, one).items:
                parts[item.dest_index] = tuple(item.lengths)
        else:
            parts[name] = tuple(value.shape)
    return parts


def coverage_problems(items: Iterable[ReadItem], parts: Parts, metadata: Metadata) -> list[str]:
    """Return what keeps `items` from filling `parts` with what was saved, in sentences that name the tensor."""
    items = list(items)
    pieces: dict[str, list[ReadItem]] = {}
    for item in items:
        pieces.setdefault(item.dest_index.fqn, []).append(item)
    problems = []
    for key, shape in parts.items():
        if isinstance(key, str):
            found, name = pieces.get(key, []), key
        else:
            found, name = [item for item in pieces.get(key.fqn, []) if item.dest_index == key], key.fqn
        if (fault := _coverage_fault(shape, found)) is not None:
            size = tuple(getattr(metadata.state_dict_metadata[name], "size", ()))
            problems.append(f"{name}: its chunks do not make up the tensor {size}: {fault}")
    chunks = _find_places(items, metadata.storage_data)
    return list(dict.fromkeys(problems + _chunk_problems(chunks, metadata) + _place_problems(chunks, metadata)))


def _coverage_fault(shape: Sequence[int], items: Sequence[ReadItem]) -> str | None:
    # most tensors are one piece from one chunk, which needs no tiling
    if len(items) == 1 and tuple(items[0].lengths) == tuple(shape) and not any(items[0].dest_offsets):
        return None
    if not math.prod(shape):
        return None
    if not items:
        return "no chunk holds any of what is read"
    fault = tiling_fault(shape, [(item.dest_offsets, item.lengths) for item in items])
    begin = tuple(items[0].dest_index.offset or ())
    return (
        fault if fault is None or not any(begin) else f"{fault}, counted from {begin}, where this rank's piece begins"
    )


def _find_places(items: Sequence[ReadItem], stored: Any) -> list[tuple[MetadataIndex, Any]]:
    """Return the chunk that each item reads, and its place: None if it has none, UNKNOWN if places have other keys.

    Readers of other libraries may keep anything as storage data.
    """
    by_chunk = isinstance(stored, dict) and all(isinstance(key, MetadataIndex) for key in itertools.islice(stored, 1))
    return [(item.storage_index, stored.get(item.storage_index) if by_chunk else UNKNOWN) for item in items]


def _chunk_problems(chunks: Sequence[tuple[MetadataIndex, Any]], metadata: Metadata) -> list[str]:
    """Return the faults of chunks that are read and lie outside of their tensor, or have no place."""
    problems = list[str]()
    seen: set[tuple[int, int]] = set()  # sizes and chunks, by the objects: tensors alike share theirs
    held = stored_chunks(metadata, [index for index, place in chunks if place is not None])
    for index, place in chunks:
        if place is None:
            problems.append(f"{chunk_in_words(index)}: no file holds it: storage_data has no such chunk")
            continue
        if index not in held:
            continue
        entry: Any = metadata.state_dict_metadata[index.fqn]
        chunk = held[index][1]
        both = id(entry.size), id(chunk)
        if both in seen:
            continue
        if is_inside(entry.size, (chunk.offsets, chunk.sizes)):
            seen.add(both)
        else:
            problems.append(
                f"{index.fqn}: a chunk of {tuple(chunk.sizes)} at {tuple(chunk.offsets)} is not inside of the "
                f"tensor's {tuple(entry.size)}"
            )
    return problems


def _place_problems(chunks: Sequence[tuple[MetadataIndex, Any]], metadata: Metadata) -> list[str]:
    """Return the faults of chunks that are read and share bytes of a file with others."""
    stored = metadata.storage_data
    if not has_files(stored):
        return []
    files = {place.relative_path for _, place in chunks if place is not None and place is not UNKNOWN}
    # all chunks of these files, not only those that are read: one that is read may lie on one that is not
    held = [(index, info) for index, info in stored.items() if info.relative_path in files and index.fqn not in OWN]
    shared = [(held[one], held[other], start) for one, other, start in shared_places([info for _, info in held])]
    wanted = {index for index, _ in chunks} if shared else set()
    return [
        f"{chunk_in_words(one)}: {sharing_message(start, other)} in {info.relative_path}"
        for (one, info), (other, _), start in shared
        if one in wanted or other in wanted
    ]
