"""What a load checks on the way: chunks against their checksums (on request), byte entries against running code."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from dcp_adapters import QuantizedSavePlanner
from dcp_adapters.records.checksums import CHECKSUMS, Verification
from qtensor import quantize
from tests.dcp_adapters import tampering
from tests.dcp_adapters.cases import RECIPES, alone, assert_holds, load, models, placed, reference, save, values
from tests.ranks import run_ranks, run_ranks_catching


def saved_state(seed: int = 0) -> dict[str, Any]:
    return {"models": models(seed), "step": 5 + seed}


def save_and_verify(path: Path) -> None:
    save(saved_state(), path)
    target = saved_state(1)
    with patch.object(Verification, "_compare", autospec=True, side_effect=Verification._compare) as compared:
        load(target, path, verify_checksums=True)
    chunks = {call.args[1] for call in compared.call_args_list}
    assert chunks >= {"step", "models.mxfp8.layers.0.weight.payload", "models.nvfp4.layers.1.weight.scale"}
    assert_holds(target["models"], reference(0))
    assert target["step"] == 5


@pytest.mark.parametrize("world", [1, 2])
def test_an_intact_checkpoint_passes(world: int, shared_tmp_path: Path) -> None:
    run_ranks(world, save_and_verify, shared_tmp_path)
    target = {"models": reference(1), "step": 0}  # other chunks than were saved: nothing whole to check on 2 ranks
    load(target, shared_tmp_path, verify_checksums=True)
    assert_holds(target["models"], reference(0))


def flip(path: Path, name: str, part_of: int = 0) -> None:
    """Turn one bit of an entry's data in its file."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    index = next(index for index in metadata.storage_data if index.fqn == name and not any(index.offset or ()))
    info = metadata.storage_data[index]
    data = bytearray((path / info.relative_path).read_bytes())
    if isinstance(metadata.state_dict_metadata[name], dcp.metadata.TensorStorageMetadata):
        tensor = torch.load(_slice(path, info), weights_only=True)
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)[:64]
        at = data.index(bytes(raw.tolist()), info.offset)
    else:
        at = info.offset + info.length // 2
    data[at] ^= 1
    (path / info.relative_path).write_bytes(data)


def _slice(path: Path, info: Any) -> Any:
    import io

    with (path / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        return io.BytesIO(file.read(info.length))


@pytest.fixture(autouse=True)
def no_crc() -> Any:
    """Zip's own CRC32 would find some of these first; with it off ours has to."""
    was = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(was)


@pytest.mark.parametrize("part", ["payload", "scale"])
def test_a_flipped_bit_is_found_and_named(part: str, tmp_path: Path) -> None:
    weight = {"m": {"w": quantize(values((64, 64), 0), RECIPES["mxfp8"])}}
    save(weight, tmp_path)
    flip(tmp_path, f"m.w.{part}")
    target = {"m": {"w": quantize(torch.zeros(64, 64), RECIPES["mxfp8"])}}
    load(target, tmp_path)  # nobody asked
    with pytest.raises(BaseException, match=rf"m\.w\.{part}: its chunk at \(0, 0\) in the checkpoint has checksum"):
        load(target, tmp_path, verify_checksums=True)


def flip_on_two(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    target = {"w": placed(quantize(torch.zeros(64, 64), RECIPES["nvfp4"]), mesh, Shard(0))}
    load(target, path, verify_checksums=True)


def save_on_two(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    save({"w": placed(quantize(values((64, 64), 0), RECIPES["nvfp4"]), mesh, Shard(0))}, path)
    dist.barrier()


def test_all_ranks_learn_of_it(shared_tmp_path: Path) -> None:
    run_ranks(2, save_on_two, shared_tmp_path)
    run_ranks(1, flip, shared_tmp_path, "w.payload")
    for error in run_ranks_catching(2, flip_on_two, shared_tmp_path):
        assert "w.payload: its chunk at (0, 0) in the checkpoint has checksum" in error
        assert "run `python -m dcp_adapters verify`" in error


def test_a_dense_tensor_and_a_byte_entry_are_checked_too(tmp_path: Path) -> None:
    for name in ("b", "names"):
        path = tmp_path / name
        save({"b": values((64, 64), 1), "names": ["x" * 50]}, path, flatten_state_dict=False)
        flip(path, name)
        target: dict[str, Any] = {"b": torch.zeros(64, 64, dtype=torch.bfloat16), "names": None}
        with pytest.raises(BaseException, match=f"{name}: its chunk.* in the checkpoint has checksum"):
            load(target, path, verify_checksums=True, flatten_state_dict=False)


def test_a_chunk_without_a_row_is_found(tmp_path: Path) -> None:
    save({"b": values((64, 64), 1)}, tmp_path)
    reader = dcp.FileSystemReader(tmp_path)
    metadata = reader.read_metadata()
    metadata.storage_data[MetadataIndex("c", torch.Size([0, 0]))] = metadata.storage_data.pop(
        MetadataIndex("b", torch.Size([0, 0]))
    )
    metadata.state_dict_metadata["c"] = metadata.state_dict_metadata.pop("b")
    reader.read_metadata = lambda: metadata
    with pytest.raises(BaseException, match=r"c: its chunk.* has no row in the checksum table"):
        load({"c": torch.zeros(64, 64, dtype=torch.bfloat16)}, None, reader=reader, verify_checksums=True,
             allow_partial_load=True)  # fmt: skip


def test_a_table_without_rows_is_found(tmp_path: Path) -> None:
    """Nothing of it is read, so it never arrives; until then chunks would wait for it."""
    checkpoint = tampering.write(tmp_path / "step")
    checkpoint.replace(CHECKSUMS, torch.empty(0, 16, dtype=torch.uint8), (0, 0))
    with checkpoint.editing() as metadata:
        entry = metadata.state_dict_metadata[CHECKSUMS]
        entry.size = entry.chunks[0].sizes = torch.Size([0, 16])
    target = {"bias": torch.zeros(8, dtype=torch.bfloat16)}
    with pytest.raises(BaseException, match=r"bias: its chunk.* has no row in the checksum table"):
        load(target, checkpoint.path, verify_checksums=True, allow_partial_load=True)


def test_a_check_that_nothing_can_be_checked_against_is_refused(tmp_path: Path) -> None:
    with alone():
        dcp.save({"b": torch.ones(3)}, checkpoint_id=tmp_path, planner=QuantizedSavePlanner(checksums=False))
    target = {"b": torch.zeros(3)}
    with pytest.raises(BaseException, match="verify_checksums=True: the checkpoint has no checksums"):
        load(target, tmp_path, verify_checksums=True)
    assert torch.equal(target["b"], torch.zeros(3))
    load(target, tmp_path)
    assert torch.equal(target["b"], torch.ones(3))


# -- byte entries ------------------------------------------------------------------------------------------------------


class Trap:
    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (self.file,)


@pytest.mark.parametrize("flatten", [True, False])
def test_a_byte_entry_runs_no_code(flatten: bool, tmp_path: Path) -> None:
    save({"b": torch.ones(2), "loader": Trap(str(tmp_path / "sprung"))}, tmp_path / "c", flatten_state_dict=flatten)
    target = {"b": torch.zeros(2), "loader": None}
    with pytest.raises(BaseException, match="loader: this entry of the checkpoint holds pickled objects") as caught:
        load(target, tmp_path / "c", flatten_state_dict=flatten)
    assert "load it inside torch.serialization.safe_globals" in str(caught.value)
    assert not (tmp_path / "sprung").exists()
    assert target["loader"] is None


class Counter:
    """A class of the user's."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counter) and other.n == self.n

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("flatten", [True, False])
def test_byte_entries_come_back(flatten: bool, tmp_path: Path) -> None:
    state = {"n": 3, "text": "größe", "pair": (1, 2.5), "ordered": OrderedDict(a=1), "none": None, "user": Counter(4)}
    save(state, tmp_path, flatten_state_dict=flatten)
    target: dict[str, Any] = dict.fromkeys(state)
    if flatten:
        target["ordered"] = {"a": 0}
    with torch.serialization.safe_globals([Counter]):
        load(target, tmp_path, flatten_state_dict=flatten)
    assert target == state
