"""AtomicFileSystemWriter: what is synced when, and that it is stock's writer otherwise.

That its commit is one rename: test_overwrite_interrupted.py.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcp_adapters import AtomicFileSystemWriter, QuantizedSavePlanner
from dcp_adapters.save.atomic_writer import AtomicFiles
from tests.dcp_adapters.cases import alone, assert_holds, load
from tests.dcp_adapters.faulty import full


def saved(path: Path, seed: int, writer: Any) -> None:
    with alone():
        dcp.save(full(seed) | {"notes": ["no tensor"]}, storage_writer=writer, planner=QuantizedSavePlanner())


def test_what_is_synced_is_all_of_a_file_and_its_name_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, Any]] = []

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        held = {one.name for one in path.iterdir()} if path.is_dir() else path.read_bytes()
        synced.append((path.name, held))

    monkeypatch.setattr(os, "fsync", fsync)
    # a file of bytes alone, too: stock's is in the process still when it is synced
    saved(tmp_path, 0, AtomicFileSystemWriter(tmp_path, single_file_per_rank=False))
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    *data, metadata, before, name, behind = synced
    assert dict(data) == {name: content for name, content in files.items() if name != ".metadata"}
    begun = metadata[0]
    assert re.fullmatch(r"\.metadata\.[0-9a-f]{8}\.tmp", begun)
    assert metadata == (begun, files[".metadata"])
    assert before == (tmp_path.name, {*files} - {".metadata"} | {begun})
    assert name[0] == tmp_path.parent.name
    assert behind == (tmp_path.name, {*files})
    synced.clear()
    saved(tmp_path / "other", 0, AtomicFileSystemWriter(tmp_path / "other", sync_files=False))
    assert synced == []


def directories_synced(monkeypatch: pytest.MonkeyPatch, base: Path) -> list[tuple[str, set[str]]]:
    """Fills up with the directories that are synced, and the names in each."""
    synced: list[tuple[str, set[str]]] = []

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            synced.append((str(path.relative_to(base)), {one.name for one in path.iterdir()}))

    monkeypatch.setattr(os, "fsync", fsync)
    return synced


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_the_names_of_new_directories_are_on_the_disk_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = directories_synced(monkeypatch, tmp_path)
    path = tmp_path / "a" / "b" / "step-1"
    saved(path, 0, AtomicFileSystemWriter(path))
    assert synced[:2] == [(".", {"a"}), ("a", {"b"})]
    assert [name for name, _ in synced[2:]] == ["a/b/step-1", "a/b", "a/b/step-1"]
    assert synced[3][1] == {"step-1"}
    assert ".metadata" not in synced[2][1]
    assert ".metadata" in synced[4][1]
    synced.clear()
    saved(path, 1, AtomicFileSystemWriter(path))  # who saved before may not have synced the name
    assert [name for name, _ in synced] == ["a/b/step-1", "a/b", "a/b/step-1"]


def test_a_directory_above_that_may_not_be_read_does_not_fail_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = os.open

    def denied(path: Any, *arguments: Any) -> int:
        if Path(path) == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return opening(path, *arguments)

    monkeypatch.setattr(os, "open", denied)
    saved(tmp_path / "step-1", 2, AtomicFileSystemWriter(tmp_path / "step-1"))
    target = full(9) | {"notes": []}
    load(target, tmp_path / "step-1")
    assert_holds(target, full(2) | {"notes": ["no tensor"]})


def test_of_two_saves_at_once_none_commits_what_the_other_has_half_written(tmp_path: Path) -> None:
    one, other = AtomicFiles(syncs=True), AtomicFiles(syncs=True)
    begun, final = tmp_path / ".metadata.tmp", tmp_path / ".metadata"
    with one.create_stream(begun, "wb") as stream:
        stream.write(b"one")
    with other.create_stream(begun, "wb") as stream:
        stream.write(b"half of")
        one.rename(begun, final)
        assert final.read_bytes() == b"one"
        stream.write(b" the other")
    other.rename(begun, final)
    assert final.read_bytes() == b"half of the other"
    assert [*tmp_path.iterdir()] == [final]
    with pytest.raises(FileNotFoundError, match=r"\.tmp: another save into the same directory has removed it"):
        other.rename(begun, final)


def test_it_takes_what_the_stock_writer_takes(tmp_path: Path) -> None:
    saved(tmp_path / "a", 3, AtomicFileSystemWriter(tmp_path / "a", thread_count=2))
    assert len([*(tmp_path / "a").glob("*.distcp")]) == 2
    target = full(9) | {"notes": []}
    load(target, tmp_path / "a")
    assert_holds(target, full(3) | {"notes": ["no tensor"]})
    with pytest.raises(BaseException, match="Checkpoint already exists"):
        saved(tmp_path / "a", 3, AtomicFileSystemWriter(tmp_path / "a", overwrite=False))


class Copying(AtomicFileSystemWriter):
    """Writes a copy of the metadata, as stock's writer of torch 2.11 does."""

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(dataclasses.replace(metadata, version="another"), results)


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_metadata_that_the_writer_copies_are_committed_as_they_are_otherwise(tmp_path: Path) -> None:
    for seed in (3, 4):
        saved(tmp_path, seed, Copying(tmp_path))
    target = full(9) | {"notes": []}
    load(target, tmp_path)
    assert_holds(target, full(4) | {"notes": ["no tensor"]})

    class Losing(Copying):
        def write_data(self, plan: Any, planner: Any) -> Any:
            written = super().write_data(plan, planner)
            for path in tmp_path.glob("__0_*.distcp"):
                path.unlink()
            return written

    with pytest.raises(BaseException, match="another save into the same directory has removed it"):
        saved(tmp_path, 5, Losing(tmp_path))
