"""The coordinator's plan: what stock DCP makes of all ranks' plans, in fewer steps.

    replicated    what several plans list is left to one of them, the one that has least to write so far
    index hints   each item learns the number of its chunk
    metadata      the chunks of each tensor, in the order of the plans
    validation    they cover it exactly once; asked once for all tensors whose chunks are the same objects, as those of
                  a model's repeated layers are

A quantized model has two or three items where a dense one has one, so this is where planning it would cost most. Plans
that are not sound are left to stock, whose errors they get.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_adapters.plain.tiling import Box, is_tiled

Key = tuple[str, torch.Size | None]  # what makes two items the same: the entry, and where the chunk begins


def global_plan(
    plans: Sequence[SavePlan], *, to_lowest_rank: bool, flattened: bool
) -> tuple[list[SavePlan], Metadata] | None:
    """Return each rank's plan, and the metadata; None if stock has to say what is wrong.

    Args:
        plans: of all ranks.
        to_lowest_rank: what several ranks list is left to the lowest of them (dedup_save_to_lowest_rank).
        flattened: the plans' planner data are the paths of their entries, which the metadata keep.
    """
    out: list[SavePlan] = []
    entries: dict[str, Any] = {}
    for plan, dropped in zip(plans, _find_dropped(plans, to_lowest_rank=to_lowest_rank), strict=True):
        items: list[WriteItem] = []
        for item in plan.items:
            index, data = item.index, item.tensor_data
            if dropped and (index.fqn, index.offset) in dropped:
                continue
            entry = entries.get(index.fqn)
            # one name of two kinds, or twice as a whole: stock has the words for it
            if entry is not None and (type(entry) is BytesStorageMetadata or item.type is not WriteItemType.SHARD):
                return None
            if item.type is WriteItemType.BYTE_IO:
                entries[index.fqn] = BytesStorageMetadata()
                items.append(item)
                continue
            if data is None or data.chunk is None:
                return None
            if entry is None:
                entry = entries[index.fqn] = TensorStorageMetadata(data.properties, data.size, [])
            # as in stock's plans: a reader finds the chunk by its number, without a search
            hinted = MetadataIndex(index.fqn, index.offset, len(entry.chunks))
            items.append(WriteItem(hinted, item.type, item.bytes_io_data, data))
            entry.chunks.append(data.chunk)
        out.append(dataclasses.replace(plan, items=items))
    if not _is_covered(entries):
        return None
    return out, Metadata(entries, planner_data=_merge([plan.planner_data for plan in plans]) if flattened else None)


def _merge(paths: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return flat name -> path in the nested dict, of all ranks; if paths differ, the first rank's."""
    merged: dict[str, Any] = {}
    for one in reversed(paths):
        merged.update(one)
    return merged


def _find_dropped(plans: Sequence[SavePlan], *, to_lowest_rank: bool) -> list[set[Key]]:
    """Return for each plan the items that it leaves to another."""
    holders: dict[Key, int] = {}
    several: dict[Key, set[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            key = item.index.fqn, item.index.offset
            first = holders.setdefault(key, rank)
            if first != rank:
                several.setdefault(key, {first}).add(rank)
    dropped: list[set[Key]] = [set() for _ in plans]
    if not several:
        return dropped
    sizes = [0] * len(plans)  # what each plan has to write so far; bytes entries count as 1
    items = {(item.index.fqn, item.index.offset): item for plan in plans for item in plan.items}
    for key, rank in holders.items():
        ranks = several.get(key, {rank})
        chosen = min(ranks) if to_lowest_rank else min(ranks, key=sizes.__getitem__)
        sizes[chosen] += items[key].tensor_storage_size() or 1
        for other in ranks - {chosen}:
            dropped[other].add(key)
    return dropped


def _is_covered(entries: dict[str, Any]) -> bool:
    """Return whether the chunks of each tensor cover it exactly once."""
    found: dict[tuple[torch.Size, tuple[int, ...]], tuple[torch.Size, list[Box]]] = {}
    for entry in entries.values():
        if not isinstance(entry, TensorStorageMetadata) or not entry.size:
            continue
        # layers that repeat share the records of their chunks (write_items.py), and unpickled plans keep that;
        # `entries` keeps the objects alive, so their ids stay theirs
        key = entry.size, tuple(map(id, entry.chunks))
        if key in found:
            continue
        if any(_is_stray(entry.size, chunk) for chunk in entry.chunks):
            return False
        found[key] = entry.size, [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    return is_tiled(list(found.values()))


def _is_stray(size: torch.Size, chunk: ChunkStorageMetadata) -> bool:
    """Return whether an empty chunk lies elsewhere than at an end of the tensor, where shards are empty."""
    return 0 in chunk.sizes and 0 not in size and all(at < full for at, full in zip(chunk.offsets, size, strict=True))
