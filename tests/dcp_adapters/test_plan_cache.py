"""enable_plan_caching: unchanged plans stay at home, changed ones never leave a trace of the old ones."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard, init_device_mesh

from dcp_adapters import QuantizedSavePlanner
from dcp_adapters.save.steps import plan_cache
from qtensor import quantize
from tests.dcp_adapters.cases import (
    RECIPES,
    alone,
    assert_holds,
    load,
    models,
    placed,
    reference,
    save,
    values,
)
from tests.dcp_adapters.test_checksums import expected_rows, rows_of
from tests.ranks import run_ranks, run_ranks_catching
from tests.sampling import sampled


class Watched(QuantizedSavePlanner):
    """Records what a rank sends, and whether the coordinator planned."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)
        self.planned = 0

    def create_local_plan(self) -> dcp.SavePlan:
        self.sent = super().create_local_plan()
        return self.sent

    def _plan(self, save: Any) -> None:
        self.planned += 1
        super()._plan(save)


def forget() -> None:
    """Rank workers live on from test to test, and so does what the process keeps."""
    plan_cache._locals.clear()
    plan_cache._globals.clear()


def watched_save(state: Any, path: Path, **options: Any) -> Watched:
    planner = Watched()
    with alone():
        dcp.save(state, checkpoint_id=path, planner=planner, **options)
    return planner


def saves_in_a_row(base: Path) -> None:
    forget()
    for step in range(3):  # other values, tensor-wide scales included; the same names, shapes and formats
        planner = watched_save({"models": models(step), "step": step}, base / str(step))
        assert planner.sent.usable == (step == 0)
        assert (planner.sent.items == []) == (step > 0)
        assert planner.planned == (step == 0 and dist.get_rank() == 0)
    for step in range(3):
        target = {"models": models(9), "step": 0}
        load(target, base / str(step))
        assert_holds(target["models"], reference(step))
        assert target["step"] == step


@sampled("world", [1, 2], [2])
def test_from_the_second_save_on_nothing_is_planned_and_all_is_written(world: int, shared_tmp_path: Path) -> None:
    run_ranks(world, saves_in_a_row, shared_tmp_path)
    target = {"models": reference(9), "step": 0}
    load(target, shared_tmp_path / "2")
    assert_holds(target["models"], reference(2))
    assert dict(rows_of(shared_tmp_path / "2")) == expected_rows(shared_tmp_path / "2")


def weights(name: str, seed: int = 0, rows: int = 64) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": placed(quantize(values((rows, 64), seed), RECIPES[name]), mesh, Shard(0)), "b": torch.ones(rows)}


def full(name: str, seed: int = 0, rows: int = 64) -> dict[str, Any]:
    return {"w": quantize(values((rows, 64), seed), RECIPES[name]), "b": torch.ones(rows)}


def formats_in_turn(base: Path) -> None:
    forget()
    # mxfp8 and its square variant differ in no dtype, shape or name: only the recipe tells
    kinds = [("mxfp8", 64), ("mxfp8_square", 64), ("mxfp8", 64), ("nvfp4", 64), ("mxfp8", 96), ("mxfp8_square", 64)]
    usable = [True, True, False, True, True, False]
    for number, (name, rows) in enumerate(kinds):
        planner = watched_save(weights(name, number, rows), base / str(number))
        assert planner.sent.usable == usable[number], number
    for number, (name, rows) in enumerate(kinds):
        target = weights(name, 99, rows)
        load(target, base / str(number))
        assert_holds(target, full(name, number, rows))


def test_formats_are_part_of_what_is_compared(shared_tmp_path: Path) -> None:
    run_ranks(2, formats_in_turn, shared_tmp_path)


def one_rank_changes(base: Path) -> None:
    """Rank 1 gets one more tensor; rank 0 sends its token: the new global plan holds both."""
    forget()
    mesh = init_device_mesh("cpu", (2,))
    for step in range(3):
        state: dict[str, Any] = {"w": placed(quantize(values((64, 64), step), RECIPES["nvfp4"]), mesh, Shard(0))}
        if step and dist.get_rank() == 1:
            state["own"] = torch.full((5,), float(step))
        planner = watched_save(state, base / str(step))
        assert planner.sent.usable == (step == 0 or (step == 1 and dist.get_rank() == 1))
        assert planner.planned == (step < 2 and dist.get_rank() == 0)


def test_a_rank_that_changes_is_planned_with_the_others_kept(shared_tmp_path: Path) -> None:
    run_ranks(2, one_rank_changes, shared_tmp_path)
    for step in range(3):
        target: dict[str, Any] = {"w": quantize(values((64, 64), 50), RECIPES["nvfp4"])}
        want: dict[str, Any] = {"w": quantize(values((64, 64), step), RECIPES["nvfp4"])}
        if step:
            target["own"], want["own"] = torch.zeros(5), torch.full((5,), float(step))
        load(target, shared_tmp_path / str(step))
        assert_holds(target, want)


def scales_that_part(base: Path) -> None:
    forget()
    state = weights("nvfp4")
    watched_save(state, base / "0")
    if dist.get_rank() == 1:
        state["w"].to_local().global_scale.mul_(2)
    watched_save(state, base / "1")


def test_scales_are_compared_at_every_save(shared_tmp_path: Path) -> None:
    for error in run_ranks_catching(2, scales_that_part, shared_tmp_path):
        assert "w.global_scale: rank 0 holds" in error
        assert "Call fsdp_hooks.sync_scales(model) before saving" in error
    assert not (shared_tmp_path / "1" / ".metadata").exists()


def failures_in_between(base: Path) -> None:
    forget()
    state = weights("mxfp8")
    watched_save(state, base / "0")
    with (
        patch.object(plan_cache, "restored", side_effect=OSError("the coordinator fails")),
        pytest.raises(dcp.api.CheckpointException, match="the coordinator fails"),
    ):
        watched_save(state, base / "1")
    if dist.get_rank() == 0:
        plan_cache._globals.clear()  # and has forgotten what it kept
    planner = watched_save(weights("mxfp8", 3), base / "2")
    assert planner.sent.usable, "a rank relied on a plan of a save that failed"
    assert not watched_save(weights("mxfp8", 4), base / "3").sent.usable
    for step, seed in ((2, 3), (3, 4)):
        target = weights("mxfp8", 99)
        load(target, base / str(step))
        assert_holds(target, full("mxfp8", seed))


def test_a_failed_save_makes_the_next_one_send_full_plans(shared_tmp_path: Path) -> None:
    run_ranks(2, failures_in_between, shared_tmp_path)


def another_group(base: Path) -> None:
    forget()
    state = {"w": quantize(values((64, 64), 0), RECIPES["mxfp8"]), "rank": torch.ones(2)}
    alone_group = dist.new_group([1])
    watched_save(state, base / "0")
    if dist.get_rank() == 1:
        watched_save(state, base / "1", process_group=alone_group)


def test_a_plan_the_coordinator_does_not_hold_is_an_error(shared_tmp_path: Path) -> None:
    errors = run_ranks_catching(2, another_group, shared_tmp_path)
    text = "plan caching: rank 0 of 1 relies on a plan of an earlier save that this coordinator does not hold for it"
    assert any(error and text in error for error in errors), errors
    assert not (shared_tmp_path / "1" / ".metadata").exists()


def replicas(base: Path) -> None:
    forget()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for step in range(2):
        net = models(step, mesh)
        assert watched_save(net, base / str(step)).sent.usable == (step == 0)
        target = models(8, mesh)
        load(target, base / str(step))
        assert_holds(target, reference(step))
    w = quantize(values((64, 64), 0), RECIPES["float8_tensor"])
    for step in range(2):
        save({"w": placed(w, mesh, Replicate(), Shard(0))}, base / f"w{step}", enable_plan_caching=True)


def test_replicas_write_what_they_wrote_the_first_time(shared_tmp_path: Path) -> None:
    run_ranks(4, replicas, shared_tmp_path)


def through_safetensors(base: Path) -> None:
    forget()
    for step in range(2):
        writer = dcp.HuggingFaceStorageWriter(str(base / str(step)), save_distributed=True)
        planner = Watched()
        dcp.save(weights("mxfp8", step), storage_writer=writer, planner=planner)
        assert planner.sent.usable == (step == 0)
        target = weights("mxfp8", 9)
        load(target, None, reader=dcp.HuggingFaceStorageReader(str(base / str(step))))
        assert_holds(target, full("mxfp8", step))


def test_any_writer_writes_cached_plans(shared_tmp_path: Path) -> None:
    run_ranks(2, through_safetensors, shared_tmp_path)


def test_a_plan_in_use_outlives_many_others(tmp_path: Path) -> None:
    forget()
    for number in range(plan_cache.KEPT + 2):
        planner = watched_save({"w": torch.full((3,), float(number))}, tmp_path / f"same-{number}")
        assert planner.planned == (number == 0)
        watched_save({f"other-{number}": torch.ones(3)}, tmp_path / f"other-{number}")


def with_and_without_checksums(base: Path) -> None:
    forget()
    for step, checksums in enumerate([False, True, False, True]):
        planner = QuantizedSavePlanner(enable_plan_caching=True, checksums=checksums)
        dcp.save(weights("mxfp8", step), checkpoint_id=base / str(step), planner=planner)
        (cache,) = (one for one in planner.steps if isinstance(one, plan_cache.PlanCache))
        assert (cache.cached is None) == (step < 2)
        entries = dcp.FileSystemReader(base / str(step)).read_metadata().state_dict_metadata
        assert ("qtensor.checksums" in entries) == checksums


def test_whether_checksums_are_made_is_part_of_what_is_compared(shared_tmp_path: Path) -> None:
    run_ranks(2, with_and_without_checksums, shared_tmp_path)


def checksums_on_one_rank(base: Path) -> None:
    planner = QuantizedSavePlanner(checksums=dist.get_rank() == 0)
    dcp.save(weights("mxfp8"), checkpoint_id=base, planner=planner)


def test_ranks_must_agree_on_checksums(shared_tmp_path: Path) -> None:
    for error in run_ranks_catching(2, checksums_on_one_rank, shared_tmp_path):
        assert "some ranks save with checksums=True, some with False; choose one for all" in error


def test_the_plans_that_were_used_last_are_kept() -> None:
    plans = OrderedDict.fromkeys("abcd")
    plans.move_to_end("a")
    plan_cache._trim(plans, 2)
    assert [*plans] == ["d", "a"]
