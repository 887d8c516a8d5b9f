"""Save on one mesh, load on another: every payload, scale and tensor-wide scale comes back bit for bit.

    LAYOUTS   how a state dict may lie on 1 to 4 ranks
    saved     a checkpoint of each of them
    matrix    every layout of training (FSDP, HSDP, FSDP over tensor parallelism) loads what each of them saved into
              shards full of other bytes; one of them, and one process, loads what plain DTensors saved, too. Weights
              are read each by itself, so all recipes come from the same layout and from FSDP on 3 ranks, and from each
              other layout a hand of them in turn

The bytes are none a quantizer makes, so that a load that decodes, encodes or leaves anything as it was is seen. Larger
meshes are in test_plans.py, which needs no ranks.
"""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard

from dcp_adapters import QuantizedSavePlanner, expand
from qtensor import quantize
from tests import ranks
from tests.dcp_adapters.cases import (
    EVERY,
    RECIPES,
    ROW,
    alone,
    arbitrary,
    assert_holds,
    held,
    leaves,
    load,
    local_of,
    models,
    placed,
    reference,
    rows_for,
    save,
    sharded,
    values,
)
from tests.dcp_adapters.cases import model as model_of
from tests.ranks import run_ranks, run_ranks_catching
from tests.recipes import HANDS
from tests.sampling import sampled

COLUMNS = 512  # four column cuts of a block of 128


@cache
def whole(seed: int) -> dict[str, Tensor]:
    """Weights of all recipes, with rows that are even, uneven and fewer than 4 ranks; experts and dense tensors."""
    weights = {
        f"{name}_{rows}": arbitrary((rows, COLUMNS), recipe, 10 * i + seed)
        for i, (name, recipe) in enumerate(EVERY.items())
        for rows in rows_for(name)
    }
    weights |= {f"{name}_experts": arbitrary((5, 7, COLUMNS), recipe, 100 + seed) for name, recipe in ROW.items()}
    dense = {f"dense_{rows}": values((rows, COLUMNS), 200 + seed) for rows in (33, 3)}
    return weights | dense


def full(seed: int) -> dict[str, Any]:
    """A state dict of one process."""
    return {"model": whole(seed), "extra": {"epoch": seed, "name": f"run {seed}", "lrs": [0.5, seed]}}


def by_fsdp(tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Any]:
    """Shards by fully_shard; on two mesh dims, HSDP."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    return module(tensors, mesh).state_dict()


def by_fsdp_over_tp(tensors: Mapping[str, Tensor], shape: tuple[int, ...], cut: Placement) -> dict[str, Any]:
    """Tensor parallelism cuts first, then fully_shard the rows of each piece."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    pieces = {name: placed(tensor, mesh["tp"], cut) for name, tensor in tensors.items()}
    return module(pieces, mesh["dp"]).state_dict()


def by_fsdp_beside_tp(tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Any]:
    """What tensor parallelism does not cut: fully_shard along one dim, a copy for each place on the other."""
    return module(tensors, init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))["dp"]).state_dict()


def module(tensors: Mapping[str, Tensor], mesh: Any) -> nn.Module:
    net = nn.Module()
    for name, tensor in tensors.items():
        net.register_parameter(name, nn.Parameter(tensor))
    return fully_shard(net, mesh=mesh)


def by_placements(tensors: Mapping[str, Tensor], shape: tuple[int, ...], *placements: Placement) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape)
    return {name: placed(tensor, mesh, *placements) for name, tensor in tensors.items()}


# name -> (shape of the mesh, how the tensors get there, placements)
MATRIX: dict[str, tuple[Any, ...]] = {
    "fsdp 1": ((1,), by_fsdp),
    "fsdp 2": ((2,), by_fsdp),
    "fsdp 3": ((3,), by_fsdp),
    "fsdp 4": ((4,), by_fsdp),
    "hsdp 2x2": ((2, 2), by_fsdp),
    "fsdp x tp rows": ((2, 2), by_fsdp_over_tp, Shard(0)),
    "fsdp x tp columns": ((2, 2), by_fsdp_over_tp, Shard(1)),
}
LAYOUTS = MATRIX | {
    "hsdp 2x1": ((2, 1), by_fsdp),
    "rows cut twice": ((2, 2), by_placements, Shard(0), Shard(0)),
    "fsdp beside tp": ((2, 2), by_fsdp_beside_tp),
    "columns": ((4,), by_placements, Shard(1)),
    "replicated": ((4,), by_placements, Replicate()),
}
WORLDS = {world: [name for name, (shape, *_) in LAYOUTS.items() if math.prod(shape) == world] for world in range(1, 5)}
WAYS = ("sync", "thread", "blocking", "staged")


def state(layout: str, seed: int) -> dict[str, Any]:
    shape, build, *placements = LAYOUTS[layout]
    return full(seed) | {"model": build(whole(seed), shape, *placements)}


def save_layouts(base: Path, world: int) -> None:
    for layout in WORLDS[world]:
        save(state(layout, 0), base / layout)


def load_layouts(base: Path, layouts: Iterable[str]) -> None:
    for layout in layouts:
        sources: Iterable[str] = MATRIX if layout in MATRIX else ("fsdp 3", layout)
        turn = list(LAYOUTS).index(layout)
        hands = {source: HANDS[(turn + number) % 3] for number, source in enumerate(LAYOUTS)}
        hands = {source: hand for source, hand in hands.items() if source not in ("fsdp 3", layout)}
        load_all(state(layout, 1), base, LAYOUTS if layout == "fsdp x tp rows" else sources, hands)


def load_all(target: dict[str, Any], base: Path, sources: Iterable[str], hands: Mapping[str, Any]) -> None:
    """All weights, or, from a source that has a hand of recipes, those of that hand and what is in no hand."""
    for source in sources:
        hand = hands.get(source)
        some = target | {"model": of_hand(target["model"], hand)}
        for _, tensor in leaves(expand(some["model"])):
            local_of(tensor).view(-1).view(torch.uint8).fill_(0x5A)
        load(some, base / source, allow_partial_load=hand is not None)
        assert_holds(some, full(0) | {"model": of_hand(whole(0), hand)})


def of_hand(tensors: Mapping[str, Any], hand: Mapping[str, Any] | None) -> dict[str, Any]:
    others = RECIPES.keys() - hand.keys() if hand is not None else ()
    return {name: tensor for name, tensor in tensors.items() if name.rpartition("_")[0] not in others}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for each layout."""
    base: Path = ranks.agreed(tmp_path_factory.mktemp("reshard"))
    for world in WORLDS:
        run_ranks(world, save_layouts, base, world)
    return base


# In `make test` uneven shards and pieces of columns load what all of the matrix saved, and rows that are cut twice what
# all layouts saved.
FIRST_TARGETS = {3: ("fsdp 3",), 4: ("fsdp x tp rows", "fsdp x tp columns")}
OTHERS = {1: WORLDS[1], 2: WORLDS[2], 4: [name for name in WORLDS[4] if name not in FIRST_TARGETS[4]]}


@pytest.mark.slow
@sampled(("world", "layouts"), [*FIRST_TARGETS.items(), *OTHERS.items()], FIRST_TARGETS.items())
def test_every_layout_loads_what_every_layout_saved(world: int, layouts: tuple[str, ...], saved: Path) -> None:
    run_ranks(world, load_layouts, saved, layouts)


@pytest.mark.slow
def test_one_process_without_a_group_loads_what_every_layout_saved(saved: Path) -> None:
    load_all({**full(1), "model": {name: tensor.clone() for name, tensor in whole(1).items()}}, saved, LAYOUTS, {})


def test_every_layout_stores_each_byte_once(saved: Path) -> None:
    parts = dict(leaves(expand(whole(0))))
    for layout in LAYOUTS:
        stored = dcp.FileSystemReader(saved / layout).read_metadata().state_dict_metadata
        for name, part in parts.items():
            entry = stored[f"model.{name}"]
            assert isinstance(entry, TensorStorageMetadata)
            assert entry.properties.dtype == part.dtype
            assert sum(chunk.sizes.numel() for chunk in entry.chunks) == part.numel(), (layout, name)


# -- ways of saving ----------------------------------------------------------------------------------------------------


def save_every_way(base: Path) -> None:
    saved = state(f"fsdp {dist.get_world_size()}", 0)
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


@pytest.mark.parametrize("world", [1, 3])
def test_every_way_of_saving_writes_the_same_checkpoint(world: int, shared_tmp_path: Path) -> None:
    run_ranks(world, save_every_way, shared_tmp_path)
    files = [sorted(path.name for path in (shared_tmp_path / way).iterdir()) for way in WAYS]
    assert all(found == files[0] for found in files)
    for name in files[0]:
        if name != ".metadata":
            assert len({(shared_tmp_path / way / name).read_bytes() for way in WAYS}) == 1, name
    first, *others = [dcp.FileSystemReader(shared_tmp_path / way).read_metadata() for way in WAYS]
    for found in others:
        for field in ("state_dict_metadata", "storage_data", "planner_data"):
            assert getattr(found, field) == getattr(first, field), field


@pytest.mark.parametrize("name", EVERY)
def test_what_was_unpickled_or_staged_can_be_staged_and_saved_again(name: str, tmp_path: Path) -> None:
    live = {"w": arbitrary((96, COLUMNS), EVERY[name], 0)}
    before, staged = held(live), live
    for _ in range(2):
        stager = DefaultStager(StagingOptions(False, False, False, False))
        staged = pickle.loads(pickle.dumps(stager.stage(pickle.loads(pickle.dumps(staged)))))
        assert held(staged) == before
    save(staged, tmp_path)
    target = {"w": arbitrary((96, COLUMNS), EVERY[name], 1)}
    load(target, tmp_path)
    assert held(target) == before


# -- cuts and groups that are out of the ordinary ----------------------------------------------------------------------


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
    saved = state("hsdp 2x2", 0)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if dist.get_rank() >= 2:
        dcp.save(saved, checkpoint_id=path, planner=QuantizedSavePlanner(), process_group=groups[1])
    dist.barrier()
    target = state("hsdp 2x2", 1)
    load(target, path)
    assert_holds(target, full(0))


def test_one_replica_group_saves_for_all(shared_tmp_path: Path) -> None:
    run_ranks(4, one_replica_group, shared_tmp_path)


def each_rank_its_own(path: Path) -> None:
    with alone(), warnings.catch_warnings():
        # Nothing orders the ranks: the slower one finds the directory of the faster one, which is no overwrite.
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        dcp.save(state("fsdp 2", 0), checkpoint_id=path, planner=QuantizedSavePlanner(), use_collectives=False)
    assert not (path / ".metadata").exists()
    target = state("fsdp 2", 1)
    load(target, path)
    assert_holds(target, full(0))


def test_ranks_that_save_without_collectives_load_what_they_saved(shared_tmp_path: Path) -> None:
    run_ranks(2, each_rank_its_own, shared_tmp_path)


def through_safetensors(path: Path, world: int) -> None:
    """The storage drops planner data and non-tensors."""
    layout = f"fsdp {dist.get_world_size()}"
    if world == dist.get_world_size():
        writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True)
        dcp.save(state(layout, 0)["model"], storage_writer=writer, planner=QuantizedSavePlanner())
    target = state(layout, 1)["model"]
    load(target, path, reader=dcp.HuggingFaceStorageReader(path))
    assert_holds(target, whole(0))


def test_safetensors_storage_keeps_the_same_bytes(shared_tmp_path: Path) -> None:
    for saved_on, loaded_on in ((1, (2,)), (2, (1, 3))):
        path = shared_tmp_path / str(saved_on)
        path.mkdir(exist_ok=True)
        for world in (saved_on, *loaded_on):
            run_ranks(world, through_safetensors, path, saved_on)


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


@sampled("world", [1, 2], [2])
def test_nested_flat_listed_and_stateful_state_dicts(world: int, shared_tmp_path: Path) -> None:
    run_ranks(world, shapes_of_state_dicts, shared_tmp_path)
