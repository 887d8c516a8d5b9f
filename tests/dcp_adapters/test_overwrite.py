"""A save into the directory of an older checkpoint never leaves something that loads as a mixture of the two."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_adapters import QuantizedSavePlanner, read_manifest
from dcp_adapters.overwrite import retire
from fsdp_hooks.scale_sync import local_of
from tests.dcp_adapters.cases import assert_holds, load, save
from tests.dcp_adapters.faulty import UNFINISHED, assert_loads, assert_refused, full, overwrite, save_state, state
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
    assert (path / ".metadata.retired").exists()


class Unretired(QuantizedSavePlanner):
    """A planner that does not know where it saves to."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, None, is_coordinator)


def holds_a_mixture(path: Path) -> None:
    target = state(99)
    load(target, path)
    for seed in (0, 5):
        with pytest.raises(AssertionError, match="other bytes"):
            assert_holds(target, full(seed))


def test_without_retiring_a_mixture_would_load(shared_tmp_path: Path) -> None:
    run_ranks(2, overwrite_in_vain, shared_tmp_path / "checkpoint", Unretired, caching=False)
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


def test_ranks_that_save_each_for_itself_retire_what_all_had_saved(shared_tmp_path: Path) -> None:
    """Otherwise dcp.load would go by the old metadata, which it prefers."""
    run_ranks(2, overwrite_rank_by_rank, shared_tmp_path)
    left = {file.name for file in shared_tmp_path.iterdir() if "metadata" in file.name}
    assert left == {"__0.metadata", "__1.metadata", ".metadata.retired"}


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
    assert not (shared_tmp_path / ".metadata.retired").exists()


def fail_to_retire(path: Path) -> None:
    save_state(path)
    (path / ".metadata.retired" / "in the way").mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with pytest.raises(BaseException, match=r"\.metadata' -> .*\.metadata\.retired'"):
        save_state(path, 5)
    assert_loads(path, 0)


def test_a_checkpoint_that_can_not_be_retired_is_not_overwritten(shared_tmp_path: Path) -> None:
    run_ranks(2, fail_to_retire, shared_tmp_path)


# -- retire ------------------------------------------------------------------------------------------------------------


def test_a_retired_checkpoint_is_incomplete_until_its_metadata_is_renamed_back(tmp_path: Path) -> None:
    save(full(0), tmp_path)
    metadata = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata.retired").write_text("of an earlier overwrite")
    assert retire(tmp_path, ranks=2) == [tmp_path / ".metadata.retired"]
    with pytest.raises(FileNotFoundError, match=UNFINISHED):
        read_manifest(tmp_path)
    assert (tmp_path / ".metadata.retired").read_bytes() == metadata
    (tmp_path / ".metadata.retired").rename(tmp_path / ".metadata")
    target = full(9)
    load(target, tmp_path)
    assert_holds(target, full(0))


def test_where_there_is_no_checkpoint_nothing_is_retired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__0_0.distcp").write_text("of a save that never finished")
    assert retire(tmp_path, ranks=2) == []
    assert retire(str(tmp_path / "new"), ranks=2) == []
    assert retire(tmp_path / "__0_0.distcp", ranks=2) == []
    assert retire(None, ranks=2) == []
    monkeypatch.chdir(tmp_path)
    Path("s3:/bucket").mkdir(parents=True)
    Path("s3:/bucket/.metadata").touch()
    assert retire("s3://bucket", ranks=2) == []


def test_metadata_that_each_rank_wrote_for_itself_goes_only_if_all_ranks_plan(tmp_path: Path) -> None:
    names = (".metadata", "__0.metadata", "__11.metadata", "__0_0.distcp", "__x.metadata")
    for name in names:
        (tmp_path / name).write_text(name)
    assert retire(tmp_path, ranks=1) == [tmp_path / ".metadata.retired"]
    assert retire(tmp_path, ranks=2) == [tmp_path / f"__{rank}.metadata.retired" for rank in (0, 11)]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"{name}.retired" for name in names[:3]} | set(names[3:])


def test_the_rename_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    (tmp_path / ".metadata").touch()
    retire(tmp_path, ranks=1)
    assert synced == [tmp_path.stat().st_ino]


def test_only_a_file_system_that_can_not_sync_directories_is_excused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(22, "Invalid argument")

    def fsync(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fsync)
    (tmp_path / ".metadata").touch()
    assert retire(tmp_path, ranks=1)
    error = OSError(5, "Input/output error")
    (tmp_path / ".metadata").touch()
    with pytest.raises(OSError, match="Input/output error"):
        retire(tmp_path, ranks=1)
