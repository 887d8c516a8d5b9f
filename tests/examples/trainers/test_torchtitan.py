"""torchtitan's Llama and its checkpoints, on quantized weights; and what does not work is as the recipes say."""

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")

import torch

if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    pytest.skip("torchtitan imports torch.distributed.fsdp.DataParallelMeshDims", allow_module_level=True)

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.checkpoint import CheckpointManager, ModelWrapper

from dcp_adapters import expand
from examples.trainers import torchtitan_checkpoint, torchtitan_llama
from qtensor import MXFP8BlockScaling, quantize_
from tests.examples.trainers.checkpoints import hold_the_same, quantized_in
from tests.qtensor.recipes_under_test import raw
from tests.ranks import run_ranks, run_ranks_catching


def _run(argv: list[str]) -> list[float]:
    with warnings.catch_warnings():  # torchtitan calls it where torch warns of it, when it loads a scheduler
        warnings.filterwarnings("ignore", "To get the last learning rate computed by the scheduler", UserWarning)
        return torchtitan_checkpoint.main(argv)


def _manager(kind: type[CheckpointManager], model: Any, out: Path) -> CheckpointManager:
    config = CheckpointManager.Config(enable=True, export_dtype="bfloat16")
    parts = {"model_parts": [model], "optimizers": torchtitan_checkpoint.Masters(model), "lr_schedulers": None}
    manager = kind(config, **parts, dataloader=None, states={}, sd_adapter=None, base_folder=str(out))
    manager.states["model"] = torchtitan_checkpoint.Weights(model)
    return manager


def test_the_model_trains() -> None:
    every = run_ranks(2, torchtitan_llama.main)
    assert sum(losses[-1] for losses in every) < 0.95 * sum(losses[0] for losses in every)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "mode"), [(1, "async"), (2, "async"), (2, "disabled")])
def test_a_run_that_is_started_again_ends_in_the_bytes_of_the_uninterrupted_one(
    ranks: int, mode: str, shared_tmp_path: Path
) -> None:
    whole, again = shared_tmp_path / "whole", shared_tmp_path / "again"
    every = run_ranks(ranks, _run, ["--out", str(whole), "--async-mode", mode])
    assert sum(losses[-1] for losses in every) < 0.95 * sum(losses[0] for losses in every)
    argv = ["--out", str(again), "--async-mode", mode]
    run_ranks(ranks, _run, [*argv, "--steps", "3"])
    assert [len(losses) for losses in run_ranks(ranks, _run, argv)] == [3] * ranks
    held = quantized_in(whole / "checkpoint" / "step-3")
    assert "layers.1.attention.qkv_linear.wq.weight" in held
    assert len(held) == 2 * 7
    assert set(held.values()) == {"MXFP8BlockScaling"}
    assert hold_the_same(whole / "checkpoint" / "step-6", again / "checkpoint" / "step-6")
    assert not hold_the_same(whole / "checkpoint" / "step-3", whole / "checkpoint" / "step-6")


def _saves_for_the_last_time(out: Path) -> None:
    model = torchtitan_llama.sharded_llama()
    manager = _manager(torchtitan_checkpoint.Checkpoints, model, out)
    assert manager.save(1, last_step=True)
    parts = expand(model.state_dict())
    read = {name: torch.empty_like(part) for name, part in parts.items() if name.endswith((".payload", ".scale"))}
    dcp.load(read, checkpoint_id=out / "checkpoint" / "step-1")
    assert len(read) == 2 * 7 * 2
    assert all(torch.equal(raw(part.to_local()), raw(parts[name].to_local())) for name, part in read.items())


def test_the_last_save_holds_the_weights_alone_and_raw(shared_tmp_path: Path) -> None:
    run_ranks(2, _saves_for_the_last_time, shared_tmp_path)
    assert len(quantized_in(shared_tmp_path / "checkpoint" / "step-1")) == 2 * 7
    stored = dcp.FileSystemReader(shared_tmp_path / "checkpoint" / "step-1").read_metadata().state_dict_metadata
    assert not [name for name in stored if name.startswith(("optimizer", "lr_scheduler"))]


# -- what does not work; a test that fails here says that upstream has moved, and the recipe may become simpler --------


def _imports_without_triton() -> None:
    for name in [name for name in sys.modules if name.startswith("torchtitan.distributed.minimal_async_ep")]:
        del sys.modules[name]
    importlib.import_module("torchtitan.distributed.minimal_async_ep")


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_models_are_not_imported_without_triton() -> None:
    (error,) = run_ranks_catching(1, _imports_without_triton)
    assert error == "ModuleNotFoundError: No module named 'triton'"


def _asks_a_wrapper_twice() -> None:
    wrapper = ModelWrapper(torchtitan_llama.sharded_llama())
    wrapper.state_dict()


def test_the_model_wrapper_compares_storages() -> None:
    for error in run_ranks_catching(2, _asks_a_wrapper_twice):
        assert error.startswith("RuntimeError: a quantized weight of shape (128, 256)")
        assert "has no single storage to write, share or compare" in error


def _saves_by_the_manager_as_it_is(out: Path) -> None:
    model = torchtitan_llama.sharded_llama()
    _manager(CheckpointManager, model, out).save(1, last_step=True)


def test_the_manager_as_it_is_is_refused(shared_tmp_path: Path) -> None:
    for error in run_ranks_catching(2, _saves_by_the_manager_as_it_is, shared_tmp_path):
        assert "planner=QuantizedSavePlanner()" in error


def _cuts_a_fused_weight() -> None:
    torchtitan_llama.sharded_llama()  # imports what can be imported
    from torchtitan.models.common.attention import FusedQKVLinear
    from torchtitan.models.common.linear import Linear

    config = FusedQKVLinear.Config(
        head_dim=16, n_heads=4, n_kv_heads=2, wqkv=Linear.Config(in_features=64, out_features=128)
    )
    fused = config.build()
    fused.init_states()
    quantize_(fused, MXFP8BlockScaling())
    fused.state_dict()


def test_a_fused_wqkv_is_refused() -> None:
    (error,) = run_ranks_catching(1, _cuts_a_fused_weight)
    assert error.startswith("NotImplementedError: select along dim 1 of a quantized weight of shape (2, 4, 16, 64)")


def _shards_as_torchtitan_does() -> None:
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({"0": torch.nn.Linear(8, 8)})
    model.enable_weight_tying = False
    model.tok_embeddings, model.norm, model.lm_head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), None
    dtypes = {"param_dtype": torch.float32, "reduce_dtype": torch.float32}
    apply_fsdp_to_decoder(model, init_device_mesh("cpu", (dist.get_world_size(),)), pp_enabled=False, **dtypes)
    model.layers["0"](torch.ones(1, 8)).sum().backward()


def test_torchtitans_fsdp_needs_more_than_gloo() -> None:
    for error in run_ranks_catching(2, _shards_as_torchtitan_does):
        assert error == "RuntimeError: Cannot use ReduceOp.PREMUL_SUM with Gloo"
