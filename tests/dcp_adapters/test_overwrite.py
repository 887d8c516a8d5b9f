"""A save into the directory of an older checkpoint: wherever it is interrupted, the one or the other loads whole."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_adapters import QuantizedSavePlanner, remove_replaced
from dcp_adapters.save.steps import overwrite as overwrite_module
from dcp_adapters.save.steps.overwrite import clear, make_room, own_names
from fsdp_hooks.torch_private import local_of
from tests.dcp_adapters.cases import assert_holds, load
from tests.dcp_adapters.faulty import assert_loads, assert_refused, full, overwrite, save_state, state
from tests.ranks import run_ranks


class FailsWhileWriting(dcp.FileSystemWriter):
    """Rank 0 writes its data, the others fail: files of two saves, of the same sizes, beside each other."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank():
            raise OSError("the network drive is gone")
        return super().write_data(plan, planner)


Planner = Callable[..., QuantizedSavePlanner]
DeleteFirst: Planner = partial(QuantizedSavePlanner, overwrite="delete_first")


def overwrite_in_vain(path: Path, planner: Planner, *, caching: bool) -> None:
    for seed in range(1 + caching):  # with caching the second save takes another way through the planner
        save_state(path, seed, planner=planner(enable_plan_caching=caching))
    with pytest.raises(BaseException, match="the network drive is gone"):
        save_state(path, 5, storage_writer=FailsWhileWriting(path), planner=planner(enable_plan_caching=caching))
    dist.barrier()


@pytest.mark.parametrize("caching", [False, True])
def test_an_interrupted_overwrite_leaves_the_old_checkpoint(*, caching: bool, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "checkpoint"
    run_ranks(2, overwrite_in_vain, path, QuantizedSavePlanner, caching=caching)
    run_ranks(2, assert_loads, path, int(caching))
    run_ranks(2, save_and_load, path)  # over what the interrupted one has left


@pytest.mark.parametrize("caching", [False, True])
def test_where_the_old_one_goes_first_an_incomplete_checkpoint_is_left(*, caching: bool, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "checkpoint"
    run_ranks(2, overwrite_in_vain, path, DeleteFirst, caching=caching)
    run_ranks(2, assert_refused, path)
    run_ranks(2, save_and_load, path)


def test_an_unknown_way_to_overwrite_is_refused() -> None:
    with pytest.raises(ValueError, match=r"overwrite='ask' is not one of \"keep\", \"delete_first\""):
        QuantizedSavePlanner(overwrite="ask")  # type: ignore[arg-type]


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


def data_files(path: Path) -> set[str]:
    return {file.name for file in path.iterdir() if file.suffix == ".distcp"}


def overwrite_twice(path: Path) -> None:
    before: set[str] = set()
    for seed in range(4):
        save_state(path, seed)
        assert_loads(path, seed)
        now = data_files(path)
        assert len(now - before) == 2  # one a rank
        assert len(now) == (2 if seed == 0 else 4), "files of the checkpoint before the last one are left"
        before = now
        dist.barrier()
    for _ in range(2):
        with pytest.raises(BaseException, match="the network drive is gone"):
            save_state(path, 5, storage_writer=FailsWhileWriting(path))
        dist.barrier()
        assert_loads(path, 3)
    assert len(data_files(path)) <= 6  # what loads, and what one save has left
    dist.barrier()
    if dist.get_rank() == 0:
        remove_replaced(str(path))
    dist.barrier()
    assert len(data_files(path)) == 2
    assert_loads(path, 3)


def test_an_overwritten_directory_holds_the_last_save_and_at_most_one_more(shared_tmp_path: Path) -> None:
    run_ranks(2, overwrite_twice, shared_tmp_path)


def overwrite_with_one_room(path: Path) -> None:
    for seed in range(3):
        save_state(path, seed, planner=DeleteFirst())
        assert_loads(path, seed)
        assert len(data_files(path)) == 2
        dist.barrier()


def test_where_the_old_one_goes_first_there_is_never_more_than_one(shared_tmp_path: Path) -> None:
    run_ranks(2, overwrite_with_one_room, shared_tmp_path)


class ReadsLater(dcp.FileSystemReader):
    """Between its metadata and its data other saves come and go."""

    def __init__(self, path: Path, *saves: int) -> None:
        super().__init__(path)
        self.saves = saves

    def read_data(self, plan: Any, planner: Any) -> Any:
        for seed in self.saves:
            save_state(self.path, seed)
        return super().read_data(plan, planner)


def read_meanwhile(path: Path) -> None:
    save_state(path, 1)
    target = state(99)
    load(target, None, reader=ReadsLater(path, 5))
    assert_holds(target, full(1))
    assert_loads(path, 5)
    with pytest.raises(BaseException, match=r"No such file or directory: .*__0_\w+\.distcp"):
        load(state(99), None, reader=ReadsLater(path, 6, 7))
    assert_loads(path, 7)


def test_who_has_begun_to_load_the_old_one_gets_it_whole_or_an_error(shared_tmp_path: Path) -> None:
    run_ranks(2, read_meanwhile, shared_tmp_path)


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
    save_state(path, 3)
    save_state(path, 0)
    with (
        patch.object(overwrite_module, "_removed", side_effect=PermissionError("read-only")),
        pytest.raises(BaseException, match="PermissionError: read-only"),
    ):
        save_state(path, 5)
    assert_loads(path, 0)


def test_a_save_that_can_not_remove_what_is_replaced_leaves_the_checkpoint(shared_tmp_path: Path) -> None:
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
    """Two more saves begin and end; the second of them overwrites the first, and removes this one's files."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = dcp.FileSystemWriter.write_data(self, plan, planner)
        for seed in (5, 6):
            save_state(self.path, seed)
        return written


def three_at_once(path: Path) -> None:
    with pytest.raises(BaseException, match=r"__0_0\.distcp: another save into the same directory has removed it"):
        save_state(path, 0, storage_writer=ThreeAtOnce(path, finishes_first=False))
    assert_loads(path, 6)


def test_a_save_whose_files_another_one_has_removed_fails_and_replaces_nothing(shared_tmp_path: Path) -> None:
    run_ranks(2, three_at_once, shared_tmp_path)


# -- the steps one by one ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [make_room, clear])
def test_where_there_is_no_checkpoint_nothing_is_removed(
    step: Callable[[Any], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__0_0.distcp").write_text("of a save that never finished, or has not yet")
    for place in (tmp_path, str(tmp_path / "new"), tmp_path / "__0_0.distcp", None):
        assert not step(place)
    assert (tmp_path / "__0_0.distcp").exists()
    monkeypatch.chdir(tmp_path)
    Path("s3:/bucket").mkdir(parents=True)
    Path("s3:/bucket/.metadata").touch()
    step("s3://bucket")
    assert Path("s3:/bucket/.metadata").exists()
    with pytest.raises(ValueError, match="s3://bucket: expected a local directory; behind URLs"):
        remove_replaced("s3://bucket")


def listing(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


OTHERS = ("notes.txt", "model.safetensors", "__x_0.distcp", "config.json", "__x.metadata")


def made(directory: Path, metadata: dict[str, list[str]], *names: str) -> None:
    for path in directory.iterdir():
        path.unlink()
    for name in (*names, *OTHERS):
        (directory / name).touch()
    for name, named in metadata.items():
        (directory / name).write_bytes(pickle.dumps(named))


def test_files_of_others_stay(tmp_path: Path) -> None:
    data = ("__0_0.distcp", "__3_1a2b3c4d_0.distcp")
    names = (".metadata", ".metadata.1a2b3c4d.tmp", "__0.metadata", "__11.metadata", *data)
    made(tmp_path, {}, *names)
    assert clear(tmp_path, own="__0_")
    assert listing(tmp_path) == {*names[1:], *OTHERS}
    assert clear(tmp_path)
    assert listing(tmp_path) == {*OTHERS}


def test_what_the_metadata_in_place_do_not_name_goes(tmp_path: Path) -> None:
    kept, gone = ["__0_1a2b3c4d_0.distcp", "__11_0.distcp"], ["__0_0.distcp", "__1_0.distcp", "__1_1a2b3c4d_1.distcp"]
    made(tmp_path, {".metadata": kept, "__0.metadata": ["__0_0.distcp"]}, *kept, *gone)
    assert make_room(tmp_path)
    assert listing(tmp_path) == {".metadata", *kept, *OTHERS}
    # new metadata of saves that were interrupted at their commit
    made(
        tmp_path, {".metadata": kept}, *kept, ".metadata.1a2b3c4d.tmp", "__3.metadata.1a2b3c4d.tmp", ".metadata.old.tmp"
    )
    assert make_room(tmp_path)
    assert listing(tmp_path) == {".metadata", *kept, ".metadata.old.tmp", *OTHERS}
    # a rank that saves for itself removes its own alone, and what any metadata name stays
    made(tmp_path, {".metadata": kept, "__0.metadata": ["__0_0.distcp"]}, *kept, *gone)
    assert make_room(tmp_path, own="__1_")
    assert listing(tmp_path) == {".metadata", "__0.metadata", *kept, "__0_0.distcp", *OTHERS}
    # metadata of ranks are the checkpoint where there are no others
    made(tmp_path, {"__0.metadata": kept[:1], "__11.metadata": kept[1:]}, *kept, *gone)
    assert make_room(tmp_path)
    assert listing(tmp_path) == {"__0.metadata", "__11.metadata", *kept, *OTHERS}


def test_metadata_that_are_cut_off_or_name_no_files_remove_nothing(tmp_path: Path) -> None:
    for content in (b"", pickle.dumps(["__0_0.distcp"])[:-1], pickle.dumps(["elsewhere/0.bin"])):
        made(tmp_path, {}, "__0_0.distcp", "__1_0.distcp")
        (tmp_path / ".metadata").write_bytes(content)
        assert make_room(tmp_path)
        assert listing(tmp_path) == {".metadata", "__0_0.distcp", "__1_0.distcp", *OTHERS}


def test_what_loads_is_on_the_disk_before_anything_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, {".metadata": ["__0_1.distcp"]}, "__0_0.distcp", "__0_1.distcp")
    left = []
    monkeypatch.setattr(os, "fsync", lambda _: left.append("__0_0.distcp" in listing(tmp_path)))
    make_room(tmp_path)
    assert left == [True, True]
    assert "__0_0.distcp" not in listing(tmp_path)


def test_metadata_goes_durably_and_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_at_sync = []
    monkeypatch.setattr(os, "fsync", lambda _: left_at_sync.append({path.name for path in tmp_path.iterdir()}))
    for name in (".metadata", "__0_0.distcp"):
        (tmp_path / name).touch()
    clear(tmp_path)
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
    clear(tmp_path)
    assert not (tmp_path / ".metadata").exists()
    error = OSError(5, "Input/output error")
    (tmp_path / ".metadata").touch()
    with pytest.raises(OSError, match="Input/output error"):
        clear(tmp_path)


@dataclasses.dataclass
class Prefix:
    prefix: str


def test_a_name_that_is_taken_is_not_taken_again(tmp_path: Path) -> None:
    first = own_names(tmp_path, Prefix("__3_"), taken=False)
    assert first == Prefix("__3_")
    assert (tmp_path / "__3_0.distcp").read_bytes() == b""
    second = own_names(tmp_path, Prefix("__3_"), taken=False)
    third = own_names(str(tmp_path), Prefix("__3_"), taken=True)
    assert len({first.prefix, second.prefix, third.prefix}) == 3
    assert all(re.fullmatch(r"__3_[0-9a-f]{8}_", one.prefix) for one in (second, third))
    assert own_names(tmp_path, Prefix("__4_"), taken=False) == Prefix("__4_")
    assert own_names(tmp_path, Prefix("__5_"), taken=True) != Prefix("__5_")
    for place in (None, "s3://bucket", tmp_path / "not there"):
        assert own_names(place, Prefix("__3_"), taken=True) == Prefix("__3_")
    assert own_names(tmp_path, {"shard_index": 1}, taken=True) == {"shard_index": 1}  # a writer that names no prefix
