"""Plans of meshes of any size, made without ranks: what is written tiles every part, what is read covers every shard.

    mesh, placements -> a DeviceMesh that is told which rank it is on, no process group behind it
    save             -> set_up_planner, create_local_plan of every rank, create_global_plan of one; chunks: resolve_data
    load             -> set_up_planner, create_local_plan of some rank; chunks copied as its read items say

Shards are cut here by `cut`, from the definitions of FSDP and tensor parallelism, not by asking DTensor where they lie.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import DeviceMesh, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # what FSDP2 makes of TP rows; has no public name

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, expand
from fsdp_hooks.torch_private import dtensor_around
from qtensor import QuantizedTensor, quantize
from tests.dcp_adapters.cases import EVERY, ROW, SQUARE, arbitrary, bits
from tests.recipes import HANDS, MAIN, facts
from tests.sampling import sampled

COLUMNS = 128  # four cuts of a block of 32
Box = tuple[tuple[int, int], ...]  # for each dim: first, how many


@dataclass(frozen=True)
class Layout:
    """A mesh and what lies on it; `cuts` lists (mesh dim, tensor dim) in the order in which the tensor is cut."""

    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    cuts: tuple[tuple[int, int], ...]

    @property
    def ranks(self) -> int:
        return math.prod(self.shape)

    def mesh(self, rank: int) -> DeviceMesh:
        return DeviceMesh("cpu", torch.arange(self.ranks).view(self.shape), _init_backend=False, _rank=rank)

    def box(self, rank: int, shape: tuple[int, ...]) -> Box:
        """What a rank holds of a weight."""
        coordinate = [int(i) for i in torch.unravel_index(torch.tensor(rank), self.shape)]
        found = [(0, size) for size in shape]
        for mesh_dim, dim in self.cuts:
            found[dim] = cut(*found[dim], self.shape[mesh_dim], coordinate[mesh_dim])
        return tuple(found)

    def some_ranks(self) -> list[int]:
        """The first, the last, and the two on the sides of the middle."""
        return sorted({0, max(0, self.ranks // 2 - 1), self.ranks // 2, self.ranks - 1})


def cut(start: int, size: int, pieces: int, index: int) -> tuple[int, int]:
    """Piece `index` of [start, start + size): all pieces are ceil(size / pieces) long, until nothing is left."""
    step = -(-size // pieces)
    first = min(index * step, size)
    return start + first, min(first + step, size) - first


def fsdp(ranks: int) -> Layout:
    return Layout((ranks,), (Shard(0),), ((0, 0),))


def hsdp(replicas: int, ranks: int) -> Layout:
    return Layout((replicas, ranks), (Replicate(), Shard(0)), ((1, 0),))


def fsdp_tp_rows(ranks: int, tp: int) -> Layout:
    """TP cuts the rows, then FSDP each piece."""
    return Layout((ranks, tp), (_StridedShard(0, split_factor=tp), Shard(0)), ((1, 0), (0, 0)))


def fsdp_tp_columns(ranks: int, tp: int) -> Layout:
    return Layout((ranks, tp), (Shard(0), Shard(1)), ((1, 1), (0, 0)))


def columns(ranks: int) -> Layout:
    return Layout((ranks,), (Shard(1),), ((0, 1),))


def fsdp_tp_columns_both(ranks: int, tp: int) -> Layout:
    """TP cuts the columns, then FSDP (shard_placement_fn) each piece."""
    return Layout((ranks, tp), (_StridedShard(1, split_factor=tp), Shard(1)), ((1, 1), (0, 1)))


def rows_of(name: str, rows: int) -> int:
    return -(-rows // 32) * 32 if name in SQUARE else rows


def weights(names: Mapping[str, Any], rows: tuple[int, ...]) -> dict[str, QuantizedTensor]:
    return {
        f"{name} {n}": arbitrary((rows_of(name, n), max(COLUMNS, 4 * facts(recipe).block)), recipe, seed)
        for seed, (name, recipe) in enumerate(names.items())
        for n in rows
    }


def piece(part: Tensor, q: QuantizedTensor, box: Box) -> Tensor:
    """What a part, which may have fewer columns or no rows, holds of that piece of its weight."""
    if part.ndim < q.ndim:
        return part
    for dim, (start, size) in enumerate(box):
        if dim < q.ndim - 1:
            part = part.narrow(dim, start, size)
        elif part.shape[dim] > 1:
            block = -(-q.shape[dim] // part.shape[dim])
            assert not start % block
            assert not size % block or start + size == q.shape[dim]
            part = part.narrow(dim, start // block, -(-size // block))
    return part


def state(whole: Mapping[str, QuantizedTensor], layout: Layout, rank: int, *, poisoned: bool = False) -> dict[str, Any]:
    """A rank's shards; poisoned: of bytes none of which is the right one."""
    mesh = layout.mesh(rank)
    found = {}
    for name, q in whole.items():
        box = layout.box(rank, q.shape)
        parts = {part: piece(tensor, q, box) for part, tensor in q.parts().items()}
        if poisoned:
            parts = {part: complement(tensor) for part, tensor in parts.items()}
        local = QuantizedTensor.from_parts(parts, q.recipe, q.dtype)
        found[name] = dtensor_around(local, mesh, layout.placements, q.shape)
    return found


def complement(tensor: Tensor) -> Tensor:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    return (255 - raw).view(tensor.dtype).view(tensor.shape)


# -- saving ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """What the ranks of a simulated save wrote."""

    metadata: Metadata
    chunks: Mapping[tuple[str, tuple[int, ...]], Tensor]

    def of(self, part: str) -> list[tuple[ChunkStorageMetadata, Tensor]]:
        entry = self.metadata.state_dict_metadata[part]
        assert isinstance(entry, TensorStorageMetadata)
        return [(chunk, self.chunks[part, tuple(chunk.offsets)]) for chunk in entry.chunks]


def saved(whole: Mapping[str, QuantizedTensor], layout: Layout) -> Checkpoint:
    planners = [QuantizedSavePlanner() for _ in range(layout.ranks)]
    for rank, planner in enumerate(planners):
        planner.set_up_planner(state(whole, layout, rank), None, rank == 0)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    chunks: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    for planner, plan in zip(planners, plans, strict=True):
        for item in planner.finish_plan(plan).items:
            if item.index.fqn.startswith("qtensor."):
                continue
            key = (item.index.fqn, tuple(item.index.offset or ()))
            assert key not in chunks, f"{key} is written twice"
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)
            assert item.tensor_data is not None
            assert item.tensor_data.chunk.sizes == data.shape
            chunks[key] = data
    return Checkpoint(metadata, chunks)


def assert_tiled(checkpoint: Checkpoint, part: str, whole: Tensor) -> None:
    """The chunks of a part are the part: no element missing, none twice, none elsewhere."""
    entry = checkpoint.metadata.state_dict_metadata[part]
    assert isinstance(entry, TensorStorageMetadata)
    assert (tuple(entry.size), entry.properties.dtype) == (tuple(whole.shape), whole.dtype), part
    count, found = torch.zeros(whole.shape, dtype=torch.int32), complement(whole)
    for chunk, data in checkpoint.of(part):
        where = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        count[where] += 1
        found[where] = data
    assert bool((count == 1).all()), part
    assert bits(found) == bits(whole), part


def assert_cut_alike(checkpoint: Checkpoint, name: str, q: QuantizedTensor) -> None:
    """Scales are cut where their payload is: in rows always, in columns where they have any."""
    payload = {logical_box(chunk, q.payload, q) for chunk, _ in checkpoint.of(f"{name}.payload")}
    for part, tensor in q.parts().items():
        if tensor.ndim < q.ndim:
            continue
        boxes = {logical_box(chunk, tensor, q) for chunk, _ in checkpoint.of(f"{name}.{part}")}
        if tensor.shape[-1] == 1:
            assert {box[:-1] for box in boxes} == {box[:-1] for box in payload}, part
        else:
            assert boxes == payload, part


def logical_box(chunk: ChunkStorageMetadata, part: Tensor, q: QuantizedTensor) -> Box:
    block = -(-q.shape[-1] // part.shape[-1])  # the last may be smaller
    *leading, (column, size) = zip(chunk.offsets, chunk.sizes, strict=True)
    return (*leading, (column * block, min(size * block, q.shape[-1] - column * block)))


def items_of(planner: Any, of: Mapping[str, Any]) -> Counter[Any]:
    """What a rank plans to write of parts with rows; a scalar that all ranks hold is not listed by all of them."""
    planner.set_up_planner(dict(of), None, False)
    return Counter(
        (
            item.index.fqn,
            tuple(item.index.offset),
            tuple(item.tensor_data.chunk.offsets),
            tuple(item.tensor_data.chunk.sizes),
            tuple(item.tensor_data.size),
            item.tensor_data.properties.dtype,
        )
        for item in planner.create_local_plan().items
        if len(item.tensor_data.size) > 1 and not item.index.fqn.startswith("qtensor.")
    )


def assert_items_are_stock(whole: Mapping[str, QuantizedTensor], layout: Layout) -> None:
    """A rank plans what stock DCP plans for the expanded tensors."""
    for rank in layout.some_ranks():
        shards = state(whole, layout, rank)
        expected = items_of(DefaultSavePlanner(), expand(shards))
        assert items_of(QuantizedSavePlanner(), shards) == expected, (layout, rank)
        assert len(expected) == sum(part.ndim == q.ndim for q in whole.values() for part in q.parts().values())


# -- loading -----------------------------------------------------------------------------------------------------------


def assert_loads(checkpoint: Checkpoint, whole: Mapping[str, QuantizedTensor], layout: Layout, rank: int) -> None:
    """A rank's read items write each element of its shards once, with the right bytes."""
    target = state(whole, layout, rank, poisoned=True)
    stored = {name.rpartition(".")[0] for name in checkpoint.metadata.state_dict_metadata} - {"qtensor"}
    planner = QuantizedLoadPlanner(allow_partial_load=stored != whole.keys())
    planner.set_up_planner(target, checkpoint.metadata, rank == 0)
    (plan,) = planner.create_global_plan([planner.create_local_plan()])
    read: Counter[str] = Counter()
    for item in planner.finish_plan(plan).items:
        assert item.storage_index.offset is not None
        stored = checkpoint.chunks[item.storage_index.fqn, tuple(item.storage_index.offset)]
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            stored = stored.narrow(dim, start, length)
        destination = planner.resolve_tensor(item)
        destination.copy_(stored)
        planner.commit_tensor(item, destination)
        read[item.dest_index.fqn] += math.prod(item.lengths)
    for name, q in whole.items():
        box = layout.box(rank, q.shape)
        for part, tensor in target[name].to_local().parts().items():
            wanted = piece(q.parts()[part], q, box)
            assert tensor.shape == wanted.shape
            assert bits(tensor) == bits(wanted), (layout, rank, name, part)
            assert read[f"{name}.{part}"] == wanted.numel(), (layout, rank, name, part)


@pytest.fixture(autouse=True)
def _without_garbage_collection() -> Iterator[None]:
    """The objects of thousands of plans live as long as the test; looking at them again takes a fifth of its time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", EVERY)
def test_bytes_that_are_loaded_here_are_none_that_a_quantizer_makes(name: str) -> None:
    q = arbitrary((64, COLUMNS), EVERY[name], 0)
    again = quantize(q.dequantize(), EVERY[name])
    assert bits(again.payload) != bits(q.payload)
    assert bits(again.scale) != bits(q.scale)


SMALL = {
    "1 rank": fsdp(1),
    "fsdp 3": fsdp(3),
    "fsdp 48": fsdp(48),
    "hsdp 2x3": hsdp(2, 3),
    "fsdp 3 x tp 4 rows": fsdp_tp_rows(3, 4),
    "fsdp 3 x tp 4 columns": fsdp_tp_columns(3, 4),
}


def assert_saves_and_loads(
    whole: Mapping[str, QuantizedTensor], source: Layout, targets: Iterable[Layout], *, turn: int | None = None
) -> None:
    """With a turn other layouts load a hand of the recipes (and what is in no hand), each another one."""
    checkpoint = saved(whole, source)
    for name, q in whole.items():
        for part, tensor in q.parts().items():
            assert_tiled(checkpoint, f"{name}.{part}", tensor)
        assert_cut_alike(checkpoint, name, q)
    assert_items_are_stock(whole, source)
    for number, layout in enumerate(targets):
        others = MAIN.keys() - HANDS[(turn + number) % 3].keys() if turn is not None and layout != source else ()
        some = {name: q for name, q in whole.items() if name.partition(" ")[0] not in others}
        for rank in layout.some_ranks():
            assert_loads(checkpoint, some, layout, rank)


def test_small_meshes_tile_every_part_and_load_from_each_other() -> None:
    """Every recipe; 192 rows, even on all; 37 rows, uneven; 3, which leave ranks empty. Experts of some."""
    whole = weights(EVERY, (192, 37, 3))
    whole |= {f"{name} experts": arbitrary((5, 8, COLUMNS), recipe, 50) for name, recipe in ROW.items()}
    for turn, source in enumerate(SMALL.values()):
        assert_saves_and_loads(whole, source, SMALL.values(), turn=turn)


# Cuts of columns that are uneven, leave ranks empty or are made twice. Blocks of 32 and 16 columns: 1024 are 32 and 64.
COLUMN_CUTS = {
    "float8_row": (100, (columns(3), columns(1), columns(48), fsdp_tp_columns(2, 3))),
    "float8_tensor": (100, (columns(3), columns(48), fsdp_tp_columns(2, 3))),
    "mxfp8": (1024, (columns(33), columns(4), fsdp_tp_columns_both(2, 8), fsdp_tp_columns_both(33, 1))),
    "nvfp4": (1024, (columns(65), columns(8), fsdp_tp_columns_both(2, 16), fsdp(3))),
    # blocks of 128 columns, the last of 127
    "float8_block_square": (1023, (columns(2), columns(8), fsdp_tp_columns_both(2, 4), fsdp(3))),
}


@sampled("name", COLUMN_CUTS, ["float8_tensor", "nvfp4", "float8_block_square"])
def test_cuts_of_columns_keep_payload_and_scale_together(name: str) -> None:
    size, layouts = COLUMN_CUTS[name]
    whole = {"w": arbitrary((7, size), EVERY[name], 0)}
    for source in layouts:
        assert_saves_and_loads(whole, source, layouts)


# Layout, recipe, rows. 9001 rows are uneven everywhere, and 4,096 ranks of 3 rows are 1,095 ranks too many. (A
# strided shard of 512 x 8 ranks takes DTensor 5 ms to place, hence fewer.)
LARGE = {
    "fsdp 1000": (fsdp(1000), "nvfp4", 9001),
    "fsdp 4096": (fsdp(4096), "mxfp8", 9001),
    "hsdp 2x512": (hsdp(2, 512), "float8_row", 9001),
    "fsdp 128 x tp 8 rows": (fsdp_tp_rows(128, 8), "mxfp8", 1501),
    "fsdp 256 x tp 4 columns": (fsdp_tp_columns(256, 4), "nvfp4", 9001),
}


@sampled("case", LARGE, ["hsdp 2x512", "fsdp 128 x tp 8 rows"])
def test_large_meshes_tile_every_part_and_load_on_all_others(case: str) -> None:
    source, name, rows = LARGE[case]
    whole = weights({name: EVERY[name]}, (rows,))
    assert_saves_and_loads(whole, source, (fsdp(1), *(layout for layout, _, _ in LARGE.values())))
