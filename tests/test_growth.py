"""No loop over weights inside a loop over weights, none over ranks' chunks inside one over chunks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from dcp_adapters.records.checksums import CHECKSUMS
from dcp_adapters.torch_private import StorageInfo
from fsdp_hooks import sync_scales, unsharded
from qtensor import Float8CurrentScaling, MasterWeightOptimizer, NVFP4BlockScaling, quantize, quantized_model_init
from tests.growth import assert_linear, bytecodes
from tests.ranks import run_ranks

pytestmark = pytest.mark.budget
SIZES = (2, 4, 8)
NVFP4 = NVFP4BlockScaling()
WIDE = Float8CurrentScaling(granularity="tensor")


def test_what_is_not_linear_is_seen() -> None:
    def pairs(n: int) -> None:
        for _ in range(n):
            for _ in range(n):
                pass

    pairs.__code__ = pairs.__code__.replace(co_filename=sync_scales.__code__.co_filename)
    with pytest.raises(AssertionError, match="pairs is more than linear"):
        assert_linear("pairs", [bytecodes(functools.partial(pairs, n)) for n in SIZES])


def built(count: int, **options: Any) -> nn.Sequential:
    with quantized_model_init(NVFP4):
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(count))).to(torch.bfloat16)
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def lives(path: Path) -> dict[str, list[int]]:
    """Bytecodes of the phases of a model, by its number of weights."""
    costs: dict[str, list[int]] = {}
    for number, count in enumerate((SIZES[0], *SIZES)):  # the first time fills caches
        life = one_life(count, path / str(number))
        if number:
            for phase, cost in life.items():
                costs.setdefault(phase, []).append(cost)
    return costs


def one_life(count: int, path: Path) -> dict[str, int]:
    models: list[nn.Sequential] = []
    out = {"build and shard": bytecodes(lambda: models.append(built(count)))}
    (model,) = models
    state = {"model": model.state_dict()}
    out["sync"] = bytecodes(lambda: sync_scales(model))
    optimizers: list[MasterWeightOptimizer] = []
    out["optimizer"] = bytecodes(
        lambda: optimizers.append(MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3))
    )
    (optimizer,) = optimizers

    def step() -> None:
        model(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    out["step"] = bytecodes(step)
    kept = optimizer.state_dict()
    out["load optimizer"] = bytecodes(lambda: optimizer.load_state_dict(kept))
    out["save"] = bytecodes(lambda: dcp.save(state, checkpoint_id=path, planner=QuantizedSavePlanner()))
    out["load"] = bytecodes(lambda: dcp.load(state, checkpoint_id=path, planner=QuantizedLoadPlanner()))
    dense = {name: torch.ones(16, 16, dtype=torch.bfloat16) for name in model.state_dict()}
    dcp.save(dense, checkpoint_id=f"{path}-dense")
    convert = QuantizedLoadPlanner(on_mismatch="convert")
    out["convert"] = bytecodes(lambda: dcp.load(state["model"], checkpoint_id=f"{path}-dense", planner=convert))
    return out


@pytest.mark.slow
def test_phases_of_a_model_are_linear_in_its_weights(shared_tmp_path: Path) -> None:
    (costs,) = run_ranks(1, lives, shared_tmp_path)
    for phase, cost in costs.items():
        assert_linear(phase, cost)


def holds() -> dict[str, list[int]]:
    """Bytecodes of holding a whole model of many FSDP groups, at rest and as a forward left it."""
    costs: dict[str, list[int]] = {"sharded": [], "left gathered": []}
    for count in SIZES:
        model = built(8 * count, reshard_after_forward=False)
        with torch.no_grad():
            model(torch.ones(2, 16, dtype=torch.bfloat16))
        for found in ("left gathered", "sharded"):
            costs[found].append(bytecodes(lambda model=model: hold(model)))
    return costs


def hold(model: nn.Module) -> None:
    with unsharded(model):
        pass


@pytest.mark.slow
def test_unsharded_is_linear_in_the_groups() -> None:
    (costs,) = run_ranks(1, holds)
    for found, cost in costs.items():
        assert_linear(found, cost)


def read_whole(chunks: int) -> int:
    """Bytecodes of a verified load of one tensor that so many ranks have saved."""
    rows = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 4])) for row in range(chunks)]
    size = torch.Size([chunks, 4])
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), size, rows)
    table = torch.Size([chunks, 16])
    whole = [ChunkStorageMetadata(torch.Size([0, 0]), table)]
    sums = TensorStorageMetadata(TensorProperties(dtype=torch.uint8), table, whole)
    indices = [MetadataIndex(CHECKSUMS, [0, 0]), *(MetadataIndex("w", row.offsets) for row in rows)]
    stored = {index: StorageInfo("file", 10**6 * at, 10**6) for at, index in enumerate(indices)}
    metadata = Metadata({"w": entry, CHECKSUMS: sums}, storage_data=stored)
    planner = QuantizedLoadPlanner(verify_checksums=True)
    planner.set_up_planner({"w": torch.zeros(size)}, metadata)
    plan = planner.finish_plan(planner.create_local_plan())
    items = [item for item in plan.items if item.dest_index.fqn == "w"]
    assert len(items) == chunks
    pieces = [planner.resolve_tensor(item) for item in items]

    def commit() -> None:
        for item, piece in zip(items, pieces, strict=True):
            planner.commit_tensor(item, piece)

    cost = bytecodes(commit)
    assert planner.verification is not None
    assert len(planner.verification.waiting) == chunks
    return cost


def test_a_verified_load_is_linear_in_the_chunks() -> None:
    read_whole(4)
    assert_linear("reading", [read_whole(16 * size) for size in SIZES])


def conversions(path: Path) -> list[int]:
    """Bytecodes of loading dense weights into quantized ones that share scales with another rank."""
    mesh, costs = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for number, count in enumerate((SIZES[0], *SIZES)):
        folder = path / str(number)
        dense = {f"w{i}": torch.ones(32, 16, dtype=torch.bfloat16) for i in range(4 * count)}
        dcp.save(dense, checkpoint_id=folder, planner=QuantizedSavePlanner())
        target = {
            name: distribute_tensor(quantize(value, WIDE), mesh, [Shard(0)], src_data_rank=None)
            for name, value in dense.items()
        }
        planner = QuantizedLoadPlanner(on_mismatch="convert")
        costs.append(bytecodes(lambda t=target, f=folder, p=planner: dcp.load(t, checkpoint_id=f, planner=p)))
    return costs[1:]


@pytest.mark.slow
def test_conversions_that_wait_for_ranks_are_linear_in_the_weights(shared_tmp_path: Path) -> None:
    for cost in run_ranks(2, conversions, shared_tmp_path):
        assert_linear("conversion", cost)
