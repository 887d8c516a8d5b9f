"""The read items of a load are those of stock DCP, in its order, also where they are taken from an entry alike."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import Replicate

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner, expand
from dcp_adapters.load import read_items
from dcp_adapters.records.part_places import PartBoxes
from fsdp_hooks.torch_private import dtensor_around
from tests.dcp_adapters.cases import EVERY, arbitrary
from tests.dcp_adapters.test_plans import (
    COLUMNS,
    Layout,
    columns,
    fsdp,
    fsdp_tp_columns,
    fsdp_tp_columns_both,
    fsdp_tp_rows,
    hsdp,
    piece,
    rows_of,
    state,
)
from tests.sampling import sampled

if TYPE_CHECKING:
    from qtensor import QuantizedTensor

ROWS = (37, 3)  # uneven; some ranks are empty
SOME = {name: EVERY[name] for name in ("float8_row", "float8_tensor", "mxfp8", "nvfp4", "float8_delayed")}
LAYOUTS = {
    "1 rank": fsdp(1),
    "fsdp 3": fsdp(3),
    "fsdp 4": fsdp(4),
    "hsdp 2x3": hsdp(2, 3),
    "replicated 3": Layout((3,), (Replicate(),), ()),
    "fsdp 3 x tp 4 rows": fsdp_tp_rows(3, 4),
    "fsdp 3 x tp 4 columns": fsdp_tp_columns(3, 4),
}
# 3, 8 and 12 ranks of 100 columns or 32 blocks: uneven, empty, cut twice
CUT_COLUMNS = {
    "float8_row": (100, (columns(3), fsdp_tp_columns(2, 3), fsdp(2))),
    "mxfp8": (1024, (columns(8), fsdp_tp_columns_both(2, 8), fsdp(3))),
}


def quantized(layout_names: Mapping[str, Any] = SOME) -> dict[str, QuantizedTensor]:
    """Twins of every recipe and number of rows, and stacked experts."""
    whole = {
        f"{name} {rows} {twin}": arbitrary((rows_of(name, rows), COLUMNS), recipe, 0)
        for name, recipe in layout_names.items()
        for rows in ROWS
        for twin in range(2)
    }
    stacked = {f"experts {twin}": arbitrary((5, 8, COLUMNS), EVERY["mxfp8"], 0) for twin in range(2)}
    return whole | stacked


def with_others(whole: Mapping[str, QuantizedTensor], layout: Layout, rank: int) -> dict[str, Any]:
    """A rank's shards, and what stock DCP saves: dense shards, a scalar, plain tensors (one of them wrapped), a number.

    The dense ones stand between the quantized ones, so that an order of their own would show.
    """
    shards = state(whole, layout, rank)
    out: dict[str, Any] = {"plain": torch.zeros(3, 5), "wrapped": torch.nn.Parameter(torch.zeros(3, 5)), "number": 3}
    for number, (name, shard) in enumerate(shards.items()):
        out[name] = shard
        q = whole[name]
        if q.ndim == 2 and name.endswith("0"):
            dense = piece(torch.zeros(q.shape), q, layout.box(rank, q.shape))
            out[f"dense {number}"] = dtensor_around(dense, layout.mesh(rank), layout.placements, q.shape)
    scalar = dtensor_around(torch.zeros(()), layout.mesh(rank), [Replicate()] * len(layout.shape), ())
    return {**out, "scalar": scalar}


def metadata_of(whole: Mapping[str, QuantizedTensor], layout: Layout, shards: Any = with_others) -> Metadata:
    """What the coordinator makes of all ranks' plans."""
    planners = [QuantizedSavePlanner() for _ in range(layout.ranks)]
    for rank, planner in enumerate(planners):
        planner.set_up_planner(shards(whole, layout, rank), None, rank == 0)
    _, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    return metadata


def stock_items(target: Mapping[str, Any], metadata: Metadata) -> list[Any]:
    """What stock DCP reads for the expanded tensors."""
    return described(create_default_local_load_plan(dict(expand(target)), metadata).items)


def own_items(target: Mapping[str, Any], metadata: Metadata) -> list[Any]:
    planner = QuantizedLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(target), metadata)
    return described(planner.create_local_plan().items)


def described(items: list[ReadItem]) -> list[Any]:
    """Items with the numbers of their chunks, which do not count where indices are compared."""
    return [(item, item.dest_index.index, item.storage_index.index) for item in items]


def assert_stock(target: Mapping[str, Any], metadata: Metadata) -> None:
    expected = stock_items(target, metadata)
    assert own_items(target, metadata) == expected
    assert any(item.type is LoadItemType.BYTE_IO for item, *_ in expected) == ("number" in target)


@sampled("source", LAYOUTS, ["fsdp 3", "hsdp 2x3", "fsdp 3 x tp 4 columns"])
def test_items_are_those_of_stock_on_every_layout(source: str) -> None:
    whole = quantized()
    metadata = metadata_of(whole, LAYOUTS[source])
    for layout in LAYOUTS.values():
        for rank in layout.some_ranks():
            assert_stock(with_others(whole, layout, rank), metadata)


@pytest.mark.parametrize("name", CUT_COLUMNS)
def test_items_are_those_of_stock_where_columns_are_cut(name: str) -> None:
    size, layouts = CUT_COLUMNS[name]
    whole = {f"w{twin}": arbitrary((7, size), EVERY[name], 0) for twin in range(2)}
    for source, layout in itertools.product(layouts, layouts):
        metadata = metadata_of(whole, source)
        for rank in range(layout.ranks):
            assert_stock(with_others(whole, layout, rank), metadata)


def test_weights_alike_that_are_stored_in_other_chunks_have_items_of_their_own() -> None:
    """Twins, one saved on 3 ranks and one on 4: the targets are alike, the chunks are not."""
    whole = {f"w{twin}": arbitrary((37, COLUMNS), EVERY["nvfp4"], 0) for twin in range(2)}
    metadata, other = (metadata_of(whole, fsdp(ranks)) for ranks in (3, 4))
    metadata.state_dict_metadata |= {
        name: entry for name, entry in other.state_dict_metadata.items() if name.startswith("w1")
    }
    target = with_others(whole, fsdp(2), 1)  # rows 19 to 36: of 13 rows each, two chunks; of 10, three
    assert_stock(target, metadata)
    found = [item.dest_index.fqn for item, *_ in own_items(target, metadata)]
    assert (found.count("w0.payload"), found.count("w1.payload")) == (2, 3)


def test_chunks_in_another_order_are_numbered_in_that_order() -> None:
    whole = {f"w{twin}": arbitrary((37, COLUMNS), EVERY["mxfp8"], 0) for twin in range(2)}
    metadata = metadata_of(whole, fsdp(3))
    entry = metadata.state_dict_metadata["w1.payload"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks.reverse()
    assert_stock(with_others(whole, fsdp(2), 1), metadata)


def calls(target: Mapping[str, Any], metadata: Metadata) -> int:
    """How often stock computes the items of an entry while a load is planned."""
    single = read_items.create_read_items_for_chunk_list
    with (
        patch.object(read_items, single.__name__, wraps=single) as derived,
        patch.object(read_items, "create_default_local_load_plan") as whole,
    ):
        own_items(target, metadata)
    assert not whole.called
    return derived.call_count


@pytest.mark.parametrize("shared", [True, False], ids=["the same objects", "equal ones"])
def test_however_many_layers_are_alike_stock_is_asked_once(shared: bool) -> None:
    counts = []
    for layers in (1, 4):
        whole = {f"w{layer}": arbitrary((37, COLUMNS), EVERY["nvfp4"], 0) for layer in range(layers)}
        metadata = metadata_of(whole, fsdp(3), state)
        for entry in metadata.state_dict_metadata.values() if not shared else ():
            if isinstance(entry, TensorStorageMetadata):
                entry.chunks[:] = copy.deepcopy(entry.chunks)
        counts.append(calls(state(whole, fsdp(2), 1), metadata))
    assert counts[0] == counts[1] == 3  # payload, scale, global scale


class InTwo(Tensor):
    """A tensor that tells DCP of two pieces."""

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([first, 0]), torch.Size([2, 4])) for first in (0, 2)]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.as_subclass(Tensor)[index.offset[0] :][:2]


def test_tensors_in_pieces_of_their_own_are_left_to_stock() -> None:
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 4]))
    properties = TensorProperties(dtype=torch.float32)
    metadata = Metadata({"w": TensorStorageMetadata(properties, torch.Size([4, 4]), [chunk])})
    target = {"w": torch.zeros(4, 4, dtype=torch.float32, device="cpu").as_subclass(InTwo)}
    items = read_items.ReadItems(metadata, strict=True).of(target, {})
    assert described(items) == stock_items(target, metadata)
    assert len(items) == 2


def test_what_does_not_fit_gets_the_error_of_stock() -> None:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    properties = TensorProperties(dtype=torch.float32)
    metadata = Metadata({"w": TensorStorageMetadata(properties, torch.Size([4]), [chunk])})
    items = read_items.ReadItems(metadata, strict=True)
    with pytest.raises(ValueError, match=r"Size mismatch between saved torch.Size\(\[4\]\) and current"):
        items.of({"w": torch.zeros(5)}, {})
    with pytest.raises(RuntimeError, match="Missing key in checkpoint state_dict: v"):
        items.of({"v": torch.zeros(4)}, {})
    assert read_items.ReadItems(metadata, strict=False).of({"v": torch.zeros(4)}, {}) == []


def test_items_have_no_other_fields_than_those_that_are_copied() -> None:
    """A derived item is made of these; a field that a later torch adds would be lost."""
    fields = [field.name for field in dataclasses.fields(ReadItem)]
    assert fields == ["type", "dest_index", "dest_offsets", "storage_index", "storage_offsets", "lengths"]


def test_weights_alike_share_their_boxes_and_a_rank_outside_of_the_mesh_has_none() -> None:
    whole = {f"w{twin}": arbitrary((37, COLUMNS), EVERY["nvfp4"], 0) for twin in range(2)}
    layout = fsdp(3)
    mesh = layout.mesh(1)
    shards = {
        name: dtensor_around(shard.to_local(), mesh, layout.placements, shard.shape)
        for name, shard in state(whole, layout, 1).items()
    }
    boxes = PartBoxes()
    first, second = (boxes.of(name, shard, shard.to_local()) for name, shard in shards.items())
    assert first is second
    assert first["payload"] == ((13, 0), (13, COLUMNS // 2))
    assert first["scale"] == ((13, 0), (13, COLUMNS // 16))
    assert first["global_scale"] == ((), ())
    outside = dtensor_around(
        arbitrary((0, COLUMNS), EVERY["nvfp4"], 0), layout.mesh(3), layout.placements, whole["w0"].shape
    )
    assert boxes.of("w0", outside, outside.to_local()) == {}
