"""Archives that are written alike are read once; one that differs anywhere but in its elements is read for itself."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dcp_adapters import SafeFileSystemReader
from dcp_adapters.stored.reading import tensor_archive
from dcp_adapters.stored.reading.tensor_archive import MOST, FileSlice, Header, Headers, read_header
from qtensor import quantize
from tests.dcp_adapters.cases import RECIPES, bits, load, save, values


@pytest.fixture(autouse=True)
def _without_crc32() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(before)


def archive(tensor: Tensor) -> bytes:
    data = io.BytesIO()
    torch.save(tensor, data)
    return data.getvalue()


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def read_all(chunks: list[bytes]) -> tuple[list[Header], int]:
    """The headers of chunks behind each other in a file, and how many of them were read in full."""
    stream, found, known, at = io.BytesIO(b"".join(chunks)), list[Header](), Headers(), 0
    with patch.object(tensor_archive, "read_header", wraps=read_header) as full:
        for number, chunk in enumerate(chunks):
            found.append(known.read(stream, at, len(chunk), f"chunk {number}"))
            at += len(chunk)
    return found, full.call_count


def alone(chunk: bytes) -> Header:
    return read_header(FileSlice(io.BytesIO(chunk), 0, len(chunk)), "alone")


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (33, 64)], ids=str)
def test_archives_that_differ_in_their_elements_are_read_once(shape: tuple[int, ...]) -> None:
    chunks = [archive(normal(*shape, seed=seed)) for seed in range(5)]
    found, full = read_all(chunks)
    assert found == [alone(chunk) for chunk in chunks]
    assert full == 1


OTHERS: dict[str, Tensor] = {
    "another shape of as many elements": normal(64, 33),
    "another dtype of the same width": normal(33, 64).view(torch.int32),
    "columns first": normal(64, 33).t(),
    "elements from the second on": torch.cat([normal(1, 64), normal(33, 64)])[1:],
}


@pytest.mark.parametrize("name", OTHERS)
def test_archives_of_other_tensors_are_read_for_themselves(name: str) -> None:
    """Also where they are as long, byte by byte: zip pads the records."""
    usual = archive(normal(33, 64))
    chunks = [usual, archive(OTHERS[name]), usual]
    found, _ = read_all(chunks)
    assert found == [alone(chunk) for chunk in chunks]
    assert found[1] != found[0]


def changed(chunk: bytes, at: int) -> bytes:
    return chunk[:at] + bytes([chunk[at] ^ 0xFF]) + chunk[at + 1 :]


def outcome(read: Callable[[], Header]) -> Any:
    try:
        return read()
    except ValueError as error:
        return str(error)


def test_a_change_of_any_byte_has_the_outcome_of_reading_it_alone() -> None:
    """Every byte outside of the elements, behind a sound archive of the same length."""
    sound = archive(normal(4, 4))
    found = set()
    for at in range(len(sound)):
        damaged = changed(sound, at)
        stream, known = io.BytesIO(sound + damaged), Headers()
        known.read(stream, 0, len(sound), "sound")
        expected = outcome(lambda: read_header(FileSlice(stream, len(sound), len(damaged)), "it"))  # noqa: B023
        assert outcome(lambda: known.read(stream, len(sound), len(damaged), "it")) == expected, at  # noqa: B023
        found.add(type(expected))
    assert found == {Header, str}


def test_an_archive_that_is_refused_is_refused_again() -> None:
    sound = archive(normal(4, 4))
    damaged = changed(sound, len(sound) - 20)
    stream, known = io.BytesIO(damaged + damaged), Headers()
    for number in range(2):
        with pytest.raises(ValueError, match=f"chunk {number}: "):
            known.read(stream, number * len(damaged), len(damaged), f"chunk {number}")


def test_archives_that_are_all_different_are_compared_with_a_few() -> None:
    torch.serialization.set_crc32_options(True)
    chunks = [archive(normal(33, 64, seed=seed)) for seed in range(3 * MOST)]
    found, full = read_all(chunks)
    assert full == len(chunks)
    assert found == [alone(chunk) for chunk in chunks]
    stream, known, at = io.BytesIO(b"".join(chunks)), Headers(), 0
    for chunk in chunks:
        known.read(stream, at, len(chunk), "it")
        at += len(chunk)
    assert [len(kept) for kept in known._known.values()] == [MOST]


def test_a_load_reads_as_many_headers_for_four_layers_as_for_two(tmp_path: Path) -> None:
    counts = []
    for layers in (2, 4):
        state = {f"w{layer}": quantize(values((64, 64), layer), RECIPES["nvfp4"]) for layer in range(layers)}
        path = tmp_path / str(layers)
        save(state, path)
        target = {name: quantize(values((64, 64), 9), RECIPES["nvfp4"]) for name in state}
        with patch.object(tensor_archive, "read_header", wraps=read_header) as full:
            load(target, path, reader=SafeFileSystemReader(path))
        counts.append(full.call_count)
        for name, weight in target.items():
            for part, tensor in weight.parts().items():
                assert bits(tensor) == bits(state[name].parts()[part])
    assert counts[0] == counts[1]


def test_a_record_that_ends_behind_its_chunk_is_refused() -> None:
    """Its local header says how far behind it the elements begin, and they would be another chunk's."""
    sound = archive(normal(4, 4))
    at = sound.index(b"archive/data/0") - 30
    extra = at + 28  # the length of the extra field, behind the name's
    for length in (1000, 0xFFFF):
        damaged = sound[:extra] + length.to_bytes(2, "little") + sound[extra + 2 :]
        stream = io.BytesIO(damaged + sound * 50)
        with pytest.raises(
            ValueError, match=r"no archive of a tensor: a record of 64 bytes from \d+ on, in a chunk of"
        ):
            read_header(FileSlice(stream, 0, len(damaged)), "it")
    headless = sound[:at] + b"PK\x03\x05" + sound[at + 4 :]
    with pytest.raises(ValueError, match="no archive of a tensor: a record without a header; use another checkpoint"):
        read_header(FileSlice(io.BytesIO(headless), 0, len(headless)), "it")
