"""Set the order in which a load reads: DCP lets no planner do so, but read items can (torch_private.py says how).

Every file is probed before any tensor is touched, and the items of one conversion are read together rather than file by
file, so that one conversion is finished before the next needs memory. For this, items with paths of their own are added
to the storage data beside the original ones. Readers whose storage data has no (relative_path, offset, length) records
keep their own order.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint import LoadPlan, Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_adapters.torch_private import Alias, OwnPath

PROBE = "qtensor.probe"
ORDERED = "qtensor.ordered"
REBUILT = "qtensor.rebuilt"  # the bytes that stand for a chunk in a delta, see rebuilding.py
# Names that this module and rebuilding.py add to the storage data. A reader may keep that, with those of earlier loads.
OWN = frozenset({PROBE, ORDERED, REBUILT})
# With at most this many stored chunks each rank probes every file, so that all ranks stop before writing; with more it
# probes only the files it reads (opening every file on each of thousands of ranks would cost more than it protects).
PROBE_ALL_BELOW = 100_000


def is_probe(item: ReadItem) -> bool:
    """Tell whether an item is one of `probe_items`."""
    return item.storage_index.fqn == PROBE


def original_index(index: MetadataIndex) -> MetadataIndex:
    """Return the index of the stored chunk, behind an alias."""
    return index.original if isinstance(index, Alias) and index.original is not None else index


def group_after_group(groups: Sequence[Sequence[ReadItem]], metadata: Metadata) -> list[ReadItem]:
    """List the items of all groups, such that a reader reads group after group, each file of a group once."""
    stored = metadata.storage_data
    if not has_files(stored):
        return [item for group in groups for item in group]
    out: list[ReadItem] = []
    for group in groups:
        paths: dict[str, OwnPath] = {}
        for item in group:
            info = stored[item.storage_index]
            file = str(info.relative_path)
            # Stock's reader collects the items of one path. A path that equals only itself makes a file of a group one
            # that the reader has not seen before, to be read when its turn comes.
            if file not in paths:
                paths[file] = OwnPath.of(file)
            alias = Alias(ORDERED, torch.Size([len(out)]), original=item.storage_index)
            stored[alias] = dataclasses.replace(info, relative_path=paths[file])
            out.append(dataclasses.replace(item, storage_index=alias))
    return out


def probe_items(metadata: Metadata, plan: LoadPlan, look: Callable[..., None]) -> list[ReadItem]:
    """Make one-byte reads at the end of every file; none for readers that keep no files.

    `look` is called before a file is opened, if the reader joins paths as `OwnPath` needs it: with the file's path, and
    the place of the last chunk in it.
    """
    stored = metadata.storage_data
    if not has_files(stored):
        return []
    everything = len(stored) <= PROBE_ALL_BELOW
    chunks = stored.items() if everything else [(item.storage_index, stored[item.storage_index]) for item in plan.items]
    ends: dict[Any, int] = {}
    lasts: dict[Any, Any] = {}
    for index, info in reversed(chunks):  # mostly, what is last in the metadata is last in its file
        path, end = info.relative_path, info.offset + info.length
        if end > ends.get(path, 0) and info.length and index.fqn not in OWN:
            ends[path], lasts[path] = end, info
    probes = []
    for number, (path, info) in enumerate(sorted(lasts.items())):
        index = MetadataIndex(PROBE, index=number, offset=torch.Size([number]))
        changes: dict[str, Any] = {
            "relative_path": OwnPath.of(str(path), partial(look, last=info)),
            "offset": info.offset + info.length - 1,
            "length": 1,
        }
        # One byte of a compressed chunk can not be unpacked.
        if hasattr(info, "transform_descriptors"):
            changes["transform_descriptors"] = None
        stored[index] = dataclasses.replace(info, **changes)
        zero, one = torch.Size([0]), torch.Size([1])
        probes.append(ReadItem(LoadItemType.BYTE_IO, MetadataIndex(PROBE), zero, index, zero, one))
    return probes


def has_files(stored: Any) -> bool:
    """Tell whether storage data says where in which file each chunk lies; a reader's records are all of one kind."""
    record = next(iter(stored.values()), None) if isinstance(stored, dict) else None
    return hasattr(record, "relative_path") and hasattr(record, "length")


def chunks_by_file(metadata: Metadata, plan: LoadPlan) -> dict[str, list[tuple[MetadataIndex, Any]]]:
    """Return the tensor chunks that a plan reads, with their places, by file; empty if the storage has no files."""
    stored = metadata.storage_data
    files: defaultdict[str, list[tuple[MetadataIndex, Any]]] = defaultdict(list)
    for item in plan.items if has_files(stored) else []:
        if item.type is not LoadItemType.BYTE_IO:
            info = stored[item.storage_index]
            files[info.relative_path].append((item.storage_index, info))
    return files
