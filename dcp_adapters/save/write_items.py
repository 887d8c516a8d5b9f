"""What a state dict becomes in a save: leaves for stock DCP, and the parts of quantized leaves with their write items.

Where a part's chunk lies follows from where the weight's shard lies: DTensor is asked once for that, and dividing by
the blocks gives offsets and sizes of payload and scales.
The items are those that stock DCP makes for the parts that `expand` gives, at a fraction of the cost: a model repeats
its layers, so similar weights are asked about once, and their items share one record. This also shrinks what ranks
gather and what the coordinator unpickles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from dcp_adapters.plain.plain_memory import refuse_without_bytes
from dcp_adapters.records.expand import Leaf, leaves_of, settled_parts
from dcp_adapters.records.part_places import box_of, placement_key
from dcp_adapters.records.placements import placement_kind, placement_problem
from fsdp_hooks.torch_private import local_of, without_torch_function
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
        """Return the write item of the part whose entry is `name`."""
        return WriteItem(MetadataIndex(name, self.data.chunk.offsets), self.kind, tensor_data=self.data)


@dataclass
class SaveLeaves:
    """One rank's leaves, separated.

    Attributes:
        plain: what stock DCP saves, by name.
        parts: the local parts of quantized leaves, aliased, by entry; items: their write items.
        payloads: entry of a payload -> the quantized tensor; wide: -> its tensor-wide scale, if it has one.
        watched: parts that several ranks hold: [N, 1] scales cut along columns, histories.
        withheld: scalars that another rank lists, the first of their mesh.
        entries: quantized leaf -> part -> its entry.
        described: leaves that say themselves where they lie. pieces: where one has several, each piece of a part.
    """

    plain: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Tensor] = field(default_factory=dict)
    items: list[WriteItem] = field(default_factory=list)
    payloads: dict[str, QuantizedTensor] = field(default_factory=dict)
    wide: dict[str, Tensor] = field(default_factory=dict)
    watched: set[str] = field(default_factory=set)
    withheld: set[str] = field(default_factory=set)
    entries: dict[str, dict[str, str]] = field(default_factory=dict)
    described: set[str] = field(default_factory=set)
    pieces: dict[MetadataIndex, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(flat: Mapping[str, Any]) -> "SaveLeaves":
        """Return the leaves of a flattened state dict.

        Raises:
            ValueError: a leaf cannot be saved; a column cut does not fall on block boundaries; what a rank holds is
                not the box that its placement tells.
        """
        found = SaveLeaves()
        named: list[tuple[str, Tensor]] = []  # all local tensors
        known: dict[object, list[PartLayout]] = {}  # of leaves alike in shape, placement and recipe
        fitting: set[object] = set()  # kinds of placements that are as they say
        leaves = leaves_of(flat)
        # each attribute of a subclass would go through __torch_function__, thousands of times
        with without_torch_function():
            for name, leaf in leaves.items():
                q = leaf.quantized
                if leaf.place is not None:
                    named += found._keep_described(name, leaf)
                    continue
                if isinstance(leaf.value, DTensor) and (kind := placement_kind(leaf.value)) not in fitting:
                    if (problem := placement_problem(leaf.value)) is not None:
                        raise ValueError(f"{name}: {problem}")
                    fitting.add(kind)
                if q is not None:
                    # similar weights have equal layouts, and DTensor's computation of a shard's place is slow
                    key = placement_key(leaf.value, q)
                    if key not in known:
                        known[key] = _layouts(name, leaf.value, q)
                    named += found._keep_parts(name, q, known[key])
                    continue
                found.plain[name] = leaf.plain
                if leaf.local is not None:
                    named.append((name, leaf.local if leaf.plain is leaf.value else local_of(leaf.plain)))
                # every rank of the mesh holds a scalar: if all listed it, plans would grow with the world for no byte
                # more
                if isinstance(leaf.plain, DTensor) and not leaf.plain.ndim and not lists_scalars(leaf.plain):
                    found.withheld.add(name)
        refuse_without_bytes(named)
        return found

    def paths(self, mappings: Mapping[str, Any]) -> dict[str, Any]:
        """Return flat name -> path in the nested dict, with paths of parts in place of those of their weights."""
        paths = {name: path for name, path in mappings.items() if name not in self.entries}
        for weight, parts in self.entries.items():
            *container, last = mappings[weight]
            for part, entry in parts.items():
                paths[entry] = (*container, last, part) if isinstance(last, int) else (*container, f"{last}.{part}")
        return paths

    def data_of(self, index: MetadataIndex) -> Tensor | None:
        """Return what is stored for an item of these; None if stock has to look."""
        piece = self.pieces.get(index)
        return self.parts.get(index.fqn) if piece is None else piece

    def _keep_described(self, name: str, leaf: Leaf) -> list[tuple[str, Tensor]]:
        """Keep and return the pieces of a leaf that says itself where they lie.

        Raises:
            ValueError: a piece splits a block; two have one place and different bytes.
        """
        q, pieces = leaf.quantized, leaf.pieces(name)
        self.described.add(name)
        if q is not None:
            self.entries[name] = {spec.name: f"{name}.{spec.name}" for spec in specs_of(q.recipe)}
        placed: dict[MetadataIndex, Tensor] = {}
        for spec, box, data in pieces:
            entry = name if q is None else self.entries[name][spec.name]
            item = WriteItem(
                MetadataIndex(entry, torch.Size(box[0])),
                WriteItemType.SHARD,
                tensor_data=_data(*box, leaf.shape if q is None else spec.shape(leaf.shape), spec.dtype),
            )
            before = placed.setdefault(item.index, data)
            if before is not data:
                # the [N, 1] scales of pieces that have the same rows
                if before.shape != data.shape or not torch.equal(before, data):
                    raise ValueError(
                        f"{entry}: two pieces of this rank's tensor have the place {box[0]}, and differ; expected the "
                        "same bytes"
                    )
                continue
            self.items.append(item)
            self.parts.setdefault(entry, data)
            if q is not None and (spec.length is not None or (spec.per_row and not spec.block)):
                self.watched.add(entry)
            if q is not None and spec.name == "payload":
                self.payloads[entry] = q
            if q is not None and not spec.per_row and spec.length is None:
                self.wide[self.entries[name]["payload"]] = data
        if len(placed) > len({index.fqn for index in placed}):
            self.pieces |= placed
        return [(name, data) for _, _, data in pieces]

    def _keep_parts(self, name: str, q: QuantizedTensor, layouts: Sequence[PartLayout]) -> list[tuple[str, Tensor]]:
        """Keep and return the parts of a quantized leaf; none if this rank is outside of its mesh."""
        specs = specs_of(q.recipe)
        entries = self.entries[name] = {spec.name: f"{name}.{spec.name}" for spec in specs}
        if not layouts:
            return []
        parts = settled_parts(name, q)
        for layout in layouts:
            entry = entries[layout.part]
            self.parts[entry] = parts[layout.part]
            self.items.append(layout.item(entry))
            if layout.several:
                self.watched.add(entry)
            if layout.withheld:
                self.withheld.add(entry)
        self.payloads[entries["payload"]] = q
        wide = next((spec.name for spec in specs if not spec.per_row), None)
        if wide is not None:
            self.wide[entries["payload"]] = parts[wide]
        return [(name, part) for part in parts.values()]


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
            _data(*spec.box(*box), spec.shape(value.shape), spec.dtype),
            several=(spec.per_row and not spec.block and columns) or spec.length is not None,
            withheld=withheld and not spec.shape(value.shape),
        )
        for spec in specs_of(q.recipe)
    ]


def lists_scalars(value: DTensor) -> bool:
    """Return whether this rank lists the scalars that all ranks of a mesh hold: only the mesh's first does."""
    return not any(value.device_mesh.get_coordinate() or ())


def plain_item(name: str, tensor: Tensor, *, rows: tuple[int, int] | None = None) -> WriteItem:
    """Return the item of a plain tensor; with `rows` = (first, total), of some rows of a larger one."""
    first, total = rows or (0, tensor.shape[0] if tensor.ndim else 0)
    offsets = (first, *[0] * (tensor.ndim - 1)) if tensor.ndim else ()
    size = (total, *tensor.shape[1:]) if tensor.ndim else ()
    kind = WriteItemType.TENSOR if rows is None else WriteItemType.SHARD
    data = _data(offsets, tuple(tensor.shape), size, tensor.dtype)
    return WriteItem(MetadataIndex(name, data.chunk.offsets), kind, tensor_data=data)


_PROPERTIES: dict[torch.dtype, TensorProperties] = {}


def _data(offsets: Sequence[int], sizes: Sequence[int], size: Sequence[int], dtype: torch.dtype) -> TensorWriteData:
    properties = _PROPERTIES.get(dtype) or _PROPERTIES.setdefault(dtype, TensorProperties(dtype=dtype))
    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    return TensorWriteData(chunk, properties, torch.Size(size))
