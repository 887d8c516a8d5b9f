"""Write items of quantized leaves: where each part's chunk lies follows from where the weight's shard lies.

DTensor is asked once where a weight's shard lies; dividing by the blocks gives offsets and sizes of payload and scales.
The items are those that stock DCP makes for the parts that `expand` gives, at a fraction of the cost: a model repeats
its layers, so similar weights are asked about once, and their items share one record. This also shrinks what ranks
gather and what the coordinator unpickles.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from dcp_adapters.format.checksums import CHECKSUMS, ROW
from dcp_adapters.format.part_places import box_of, part_box, placement_key
from qtensor.spec.registry import specs_of
from qtensor.tensor.quantized_tensor import QuantizedTensor


@dataclass(frozen=True)
class PartLayout:
    """Where one part of a weight's shard lies.

    several: other ranks hold the same chunk (a `[N, 1]` scale under column cuts, say); the bytes must be equal.
    withheld: a scalar that all ranks of the mesh hold; the mesh's first rank lists it, not this one.
    """

    part: str
    kind: WriteItemType
    data: TensorWriteData
    several: bool
    withheld: bool

    def item(self, name: str) -> WriteItem:
        """The write item of the part whose entry is `name`."""
        return WriteItem(MetadataIndex(name, self.data.chunk.offsets), self.kind, tensor_data=self.data)


class Layouts:
    """The layouts of one state dict's weights; those alike in shape, placement and recipe share theirs."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[PartLayout, ...]] = {}

    def of(self, name: str, value: Tensor, q: QuantizedTensor) -> tuple[PartLayout, ...]:
        """A layout for each part of a quantized leaf; none where this rank is outside of the weight's mesh.

        Raises:
            ValueError: a column cut does not fall on block boundaries.
        """
        key = placement_key(value, q)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = tuple(_layouts(name, value, q))
        return found


def _layouts(name: str, value: Tensor, q: QuantizedTensor) -> list[PartLayout]:
    box = box_of(name, value, q)
    if box is None:
        return []
    kind = WriteItemType.SHARD if isinstance(value, DTensor) else WriteItemType.TENSOR
    columns = isinstance(value, DTensor) and any(p.is_shard(value.ndim - 1) for p in value.placements)
    withheld = isinstance(value, DTensor) and not lists_scalars(value)
    return [
        PartLayout(
            spec.name,
            kind,
            _data(*part_box(spec, *box), spec.shape(value.shape), spec.dtype),
            several=(spec.per_row and not spec.block and columns) or spec.length is not None,
            withheld=withheld and not spec.shape(value.shape),
        )
        for spec in specs_of(q.recipe)
    ]


def lists_scalars(value: DTensor) -> bool:
    """Whether this rank lists the scalars that all ranks of a mesh hold: only the mesh's first rank does."""
    return not any(value.device_mesh.get_coordinate() or ())


def plain_item(name: str, tensor: Tensor, *, rows: tuple[int, int] | None = None) -> WriteItem:
    """The item of a plain tensor; with `rows` = (first, total), of some rows of a larger one."""
    first, total = rows or (0, tensor.shape[0] if tensor.ndim else 0)
    offsets = (first, *[0] * (tensor.ndim - 1)) if tensor.ndim else ()
    size = (total, *tensor.shape[1:]) if tensor.ndim else ()
    kind = WriteItemType.TENSOR if rows is None else WriteItemType.SHARD
    data = _data(offsets, tuple(tensor.shape), size, tensor.dtype)
    return WriteItem(MetadataIndex(name, data.chunk.offsets), kind, tensor_data=data)


def with_checksum_items(plans: list[SavePlan]) -> tuple[list[SavePlan], TensorStorageMetadata]:
    """Each plan with an item for its rows of the table, and the table's metadata."""
    total, first = sum(len(plan.items) for plan in plans), 0
    out: list[SavePlan] = []
    chunks: list[ChunkStorageMetadata] = []
    entry = None
    for plan in plans:
        rows = torch.empty(len(plan.items), ROW, dtype=torch.uint8, device="meta")
        if not plan.items:
            out.append(plan)
            continue
        item = plain_item(CHECKSUMS, rows, rows=(first, total))
        first += len(plan.items)
        assert item.tensor_data is not None
        item = replace(item, index=replace(item.index, index=len(chunks)))
        chunks.append(item.tensor_data.chunk)  # type: ignore[union-attr]
        entry = TensorStorageMetadata(item.tensor_data.properties, item.tensor_data.size, chunks)  # type: ignore[union-attr]
        out.append(replace(plan, items=[*plan.items, item]))
    assert entry is not None  # the manifest is always an item
    return out, entry


_PROPERTIES: dict[torch.dtype, TensorProperties] = {}


def _data(offsets: Sequence[int], sizes: Sequence[int], size: Sequence[int], dtype: torch.dtype) -> TensorWriteData:
    properties = _PROPERTIES.get(dtype) or _PROPERTIES.setdefault(dtype, TensorProperties(dtype=dtype))
    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    return TensorWriteData(chunk, properties, torch.Size(size))
