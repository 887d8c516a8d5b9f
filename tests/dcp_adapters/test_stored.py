"""Checkpoints whose description contradicts itself are refused when they are opened or read, never half believed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_adapters.records.checksums import CHECKSUMS
from dcp_adapters.stored.checkpoint import CheckpointUnusable, StoredCheckpoint
from qtensor import MXFP8BlockScaling, quantize
from tests.dcp_adapters.cases import alone, save, values


@pytest.fixture
def tampered(tmp_path: Path) -> Callable[[Callable[[Any], object]], Path]:
    """Save a checkpoint and change its metadata."""

    def tamper(change: Callable[[Any], object]) -> Path:
        save({"w": quantize(values((64, 32), 0), MXFP8BlockScaling()), "b": values((6,), 1)}, tmp_path)
        metadata = dcp.FileSystemReader(tmp_path).read_metadata()
        change(metadata)
        stored = {name for name, entry in metadata.state_dict_metadata.items() if getattr(entry, "chunks", True)}
        metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn in stored}
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        return tmp_path

    return tamper


def retyped(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["w.scale"]
    entry.properties = replace(entry.properties, dtype=torch.int8)


def without_a_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata["b"].chunks.clear()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.state_dict_metadata.pop("w.scale"), "w lacks its scale"),
        (lambda m: [m.state_dict_metadata.pop(f"w.{part}") for part in ("payload", "scale")], "but not stored: w"),
        (retyped, r"w.scale is stored as torch.int8 \(64, 1\), the manifest says torch.uint8 \(64, 1\)"),
        (lambda m: m.planner_data["qtensor.manifest.json"].update(format_version=9), "has format_version 9"),
    ],
)
def test_what_contradicts_the_manifest_is_not_opened(change: Any, message: str, tampered: Any) -> None:
    path = tampered(change)
    with pytest.raises(CheckpointUnusable, match=f"{path}: .*{message}"):
        StoredCheckpoint(path)


def test_a_hole_is_not_read_as_data(tampered: Any) -> None:
    path = tampered(without_a_chunk)
    with pytest.raises(CheckpointUnusable, match=r"b: no chunk holds the elements from \(0,\) on"):
        StoredCheckpoint(path)


def test_what_is_no_metadata_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    with pytest.raises(CheckpointUnusable, match="dict"):
        StoredCheckpoint(tmp_path)


def test_a_malformed_table_of_checksums_is_refused(tmp_path: Path) -> None:
    with alone():
        dcp.save({CHECKSUMS: torch.ones(3, 5, dtype=torch.uint8)}, checkpoint_id=tmp_path)
    assert StoredCheckpoint(tmp_path).has_checksums
    with pytest.raises(CheckpointUnusable, match=r"is torch.uint8 \(3, 5\), expected torch.uint8 \(chunks, 16\)"):
        StoredCheckpoint(tmp_path, check=True)
