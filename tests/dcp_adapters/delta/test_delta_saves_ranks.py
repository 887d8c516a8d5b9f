"""Deltas saved by several ranks: FSDP2 of every recipe, other world sizes than the base's, training, async saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from dcp_adapters import QuantizedSavePlanner, QuantizedStager, SafeFileSystemReader, expand, read_manifest
from dcp_adapters.stored.verifying.verify import verify
from tests.dcp_adapters.cases import RECIPES, alone, assert_holds, leaves, load, local_of, models, reference, save
from tests.dcp_adapters.delta.test_delta_saves import data_bytes, kind_of, marked
from tests.dcp_adapters.test_async import Training, overwrite, whole
from tests.ranks import run_ranks, run_ranks_catching
from tests.sampling import halves, sampled


def stepped(state: Any) -> Any:
    """Every seventh byte of each row loses its lowest bit, in place: the same whatever rows a rank holds."""
    for _, value in leaves(expand(state)):
        if isinstance(value, Tensor) and value.ndim > 1:
            local_of(value).detach().view(torch.uint8)[..., ::7] &= 0xFE
    return state


def saved_and_loaded(base: Path) -> None:
    save(models(0), base / "full")
    save(stepped(models(0)), base / "delta", delta_to=base / "full")
    loaded(base / "delta")


def loaded(path: Path) -> None:
    for reader in (None, SafeFileSystemReader(path)):
        target = models(1)
        load(target, path, reader=reader)
        assert_holds(target, stepped(reference(0)))


@sampled("world", [1, 2, 4], [2])
def test_ranks_save_and_load_deltas_of_every_recipe(world: int, shared_tmp_path: Path) -> None:
    run_ranks(world, saved_and_loaded, shared_tmp_path)
    delta = shared_tmp_path / "delta"
    assert verify(delta).findings == ()
    assert data_bytes(delta) < data_bytes(shared_tmp_path / "full") / 2
    assert {kind_of(data) for data in marked(delta).values()} >= {"same", "changes"}


def base_saved(base: Path) -> None:
    save(models(0), base / "full")


def delta_saved(base: Path) -> None:
    save(stepped(models(0)), base / "delta", delta_to=base / "full")


@sampled("world", [3, 1], [3])
def test_base_delta_and_load_may_each_have_another_world_size(world: int, shared_tmp_path: Path) -> None:
    run_ranks(4, base_saved, shared_tmp_path)
    run_ranks(2, delta_saved, shared_tmp_path)
    run_ranks(world, loaded, shared_tmp_path / "delta")
    assert verify(shared_tmp_path / "delta").findings == ()


def in_training(base: Path, names: tuple[str, ...]) -> None:
    upload, stager = dist.new_group(backend="gloo"), QuantizedStager()
    for name in names:
        training = Training(name, 0)
        training.train(0, 2)
        save(training.state(), base / name / "full")
        training.train(2, 3)
        state = training.state()
        expected = whole(state)
        future = dcp.async_save(
            state,
            checkpoint_id=base / name / "delta",
            planner=QuantizedSavePlanner(delta_to=base / name / "full", digest=True),
            async_stager=stager,
            process_group=upload,
        )
        overwrite(training.net.state_dict(), 0x31)
        future.result()
        resumed = Training(name, 1)
        resumed.state()
        resumed.resume(base / name / "delta")
        assert whole(resumed.state()) == expected
    stager.close()


@pytest.mark.slow
@halves("names", [name for name in RECIPES if name != "mxfp8_square"], ["float8_row", "nvfp4_square"])  # 48 rows
def test_a_training_resumes_from_a_delta_that_was_saved_in_the_background(
    names: tuple[str, ...], shared_tmp_path: Path
) -> None:
    run_ranks(2, in_training, shared_tmp_path, names)
    for name in names:
        delta = shared_tmp_path / name / "delta"
        assert verify(delta).findings == ()
        assert read_manifest(delta).digests


def other_bases(base: Path) -> None:
    for name in ("a", "b"):
        save({"w": torch.ones(2)}, base / name)
    own = base / ("a" if dist.get_rank() == 0 else "b")
    save({"w": torch.ones(2)}, base / "delta", delta_to=own)


def test_ranks_with_other_bases_are_refused(shared_tmp_path: Path) -> None:
    errors = run_ranks_catching(2, other_bases, shared_tmp_path)
    assert all("give all ranks the same delta_to" in error for error in errors)
    assert not (shared_tmp_path / "delta" / ".metadata").exists()


def apart(base: Path) -> None:
    save({"w": torch.ones(2)}, base / "full")
    with alone():
        planner = QuantizedSavePlanner(delta_to=base / "full")
        dcp.save({"w": torch.ones(2)}, checkpoint_id=base / "delta", planner=planner, use_collectives=False)


def test_ranks_that_save_for_themselves_are_refused(shared_tmp_path: Path) -> None:
    for error in run_ranks_catching(2, apart, shared_tmp_path):
        assert "delta_to is agreed on by all ranks, and here each rank saves for itself" in error


def missing(base: Path) -> None:
    target = models(1)
    load(target, base / "delta")


def test_all_ranks_hear_of_a_missing_base(shared_tmp_path: Path) -> None:
    run_ranks(1, saved_and_loaded, shared_tmp_path)
    (shared_tmp_path / "full").rename(shared_tmp_path / "away")
    for error in run_ranks_catching(2, missing, shared_tmp_path):
        assert "where there is no checkpoint" in error
