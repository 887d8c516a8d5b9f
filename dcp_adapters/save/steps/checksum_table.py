"""checksums=True: a digest of every chunk, made of the bytes as they are written, becomes one more entry.

    planned       coordinator      the table becomes an entry: the rows of each rank's items are one chunk of it
    resolve       writing thread   what is about to be written is digested; the table is made when it is asked for

A writer resolves each item once and writes what it got; that very data is digested here. Its threads share the items
out, so it may ask for the table before the rest (stock's does if there is CUDA: it begins with what is small).
Missing items are then resolved for the table, and kept if they are pickled, since pickling twice need not give the same
bytes, or if they were copied from a device, which takes longer than anything else here.
"""

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from dcp_adapters.records.checksums import CHECKSUMS, ROW, archive_row_of, checksum_table, row_of
from dcp_adapters.save.steps.coordinator import tell
from dcp_adapters.save.steps.step import Data, GlobalSave, SaveStep, Saving, Source
from dcp_adapters.save.write_items import plain_item

KEPT = 2**31  # bytes of copies from a device that wait for being written; what is more is copied again


class ChecksumTable(SaveStep):
    """The digests of one rank's chunks in one save."""

    def __init__(self, saving: Saving) -> None:
        self.rows: dict[MetadataIndex, tuple[bytes, bytes]] = {}
        self.pickled: dict[MetadataIndex, io.BytesIO] = {}
        self.copies: dict[MetadataIndex, Tensor] = {}
        self.room = KEPT
        self.asked: set[MetadataIndex] = set()  # by the writer, for itself
        self.items: list[WriteItem] = []  # of this rank

    def local_plan(self, plan: SavePlan, data: Source) -> SavePlan:
        """Tell the coordinator that this rank has a table."""
        return tell(plan, "checksums", fixed=True)

    def planned(self, save: GlobalSave) -> None:
        """Make the table an entry of the checkpoint, unless the plans are kept ones, which have it."""
        metadata = save.metadata
        assert metadata is not None
        if CHECKSUMS not in metadata.state_dict_metadata:
            save.plans, metadata.state_dict_metadata[CHECKSUMS] = with_checksum_items(save.plans)
            metadata.planner_data = {**metadata.planner_data, CHECKSUMS: (CHECKSUMS,)}

    def finish_plan(self, plan: SavePlan, answers: Mapping[str, Any]) -> SavePlan:
        """Keep the items, for each of which the table will have a row."""
        self.items = [item for item in plan.items if item.index.fqn != CHECKSUMS]
        return plan

    def resolve(self, item: WriteItem, source: Source) -> Data:
        """Return the data of an item, digested; or the table."""
        index = item.index
        if index.fqn == CHECKSUMS:
            return self._make_table(source)
        self.asked.add(index)
        # each copy is written once; then its memory is free for the next
        copy = self.copies.pop(index, None)
        if copy is None:
            return self._digest(index, self.pickled.get(index) or source(item))
        self.room += copy.nbytes
        return copy

    def _digest(self, index: MetadataIndex, data: Data, *, early: bool = False) -> Data:
        """Digest what is written now, or `early`, for the table; return it, on the CPU. Raises as `row_of`."""
        copied = isinstance(data, Tensor) and not data.is_cpu
        # what is digested must be what is written: pickling again may give other bytes
        if isinstance(data, io.BytesIO):
            data = self.pickled.setdefault(index, data)
        elif copied:
            data = data.detach().cpu()
        row = row_of(index, data)
        # a class of another library, which pickles itself: prepared as writers do, so that the archives are equal
        if row is None:
            assert isinstance(data, Tensor)
            data = data.detach()
            data = data if data.untyped_storage().size() == data.nbytes else data.clone()
            row = archive_row_of(index, data)
        elif copied and early and isinstance(data, Tensor) and index not in self.asked and data.nbytes <= self.room:
            self.copies[index] = data
            self.room -= data.nbytes
        self.rows[index] = row
        return data

    def _make_table(self, source: Source) -> Tensor:
        """Return the rows of this rank's items, in their order; resolve those that have not been written yet."""
        for item in self.items:
            if item.index not in self.rows:
                index = item.index
                self._digest(index, self.pickled.get(index) or source(item), early=True)
        return checksum_table([self.rows[item.index] for item in self.items])


def with_checksum_items(plans: list[SavePlan]) -> tuple[list[SavePlan], TensorStorageMetadata]:
    """Return each plan with an item for its rows of the table, and the table's metadata."""
    total, first = sum(len(plan.items) for plan in plans), 0
    out: list[SavePlan] = []
    chunks: list[ChunkStorageMetadata] = []
    entry = None
    for plan in plans:
        # a plan has no data: the rows are known when the chunks have been written
        rows = torch.empty(len(plan.items), ROW, dtype=torch.uint8, device="meta")
        if not plan.items:
            out.append(plan)
            continue
        item = plain_item(CHECKSUMS, rows, rows=(first, total))
        first += len(plan.items)
        assert item.tensor_data is not None
        # the global plan is made already, so the chunk's number is set here
        item = replace(item, index=replace(item.index, index=len(chunks)))
        chunks.append(item.tensor_data.chunk)  # type: ignore[union-attr]
        entry = TensorStorageMetadata(item.tensor_data.properties, item.tensor_data.size, chunks)  # type: ignore[union-attr]
        out.append(replace(plan, items=[*plan.items, item]))
    assert entry is not None  # the manifest is always an item
    return out, entry
