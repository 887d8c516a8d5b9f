"""AtomicFileSystemWriter's data files are those of stock's writer, to the byte; errors of its threads are raised."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import SerializationFormat

from dcp_adapters import AtomicFileSystemWriter, QuantizedSavePlanner, QuantizedStager, SafeFileSystemReader
from dcp_adapters.save import archives, data_files
from qtensor import quantize
from tests.dcp_adapters.cases import RECIPES, alone, bits, load, values

LAYERS = 5


@pytest.fixture(autouse=True)
def _crc32_as_before() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    archives._known.clear()
    archives._met.clear()
    yield
    torch.serialization.set_crc32_options(before)


class Sub(Tensor):
    """A subclass that torch.save stores by its class."""


def state(seed: int = 0) -> dict[str, Any]:
    """Weights of repeated layers, and everything that a state dict holds once."""
    whole = values((64, 48), seed)
    layers = {
        f"layers.{number}": {
            "q": quantize(values((64, 64), seed + number), RECIPES["nvfp4"]),
            "norm": values((64,), seed + number),
            "step": torch.tensor(float(number)),
        }
        for number in range(LAYERS)
    }
    return {
        "model": layers,
        "columns": whole.t(),
        "rows": whole[3:9],
        "empty": torch.empty(0, 4),
        "count": 7,
        "notes": ["no tensor"],
        "parameter": torch.nn.Parameter(values((64,), seed)),
        "conjugate": torch.complex(values((8,), 1).float(), values((8,), 2).float()).conj(),
        "large": torch.full((archives.LARGEST + 3,), seed, dtype=torch.uint8),
    }


def save(path: Path, writer: type[FileSystemWriter], **options: Any) -> dict[str, bytes]:
    """The files of a save, but for its id in the metadata."""
    with alone():
        dcp.save(state(), storage_writer=writer(path, **options), planner=QuantizedSavePlanner())
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    metadata = pickle.loads(files.pop(".metadata"))
    return files | {".metadata": pickle.dumps([metadata.state_dict_metadata, sorted_places(metadata)])}


def sorted_places(metadata: Any) -> list[Any]:
    return sorted((repr(index), repr(info)) for index, info in metadata.storage_data.items())


@pytest.mark.parametrize("crc32", [False, True], ids=["plain", "crc32"])
@pytest.mark.parametrize(
    "options",
    [{}, {"thread_count": 2}, {"thread_count": 3}, {"single_file_per_rank": False, "thread_count": 2}],
    ids=str,
)
def test_the_files_are_those_of_the_stock_writer(options: dict[str, Any], crc32: bool, tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(crc32)
    stock = save(tmp_path / "stock", FileSystemWriter, **options)
    for name in ("first", "second"):  # with frames of the first
        mine = save(tmp_path / name, AtomicFileSystemWriter, **options)
        assert mine.keys() == stock.keys()
        for file, data in stock.items():
            assert mine[file] == data, file


@pytest.mark.parametrize("reader", [FileSystemReader, SafeFileSystemReader])
def test_they_load(reader: type[FileSystemReader], tmp_path: Path) -> None:
    save(tmp_path, AtomicFileSystemWriter, thread_count=2)
    target, saved = state(seed=50), state()
    load(target, tmp_path, reader=reader(tmp_path), verify_checksums=True)
    for number in range(LAYERS):
        mine, expected = target["model"][f"layers.{number}"], saved["model"][f"layers.{number}"]
        assert bits(mine["q"].parts()["payload"]) == bits(expected["q"].parts()["payload"])
        assert bits(mine["step"]) == bits(expected["step"])
    assert bits(target["columns"].contiguous()) == bits(saved["columns"].contiguous())


def saves_of(layers: int, path: Path) -> int:
    """How often torch.save runs for a state dict of so many layers."""
    archives._known.clear()
    archives._met.clear()
    weights = {f"{number}": quantize(values((64, 64), number), RECIPES["nvfp4"]) for number in range(layers)}
    with alone(), patch.object(torch, "save", wraps=torch.save) as run:
        dcp.save(weights, storage_writer=AtomicFileSystemWriter(path), planner=QuantizedSavePlanner())
    return run.call_count


def test_the_saving_thread_says_for_all_whether_crc32_is_written(tmp_path: Path) -> None:
    """Also with a planner that does not pass it on; in threads of the stock writer CRC32 is on."""
    weights = {f"{number}": values((64,), number) for number in range(40)}
    for threads in (1, 2, 4):
        archives._known.clear()
        archives._met.clear()
        writer = AtomicFileSystemWriter(tmp_path / f"{threads}", thread_count=threads)
        with alone(), patch.object(torch, "save", wraps=torch.save) as run:
            dcp.save(weights, storage_writer=writer, planner=DefaultSavePlanner())
        assert run.call_count < 10 + 3 * threads


def test_torch_save_runs_as_often_for_twenty_layers_as_for_four(tmp_path: Path) -> None:
    assert saves_of(4, tmp_path / "4") == saves_of(20, tmp_path / "20")


def test_an_async_save_writes_what_that_of_the_stock_writer_writes(tmp_path: Path) -> None:
    found = []
    for writer in (FileSystemWriter, AtomicFileSystemWriter, AtomicFileSystemWriter):
        path = tmp_path / f"{len(found)}"
        with alone():
            dcp.async_save(
                state(),
                storage_writer=writer(path, thread_count=2),
                planner=QuantizedSavePlanner(),
                async_stager=QuantizedStager(),
            ).result()
        found.append({file.name: file.read_bytes() for file in path.glob("*.distcp")})
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_thread_raises_fails_the_save(threads: int, tmp_path: Path) -> None:
    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "3":
                raise OSError("this one cannot be read")
            return super().resolve_data(write_item)

    weights = {f"{number}": torch.ones(100 + number) for number in range(6)}
    writer = AtomicFileSystemWriter(tmp_path, thread_count=threads)
    with alone(), pytest.raises(BaseException, match="this one cannot be read"):
        dcp.save(weights, storage_writer=writer, planner=Failing())
    assert not (tmp_path / ".metadata").exists()


def test_a_thread_stops_between_tensors_when_another_has_failed(tmp_path: Path) -> None:
    failed, resolved = threading.Event(), []

    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "large":
                failed.set()
                raise OSError("this one cannot be read")
            assert failed.wait(30)
            while not writers[0]._failed:
                time.sleep(0.001)
            resolved.append(write_item.index.fqn)
            return super().resolve_data(write_item)

    weights = {"large": torch.ones(10_000)} | {f"{number}": torch.ones(8) for number in range(50)}
    writers: list[data_files.DataWriter] = []
    write = data_files.DataWriter.write

    def noted(self: data_files.DataWriter, files: Any, threads: int) -> Any:
        writers.append(self)
        return write(self, files, threads)

    writer = AtomicFileSystemWriter(tmp_path, thread_count=2)
    with (
        alone(),
        patch.object(data_files.DataWriter, "write", noted),
        pytest.raises(BaseException, match="this one cannot be read"),
    ):
        dcp.save(weights, storage_writer=writer, planner=Failing())
    assert len(resolved) <= 1


@pytest.mark.parametrize("threads", [0, -1])
def test_less_than_one_thread_is_refused(threads: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^AtomicFileSystemWriter\(thread_count={threads}\): expected 1 or more$"):
        AtomicFileSystemWriter(tmp_path, thread_count=threads)


def test_a_tensor_whose_storage_was_freed_is_refused(tmp_path: Path) -> None:
    """By any planner: its bytes would be read from address 0."""
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    with alone(), pytest.raises(BaseException, match="w: its storage was freed, as FSDP does"):
        dcp.save({"w": freed}, storage_writer=AtomicFileSystemWriter(tmp_path), planner=DefaultSavePlanner())


class Unchanged(StreamTransformExtension):
    """An extension that changes nothing."""

    @staticmethod
    def get_descriptor() -> str:
        return "unchanged/1"

    @staticmethod
    def registry_name() -> str:
        return "unchanged"

    @staticmethod
    def from_descriptor(version: str) -> Unchanged:
        return Unchanged()

    def transform_to(self, output: Any) -> Any:
        return output

    def transform_from(self, input: Any) -> Any:  # noqa: A002 - the base class's name
        return input


def test_what_the_stock_writer_has_options_for_it_writes_itself(tmp_path: Path) -> None:
    weights = {"w": torch.ones(4)}
    with alone(), patch.object(data_files.DataWriter, "write", side_effect=AssertionError("ours")):
        for number, options in enumerate(
            ({"_extensions": [Unchanged()]}, {"serialization_format": SerializationFormat.SAFETENSORS})
        ):
            path = tmp_path / f"{number}"
            dcp.save(weights, storage_writer=AtomicFileSystemWriter(path, **options), planner=DefaultSavePlanner())
            assert (path / ".metadata").exists()
        late = AtomicFileSystemWriter(tmp_path / "late")
        late.serialization_format = SerializationFormat.SAFETENSORS
        dcp.save(weights, storage_writer=late, planner=DefaultSavePlanner())
        with pytest.raises(BaseException, match="ours"):
            dcp.save(weights, storage_writer=AtomicFileSystemWriter(tmp_path / "o"), planner=DefaultSavePlanner())


def test_with_one_thread_and_a_device_stock_overlaps_copies_with_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert AtomicFileSystemWriter("x")._overlaps_copies()
    assert not AtomicFileSystemWriter("x", thread_count=2)._overlaps_copies()
    assert not AtomicFileSystemWriter("x", per_thread_copy_ahead=0)._overlaps_copies()
