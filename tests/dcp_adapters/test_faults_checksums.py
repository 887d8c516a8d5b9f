"""Bytes that are not those that were saved are found by their checksums, and named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from tests import ranks
from tests.dcp_adapters.cases import load
from tests.dcp_adapters.faulty import WORLD, assert_loads, save_state, state
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that is whole: seed 0, two ranks."""
    path: Path = ranks.agreed(tmp_path_factory.mktemp("faults")) / "good"
    run_ranks(WORLD, save_state, path)
    return path


def stored(path: Path, name: str) -> tuple[Path, Any]:
    """File and place of rank 1's chunk of an entry."""
    places = dcp.FileSystemReader(path).read_metadata().storage_data
    info = next(info for index, info in places.items() if index.fqn == name and index.offset[0])
    return path / info.relative_path, info


def flip_a_bit(path: Path, name: str) -> None:
    """One bit in the middle of the chunk's data."""
    file, info = stored(path, name)
    data = bytearray(file.read_bytes())
    data[info.offset + info.length // 2] ^= 0x10
    file.write_bytes(data)


def load_flipped(path: Path, good: Path, name: str) -> None:
    with pytest.raises(
        BaseException, match=rf"{name}: its chunk at \(80, 0\) in the checkpoint has checksum \w+, saved"
    ):
        load(state(99), path, verify_checksums=True)
    assert_loads(good, 0)


@pytest.mark.parametrize("name", ["mxfp8.payload", "exp_avg"])
def test_a_flipped_bit_is_found_and_named(name: str, good: Path, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "checkpoint"
    if not path.exists():
        shutil.copytree(good, path)
        flip_a_bit(path, name)
    run_ranks(WORLD, load_flipped, path, good, name)


def torn(path: Path, good: Path, other: Path) -> None:
    """Both savers have written rank 1's file: the first half of it is one's, the second half the other's."""
    shutil.copytree(good, path)
    one, two = (good / "__1_0.distcp").read_bytes(), (other / "__1_0.distcp").read_bytes()
    assert len(one) == len(two)
    _, info = stored(good, "exp_avg")
    cut = info.offset + info.length // 2
    (path / "__1_0.distcp").write_bytes(one[:cut] + two[cut:])


def load_mixture(path: Path) -> None:
    with pytest.raises(BaseException, match="in the checkpoint has checksum"):
        load(state(99), path, verify_checksums=True)


def test_a_file_with_pieces_of_two_saves_is_found(good: Path, shared_tmp_path: Path) -> None:
    other, path = shared_tmp_path / "other", shared_tmp_path / "mixture"
    run_ranks(WORLD, save_state, other, 5)
    if not path.exists():
        torn(path, good, other)
    run_ranks(WORLD, load_mixture, path)
