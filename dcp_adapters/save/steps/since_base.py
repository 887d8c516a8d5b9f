"""QuantizedSavePlanner(delta_to=...): tensors stored as what changed since a full save.

    __init__       every rank       opens the base
    local_plan     every rank       chooses: every plain tensor that the base has in the same dtype and shape
    agree          coordinator      ranks choose alike; the manifest names the base, the same of all ranks
    finish_plan    every rank       the items become items of bytes, whose length need not be known beforehand
    resolve        writing thread   a chunk is compared with its box of the base, and coded
    commit         coordinator      the base is still there; torch_private.Committed marks the chunks in `.metadata`

What the planner tells of a chunk (its place, its checksum, its digest) is that of the tensor, as in a full save.
"""

import dataclasses
import io
import os
from collections.abc import Mapping
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_adapters.delta.coding.chunk import encode_chunk
from dcp_adapters.plain.plain_memory import is_plain
from dcp_adapters.records.manifest import with_base
from dcp_adapters.save.steps.coordinator import tell
from dcp_adapters.save.steps.step import Data, GlobalSave, SaveStep, Saving, Source
from dcp_adapters.stored.reading.base import Base
from dcp_adapters.torch_private import writes_safetensors

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex

Directory = str | os.PathLike[str]


def refuse_without_checksums(*, checksums: bool) -> None:
    """Refuse a delta without checksums."""
    if not checksums:
        raise ValueError(
            "QuantizedSavePlanner: delta_to needs checksums=True: what is made of base and delta is compared with them"
        )


class SinceBase(SaveStep):
    """One rank's part in one save. Raises as `Base.to_save`."""

    def __init__(self, delta_to: Directory, saving: Saving) -> None:
        self.base = Base.to_save(delta_to, saving.checkpoint_id)
        self._chosen: frozenset[MetadataIndex] = frozenset()

    def local_plan(self, plan: SavePlan, data: Source) -> SavePlan:
        """Choose, and tell for each item 1 if it will be stored as changes, else 0."""
        flags = bytes(self._fits(item, data) for item in plan.items)
        self._chosen = frozenset(item.index for item, flag in zip(plan.items, flags, strict=True) if flag)
        return tell(plan, "delta_to", fixed=flags, now=self.base.link.digest)

    def agree(self, save: GlobalSave) -> None:
        """Find the tensors that are stored as changes, and name the base in the manifest.

        Raises:
            ValueError: some ranks store a tensor in full.
        """
        save.refuse_apart("delta_to is agreed on by all ranks")
        names: tuple[set[str], set[str]] = set(), set()  # in full, as changes
        for plan in save.plans:
            # the coordinator's plan may have got more items, for which it has no flag (`with_unlisted`)
            flags = chain(plan.planner_data.options["delta_to"], repeat(0))
            for item, coded in zip(plan.items, flags, strict=False):
                names[coded].add(item.index.fqn)
        both = names[0] & names[1]
        if both:
            raise ValueError(
                f"{min(both)}: some ranks hold it as a plain tensor, others as one of another class; a delta needs the "
                "same everywhere"
            )
        save.manifest, save.coded = with_base(save.manifest, self.base.link), frozenset(names[1])

    def finish_plan(self, plan: SavePlan, answers: Mapping[str, Any]) -> SavePlan:
        """Make the chosen items items of bytes. Raises ValueError for a writer that keeps no bytes."""
        if writes_safetensors(plan.storage_data):
            raise ValueError(
                "QuantizedSavePlanner: delta_to needs a writer that keeps bytes and DCP's planner data, such as "
                "FileSystemWriter; HuggingFaceStorageWriter keeps tensors alone"
            )
        items = [
            # writers store an item of bytes at whatever length it has; a tensor's length follows from its shape
            dataclasses.replace(item, type=WriteItemType.BYTE_IO) if item.index in self._chosen else item
            for item in plan.items
        ]
        return dataclasses.replace(plan, items=items)

    def resolve(self, item: WriteItem, source: Source) -> Data:
        """Return what is stored for a chunk, which the step of the checksums has copied to the CPU."""
        data = source(item)
        if item.index not in self._chosen:
            return data
        assert isinstance(data, Tensor)
        assert item.tensor_data is not None
        # changes are found byte by byte, so the bytes must be those of the values
        plain = data.detach().resolve_conj().resolve_neg().contiguous()
        return io.BytesIO(encode_chunk(self.base.read(item.index.fqn, item.tensor_data.chunk), plain))

    def commit(self, files: set[str]) -> None:
        """Check that the base is still there."""
        self.base.check_unchanged()

    def _fits(self, item: WriteItem, data: Source) -> bool:
        placed = item.tensor_data
        if item.type == WriteItemType.BYTE_IO or placed is None:
            return False
        if not self.base.holds(item.index.fqn, placed.properties.dtype, placed.size):
            return False
        # the record says shape and dtype alone; a tensor of another library's class has other bytes than these
        found = data(item)
        return isinstance(found, Tensor) and is_plain(found)
