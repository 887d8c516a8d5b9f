"""A chunk as what changed since the base: exact for whatever bytes, never larger than whole, refused when damaged."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from torch import Tensor

from dcp_adapters.delta.coding import chunk as chunk_module
from dcp_adapters.delta.coding import codec
from dcp_adapters.delta.coding.chunk import decode_chunk, encode_chunk
from tests.dcp_adapters.delta.test_changes import DTYPES, same_bytes


def noise(count: int, seed: int) -> Tensor:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def again(data: bytes, old: Tensor, like: Tensor) -> Tensor:
    return decode_chunk(data, like.dtype, tuple(like.shape), old.clone, "the chunk")


def kind(data: bytes) -> str:
    return json.loads(data[: data.index(b"\n")])["kind"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whatever_bytes_come_back(dtype: torch.dtype) -> None:
    old = noise(16 * 4096, 0)
    few = old.clone()
    few[::501] += 1
    many = old.clone()
    many[:: dtype.itemsize] ^= 1
    cases = [(old, {"same"}), (few, {"changes"}), (many, {"changes", "whole"}), (noise(16 * 4096, 1), {"whole"})]
    for new, kinds in cases:
        before, after = ((raw % 2 if dtype == torch.bool else raw).view(dtype) for raw in (old, new))
        data = encode_chunk(before, after)
        assert dtype == torch.bool or kind(data) in kinds
        assert len(data) <= after.nbytes + 20
        assert same_bytes(again(data, before, after), after)


@pytest.mark.parametrize("shape", [(), (0, 4), (3,), (2, 3, 5)])
def test_shapes_come_back(shape: tuple[int, ...]) -> None:
    for seed in (0, 1):
        old, new = torch.zeros(shape), torch.full(shape, float(seed))
        found = again(encode_chunk(old, new), old, new)
        assert (found.shape, found.dtype) == (new.shape, new.dtype)
        assert torch.equal(found, new)


def test_more_changes_than_a_frame_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_module, "MOST_CHANGES", 100)
    assert codec.MOST_CHANGES > 100
    old = torch.arange(3000, dtype=torch.float32)
    new = old + (torch.arange(3000) % 7 == 0)
    data = encode_chunk(old, new)
    assert len(json.loads(data[: data.index(b"\n")])["frames"]) == 5
    assert torch.equal(again(data, old, new), new)


def test_what_does_not_compress_is_given_up_at_the_first_full_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """And after a look at the rest."""
    monkeypatch.setattr(chunk_module, "MOST_CHANGES", 1000)
    monkeypatch.setattr(chunk_module, "LOOK", 20)
    tried: list[int] = []
    encoded = chunk_module.encode

    def counted(changes: codec.Changes, start: int, *, level: int | None = None) -> codec.Coded:
        tried.append(len(changes))
        return encoded(changes, start, level=level)

    monkeypatch.setattr(chunk_module, "encode", counted)
    old, new = (noise(40_000, seed).view(torch.int32).view(torch.float32) for seed in (0, 1))
    assert kind(encode_chunk(old, new)) == "whole"
    assert tried == [1000, *[20] * chunk_module.LOOKS]


@pytest.mark.parametrize("look", [40, 2**15])  # the rest is judged by pieces, or so small that it is coded
def test_a_chunk_that_begins_dense_and_goes_on_sparse_is_stored_as_changes(
    look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_module, "MOST_CHANGES", 1000)
    monkeypatch.setattr(chunk_module, "LOOK", look)
    old = noise(80_000, 0).view(torch.int32).view(torch.float32)
    new = old.clone()
    for part in (slice(0, 2500), slice(12_000, 13_500)):  # a fifth of it, also in full runs behind the first
        new[part] = noise(80_000, 1).view(torch.int32).view(torch.float32)[part]
    data = encode_chunk(old, new)
    assert kind(data) == "changes"
    assert len(data) < 0.3 * new.nbytes
    assert same_bytes(again(data, old, new), new)


def test_a_chunk_that_is_dense_is_stored_whole_whatever_the_pieces_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of the bytes holds all the same: here the pieces, of one unit each, see few changes."""
    monkeypatch.setattr(chunk_module, "MOST_CHANGES", 1000)
    monkeypatch.setattr(chunk_module, "LOOK", 1)
    old, new = (noise(40_000, seed).view(torch.int32).view(torch.float32) for seed in (0, 1))
    for number in range(chunk_module.LOOKS):
        at = 1000 + number * (9000 - 1) // (chunk_module.LOOKS - 1)
        new[at] = old[at]
    data = encode_chunk(old, new)
    assert kind(data) == "whole"
    assert same_bytes(again(data, old, new), new)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "the chunk is damaged: JSONDecodeError"),
        (b"[]\n", "the chunk is damaged: TypeError"),
        (b'{"frames":[]}\n', "the chunk is damaged: KeyError: 'kind'"),
        (b'{"kind":"other"}\n', "the chunk is damaged: 0 bytes and 0 frames of the kind other"),
        (b'{"kind":"same"}\nx', "the chunk is damaged: 1 bytes and 0 frames of the kind same"),
        (b'{"kind":"changes","frames":[]}\n', "0 bytes and 0 frames of the kind changes"),
        (b'{"kind":"whole"}\nxyz', "3 bytes and 0 frames of the kind whole"),
        (b'{"kind":"changes","frames":[[0,-1,0,[0]]]}\n', "a frame is not described by counts"),
        (b'{"kind":"changes","frames":[[0,1,0,[0,0]]]}\n', "in 2 streams with a shift of 0"),
        (b'{"kind":"changes","frames":[[0,9,0,[0,0,0,0,0,0]]]}\n', "9 changes from 0 on in 4 units"),
    ],
)
def test_what_contradicts_itself_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        decode_chunk(data, torch.float32, (4,), lambda: torch.zeros(4), "the chunk")


def test_a_changed_byte_never_makes_more_than_another_tensor() -> None:
    old = torch.arange(4000, dtype=torch.float32)
    new = old + (torch.arange(4000) % 31 == 0)
    sound = encode_chunk(old, new)
    for at in range(0, len(sound), 3):
        data = bytearray(sound)
        data[at] ^= 1 << (at % 8)
        with contextlib.suppress(ValueError):
            found = again(bytes(data), old, new)
            assert (found.shape, found.dtype) == (new.shape, new.dtype)
