"""Any rank of any world in one process: state dicts of FSDP2 shape (row shards on a 1-D mesh) without the bytes.

The process becomes rank r of n by a "fake" process group, which takes a millisecond and talks to nobody. All shards are
views of one buffer whose pages are never touched, so a model of 800 GB costs its Python objects only; tensor-wide
scales, which the planner reads, are real. Plans of further ranks are the plan of rank 1, moved.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DeviceMesh, DTensor, Shard, init_device_mesh

from benchmarks.model_shapes import Shapes
from qtensor import QuantizedTensor
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import specs_of


@contextlib.contextmanager
def as_rank(rank: int, world: int) -> Iterator[DeviceMesh]:
    """This process as one rank of a world; yields the 1-D mesh over all of it."""
    dist.init_process_group("fake", rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


def state_dict_of(shapes: Shapes, mesh: DeviceMesh, recipe: Recipe | None) -> dict[str, Any]:
    """This rank's shards of a model, as `{"model": model.state_dict()}` gives them; recipe None: all of it in bf16."""
    rank, world = mesh.get_local_rank(), mesh.size()
    model = {}
    for name, (shape, quantized) in shapes.items():
        rows = _rows(shape[0], rank, world)[1]
        local = _shard((rows, *shape[1:]), recipe if quantized else None)
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        model[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )
    return {"model": model}


def moved(plan: SavePlan, rank: int, world: int) -> SavePlan:
    """The plan that rank 1 made, as `rank` makes it; objects that items share stay shared (pickle counts them once)."""
    chunks: dict[int, TensorWriteData] = {}
    items = []
    for item in plan.items:
        if item.type != WriteItemType.SHARD:
            items.append(item)
            continue
        data = chunks.get(id(item.tensor_data))
        if data is None:
            data = chunks[id(item.tensor_data)] = _moved_data(item, rank, world)
        items.append(WriteItem(MetadataIndex(item.index.fqn, data.chunk.offsets), item.type, tensor_data=data))
    return dataclasses.replace(plan, items=items)


def _moved_data(item: WriteItem, rank: int, world: int) -> TensorWriteData:
    old = item.tensor_data
    assert old is not None
    first, rows = _rows(old.size[0], rank, world)
    offsets, sizes = old.chunk.offsets, old.chunk.sizes
    chunk = ChunkStorageMetadata(torch.Size((first, *offsets[1:])), torch.Size((rows, *sizes[1:])))
    return TensorWriteData(chunk, old.properties, old.size)


def _rows(total: int, rank: int, world: int) -> tuple[int, int]:
    """The first row and the number of rows of a shard, as torch.chunk cuts."""
    each = -(-total // world)
    first = min(rank * each, total)
    return first, min(each, total - first)


def _shard(shape: tuple[int, ...], recipe: Recipe | None) -> Tensor:
    if recipe is None:
        return _view(shape, torch.bfloat16)
    parts = {
        spec.name: _view(spec.shape(shape), spec.dtype) if spec.per_row else torch.ones(spec.shape(shape))
        for spec in specs_of(recipe)
    }
    return QuantizedTensor.from_parts(parts, recipe, torch.bfloat16)


def _view(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    return _untouched()[:nbytes].view(dtype).view(shape)


@functools.cache
def _untouched() -> Tensor:
    """Room for the largest shard (DeepSeek's stacked experts on 8 ranks), all of it address space."""
    return torch.empty(1 << 30, dtype=torch.uint8)
