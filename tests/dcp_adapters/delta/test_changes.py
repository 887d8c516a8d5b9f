"""Changes and their code: exact for whatever bits, the same from shards as from the whole, near to the entropy."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dcp_adapters.delta.coding import changes as changes_module
from dcp_adapters.delta.coding.changes import (
    Changes,
    changes_between,
    global_changes,
    join,
    local_changes,
    unit_of,
    unit_shape,
    units,
)
from dcp_adapters.delta.coding.codec import Coded, decode, encode
from dcp_adapters.delta.coding.zstd import compress, decompress

DTYPES = [
    torch.uint8, torch.bool, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16,
    torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


def of_bytes(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)


def all_changes(old: Tensor, new: Tensor) -> Changes:
    return join(changes_between(old, new), unit_of(old.dtype))


def again(found: Changes, unit: torch.dtype, extent: int) -> Changes:
    return decode(encode(found, 0), unit, extent, "a frame") if len(found) else found


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@st.composite
def two_states(draw: st.DrawFn) -> tuple[bytes, bytes, torch.dtype]:
    dtype = draw(st.sampled_from(DTYPES))
    count = draw(st.integers(0, 70)) * dtype.itemsize
    old = draw(st.binary(min_size=count, max_size=count))
    new = bytearray(old)
    for at in draw(st.sets(st.integers(0, max(count - 1, 0)), max_size=count)):
        new[at] = draw(st.integers(0, 255))
    return old, bytes(new), dtype


@settings(max_examples=150, deadline=None)
@given(two_states())
@example((b"\x00" * 16, b"\x80" + b"\x00" * 15, torch.float8_e4m3fn))  # minus zero
@example((b"\x00\x00\xc0\x7f" * 3, b"\x01\x00\xc0\x7f" * 2 + b"\xff\xff\xff\xff", torch.float32))  # NaN payloads
@example((b"\x80" * 8, b"\x7f" * 8, torch.uint8))  # the step wraps around
@example((b"\x00" * 8, b"\xff" * 7 + b"\x7f", torch.float64))
def test_changes_lead_from_one_tensor_to_the_other(case: tuple[bytes, bytes, torch.dtype]) -> None:
    old, new = (of_bytes(data, case[2]) for data in case[:2])
    if case[2] == torch.bool:  # torch has no others
        old, new = (side.view(torch.uint8).bitwise_and(1).view(torch.bool) for side in (old, new))
    found = all_changes(old, new)
    assert torch.equal(found.positions, (units(old) != units(new)).nonzero().flatten())
    found = again(found, unit_of(old.dtype), units(old).numel())
    out = old.clone()
    units(out)[found.positions] += found.steps
    assert same_bytes(out, new)


@pytest.mark.parametrize("kind", ["none", "first", "last", "all"])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (5, 13)])
def test_few_and_all_units(kind: str, shape: tuple[int, ...]) -> None:
    old = torch.zeros(shape, dtype=torch.bfloat16)
    new = old.clone()
    flat = new.view(-1)
    if flat.numel() and kind != "none":
        flat[{"first": slice(0, 1), "last": slice(-1, None), "all": slice(None)}[kind]] = -1.0
    found = again(all_changes(old, new), torch.int16, old.numel())
    out = old.clone()
    units(out)[found.positions] += found.steps
    assert same_bytes(out, new)
    assert len(found) == int((old != new).sum())


def test_tensors_that_are_not_alike_have_no_changes() -> None:
    with pytest.raises(ValueError, match=r"changes from torch.uint8 \(2,\) to torch.uint8 \(3,\): expected equal tens"):
        list(changes_between(torch.zeros(2, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bfloat16])
def test_pieces_and_dense_changes_are_found_alike(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randint(0, 255, (1003 * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    for share in (0.002, 0.5):
        new = old.clone()
        hit = torch.rand(units(new).shape, generator=generator) < share
        units(new)[hit] += 1
        whole = all_changes(old, new)
        with monkeypatch.context() as patched:
            patched.setattr(changes_module, "PIECE", 64)
            pieces = all_changes(old, new)
        odd = all_changes(old[1:], new[1:])  # words of 8 bytes do not begin at an address of their own
        assert torch.equal(whole.positions, hit.nonzero().flatten())
        assert torch.equal(pieces.positions, whole.positions)
        assert torch.equal(pieces.steps, whole.steps)
        per = dtype.itemsize // unit_of(dtype).itemsize
        assert torch.equal(odd.positions, whole.positions[whole.positions >= per] - per)


@pytest.mark.parametrize("shape", [(12,), (6, 8), (3, 4, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_boxes_add_up_to_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randint(0, 9, shape, generator=generator).to(dtype)
    new = torch.where(torch.rand(shape, generator=generator) < 0.4, old + 1, old)
    whole, extents = all_changes(old, new), unit_shape(dtype, shape)
    per = extents[-1] // shape[-1]
    for dim in range(len(shape)):
        found = []
        for offset in range(0, shape[dim], 2):
            offsets = [offset if number == dim else 0 for number in range(len(shape))]
            box = tuple(slice(start, start + 2 if number == dim else None) for number, start in enumerate(offsets))
            local = all_changes(old[box].contiguous(), new[box].contiguous())
            at, sizes = (*offsets[:-1], offsets[-1] * per), unit_shape(dtype, old[box].shape)
            there = global_changes(local, extents, at, sizes)
            back = local_changes(whole, extents, at, sizes)
            assert torch.equal(back.positions, local.positions)
            assert torch.equal(back.steps, local.steps)
            found.append(there)
        both = join(found, unit_of(dtype))
        assert torch.equal(both.positions, whole.positions)
        assert torch.equal(both.steps, whole.steps)


def test_a_unit_that_two_shards_change_is_refused() -> None:
    one = Changes(torch.tensor([1, 5]), torch.tensor([1, 1], dtype=torch.int8))
    with pytest.raises(ValueError, match="two shards change the same unit; expected shards that hold each unit once"):
        join([one, one], torch.int8)


@pytest.mark.parametrize("probability", [0.3, 0.01, 0.001])
def test_the_code_is_near_to_the_entropy(probability: float) -> None:
    """Positions by chance and steps of -1 or 1: Huffman codes lose a few per cent, and tables cost some 300 bytes."""
    count = 2**20
    generator = torch.Generator().manual_seed(0)
    positions = (torch.rand(count, generator=generator) < probability).nonzero().flatten()
    steps = torch.randint(0, 2, positions.shape, generator=generator).mul(2).sub(1).to(torch.int8)
    p = len(positions) / count
    entropy = count * -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) + len(positions)  # bits
    assert 8 * len(encode(Changes(positions, steps), 0).data) <= 1.05 * entropy + 8 * 300


# -- damage ------------------------------------------------------------------------------------------------------------


def frame() -> Coded:
    found = Changes(torch.tensor([3, 700, 701, 9000]), torch.tensor([1, -1, 40, -300], dtype=torch.int16))
    return encode(found, 0)


@pytest.mark.parametrize("at", range(0, 80, 3))
def test_a_changed_byte_is_an_error_or_decodes_to_something_in_bounds(at: int) -> None:
    coded = frame()
    for bit in range(8):
        data = bytearray(coded.data)
        data[at % len(data)] ^= 1 << bit
        changed = Coded(coded.start, coded.count, coded.shift, coded.lengths, bytes(data))
        try:
            found = decode(changed, torch.int16, 10000, "a frame")
        except ValueError:
            continue
        assert bool((found.positions.diff() > 0).all())
        assert int(found.positions[0]) >= 0
        assert int(found.positions[-1]) < 10000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"count": 2**60}, "a frame is damaged: 1152921504606846976 changes from 0 on in 10000 units"),
        ({"count": 5}, "a frame is damaged: 3 gaps|a frame is damaged: 4 gaps, expected 5|bytes of gaps"),
        ({"count": 0}, "a frame is damaged: 0 changes"),
        ({"start": 10000}, "a frame is damaged: 4 changes from 10000 on"),
        ({"start": 9000}, "a frame is damaged: it changes unit 18000 of 10000"),
        ({"shift": 41}, "with a shift of 41"),
        ({"lengths": (1, 2, 3)}, "in 3 streams"),
        ({"data": b""}, "a frame is damaged: 0 bytes, expected "),
    ],
)
def test_figures_that_do_not_fit_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(Coded(**(vars(frame()) | fields)), torch.int16, 10000, "a frame")


def test_a_frame_that_says_it_holds_more_takes_no_memory_for_it() -> None:
    bomb = compress(b"\0" * 2**26, 19)
    with pytest.raises(ValueError, match="x is damaged: it holds more than the 100 bytes that it should"):
        decompress(bomb, 100, "x")
    whole = compress(b"abc" * 50, 19)
    assert decompress(whole, 150, "x") == b"abc" * 50
    with pytest.raises(ValueError, match="x is damaged: it is cut off"):
        decompress(whole[:-1], 150, "x")
    with pytest.raises(ValueError, match="x is damaged: bytes follow its end"):
        decompress(whole + b"\0", 150, "x")


def test_without_zstd_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'from 3.14 on; install "qtensor-fsdp\[delta\]", or backports.zstd'):
        compress(b"", 1)
