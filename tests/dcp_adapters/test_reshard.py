"""Save on m ranks, load on n: every payload, scale and tensor-wide scale comes back bit for bit.

A checkpoint holds one model for each recipe; a world size saves it once by each way of saving, and every world size
loads all of them.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from dcp_adapters import QuantizedSavePlanner, expand
from qtensor import quantize
from tests import ranks
from tests.dcp_adapters.cases import (
    RECIPES,
    alone,
    assert_holds,
    leaves,
    load,
    local_of,
    models,
    placed,
    reference,
    save,
    sharded,
    values,
)
from tests.dcp_adapters.cases import model as model_of
from tests.ranks import run_ranks, run_ranks_catching

WORLDS = (1, 2, 3, 4)
WAYS = ("sync", "thread", "blocking", "staged")


def state(seed: int, mesh: Any = None) -> dict[str, Any]:
    return {"models": models(seed, mesh), "extra": {"epoch": seed, "name": f"run {seed}", "lrs": [0.5, seed]}}


def full(seed: int) -> dict[str, Any]:
    return {"models": reference(seed), "extra": {"epoch": seed, "name": f"run {seed}", "lrs": [0.5, seed]}}


def save_every_way(base: Path) -> None:
    saved = state(0)
    upload = dist.new_group(backend="gloo")
    save(saved, base / "sync")
    asynchronous = {
        "thread": {},
        "blocking": {"storage_writer": dcp.FileSystemWriter(base / "blocking")},
        "staged": {"async_stager": DefaultStager(StagingOptions(False, False, False, False))},
    }
    for way, options in asynchronous.items():
        where = {} if "storage_writer" in options else {"checkpoint_id": base / way}
        future = dcp.async_save(saved, **where, **options, planner=QuantizedSavePlanner(), process_group=upload)
        future.result()


def load_every_way(base: Path) -> None:
    expected = full(0)
    target = state(1)
    for world in WORLDS:
        for way in WAYS:
            for tensor in state_tensors(target):
                tensor.view(-1).view(torch.uint8).fill_(0x5A)
            load(target, base / str(world) / way)
            assert_holds(target, expected)


def state_tensors(target: Any) -> list[torch.Tensor]:
    return [local_of(value) for _, value in leaves(expand(target["models"])) if isinstance(value, torch.Tensor)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory <world size>/<way of saving>."""
    base: Path = ranks.agreed(tmp_path_factory.mktemp("reshard"))
    for world in WORLDS:
        run_ranks(world, save_every_way, base / str(world))
    return base


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_every_world_size_loads_what_every_world_size_saved(world: int, saved: Path) -> None:
    run_ranks(world, load_every_way, saved)


@pytest.mark.slow
def test_one_process_without_a_group_loads_what_every_world_size_saved(saved: Path) -> None:
    for world in WORLDS:
        target = {"models": reference(1), "extra": {"epoch": 0, "name": "", "lrs": []}}
        load(target, saved / str(world) / "thread")
        assert_holds(target, full(0))


def test_every_way_of_saving_writes_the_same_bytes(saved: Path) -> None:
    for world in WORLDS:
        files = [sorted(path.name for path in (saved / str(world) / way).iterdir()) for way in WAYS]
        assert all(found == files[0] for found in files)
        for name in files[0]:
            if name != ".metadata":
                contents = {(saved / str(world) / way / name).read_bytes() for way in WAYS}
                assert len(contents) == 1, (world, name)


# -- other meshes ------------------------------------------------------------------------------------------------------


def hsdp(path: Path, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    saved = state(0, mesh)
    save(saved, path)
    target = state(1, mesh)
    load(target, path)
    assert_holds(target, full(0))
    target = state(1)  # FSDP over all ranks
    load(target, path)
    assert_holds(target, full(0))


@pytest.mark.parametrize("world", [2, 4])
def test_hsdp_saves_and_loads(world: int, shared_tmp_path: Path) -> None:
    run_ranks(world, hsdp, shared_tmp_path / "saved", world)


def test_one_process_loads_what_hsdp_saved_and_the_reverse(shared_tmp_path: Path) -> None:
    run_ranks(4, hsdp, shared_tmp_path / "hsdp", 4)
    target = full(1)
    load(target, shared_tmp_path / "hsdp")
    assert_holds(target, full(0))
    save(full(2), shared_tmp_path / "single")
    run_ranks(4, load_hsdp, shared_tmp_path / "single")


def load_hsdp(path: Path) -> None:
    target = state(1, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    load(target, path)
    assert_holds(target, full(2))


PLACEMENTS = {
    "fsdp": ((4,), (Shard(0),)),
    "tp columns": ((4,), (Shard(1),)),
    "replicated": ((4,), (Replicate(),)),
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "fsdp x tp rows": ((2, 2), (Shard(0), Shard(0))),
    "fsdp x tp columns": ((2, 2), (Shard(0), Shard(1))),
}
COLUMNS = 256  # four column cuts of two blocks of 32


def weights(seed: int) -> dict[str, torch.Tensor]:
    rows = {name: 96 if "square" in name else 33 for name in RECIPES}
    return {name: quantize(values((rows[name], COLUMNS), seed), recipe) for name, recipe in RECIPES.items()}


def placed_weights(layout: str, seed: int) -> dict[str, torch.Tensor]:
    shape, placements = PLACEMENTS[layout]
    mesh = init_device_mesh("cpu", shape)
    return {name: placed(weight, mesh, *placements) for name, weight in weights(seed).items()}


def between_placements(base: Path) -> None:
    for layout in PLACEMENTS:
        save(placed_weights(layout, 0), base / layout)
    for layout in PLACEMENTS:
        for source in PLACEMENTS:
            target = placed_weights(layout, 1)
            load(target, base / source)
            assert_holds(target, weights(0))


def test_any_placement_loads_what_any_placement_saved(shared_tmp_path: Path) -> None:
    run_ranks(4, between_placements, shared_tmp_path)
    for layout in PLACEMENTS:
        target = weights(1)
        load(target, shared_tmp_path / layout)
        assert_holds(target, weights(0))


def cut_inside_a_block(path: Path, name: str, columns: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    save({"w": placed(quantize(values((32, columns), 0), RECIPES[name]), mesh, Shard(1))}, path)


@pytest.mark.parametrize(("name", "columns", "block"), [("mxfp8", 96, 32), ("nvfp4", 96, 16)])
def test_column_cuts_off_block_boundaries_are_refused(
    name: str, columns: int, block: int, shared_tmp_path: Path
) -> None:
    for error in run_ranks_catching(4, cut_inside_a_block, shared_tmp_path / "saved", name, columns):
        assert "ValueError" in error
        assert f"multiples of {block}" in error
    assert not (shared_tmp_path / "saved" / ".metadata").exists()


def one_replica_group(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    saved = state(0, mesh)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if dist.get_rank() >= 2:
        dcp.save(saved, checkpoint_id=path, planner=QuantizedSavePlanner(), process_group=groups[1])
    dist.barrier()
    target = state(1, mesh)
    load(target, path)
    assert_holds(target, full(0))


def test_one_replica_group_saves_for_all(shared_tmp_path: Path) -> None:
    run_ranks(4, one_replica_group, shared_tmp_path)


def each_rank_its_own(path: Path) -> None:
    with alone(), warnings.catch_warnings():
        # Nothing orders the ranks: the slower one finds the directory of the faster one, which is no overwrite.
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        dcp.save(state(0), checkpoint_id=path, planner=QuantizedSavePlanner(), use_collectives=False)
    assert not (path / ".metadata").exists()
    target = state(1)
    load(target, path)
    assert_holds(target, full(0))


def test_ranks_that_save_without_collectives_load_what_they_saved(shared_tmp_path: Path) -> None:
    run_ranks(2, each_rank_its_own, shared_tmp_path)


def through_safetensors(path: Path, world: int) -> None:
    """The storage drops planner data and non-tensors."""
    if world == dist.get_world_size():
        writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True)
        dcp.save({"models": models(0)}, storage_writer=writer, planner=QuantizedSavePlanner())
    target = {"models": models(1)}
    load(target, path, reader=dcp.HuggingFaceStorageReader(path))
    assert_holds(target, {"models": reference(0)})


def test_safetensors_storage_keeps_the_same_bytes(shared_tmp_path: Path) -> None:
    for saved_on in (1, 2):
        path = shared_tmp_path / str(saved_on)
        path.mkdir(exist_ok=True)
        run_ranks(saved_on, through_safetensors, path, saved_on)
        for loaded_on in (1, 2, 3):
            run_ranks(loaded_on, through_safetensors, path, 0)


# -- what a state dict may look like -----------------------------------------------------------------------------------


def shapes_of_state_dicts(base: Path) -> None:
    """Flat, nested, in lists, without flattening, and with a Stateful around the model."""
    names = {"mxfp8": None, "nvfp4": None}
    nested = {"model": models(0, names=names), "list": [models(3, names=names), {"n": 4}], "step": 7, "none": None}
    target = {"model": models(1, names=names), "list": [models(1, names=names), {"n": 0}], "step": 0, "none": 1}
    save(nested, base / "nested")
    load(target, base / "nested")
    assert_holds(
        target,
        {"model": reference(0, names=names), "list": [reference(3, names=names), {"n": 4}], "step": 7, "none": None},
    )

    flat, again = models(0, names=names)["mxfp8"], models(1, names=names)["mxfp8"]
    save(flat, base / "unflattened", flatten_state_dict=False)
    for option in (False, True):
        again = models(1, names=names)["mxfp8"]
        load(again, base / "unflattened", flatten_state_dict=option)
        assert_holds(again, reference(0, names=names)["mxfp8"])

    save({"app": App(0)}, base / "stateful")
    app = App(1)
    load({"app": app}, base / "stateful")
    assert_holds(app.net.state_dict(), reference(0, names=names)["mxfp8"])
    assert app.loaded == 1

    planner = QuantizedSavePlanner()
    with alone():
        dcp.save({"a": flat}, checkpoint_id=base / "first", planner=planner)
        dcp.save({"b": models(2, names=names)["nvfp4"]}, checkpoint_id=base / "second", planner=planner)
    target = {"b": models(1, names=names)["nvfp4"]}
    load(target, base / "second")
    assert_holds(target, {"b": reference(2, names=names)["nvfp4"]})
    assert not any(
        name.startswith("a.") for name in dcp.FileSystemReader(base / "second").read_metadata().state_dict_metadata
    )


class App:
    """An application's own Stateful around a model."""

    def __init__(self, seed: int) -> None:
        self.net, self.loaded = sharded(model_of("mxfp8", seed)), 0

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "best": 0.5}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.net.load_state_dict(state_dict["net"])
        assert state_dict["best"] == 0.5
        self.loaded += 1


@pytest.mark.parametrize("world", [1, 2])
def test_nested_flat_listed_and_stateful_state_dicts(world: int, shared_tmp_path: Path) -> None:
    run_ranks(world, shapes_of_state_dicts, shared_tmp_path)
