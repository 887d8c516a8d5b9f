"""SafeFileSystemReader reads rows straight into targets; what it gives is what the stock reader gives."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_adapters import SafeFileSystemReader
from dcp_adapters.stored.reading.direct_read import Elements
from dcp_adapters.stored.reading.tensor_archive import FileSlice, read_header
from tests.dcp_adapters.cases import alone, bits

SHAPE = (7, 5, 6)
STORED: dict[str, Any] = {
    "contiguous": lambda: torch.arange(210, dtype=torch.int32).reshape(SHAPE),
    "a view into a larger one": lambda: torch.arange(500, dtype=torch.float32)[100:310].reshape(SHAPE),
    "transposed": lambda: torch.arange(210.0).reshape(6, 5, 7).permute(2, 1, 0),
    "expanded": lambda: torch.arange(6.0).expand(SHAPE),
    "float8": lambda: torch.arange(210.0).reshape(SHAPE).to(torch.float8_e4m3fn),
    "complex": lambda: torch.complex(torch.arange(210.0), -torch.arange(210.0)).reshape(SHAPE),
    "conjugate": lambda: torch.complex(torch.arange(210.0), -torch.arange(210.0)).reshape(SHAPE).conj(),
    "one row": lambda: torch.arange(30, dtype=torch.float16).reshape(1, 5, 6),
    "one element a row": lambda: torch.arange(7.0).reshape(7, 1, 1),
    "vector": lambda: torch.arange(11, dtype=torch.bfloat16),
    "scalar": lambda: torch.tensor(2.5, dtype=torch.float64),
    "empty": lambda: torch.empty(0, 3),
}


@pytest.mark.parametrize("name", STORED)
def test_it_reads_what_stock_reads(name: str, tmp_path: Path) -> None:
    stored = STORED[name]()
    with alone():
        dcp.save({"w": stored}, checkpoint_id=tmp_path, planner=dcp.DefaultSavePlanner())
        for make in (
            lambda: torch.empty(stored.shape, dtype=stored.dtype),
            lambda: torch.empty([*stored.shape, 2], dtype=stored.dtype)[..., 0],  # not contiguous
            lambda: torch.empty(stored.shape, dtype=torch.complex128 if stored.is_complex() else torch.float64),
        ):
            direct, stock = make(), make()
            dcp.load({"w": direct}, storage_reader=SafeFileSystemReader(tmp_path))
            dcp.load({"w": stock}, storage_reader=dcp.FileSystemReader(tmp_path))
            assert bits(direct.contiguous()) == bits(stock.contiguous())


@pytest.mark.parametrize("name", ["contiguous", "a view into a larger one", "float8", "scalar"])
def test_no_archive_is_unpacked_for_it(name: str, tmp_path: Path) -> None:
    with alone():
        dcp.save({"w": STORED[name]()}, checkpoint_id=tmp_path, planner=dcp.DefaultSavePlanner())
        target = torch.zeros_like(STORED[name]())
        with patch.object(torch, "load", side_effect=AssertionError("an archive was unpacked")):
            dcp.load({"w": target}, storage_reader=SafeFileSystemReader(tmp_path))
    assert bits(target) == bits(STORED[name]().contiguous())


class Box(dcp.DefaultLoadPlanner):
    """Asks for one box of the stored tensor."""

    def __init__(self, offsets: tuple[int, ...], target: torch.Tensor) -> None:
        super().__init__()
        self.box, self.target = ChunkStorageMetadata(torch.Size(offsets), target.shape), target

    def create_local_plan(self) -> dcp.LoadPlan:
        return dcp.LoadPlan(create_read_items_for_chunk_list("w", self.metadata.state_dict_metadata["w"], [self.box]))

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        return self.target


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("direct")
    with alone():
        dcp.save({"w": STORED["contiguous"]()}, checkpoint_id=path, planner=dcp.DefaultSavePlanner())
    return path


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_box_is_the_box(saved: Path, data: st.DataObject) -> None:
    offsets = tuple(data.draw(st.integers(0, extent - 1)) for extent in SHAPE)
    sizes = tuple(data.draw(st.integers(1, extent - start)) for extent, start in zip(SHAPE, offsets, strict=True))
    target = torch.full(sizes, -1, dtype=torch.int32)
    with alone():
        dcp.load({"w": target}, storage_reader=SafeFileSystemReader(saved), planner=Box(offsets, target))
    want = STORED["contiguous"]()
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        want = want.narrow(dim, start, size)
    assert torch.equal(target, want)


def test_only_the_rows_that_are_wanted_are_read(saved: Path) -> None:
    target = torch.zeros(2, 5, 6, dtype=torch.int32)
    metadata = dcp.FileSystemReader(saved).read_metadata()
    (info,) = metadata.storage_data.values()
    with (saved / info.relative_path).open("rb", buffering=0) as stream:
        header = read_header(FileSlice(stream, info.offset, info.length), "w")
        elements = Elements.of(stream, info.offset, header)
        elements.read((3, 0, 0), (2, 5, 6), target)
        assert stream.tell() == elements.begin + 5 * 30 * 4
    assert torch.equal(target, STORED["contiguous"]()[3:5])


class FewAtATime(io.FileIO):
    """A file as some file systems have it: a read gives less than was asked for."""

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[:7])


def test_a_header_is_read_in_as_many_reads_as_it_takes(saved: Path) -> None:
    metadata = dcp.FileSystemReader(saved).read_metadata()
    (info,) = metadata.storage_data.values()
    with (saved / info.relative_path).open("rb") as whole, FewAtATime(saved / info.relative_path) as stream:
        expected = read_header(FileSlice(whole, info.offset, info.length), "w")
        assert read_header(FileSlice(stream, info.offset, info.length), "w") == expected


def test_a_file_that_ends_too_early_is_an_error(saved: Path, tmp_path: Path) -> None:
    metadata = dcp.FileSystemReader(saved).read_metadata()
    (info,) = metadata.storage_data.values()
    short = tmp_path / "short"
    with (saved / info.relative_path).open("rb") as stream:
        header = read_header(FileSlice(stream, info.offset, info.length), "w")
        elements = Elements.of(stream, info.offset, header)
    short.write_bytes((saved / info.relative_path).read_bytes()[: elements.begin + 100])
    target = torch.zeros(SHAPE, dtype=torch.int32)
    with (
        short.open("rb", buffering=0) as stream,
        pytest.raises(EOFError, match="the file ends 740 bytes before the end"),
    ):
        Elements(stream, elements.begin, header.dtype, header.shape).read((0, 0, 0), SHAPE, target)
