"""What ranks send and what .metadata holds: weights alike are described once, names are written once."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import Replicate, Shard, init_device_mesh

from dcp_adapters import QuantizedSavePlanner, expand
from qtensor import quantize
from tests.dcp_adapters.cases import RECIPES, alone, models, placed, save, values
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem


def planned(planner: DefaultSavePlanner, state_dict: Any) -> SavePlan:
    planner.set_up_planner(state_dict, is_coordinator=dist.get_rank() == 0)
    return planner.create_local_plan()


def weights_alike_but_for_one_thing() -> dict[str, Any]:
    """Pairs that differ in shape, recipe, placement or mesh alone; the last one is the first one's twin."""
    rows, flat = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    cut = (Shard(0), Replicate())
    described = [
        ((64, 64), "mxfp8", rows, cut),
        ((96, 64), "mxfp8", rows, cut),
        ((64, 64), "float8_row", rows, cut),
        ((64, 64), "nvfp4", rows, cut),
        ((64, 64), "mxfp8", rows, (Replicate(), Shard(0))),
        ((64, 64), "mxfp8", rows, (Shard(0), Shard(1))),
        ((64, 64), "float8_row", rows, (Shard(0), Shard(1))),
        ((64, 64), "mxfp8", flat, (Shard(0),)),
        ((64, 64), "mxfp8", rows, cut),
    ]
    state: dict[str, Any] = {
        f"w{i}": placed(quantize(values(shape, i), RECIPES[name]), mesh, *placements)
        for i, (shape, name, mesh, placements) in enumerate(described)
    }
    return {**state, "plain": quantize(values((64, 64), 20), RECIPES["mxfp8"])}


def without_strides(item: WriteItem) -> WriteItem:
    """As torch wrote it before 2.15, which notes the strides in memory and reads them nowhere: parts are contiguous."""
    if item.tensor_data is None or getattr(item.tensor_data.properties, "strides", None) is None:
        return item
    properties = dataclasses.replace(item.tensor_data.properties, strides=None)
    return dataclasses.replace(item, tensor_data=dataclasses.replace(item.tensor_data, properties=properties))


def items_are_those_of_the_expanded_state_dict() -> None:
    state = weights_alike_but_for_one_thing()
    found = {item.index.fqn: item for item in planned(QuantizedSavePlanner(), state).items}
    stock = {item.index.fqn: item for item in planned(DefaultSavePlanner(), expand(state)).items}
    if dist.get_rank():
        stock = {name: item for name, item in stock.items() if not name.endswith(".global_scale")}
    assert {name: without_strides(item) for name, item in stock.items()} == found
    for part in ("payload", "scale"):
        assert found[f"w0.{part}"].tensor_data is found[f"w8.{part}"].tensor_data
        assert found[f"w0.{part}"].tensor_data is not found[f"w1.{part}"].tensor_data


def test_weights_alike_share_what_describes_them_and_others_do_not() -> None:
    run_ranks(4, items_are_those_of_the_expanded_state_dict)


def paths_sent() -> set[str]:
    return set(planned(QuantizedSavePlanner(), {"m": models(0, names={"nvfp4": None})}).planner_data.mappings)


def test_a_rank_tells_the_paths_of_what_it_lists() -> None:
    first, second = run_ranks(2, paths_sent)
    assert first - second == {f"m.nvfp4.layers.{i}.weight.global_scale" for i in range(3)}
    assert second < first


def save_on_ranks(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    save({"w": placed(quantize(values((64, 64), 0), RECIPES["nvfp4"]), mesh, Shard(0)), "step": 3}, path)


def test_a_name_is_written_once_however_many_ranks_wrote(shared_tmp_path: Path) -> None:
    counts = []
    for world in (2, 3):
        run_ranks(world, save_on_ranks, shared_tmp_path / str(world))
        data = (shared_tmp_path / str(world) / ".metadata").read_bytes()
        counts.append([data.count(name) for name in (b"w.payload", b"w.scale", b"qtensor.checksums")])
        metadata = pickle.loads(data)
        for name, entry in metadata.state_dict_metadata.items():
            offsets = [chunk.offsets for chunk in entry.chunks] if name != "step" else [None]
            indices = [index for index in metadata.storage_data if index.fqn == name]
            assert [index.offset for index in indices] == offsets
            assert [index.index for index in indices] == ([None] if name == "step" else list(range(len(offsets))))
    assert counts[0] == counts[1]


def test_tensors_alike_share_their_record_in_the_manifest(tmp_path: Path) -> None:
    weights = {name: quantize(values((64, 64), 0), RECIPES["mxfp8"]) for name in ("a", "b")}
    save({**weights, "c": quantize(values((32, 64), 0), RECIPES["mxfp8"])}, tmp_path)
    tensors = dcp.FileSystemReader(tmp_path).read_metadata().planner_data["qtensor.manifest.json"]["tensors"]
    assert tensors["a"] is tensors["b"]
    assert tensors["a"] != tensors["c"]


class WritesMore(dcp.FileSystemWriter):
    """Its results name something that is no entry of the state dict."""

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, [*results, [WriteResult(MetadataIndex("log"), 1, results[0][0].storage_data)]])


def test_what_a_writer_adds_is_kept(tmp_path: Path) -> None:
    with alone():
        dcp.save({"w": torch.ones(3)}, storage_writer=WritesMore(tmp_path), planner=QuantizedSavePlanner())
    stored = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    assert MetadataIndex("log") in stored
    assert MetadataIndex("w", [0]) in stored
