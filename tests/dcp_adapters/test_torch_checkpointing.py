"""Quantized tensors through the package torch_checkpointing: its own manager, files and process."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from dcp_adapters import PlacedShard
from dcp_adapters.torch_checkpointing import QuantizedResharder, to_load, to_save
from qtensor import quantize
from qtensor.spec.registry import block_multiple
from tests.dcp_adapters.cases import EVERY, K, arbitrary, assert_holds, held, placed, values
from tests.ranks import run_ranks

ROWS = 96


def gathered(self: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    """What the package's method of this place returns, which moves the bytes over CUDA whatever the backend is."""
    found = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


DefaultMetadataManager._all_gather_pickled_data = gathered  # type: ignore[method-assign]


def manager(*, save: Any = None, resharder: Any = None, layout: Any = None) -> CheckpointManager:
    spec = ItemSpec(resharder=resharder or QuantizedResharder(), layout=layout)
    # with direct IO the package's writer fails on ext4, whose files take aligned blocks alone
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager(
        CheckpointManager.Config(
            items={"model": spec}, save=save or SyncCheckpointSaverConfig(), storage_config=storage
        )
    )


def whole(seed: int, dim: int = 0, parts: int = 1) -> dict[str, Any]:
    cut = K // parts
    state = {
        name: arbitrary((ROWS, K), recipe, seed + i)
        for i, (name, recipe) in enumerate(EVERY.items())
        if dim == 0 or not cut % block_multiple(recipe)
    }
    return {"layers": state, "dense": values((ROWS, K), seed + 50), "norm": values((K,), seed + 51)}


def sharded(seed: int, dim: int = 0) -> dict[str, Any]:
    world = dist.get_world_size()
    mesh, full = init_device_mesh("cpu", (world,)), whole(seed, dim, world)
    layers = {name: placed(value, mesh, Shard(dim)) for name, value in full["layers"].items()}
    return {"layers": layers, "dense": placed(full["dense"], mesh, Shard(dim)), "norm": full["norm"]}


def save(path: Path, dim: int = 0, **options: Any) -> None:
    one = manager(**options)
    one.save(str(path), {"model": to_save(sharded(0, dim))})
    one.close()


def load(path: Path, dim: int = 0) -> None:
    state, one = sharded(7, dim), manager(resharder=QuantizedResharder(allow_partial_load=dim == 1))
    one.load(str(path), into={"model": to_load(state)})
    one.close()
    assert_holds(state, whole(0, dim, dist.get_world_size()))


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
def test_weights_go_to_other_world_sizes_and_dims_bit_for_bit(shared_tmp_path: Path, layout: str) -> None:
    safetensors = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization()) if layout != "torch" else None
    run_ranks(2, save, shared_tmp_path / "2", layout=safetensors)
    run_ranks(3, load, shared_tmp_path / "2")
    run_ranks(2, load, shared_tmp_path / "2", 1)
    if layout == "torch":
        run_ranks(3, save, shared_tmp_path / "3")
        run_ranks(1, load, shared_tmp_path / "3")
        run_ranks(2, save, shared_tmp_path / "columns", 1)
        run_ranks(2, load_columns, shared_tmp_path / "columns")


def load_columns(path: Path) -> None:
    state = {"layers": {name: v for name, v in sharded(7)["layers"].items() if name in whole(0, 1, 2)["layers"]}}
    one = manager()
    one.load(str(path), into={"model": to_load(state | {k: v for k, v in sharded(7).items() if k != "layers"})})
    one.close()
    assert_holds(state["layers"], whole(0, 1, 2)["layers"])


# -- in its own process ------------------------------------------------------------------------------------------------


def save_in_the_background(path: Path) -> None:
    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    state = sharded(0)
    # ranks of the pool are daemons, which must not have children
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = manager(save=AsyncCheckpointSaverConfig(staging_config=staging))
        future = one.save(str(path), {"model": to_save(state)})
        with one.lock():  # staging reads the live bytes until then
            for value in state["layers"].values():
                for part in value.to_local().parts().values():
                    part.zero_()
        assert future is not None
        future.result()
        one.close()


@pytest.mark.full
def test_saves_in_the_background_hold_the_bytes_of_the_call(shared_tmp_path: Path) -> None:
    run_ranks(2, save_in_the_background, shared_tmp_path / "async", timeout=300)
    run_ranks(3, load, shared_tmp_path / "async")


# -- what is refused ---------------------------------------------------------------------------------------------------


def weight(rows: int = ROWS, recipe: str = "mxfp8", seed: int = 0) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return placed(quantize(values((rows, K), seed), EVERY[recipe]), mesh, Shard(0))


class Broken(dict[str, Any]):
    """A state dict of which reading fails."""

    def items(self) -> Any:
        raise RuntimeError("out of memory")


def refused_saves(path: Path) -> None:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    from torch.distributed.tensor import DTensor

    own_scale = DTensor.from_local(quantize(values((8, K), rank), EVERY["nvfp4"]), mesh, [Shard(0)], run_check=False)
    cases: list[tuple[Any, str]] = [
        ({"w": own_scale}, "w.global_scale: rank 0 holds .*, rank 1"),
        ({"w": weight(), "n": 3}, "n: a int, which the package does not restore"),
        ({"w": PlacedShard(torch.ones(4, K), (8, K), (4 * rank, 0))}, "w: it says itself where it lies"),
        ({"w": weight(), "w.payload": torch.ones(1)}, "'w.payload' twice"),
        ({"w": torch.ones(2 + rank)}, "w: it is no DTensor, and rank 0 and rank 1 do not hold it alike"),
        ({"w": weight(recipe=["mxfp8", "mxfp4"][rank])}, "w: rank 1 holds .*MXFP4"),
        ({"w": torch.ones(2, device="meta") if rank else torch.ones(2)}, "rank 1: w: on the meta device"),
        (Broken(w=torch.ones(2)) if rank else {"w": torch.ones(2)}, "rank 1: RuntimeError: out of memory"),
    ]
    for state, text in cases:
        with pytest.raises(ValueError, match=text):
            to_save(state)
    one = manager()
    with pytest.raises(TypeError, match="item 'model' is a dict that neither to_save nor to_load has made"):
        one.save(str(path / "raw"), {"model": {"w": weight()}})
    one.close()
    assert not (path / "raw").exists()


def refused_loads(path: Path) -> None:
    one = manager()
    one.save(str(path / "ck"), {"model": to_save({"w": weight(), "d": torch.ones(4), "q": weight(recipe="nvfp4")})})
    good: Callable[[], dict[str, Any]] = lambda: {  # noqa: E731
        "w": weight(seed=3),
        "d": torch.zeros(4),
        "q": weight(recipe="nvfp4", seed=3),
    }
    cases: list[tuple[dict[str, Any], str]] = [
        ({"w": weight(recipe="mxfp8_square")}, "w: the checkpoint holds MXFP8.*the target is MXFP8"),
        ({"w": torch.zeros(ROWS, K)}, "w: the checkpoint holds it quantized"),
        ({"w": weight(rows=64)}, "w: the checkpoint holds shape"),
        ({"d": torch.zeros(5)}, "d: the checkpoint holds shape"),
        ({"d": torch.zeros(4, dtype=torch.int32)}, "d: the checkpoint holds torch.float32, the target is torch.int32"),
        ({"more": torch.zeros(4)}, "more: missing in the checkpoint"),
    ]
    for change, text in cases:
        state = good() | change
        before = held(state)
        with pytest.raises(ValueError, match=text):
            one.load(str(path / "ck"), into={"model": to_load(state)})
        assert held(state) == before
    state = {"w": weight(seed=3)}
    with pytest.raises(ValueError, match="q: only the checkpoint has it"):
        one.load(str(path / "ck"), into={"model": to_load(state)})
    with pytest.raises(TypeError, match="neither to_save nor to_load"):
        one.load(str(path / "ck"), into={"model": state})
    partial_load = manager(resharder=QuantizedResharder(allow_partial_load=True))
    partial_load.load(str(path / "ck"), into={"model": to_load(state)})
    assert_holds(state, {"w": quantize(values((ROWS, K), 0), EVERY["mxfp8"])})
    with pytest.raises(ValueError, match="has none of the 1 tensors"):
        partial_load.load(str(path / "ck"), into={"model": to_load({"x": torch.ones(1)})})
    plain = manager(resharder=DefaultResharder())
    plain.save(str(path / "plain"), {"model": {"w": torch.ones(2)}})
    with pytest.raises(ValueError, match="w: the checkpoint holds a dense tensor, the target is quantized"):
        one.load(str(path / "plain"), into={"model": to_load({"w": weight()})})
    for each in (one, partial_load, plain):
        each.close()


def ties(path: Path) -> None:
    for name, other in (("alike", 1.0), ("unlike", 2.0)):
        one = manager()
        saved = {"embed": torch.ones(4), "head": torch.full((4,), other), "w": weight()}
        one.save(str(path / name), {"model": to_save(saved)})
        shared, w = torch.zeros(4), weight(seed=3)
        tied = {"embed": shared, "head": shared.view(4), "w": w}
        if name == "alike":
            one.load(str(path / name), into={"model": to_load(tied)})
            assert torch.equal(shared, torch.ones(4))
        else:
            before = held(tied)
            with pytest.raises(ValueError, match="embed, head: they share memory in the target, and the checkpoint"):
                one.load(str(path / name), into={"model": to_load(tied)})
            assert held(tied) == before
        one.close()


def test_tied_targets_need_equal_values(shared_tmp_path: Path) -> None:
    run_ranks(1, ties, shared_tmp_path)


def test_what_does_not_fit_is_refused_before_anything_is_written(shared_tmp_path: Path) -> None:
    run_ranks(2, refused_saves, shared_tmp_path)
    run_ranks(1, refused_loads, shared_tmp_path)


def untouched() -> None:
    with torch.no_grad():
        state = {"w": quantize(values((8, K), 0), EVERY["mxfp8"])[:, :32]}
    with pytest.raises(ValueError, match=r"to_load: [\s\S]*w: it is a slice of some columns"):
        to_load(state)


def test_a_target_that_is_a_copy_is_refused() -> None:
    untouched()


def test_the_files_need_nothing_of_this_library(shared_tmp_path: Path) -> None:
    run_ranks(1, save, shared_tmp_path)
    names = sorted(path.name for path in shared_tmp_path.iterdir())
    assert names == ["metadata.pkl", "model_0.pt"]
    for name in names:
        assert b"qtensor\n" not in (shared_tmp_path / name).read_bytes()
        assert b"dcp_adapters" not in (shared_tmp_path / name).read_bytes()
