"""AtomicFileSystemWriter: what is synced when, and that it is stock's writer otherwise.

That its commit is one rename: test_overwrite_interrupted.py.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcp_adapters import AtomicFileSystemWriter, QuantizedSavePlanner
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
    *data, metadata, before, behind = synced
    assert dict(data) == {name: content for name, content in files.items() if name != ".metadata"}
    assert metadata == (".metadata.tmp", files[".metadata"])
    assert before == (tmp_path.name, {*files} - {".metadata"} | {".metadata.tmp"})
    assert behind == (tmp_path.name, {*files})
    synced.clear()
    saved(tmp_path / "other", 0, AtomicFileSystemWriter(tmp_path / "other", sync_files=False))
    assert synced == []


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
