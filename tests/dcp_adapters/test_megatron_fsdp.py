"""Uneven DTensors as Megatron-FSDP describes them, by its own package, through the planners and to FSDP2's layout."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.dcp_adapters.cases import K, assert_holds, bits, load, placed, save, values
from tests.ranks import run_ranks

CUTS = {2: [24, 72], 3: [0, 90, 6], 4: [13, 83, 13, 83]}  # rows of each rank; 4 ranks: two replicas of two
ROWS = 96


def described(seed: int) -> dict[str, Any]:
    with warnings.catch_warnings():  # that Transformer Engine is not there
        warnings.simplefilter("ignore")
        from megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor

    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2) if world == 4 else (world,))
    placements = [Replicate(), Shard(0)] if world == 4 else [Shard(0)]
    start = sum(CUTS[world][: rank % 2 if world == 4 else rank])
    state: dict[str, Any] = {}
    for name, dtype in (("weight", torch.bfloat16), ("master", torch.float32)):
        local = values((ROWS, K), seed, dtype).narrow(0, start, CUTS[world][rank]).clone()
        state[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size((ROWS, K)), stride=(K, 1)
        )
    return {"model": preprocess_state_dict_for_uneven_dtensor(state)}


def save_described(path: Path) -> None:
    save(described(0), path, digest=True)


def load_described(path: Path) -> None:
    state = described(7)
    load(state, path, verify_checksums=True)
    for name, value in described(0)["model"].items():
        assert bits(state["model"][name].to_local()) == bits(value.to_local()), name


def full() -> dict[str, Any]:
    return {"weight": values((ROWS, K), 0), "master": values((ROWS, K), 0, torch.float32)}


def load_even(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {name: placed(torch.zeros_like(value), mesh, Shard(0)) for name, value in full().items()}
    load({"model": state}, path)
    assert_holds(state, full())


def save_even(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    save({"model": {name: placed(value, mesh, Shard(0)) for name, value in full().items()}}, path)


@pytest.mark.parametrize("world", CUTS)
def test_its_shards_are_saved_and_loaded_at_their_places(shared_tmp_path: Path, world: int) -> None:
    run_ranks(world, save_described, shared_tmp_path / "uneven")
    run_ranks(2, load_even, shared_tmp_path / "uneven")
    run_ranks(2, save_even, shared_tmp_path / "even")
    run_ranks(world, load_described, shared_tmp_path / "even")


def without_description(path: Path) -> None:
    for name, value in described(0)["model"].items():
        bare = DTensor.from_local(
            value.to_local().clone(), value.device_mesh, [Shard(0)], run_check=False, shape=value.shape, stride=(K, 1)
        )
        with pytest.raises(BaseException, match=f"{name}: .*preprocess_state_dict_for_uneven_dtensor"):
            save({name: bare}, path)


def test_what_it_has_not_described_is_refused(shared_tmp_path: Path) -> None:
    run_ranks(2, without_description, shared_tmp_path)
