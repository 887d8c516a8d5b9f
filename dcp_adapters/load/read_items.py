"""Read items of what is loaded as it is: those of stock DCP, made once for all entries that are alike.

Which pieces of the stored chunks make up a rank's box follows from the chunks and the box alone, and a model repeats
its layers. So stock is asked about the first of the entries that are stored and placed alike, and the others get its
items under their own names:

    chunks    entries whose lists of chunks are equal; those of a checkpoint saved by QuantizedSavePlanner share their
              records, so mostly the same objects are found, and are not compared
    boxes     the parts of a quantized weight: in part_places.py, from where the weight lies; other tensors: asked of
              DTensor once for each shape, mesh and placements
    anything else (bytes, tensors of other libraries' classes, tensors in several pieces)     stock, one by one
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from dcp_adapters.plain.described import CHUNKS
from dcp_adapters.records.part_places import Box, PartPiece
from fsdp_hooks.torch_private import compute_local_shape_and_global_offset, local_of, without_torch_function

PLAIN = (Tensor, nn.Parameter)  # classes of tensors that are one box; others may tell DCP of several


class ReadItems:
    """The read items of one load.

    Args:
        metadata: of the checkpoint.
        strict: a name that the checkpoint lacks is an error; else it is left out.
    """

    def __init__(self, metadata: Metadata, *, strict: bool) -> None:
        self.metadata, self.strict = metadata, strict
        # numbers of lists of chunks, by the objects (which the metadata keep alive) and by what these say
        self._by_object: dict[tuple[int, ...], int] = {}
        self._by_value: dict[tuple[tuple[torch.Size, torch.Size], ...], int] = {}
        self._boxes: dict[object, Box] = {}
        self._items: dict[tuple[int, Box], list[ReadItem]] = {}

    def of(
        self,
        state_dict: Mapping[str, Any],
        parts: Mapping[str, Box],
        several: Mapping[str, Sequence[PartPiece]] = MappingProxyType({}),
    ) -> list[ReadItem]:
        """Return the items for a flat state dict, in its order.

        `parts` are those of its entries that are parts of quantized weights: local tensors, each with its box.
        `several` are those in several pieces.

        Raises:
            RuntimeError, ValueError: as stock DCP.
        """
        # each attribute of a subclass would go through __torch_function__, thousands of times
        with without_torch_function():
            boxes = {name: parts.get(name) or self._box_of(name, value) for name, value in state_dict.items()}
        return [
            item
            for name, value in state_dict.items()
            for item in (self._in_boxes(name, several[name]) if name in several else self._of(name, value, boxes[name]))
        ]

    def _in_boxes(self, name: str, pieces: Sequence[PartPiece]) -> list[ReadItem]:
        entry = self.metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            return create_default_local_load_plan({name: pieces[0].data}, self.metadata, self.strict).items
        chunks = [ChunkStorageMetadata(torch.Size(piece.box[0]), torch.Size(piece.box[1])) for piece in pieces]
        return create_read_items_for_chunk_list(name, entry, chunks)

    def _of(self, name: str, value: Any, box: Box | None) -> list[ReadItem] | Iterator[ReadItem]:
        entry = self.metadata.state_dict_metadata.get(name)
        if box is not None and isinstance(entry, TensorStorageMetadata):
            return self._in_box(name, entry, box)
        return create_default_local_load_plan({name: value}, self.metadata, self.strict).items

    def _box_of(self, name: str, value: Any) -> Box | None:
        """Return where this rank's piece of a plain tensor lies; None if stock has to say, or to refuse."""
        # a class of another library may tell DCP of several chunks, which stock asks it about
        if not isinstance(value, Tensor) or type(local := local_of(value)) not in PLAIN or hasattr(local, CHUNKS):
            return None
        entry = self.metadata.state_dict_metadata.get(name)
        # stock refuses what does not fit, in its own words
        if not isinstance(entry, TensorStorageMetadata) or value.shape != entry.size:
            return None
        if not isinstance(value, DTensor):
            return (0,) * value.ndim, value.shape
        mesh = value.device_mesh
        if type(value) is not DTensor or mesh.get_coordinate() is None:
            return None
        key = id(mesh), value.placements, value.shape
        found = self._boxes.get(key)
        if found is None:
            sizes, offsets = compute_local_shape_and_global_offset(value.shape, mesh, value.placements)
            found = self._boxes[key] = tuple(offsets), tuple(sizes)
        return found

    def _in_box(self, name: str, entry: TensorStorageMetadata, box: Box) -> list[ReadItem] | Iterator[ReadItem]:
        key = self._number(entry.chunks), box
        alike = self._items.get(key)
        if alike is not None:
            return (_rename(item, name) for item in alike)
        chunk = ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))
        self._items[key] = items = create_read_items_for_chunk_list(name, entry, [chunk])
        return items

    def _number(self, chunks: list[ChunkStorageMetadata]) -> int:
        """Return a number that is the same for lists of chunks that are equal."""
        # first by the objects: comparing the chunks of every tensor takes longer than making its items
        objects = tuple(map(id, chunks))
        found = self._by_object.get(objects)
        if found is None:
            values = tuple([(chunk.offsets, chunk.sizes) for chunk in chunks])
            found = self._by_object[objects] = self._by_value.setdefault(values, len(self._by_value))
        return found


def _rename(item: ReadItem, name: str) -> ReadItem:
    """Return the item under the name of another entry."""
    to, stored = item.dest_index, item.storage_index
    return ReadItem(
        item.type,
        MetadataIndex(name, to.offset, to.index),
        item.dest_offsets,
        MetadataIndex(name, stored.offset, stored.index),
        item.storage_offsets,
        item.lengths,
    )
