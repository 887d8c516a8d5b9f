"""Sums of bytes: as defined, from any pieces, and different where any word or the order of anything is."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsdp_hooks.kernels import byte_sums as module
from fsdp_hooks.kernels.byte_sums import TensorPiece, byte_sums
from fsdp_hooks.kernels.compiled import use_kernels
from tests.weight_digests import byte_sum

DTYPES = [
    *(torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64),
]
SHAPES = [(), (1,), (9,), (5, 7), (4, 1), (3, 4, 6), (0, 3), (3, 0), (2, 0, 3)]


def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Bytes of every value."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    data = torch.randint(256, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).view(shape)


def total(*pieces: TensorPiece) -> int:
    return sum(byte_sums(pieces).tolist()) % 2**64


def cut(tensor: Tensor, bounds: list[list[int]]) -> list[TensorPiece]:
    """The boxes of a tensor between bounds along each dim."""
    along = [
        list(itertools.pairwise([0, *sorted(own), extent])) for own, extent in zip(bounds, tensor.shape, strict=True)
    ]
    return [
        TensorPiece(
            tensor[tuple(slice(*pair) for pair in box)],
            tuple(tensor.shape),
            tuple(start for start, _ in box),
        )
        for box in itertools.product(*along)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_is_the_one_defined(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = made(shape, dtype)
    assert total(TensorPiece.whole(tensor)) == byte_sum(tensor)


def test_the_sums_are_frozen() -> None:
    """Digests are kept in files and compared with those of other versions."""
    assert byte_sums([TensorPiece.whole(torch.arange(35, dtype=torch.uint8).view(5, 7))]).tolist() == [
        4467608922412196156
    ]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pieces_add_up_wherever_they_are_cut(data: Any) -> None:
    """Columns are cut inside of words, too; empty pieces add nothing."""
    dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
    shape = data.draw(st.sampled_from([(11,), (5, 9), (2, 3, 13)]))
    tensor = made(shape, dtype, data.draw(st.integers(0, 99)))
    bounds = [data.draw(st.lists(st.integers(0, extent), max_size=3)) for extent in shape]
    pieces = cut(tensor, bounds)
    assert total(*pieces) == byte_sum(tensor)
    assert sum(total(piece) for piece in pieces) % 2**64 == byte_sum(tensor)


@pytest.mark.parametrize("limit", [8, 64])
def test_pieces_read_in_parts_have_the_same_sum(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits far below the sizes of the tensors: they are read in parts of rows and columns, and in several stacks."""
    monkeypatch.setattr(module, "AT_ONCE_CPU", limit)
    monkeypatch.setattr(module, "STACK", 4 * limit)
    for shape in [(7, 45), (3, 3, 17), (301,)]:
        many = [made(shape, torch.uint8, seed) for seed in range(5)]
        assert byte_sums([TensorPiece.whole(one) for one in many]).view(-1).tolist() == [
            signed(byte_sum(one)) for one in many
        ]
        assert total(*cut(many[0], [[extent // 2] for extent in shape])) == byte_sum(many[0])


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def test_pieces_of_many_kinds_come_back_in_their_order() -> None:
    tensors = [made(shape, dtype, seed) for seed in range(3) for shape in SHAPES for dtype in DTYPES]
    assert byte_sums([TensorPiece.whole(tensor) for tensor in tensors]).tolist() == [
        signed(byte_sum(tensor)) for tensor in tensors
    ]


def test_views_and_unaligned_memory_have_the_sum_of_their_values() -> None:
    data = made((64 * 64 + 3,), torch.uint8)
    unaligned = data[3:].view(64, 64)
    for tensor in (unaligned, unaligned.T, unaligned[:, 1:60], made((8, 8), torch.complex64).conj()):
        assert total(TensorPiece.whole(tensor)) == byte_sum(tensor.resolve_conj())


def test_large_pieces_have_the_same_sum() -> None:
    tensors = [made((300, 2050), torch.uint8), made((129, 1024), torch.float32), made((70001,), torch.bfloat16)]
    assert [total(TensorPiece.whole(tensor)) for tensor in tensors] == [byte_sum(tensor) for tensor in tensors]


def test_what_other_devices_compute_is_what_a_cpu_computes() -> None:
    """Also of the largest words and weights, whose products exceed 64 bits."""
    words = made((300, 512), torch.int32)
    words[0], words[1] = -(2**31), 2**31 - 1
    weights = made((512,), torch.int64)
    weights[:2] = torch.tensor([-(2**63), 2**63 - 1])
    expected = module._row_dots_cpu(words, weights)
    for mode in ("eager", "compiled"):
        with use_kernels(mode):
            assert torch.equal(module._row_sums(words, weights), expected)


@pytest.mark.parametrize("shape", [(4, 6), (24,), (2, 3, 4)])
def test_every_flipped_bit_changes_the_sum(shape: tuple[int, ...]) -> None:
    tensor = made(shape, torch.uint8)
    flat, found = tensor.view(-1), {total(TensorPiece.whole(tensor))}
    for place in range(len(flat)):
        for bit in range(8):
            flat[place] ^= 1 << bit
            found.add(total(TensorPiece.whole(tensor)))
            flat[place] ^= 1 << bit
    assert len(found) == 1 + 8 * len(flat)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_what_changes_places_changes_the_sum(dtype: torch.dtype) -> None:
    tensor = made((8, 64), dtype)
    changed = [
        *(tensor.roll(by, dim) for dim in (0, 1) for by in (1, 2, 4)),
        *(tensor[order] for order in ([1, 0, 2, 3, 4, 5, 6, 7], [0, 1, 2, 4, 3, 6, 5, 7], [7, 6, 5, 4, 3, 2, 1, 0])),
        torch.cat([tensor[:, 32:], tensor[:, :32]], dim=1),
        tensor.view(4, 2, 2, 32).transpose(1, 2).reshape(8, 64),
        tensor.flip(1),
    ]
    assert len({total(TensorPiece.whole(one)) for one in [tensor, *changed]}) == 1 + len(changed)


def test_signs_of_any_rows_and_columns_show() -> None:
    """The highest bits of words; those at the corners of a rectangle are the worst case of the weights."""
    tensor = torch.arange(1, 16 * 16 + 1, dtype=torch.float32).view(16, 16)
    found = {total(TensorPiece.whole(tensor))}
    flips = [(rows, columns) for rows in itertools.combinations(range(16), 2) for columns in ((0, 1), (3, 9))]
    flips += [(range(16), (column,)) for column in range(16)] + [((row,), range(16)) for row in range(16)]
    for rows, columns in flips:
        changed = tensor.clone()
        for row in rows:
            changed[row, list(columns)] *= -1
        found.add(total(TensorPiece.whole(changed)))
    assert len(found) == 1 + len(flips)


def test_default_device_and_autocast_do_not_matter() -> None:
    tensors = [made((8, 12), torch.float8_e4m3fn), made((7,), torch.bfloat16)]
    expected = byte_sums([TensorPiece.whole(tensor) for tensor in tensors])
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(byte_sums([TensorPiece.whole(tensor) for tensor in tensors]), expected)


def test_another_byte_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(NotImplementedError, match="use a little-endian machine"):
        byte_sums([TensorPiece.whole(torch.zeros(4, dtype=torch.uint8))])
