"""Write items of quantized leaves: where each part's chunk lies follows from where the weight's shard lies.

DTensor is asked once for a weight's shard; offsets and sizes of its payload and scales are that, divided by their
blocks. The items are those stock DCP makes for the parts that `expand` gives, at a fraction of the cost: a model
repeats its layers, so weights alike are asked about once, and their items share one record. What ranks gather and what
the coordinator unpickles is smaller by that, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from fsdp_hooks.torch_private import compute_local_shape_and_global_offset
from qtensor.formats import PartSpec, block_multiple, specs_of
from qtensor.tensor import QuantizedTensor

Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offsets, sizes) in the global tensor


@dataclass(frozen=True)
class PartLayout:
    """Where one part of a weight's shard lies.

    several: other ranks hold the same bytes, as a `[N, 1]` scale under column cuts; they must be equal there.
    withheld: a scalar that all ranks of the mesh hold and another rank, the mesh's first, lists.
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
        placed = (id(value.device_mesh), value.placements) if isinstance(value, DTensor) else None
        key = (value.shape, q.shape, q.recipe, placed)
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
    """Whether this rank lists what is a scalar on every rank of a mesh: the mesh's first rank does."""
    return not any(value.device_mesh.get_coordinate() or ())


def plain_item(name: str, tensor: Tensor, *, rows: tuple[int, int] | None = None) -> WriteItem:
    """The item of a plain tensor; with `rows` = (first, total), of some rows of a larger one."""
    first, total = rows or (0, tensor.shape[0] if tensor.ndim else 0)
    offsets = (first, *[0] * (tensor.ndim - 1)) if tensor.ndim else ()
    size = (total, *tensor.shape[1:]) if tensor.ndim else ()
    kind = WriteItemType.TENSOR if rows is None else WriteItemType.SHARD
    data = _data(offsets, tuple(tensor.shape), size, tensor.dtype)
    return WriteItem(MetadataIndex(name, data.chunk.offsets), kind, tensor_data=data)


def box_of(name: str, value: Tensor, q: QuantizedTensor) -> Box | None:
    """Where this rank's shard of a quantized weight lies; None where the rank is outside of its mesh."""
    if not isinstance(value, DTensor):
        return (0,) * value.ndim, tuple(value.shape)
    if value.device_mesh.get_coordinate() is None:
        return None
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    multiple = block_multiple(q.recipe)
    if tuple(sizes) != tuple(q.shape) or offsets[-1] % multiple or sizes[-1] % multiple:
        raise ValueError(
            f"{name}: a shard of {tuple(q.shape)} at {tuple(offsets)} out of {tuple(value.shape)}, expected "
            f"{tuple(sizes)}: column cuts must fall on multiples of {multiple}; choose a mesh that divides K into such "
            "pieces"
        )
    return tuple(offsets), tuple(sizes)


def part_box(spec: PartSpec, offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    """Where the part of a box of the weight lies in the global part."""
    shape = spec.shape(sizes)
    if not spec.per_row:
        return (0,) * len(shape), shape
    return (*offsets[:-1], offsets[-1] // spec.block if spec.block else 0), shape


_PROPERTIES: dict[torch.dtype, TensorProperties] = {}


def _data(offsets: Sequence[int], sizes: Sequence[int], size: Sequence[int], dtype: torch.dtype) -> TensorWriteData:
    properties = _PROPERTIES.get(dtype) or _PROPERTIES.setdefault(dtype, TensorProperties(dtype=dtype))
    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    return TensorWriteData(chunk, properties, torch.Size(size))
