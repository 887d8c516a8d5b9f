"""Weights that share one scale under FSDP2: the bytes of one process on any number of ranks, by the same collectives.

In one process tests/qtensor/test_shared_scales.py shows what these bytes are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from fsdp_hooks import sync_scales, unsharded
from qtensor import MasterWeightOptimizer, share_scales
from tests.fsdp_hooks.cases import Collectives, bits, local
from tests.qtensor.fused import GROUPS, NAMES, RECIPES, Model, as_one, batch, built, values
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each
from tests.sampling import sampled

NVFP4 = RECIPES["nvfp4"]
CASES = [
    ("nvfp4", "quantized"),
    ("nvfp4_square", "quantized"),
    ("nvfp4", "high_precision"),
    ("float8_tensor", "quantized"),
]


def sharded(model: Model) -> Model:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)  # type: ignore[return-value] # the module itself


def placed(model: Model, dense: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: distribute_tensor(dense[name], param.device_mesh, param.placements, src_data_rank=None)
        for name, param in model.named_parameters()
    }


def gathered(model: Model) -> dict[str, dict[str, Tensor]]:
    """The bytes that forwards compute with, whole; shards must have one tensor-wide scale."""
    found = {}
    with unsharded(model):
        for name, param in model.named_parameters():
            parts = dict(local(param).parts())
            for part, value in parts.items():
                if value.ndim == 1:
                    assert len(set(value.tolist())) == 1, name
                    parts[part] = value[0]
            found[name] = {part: bits(value) for part, value in parts.items()}
    return found


def assert_as_one(model: Model, dense: dict[str, Tensor], recipe: Any) -> None:
    found = gathered(model)
    for name, parts in as_one(dense, recipe).items():
        for part, value in parts.items():
            assert torch.equal(found[name][part], bits(value)), f"{name}.{part}"


def trained(case: tuple[str, str], path: Path | None = None) -> dict[str, dict[str, Tensor]]:
    """Two steps on the same tokens on every rank; the bytes of each step are looked at."""
    name, storage = case
    model = sharded(built(RECIPES[name], storage=storage))
    model.load_state_dict(placed(model, values()))
    assert_as_one(model, values(), RECIPES[name])
    masters = storage == "quantized"
    trainer: Any = (
        MasterWeightOptimizer(torch.optim.AdamW, model.named_parameters(), lr=0.01)
        if masters
        else torch.optim.AdamW(model.parameters(), lr=0.01)
    )
    for step in range(2):
        model(batch(step)).backward()
        with Collectives() as comms:
            trainer.step()
            if not masters:
                sync_scales(model)
        assert comms.counts == ({"allreduce_": 1} if dist.get_world_size() > 1 else {})
        trainer.zero_grad()
        state = {
            name: trainer.state[param]["master_weight"] if masters else param
            for name, param in model.named_parameters()
        }
        dense = {name: _dense(value.detach()) for name, value in state.items()}
        assert not any(torch.equal(dense[name], values()[name]) for name in dense)
        assert_as_one(model, dense, RECIPES[name])
    if path is not None:
        dcp.save({"model": model.state_dict()}, checkpoint_id=path, planner=QuantizedSavePlanner())
    return gathered(model)


def _dense(value: Any) -> Tensor:
    whole = value.full_tensor()
    return getattr(whole, "dense", whole)


@sampled("ranks", [1, 2, 3], [3])
def test_each_step_quantizes_a_group_as_one_by_one_all_reduce(ranks: int) -> None:
    run_ranks_each(ranks, CASES, trained)


def test_training_gives_the_bytes_of_one_process() -> None:
    """Equal gradients on both ranks have themselves as their mean, exactly."""
    (alone,) = run_ranks(1, trained, CASES[0])
    for found in run_ranks(2, trained, CASES[0]):
        for name, parts in alone.items():
            for part, value in parts.items():
                assert torch.equal(found[name][part], value), f"{name}.{part}"


def _reads(path: Path) -> dict[str, dict[str, Tensor]]:
    model = sharded(built(NVFP4))
    dcp.load({"model": model.state_dict()}, checkpoint_id=path, planner=QuantizedLoadPlanner())
    before = gathered(model)
    sync_scales(model)
    after = gathered(model)
    for name, parts in before.items():
        for part, value in parts.items():
            assert torch.equal(after[name][part], value), f"{name}.{part}: they agree already"
    return after


def test_checkpoints_keep_the_bytes_on_another_world_size(shared_tmp_path: Path) -> None:
    saved, _ = run_ranks(2, trained, CASES[0], shared_tmp_path)
    for ranks in (1, 3):
        found = run_ranks(ranks, _reads, shared_tmp_path)[0]
        for name, parts in saved.items():
            for part, value in parts.items():
                assert torch.equal(found[name][part], value), f"{name}.{part}"


def _converts(case: tuple[str, str], path: Path) -> None:
    name, _ = case
    model = sharded(built(RECIPES[name], storage="quantized"))
    planner = QuantizedLoadPlanner(on_mismatch="convert")
    dcp.load(model.state_dict(), checkpoint_id=path, planner=planner)
    assert_as_one(model, values(), RECIPES[name])


def _saves(path: Path) -> None:
    dcp.save(values(), checkpoint_id=path)


@sampled("ranks", [1, 2], [2])
def test_a_dense_checkpoint_is_quantized_as_one_while_it_is_read(ranks: int, shared_tmp_path: Path) -> None:
    run_ranks(1, _saves, shared_tmp_path)
    run_ranks_each(ranks, CASES[:2], _converts, shared_tmp_path)


# -- what is refused ---------------------------------------------------------------------------------------------------


def _one_rank_shares() -> None:
    model = sharded(built(NVFP4, share=dist.get_rank() == 1))
    sync_scales(model)


def test_ranks_that_share_differently_are_told() -> None:
    for text in run_ranks_catching(2, _one_rank_shares):
        assert "sync_scales: the ranks of a group do not list the same weights" in text
        assert "one scale for layers." in text


def _one_rank_freezes() -> None:
    model = sharded(built(NVFP4))
    trainer = MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    model(batch(0)).backward()
    if dist.get_rank() == 1:
        model.get_parameter(NAMES[0][0]).requires_grad_(False)
    trainer.step()


def test_a_rank_without_a_partner_tells_the_others() -> None:
    first, second = run_ranks_catching(2, _one_rank_freezes)
    assert "MasterWeightOptimizer.step: rank 1 failed before the ranks could agree" in first
    assert second.startswith("ValueError: MasterWeightOptimizer.step: layers.0.q_proj.weight: not among the parameters")


def _late() -> None:
    share_scales(sharded(built(NVFP4, share=False)), GROUPS)


def _again_and_late() -> None:
    share_scales(sharded(built(NVFP4)), [])


def test_groups_of_shards_are_not_left_as_they_were_without_a_word() -> None:
    (told,) = run_ranks_catching(1, _again_and_late)
    assert told.startswith("ValueError: share_scales: layers.0.q_proj.weight is a DTensor already, and shares a scale")


def test_it_comes_before_fully_shard() -> None:
    (text,) = run_ranks_catching(1, _late)
    assert text.startswith(
        "ValueError: share_scales: layers.0.q_proj.weight is a DTensor already; call it before fully"
    )
