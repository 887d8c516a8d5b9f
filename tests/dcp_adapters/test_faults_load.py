"""Whatever is wrong with a checkpoint or with reading it: every rank hears of it, and the one before it loads."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_adapters.stored.reading import order as read_items
from tests import _rank_worker, ranks
from tests.dcp_adapters.cases import load
from tests.dcp_adapters.faulty import WORLD, assert_holds, assert_loads, fail_on, full, save_state, state
from tests.ranks import RankFailure, run_ranks


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that is whole: seed 0, two ranks."""
    path: Path = ranks.agreed(tmp_path_factory.mktemp("faults")) / "good"
    run_ranks(WORLD, save_state, path)
    return path


class Reader(dcp.FileSystemReader):
    def read_data(self, plan: Any, planner: Any) -> Any:
        fail_on(1)
        return super().read_data(plan, planner)


def fail_to_read(good: Path) -> None:
    with pytest.raises(BaseException, match="the disk is on fire"):
        load(state(99), good, reader=Reader(good))
    assert_loads(good, 0)


def test_a_load_that_fails_on_one_rank_fails_on_all(good: Path) -> None:
    run_ranks(WORLD, fail_to_read, good)


def unreadable(file: Path) -> None:
    file.unlink()
    file.symlink_to("/proc/self/mem")  # EIO wherever nothing is mapped


def _archive(file: Path) -> Any:
    """Where the zip archive is that holds rank 1's piece of exp_avg."""
    stored = dcp.FileSystemReader(file.parent).read_metadata().storage_data
    return next(info for index, info in stored.items() if index.fqn == "exp_avg" and index.offset[0])


def break_zip(file: Path) -> None:
    """One bit among the end records of the archive."""
    info, data = _archive(file), bytearray(file.read_bytes())
    data[info.offset + info.length - 30] ^= 0x10
    file.write_bytes(data)


def erase_header(file: Path) -> None:
    """Zeros in place of the pickle that says what the archive holds."""
    info, data = _archive(file), bytearray(file.read_bytes())
    data[info.offset : info.offset + 128] = bytes(128)
    file.write_bytes(data)


IN_A_CHUNK = "no header in an archive"  # which the rank that reads it notices before it loads anything, and it alone
WHILE_LOADING = "a bit of a zip file's structure"  # which only torch notices, when it reads the chunk
HARMS: dict[str, tuple[Callable[[Path], None], str]] = {
    "read error": (unreadable, r"Input/output error"),
    WHILE_LOADING: (break_zip, "PytorchStreamReader failed"),
    IN_A_CHUNK: (erase_header, r"(?s)exp_avg.*it can not be read: .*This rank has loaded nothing, others may have"),
    "truncated": (lambda file: os.truncate(file, 1000), r"__1_0\.distcp of the checkpoint is truncated"),
    "missing": (Path.unlink, r"No such file or directory: '.*__1_0\.distcp'"),
}


def load_harmed(path: Path, good: Path, harm: str) -> None:
    """All ranks raise, and what can be seen before anything is read leaves the target as it was."""
    target, (_, error) = state(99), HARMS[harm]
    with pytest.raises(BaseException, match=error):
        load(target, path)
    if harm != WHILE_LOADING and (harm != IN_A_CHUNK or dist.get_rank() == 1):
        assert_holds(target, full(99))
    assert_loads(good, 0)


def harm_a_copy(good: Path, path: Path, harm: str) -> None:
    shutil.copytree(good, path)
    do_harm, _ = HARMS[harm]
    do_harm(path / "__1_0.distcp")


@pytest.mark.parametrize("harm", HARMS)
def test_a_harmed_file_fails_the_load_on_all_ranks(harm: str, good: Path, shared_tmp_path: Path) -> None:
    if harm == "read error" and not sys.platform.startswith("linux"):
        pytest.skip("needs /proc/self/mem")
    path = shared_tmp_path / "checkpoint"
    run_ranks(1, harm_a_copy, good, path, harm)
    run_ranks(WORLD, load_harmed, path, good, harm)


@pytest.mark.parametrize(("most", "probed"), [(100_000, {"__0_0.distcp", "__1_0.distcp"}), (1, {"__1_0.distcp"})])
def test_beyond_many_chunks_a_rank_probes_only_the_files_it_reads(
    most: int, probed: set[str], good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_items.PROBE_ALL_BELOW == 100_000  # as docs/guarantees.md says
    monkeypatch.setattr(read_items, "PROBE_ALL_BELOW", most)
    metadata = dcp.FileSystemReader(good).read_metadata()
    index = next(index for index, info in metadata.storage_data.items() if info.relative_path == "__1_0.distcp")
    item = ReadItem(LoadItemType.BYTE_IO, index, torch.Size([0]), index, torch.Size([0]), torch.Size([1]))
    probes = read_items.probe_items(metadata, dcp.LoadPlan([item]), look=lambda path, last: None)
    assert {str(metadata.storage_data[probe.storage_index].relative_path) for probe in probes} == probed


class DyingReader(dcp.FileSystemReader):
    def read_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read_data(plan, planner)


def load_beside_a_dying_rank(good: Path) -> None:
    with pytest.raises(BaseException, match=r"[Cc]onnection (closed|reset)"):
        load(state(99), good, reader=DyingReader(good))


@pytest.mark.skipif(_rank_worker.under_torchrun(), reason="kills a rank, and torchrun's are its own")
def test_a_rank_that_is_killed_while_loading_fails_the_load_on_the_others(good: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(WORLD, load_beside_a_dying_rank, good, timeout=60)
    assert str(failure.value).startswith("1 of 2 ranks failed in load_beside_a_dying_rank")
    assert "rank 1 of 2: died, killed by SIGKILL" in str(failure.value)
    run_ranks(WORLD, assert_loads, good, 0)
