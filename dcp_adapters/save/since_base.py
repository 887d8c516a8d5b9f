"""QuantizedSavePlanner(delta_to=...): tensors stored as what changed since a full save.

    set_up_planner       every rank       opens the base
    create_local_plan    every rank       chooses: every plain tensor that the base has in the same dtype and shape
    create_global_plan   coordinator      all ranks have the same base, and choose alike; the manifest names the base
    finish_plan          every rank       the items become items of bytes, whose length need not be known beforehand
    resolve_data         writing thread   a chunk is compared with its box of the base, and coded
    commit               coordinator      the base is still there; the chunks are marked in `.metadata`

What the planner tells of a chunk (its place, its checksum, its digest) is that of the tensor, as in a full save.
"""

import dataclasses
import io
import os
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_adapters.delta.coding.chunk import encode_chunk
from dcp_adapters.plain.plain_memory import is_plain
from dcp_adapters.stored.reading.base import Base
from dcp_adapters.torch_private import writes_safetensors

Directory = str | os.PathLike[str]


def refuse_without_checksums(*, checksums: bool) -> None:
    """Refuse a delta without them."""
    if not checksums:
        raise ValueError(
            "QuantizedSavePlanner: delta_to needs checksums=True: what is made of base and delta is compared with them"
        )


class SinceBase:
    """One rank's part in one save. Raises as `Base.to_save`."""

    def __init__(self, delta_to: Directory, checkpoint_id: Directory | None) -> None:
        self.base = Base.to_save(delta_to, checkpoint_id)
        self._chosen: frozenset[MetadataIndex] = frozenset()

    def chosen(self, items: Sequence[WriteItem], lookup: Callable[[MetadataIndex], Tensor]) -> bytes:
        """1 for each item that will be stored as changes, else 0."""
        flags = bytes(self._fits(item, lookup) for item in items)
        self._chosen = frozenset(item.index for item, flag in zip(items, flags, strict=True) if flag)
        return flags

    def has(self, item: WriteItem) -> bool:
        """Whether an item is stored as changes."""
        return item.index in self._chosen

    def as_bytes(self, plan: SavePlan) -> SavePlan:
        """The plan to write. Raises ValueError for a writer that keeps no bytes."""
        if writes_safetensors(plan.storage_data):
            raise ValueError(
                "QuantizedSavePlanner: delta_to needs a writer that keeps bytes and DCP's planner data, such as "
                "FileSystemWriter; HuggingFaceStorageWriter keeps tensors alone"
            )
        items = [
            dataclasses.replace(item, type=WriteItemType.BYTE_IO) if self.has(item) else item for item in plan.items
        ]
        return dataclasses.replace(plan, items=items)

    def coded(self, item: WriteItem, data: Tensor) -> io.BytesIO:
        """What is stored for a chunk, a CPU tensor."""
        assert item.tensor_data is not None
        plain = data.detach().resolve_conj().resolve_neg().contiguous()
        return io.BytesIO(encode_chunk(self.base.read(item.index.fqn, item.tensor_data.chunk), plain))

    def _fits(self, item: WriteItem, lookup: Callable[[MetadataIndex], Tensor]) -> bool:
        placed = item.tensor_data
        if item.type == WriteItemType.BYTE_IO or placed is None:
            return False
        return self.base.holds(item.index.fqn, placed.properties.dtype, placed.size) and is_plain(lookup(item.index))
