"""The checksum table: one row a stored chunk, made from the very bytes that were written, whoever wrote them."""

from __future__ import annotations

import io
import queue
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from dcp_adapters import QuantizedSavePlanner, QuantizedStager
from dcp_adapters.records.checksums import CHECKSUMS, chunk_key, digest_of
from qtensor import quantize
from tests.dcp_adapters.cases import RECIPES, alone, bits, models, reference, save, values
from tests.ranks import run_ranks


def rows_of(path: Path) -> list[tuple[bytes, bytes]]:
    """(key, digest) rows, by stock DCP alone."""
    entry = dcp.FileSystemReader(path).read_metadata().state_dict_metadata[CHECKSUMS]
    table = torch.empty(entry.size, dtype=torch.uint8)
    with alone():
        dcp.load({CHECKSUMS: table}, checkpoint_id=path)
    return [(bytes(row[:8]), bytes(row[8:])) for row in table.tolist()]


def expected_rows(path: Path) -> dict[bytes, bytes]:
    """What the rows must be, from the files: each chunk is read where the metadata says it lies."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    rows = {}
    for index, info in metadata.storage_data.items():
        if index.fqn == CHECKSUMS:
            continue
        with (path / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        if isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            data = bits(torch.load(io.BytesIO(data), weights_only=True))
        offset = ",".join(str(o) for o in index.offset or ())
        rows[xxhash.xxh3_64_digest(f"{index.fqn}@{offset}".encode())] = xxhash.xxh3_64_digest(data)
    return rows


def state(seed: int = 0) -> dict[str, Any]:
    return {"models": models(seed), "step": 7 + seed, "names": ("a", "b")}


def save_state(path: Path, threads: int) -> None:
    writer = dcp.FileSystemWriter(path, thread_count=threads)
    with alone():
        dcp.save(state(), storage_writer=writer, planner=QuantizedSavePlanner())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("world", [1, 3])
def test_every_stored_chunk_has_the_row_of_its_bytes(world: int, threads: int, shared_tmp_path: Path) -> None:
    run_ranks(world, save_state, shared_tmp_path, threads)
    rows = rows_of(shared_tmp_path)
    assert len(dict(rows)) == len(rows), "a chunk has two rows"
    assert dict(rows) == expected_rows(shared_tmp_path)


def save_async(path: Path) -> None:
    live = state()
    group = dist.new_group(backend="gloo")
    future = dcp.async_save(live, checkpoint_id=path, planner=QuantizedSavePlanner(), process_group=group)
    for value in live["models"]["mxfp8"].values():  # training goes on: what is digested is what was staged
        value.to_local().fill_(1.0) if hasattr(value, "to_local") else value.fill_(1.0)
    future.result()


def test_an_async_save_digests_the_snapshot(shared_tmp_path: Path) -> None:
    run_ranks(2, save_async, shared_tmp_path)
    assert dict(rows_of(shared_tmp_path)) == expected_rows(shared_tmp_path)


def test_rows_are_canonical_xxh3_digests_of_name_at_offset_and_bytes(tmp_path: Path) -> None:
    save({"a": torch.arange(6, dtype=torch.int32).reshape(2, 3), "s": torch.tensor(1.5)}, tmp_path)
    rows = dict(rows_of(tmp_path))
    data = b"".join(i.to_bytes(4, "little") for i in range(6))
    assert rows[xxhash.xxh3_64_digest(b"a@0,0")] == xxhash.xxh3_64(data).intdigest().to_bytes(8, "big")
    assert rows[xxhash.xxh3_64_digest(b"s@")] == xxhash.xxh3_64_digest(b"\x00\x00\xc0\x3f")
    assert chunk_key(MetadataIndex("a", torch.Size([0, 0]))) == xxhash.xxh3_64_digest(b"a@0,0")


@pytest.mark.parametrize("tensor", [torch.arange(12.0).reshape(3, 4).T, torch.empty(0, 3), torch.tensor(3)])
def test_digests_are_of_the_elements_in_logical_order(tensor: torch.Tensor) -> None:
    assert digest_of(tensor) == xxhash.xxh3_64_digest(bits(tensor))


def test_without_checksums_there_is_no_table(tmp_path: Path) -> None:
    with alone():
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, planner=QuantizedSavePlanner(checksums=False))
    assert CHECKSUMS not in dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata


# -- chunks that a writer lost -----------------------------------------------------------------------------------------


class FullDisk(dcp.FileSystemWriter):
    """Writes run dry in the second thread, whose exception stock DCP loses."""

    def _write_data(self, planner: Any, file_queue: queue.Queue[Any]) -> Any:
        results = super()._write_data(planner, file_queue).value()
        kept = [result for result in results if not result.storage_data.relative_path.endswith("_1.distcp")]
        assert len(kept) < len(results)
        lost: Any = torch.futures.Future()
        lost.set_result(kept)
        return lost


def test_a_chunk_the_writer_lost_fails_the_save(tmp_path: Path) -> None:
    weights = {"w": quantize(values((64, 64), 0), RECIPES["mxfp8"]), "b": torch.ones(3)}
    text = "the storage writer did not write it, although no error was reported"
    with pytest.raises(BaseException, match=text), alone():
        dcp.save(weights, storage_writer=FullDisk(tmp_path, thread_count=2), planner=QuantizedSavePlanner())
    assert not (tmp_path / ".metadata").exists()


def test_the_metadata_on_disk_is_stock(tmp_path: Path) -> None:
    save({"m": reference()["mxfp8"]}, tmp_path)
    assert type(dcp.FileSystemReader(tmp_path).read_metadata()) is dcp.Metadata


# -- zip's own checksums -----------------------------------------------------------------------------------------------


def crcs(path: Path) -> set[bool]:
    """Whether the records of the tensors' archives have a CRC32, of all files."""
    found = set()
    metadata = dcp.FileSystemReader(path).read_metadata()
    for index, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            with (path / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                data = io.BytesIO(file.read(info.length))
            found |= {bool(record.CRC) for record in zipfile.ZipFile(data).infolist() if record.filename.endswith("/0")}
    return found


def save_with(path: Path, *, crc32: bool, asynchronous: bool) -> None:
    was = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(crc32)
    try:
        planner, writer = QuantizedSavePlanner(), dcp.FileSystemWriter(path, thread_count=3)
        state = {f"w{i}": quantize(values((64, 64), i), RECIPES["mxfp8"]) for i in range(6)}
        if asynchronous:
            dcp.async_save(state, storage_writer=writer, planner=planner, async_stager=QuantizedStager()).result()
        else:
            dcp.save(state, storage_writer=writer, planner=planner)
        assert torch.serialization.get_crc32_options() == crc32
    finally:
        torch.serialization.set_crc32_options(was)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("crc32", [False, True])
def test_all_threads_write_crc32_as_the_planner_was_told(
    *, crc32: bool, asynchronous: bool, shared_tmp_path: Path
) -> None:
    run_ranks(1, save_with, shared_tmp_path, crc32=crc32, asynchronous=asynchronous)
    assert crcs(shared_tmp_path) == {crc32}
