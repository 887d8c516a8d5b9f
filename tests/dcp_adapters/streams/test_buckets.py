"""Which tensors travel together, and where they lie, from records alone."""

from __future__ import annotations

import json

import pytest
import torch

from dcp_adapters.streams.announcement import Announcement
from dcp_adapters.streams.buckets import TensorRecord, bucket_sizes, buckets_of, fill, room_of, views

RECORDS = (
    TensorRecord("a", torch.float8_e4m3fn, (3, 5)),
    TensorRecord("b", torch.bfloat16, (7,)),
    TensorRecord("c", torch.float32, ()),
    TensorRecord("d", torch.int64, (40,)),
    TensorRecord("e", torch.uint8, (0, 4)),
)


@pytest.mark.parametrize(("limit", "sizes"), [(1, (1, 1, 1, 1, 1)), (128, (2, 1, 1, 1)), (192, (3, 1, 1)), (999, (5,))])
def test_a_bucket_is_filled_up_to_its_limit(limit: int, sizes: tuple[int, ...]) -> None:
    """Rooms are 64, 64, 64, 320 and 0 bytes; a tensor over the limit is alone."""
    assert bucket_sizes(RECORDS, limit) == sizes
    buckets = buckets_of(RECORDS, sizes)
    assert [record for bucket in buckets for record in bucket] == list(RECORDS)


def test_no_tensors_are_no_buckets() -> None:
    assert bucket_sizes((), 5) == ()
    assert buckets_of((), ()) == []


def test_what_is_filled_in_is_seen_in_the_views() -> None:
    tensors = {
        record.name: (torch.arange(record.nbytes, dtype=torch.int16) % 251)
        .to(torch.uint8)
        .view(record.dtype)
        .view(record.shape)
        for record in RECORDS
    }
    memory = torch.full((room_of(RECORDS) + 7,), 255, dtype=torch.uint8)
    fill(RECORDS, tensors, memory)
    found = dict(views(RECORDS, memory))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert memory[15:64].eq(0).all()  # equal tensors make equal bytes
    assert memory[room_of(RECORDS) :].eq(255).all()


def test_an_announcement_survives_its_journey() -> None:
    said = Announcement(3, RECORDS, (2, 3), {"config.json": {"quantization_config": {"quant_method": "modelopt"}}})
    heard = Announcement.from_bytes(said.to_bytes())
    assert heard == said
    assert heard.largest == 384
    assert heard.nbytes == 15 + 14 + 4 + 320
    delta = Announcement.of_delta(3, 2, 1000)
    assert Announcement.from_bytes(delta.to_bytes()) == delta
    assert (heard.base, delta.base, delta.nbytes, len(delta.buckets)) == (None, 2, 1000, 1)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("tensors", [["a", "float8", [3]]], "'a' has the dtype 'float8', which this torch does not have"),
        ("tensors", [["a", "float32", [-3]]], r"a has the shape \(-3,\)"),
        ("sizes", [1], "an announcement of 5 tensors has buckets of 1, or two tensors of one name"),
        ("version", None, "an announcement of weights cannot be read"),
        ("base", 2, "an announcement of a delta has 5 tensors or files of JSON; expected its bytes alone"),
    ],
)
def test_an_announcement_that_cannot_be_is_refused(key: str, value: object, text: str) -> None:
    told = json.loads(Announcement(3, RECORDS, (2, 3), {}).to_bytes())
    with pytest.raises(ValueError, match=text):
        Announcement.from_bytes(json.dumps({**told, key: value}).encode())
