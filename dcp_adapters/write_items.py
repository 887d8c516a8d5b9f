"""Write items of quantized leaves: where each part's chunk lies follows from where the weight's shard lies.

DTensor is asked once for a weight's shard; offsets and sizes of its payload and scales are that, divided by their
blocks. The items are those stock DCP makes for the parts that `expand` gives, at a fraction of the cost.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from dcp_adapters.expand import settled_parts
from fsdp_hooks.torch_private import compute_local_shape_and_global_offset
from qtensor.formats import PartSpec, block_multiple
from qtensor.tensor import QuantizedTensor

__all__ = ["Box", "box_of", "part_box", "plain_item", "quantized_items"]

Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offsets, sizes) in the global tensor


def quantized_items(name: str, value: Tensor, q: QuantizedTensor) -> Iterator[tuple[WriteItem, Tensor]]:
    """(write item, the local part it writes) for each part of a quantized leaf.

    Nothing where this rank is outside of the weight's mesh.

    Raises:
        ValueError: a column cut does not fall on block boundaries; the shards of a gathered weight hold different
            tensor-wide scales.
    """
    box = box_of(name, value, q)
    if box is None:
        return
    kind = WriteItemType.SHARD if isinstance(value, DTensor) else WriteItemType.TENSOR
    parts = settled_parts(name, q)
    for spec in q.specs():
        offsets, sizes = part_box(spec, *box)
        part = parts[spec.name]
        yield _item(f"{name}.{spec.name}", kind, offsets, sizes, spec.shape(value.shape), part), part


def plain_item(name: str, tensor: Tensor, *, rows: tuple[int, int] | None = None) -> WriteItem:
    """The item of a plain tensor; with `rows` = (first, total), of some rows of a larger one."""
    first, total = rows or (0, tensor.shape[0] if tensor.ndim else 0)
    offsets = (first, *[0] * (tensor.ndim - 1)) if tensor.ndim else ()
    size = (total, *tensor.shape[1:]) if tensor.ndim else ()
    kind = WriteItemType.TENSOR if rows is None else WriteItemType.SHARD
    return _item(name, kind, offsets, tuple(tensor.shape), size, tensor)


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


def _item(  # noqa: PLR0913, PLR0917 - the fields of one record
    name: str, kind: WriteItemType, offsets: Sequence[int], sizes: Sequence[int], size: Sequence[int], tensor: Tensor
) -> WriteItem:
    offset = torch.Size(offsets)
    properties = _PROPERTIES.get(tensor.dtype) or _PROPERTIES.setdefault(
        tensor.dtype, TensorProperties(dtype=tensor.dtype)
    )
    chunk = ChunkStorageMetadata(offsets=offset, sizes=torch.Size(sizes))
    return WriteItem(
        MetadataIndex(name, offset), kind, tensor_data=TensorWriteData(chunk, properties, torch.Size(size))
    )
