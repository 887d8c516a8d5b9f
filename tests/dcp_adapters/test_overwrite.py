"""A save into the directory of an older checkpoint never leaves something that loads as a mixture of the two."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_adapters import QuantizedSavePlanner
from dcp_adapters import overwrite as overwrite_module
from dcp_adapters.overwrite import clear, own_names
from fsdp_hooks.scale_sync import local_of
from tests.dcp_adapters.cases import assert_holds, load
from tests.dcp_adapters.faulty import assert_loads, assert_refused, full, overwrite, save_state, state
from tests.ranks import run_ranks


class FailsWhileWriting(dcp.FileSystemWriter):
    """Rank 0 writes its data, the others fail: files of two saves, of the same sizes, beside each other."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank():
            raise OSError("the network drive is gone")
        return super().write_data(plan, planner)


def overwrite_in_vain(path: Path, planner: type[QuantizedSavePlanner], *, caching: bool) -> None:
    for seed in range(1 + caching):  # with caching the second save takes another way through the planner
        save_state(path, seed, planner=planner(enable_plan_caching=caching))
    with pytest.raises(BaseException, match="the network drive is gone"):
        save_state(path, 5, storage_writer=FailsWhileWriting(path), planner=planner(enable_plan_caching=caching))
    dist.barrier()


@pytest.mark.parametrize("caching", [False, True])
def test_an_interrupted_overwrite_leaves_an_incomplete_checkpoint(*, caching: bool, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "checkpoint"
    run_ranks(2, overwrite_in_vain, path, QuantizedSavePlanner, caching=caching)
    run_ranks(2, assert_refused, path)
    run_ranks(2, save_and_load, path)  # over what the interrupted one has left


def save_and_load(path: Path) -> None:
    save_state(path, 7)
    assert_loads(path, 7)


class Unaware(QuantizedSavePlanner):
    """A planner that does not know where it saves to."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, None, is_coordinator)


def holds_a_mixture(path: Path) -> None:
    target = state(99)
    load(target, path)
    for seed in (0, 5):
        with pytest.raises(AssertionError, match="other bytes"):
            assert_holds(target, full(seed))


def test_a_planner_that_does_not_know_where_it_saves_to_leaves_a_mixture(shared_tmp_path: Path) -> None:
    run_ranks(2, overwrite_in_vain, shared_tmp_path / "checkpoint", Unaware, caching=False)
    run_ranks(1, holds_a_mixture, shared_tmp_path / "checkpoint")


def overwrite_twice(path: Path) -> None:
    for seed in range(3):
        save_state(path, seed)
        assert_loads(path, seed)


def test_an_overwritten_directory_holds_the_last_save(shared_tmp_path: Path) -> None:
    run_ranks(2, overwrite_twice, shared_tmp_path)


def overwrite_rank_by_rank(path: Path) -> None:
    save_state(path, 0)
    save_state(path, 5, use_collectives=False)
    assert_loads(path, 5)


def test_ranks_that_save_each_for_itself_remove_what_all_had_saved(shared_tmp_path: Path) -> None:
    """Otherwise dcp.load would go by the old metadata, which it prefers."""
    run_ranks(2, overwrite_rank_by_rank, shared_tmp_path)
    left = {file.name for file in shared_tmp_path.iterdir() if "metadata" in file.name}
    assert left == {"__0.metadata", "__1.metadata"}


def disagreeing(seed: int) -> dict[str, Any]:
    shards = state(seed)
    local_of(shards["nvfp4"]).global_scale.mul_(1 + dist.get_rank())
    return shards


def fail_to_plan(path: Path) -> None:
    save_state(path)
    with pytest.raises(BaseException, match="must be the same in all shards"):
        overwrite(disagreeing(5), path)
    assert_loads(path, 0)
    with pytest.raises(BaseException, match=r"already exists and self\.overwrite=False"):
        save_state(path, 5, storage_writer=dcp.FileSystemWriter(path, overwrite=False))
    assert_loads(path, 0)


def test_a_save_that_can_not_be_planned_leaves_the_old_checkpoint(shared_tmp_path: Path) -> None:
    run_ranks(2, fail_to_plan, shared_tmp_path)


def fail_to_clear(path: Path) -> None:
    save_state(path)
    with (
        patch.object(overwrite_module, "_removed", side_effect=PermissionError("read-only")),
        pytest.raises(BaseException, match="PermissionError: read-only"),
    ):
        save_state(path, 5)
    assert_loads(path, 0)


def test_a_checkpoint_that_can_not_be_removed_is_not_overwritten(shared_tmp_path: Path) -> None:
    run_ranks(2, fail_to_clear, shared_tmp_path)


# -- two saves into one directory at once ------------------------------------------------------------------------------


class Meanwhile(dcp.FileSystemWriter):
    """Between planning and writing of one save another one begins and ends; `first` says whose end comes first."""

    def __init__(self, path: Path, *, finishes_first: bool) -> None:
        super().__init__(path)
        self.finishes_first = finishes_first

    def write_data(self, plan: Any, planner: Any) -> Any:
        if self.finishes_first:
            save_state(self.path, 5)
            return super().write_data(plan, planner)
        written = super().write_data(plan, planner)
        save_state(self.path, 5)
        return written


def two_at_once(path: Path, *, finishes_first: bool) -> None:
    save_state(path, 0, storage_writer=Meanwhile(path, finishes_first=finishes_first))
    assert_loads(path, 0)  # its .metadata came last


@pytest.mark.parametrize("finishes_first", [True, False])
def test_of_two_saves_at_once_the_last_to_finish_is_whole(*, finishes_first: bool, shared_tmp_path: Path) -> None:
    run_ranks(2, two_at_once, shared_tmp_path, finishes_first=finishes_first)
    names = {file.name for file in shared_tmp_path.glob("*.distcp")}
    assert len(names) == 4, names
    assert {"__0_0.distcp", "__1_0.distcp"} < names


class ThreeAtOnce(Meanwhile):
    """Two more saves begin and end; the second of them overwrites the first, and this one's files with it."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = dcp.FileSystemWriter.write_data(self, plan, planner)
        for seed in (5, 6):
            save_state(self.path, seed)
        return written


def three_at_once(path: Path) -> None:
    save_state(path, 0, storage_writer=ThreeAtOnce(path, finishes_first=False))
    with pytest.raises(BaseException, match=r"No such file or directory: .*__0_0\.distcp"):
        load(state(99), path)


def test_a_save_whose_files_were_cleared_away_is_refused(shared_tmp_path: Path) -> None:
    run_ranks(2, three_at_once, shared_tmp_path)


# -- clear and own_names -----------------------------------------------------------------------------------------------


def test_where_there_is_no_checkpoint_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__0_0.distcp").write_text("of a save that never finished, or has not yet")
    for place in (tmp_path, str(tmp_path / "new"), tmp_path / "__0_0.distcp", None):
        assert not clear(place, alone=False)
    assert (tmp_path / "__0_0.distcp").exists()
    monkeypatch.chdir(tmp_path)
    Path("s3:/bucket").mkdir(parents=True)
    Path("s3:/bucket/.metadata").touch()
    clear("s3://bucket", alone=False)
    assert Path("s3:/bucket/.metadata").exists()


def test_files_of_others_stay(tmp_path: Path) -> None:
    names = (".metadata", "__0.metadata", "__11.metadata", "__x.metadata", "__0_0.distcp", "__3_1a2b3c4d_0.distcp")
    others = ("notes.txt", "model.safetensors", "__x_0.distcp", "config.json")
    for name in (*names, *others):
        (tmp_path / name).write_text(name)
    assert clear(tmp_path, alone=True)
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:], *others}
    assert clear(tmp_path, alone=False)
    assert {path.name for path in tmp_path.iterdir()} == {*others, "__x.metadata"}


def test_metadata_goes_durably_and_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_at_sync = []
    monkeypatch.setattr(os, "fsync", lambda _: left_at_sync.append({path.name for path in tmp_path.iterdir()}))
    for name in (".metadata", "__0_0.distcp"):
        (tmp_path / name).touch()
    clear(tmp_path, alone=False)
    assert left_at_sync == [{"__0_0.distcp"}]
    assert list(tmp_path.iterdir()) == []


def test_only_a_file_system_that_can_not_sync_directories_is_excused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(22, "Invalid argument")

    def fsync(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fsync)
    (tmp_path / ".metadata").touch()
    clear(tmp_path, alone=False)
    assert not (tmp_path / ".metadata").exists()
    error = OSError(5, "Input/output error")
    (tmp_path / ".metadata").touch()
    with pytest.raises(OSError, match="Input/output error"):
        clear(tmp_path, alone=False)


@dataclasses.dataclass
class Prefix:
    prefix: str


def test_a_name_that_is_taken_is_not_taken_again(tmp_path: Path) -> None:
    first = own_names(tmp_path, Prefix("__3_"), cleared=False)
    assert first == Prefix("__3_")
    assert (tmp_path / "__3_0.distcp").read_bytes() == b""
    second = own_names(tmp_path, Prefix("__3_"), cleared=False)
    third = own_names(str(tmp_path), Prefix("__3_"), cleared=True)
    assert len({first.prefix, second.prefix, third.prefix}) == 3
    assert all(re.fullmatch(r"__3_[0-9a-f]{8}_", one.prefix) for one in (second, third))
    assert own_names(tmp_path, Prefix("__4_"), cleared=False) == Prefix("__4_")
    assert own_names(tmp_path, Prefix("__5_"), cleared=True) != Prefix("__5_")
    for place in (None, "s3://bucket", tmp_path / "not there"):
        assert own_names(place, Prefix("__3_"), cleared=True) == Prefix("__3_")
    assert own_names(tmp_path, {"shard_index": 1}, cleared=True) == {"shard_index": 1}  # a writer that names no prefix
