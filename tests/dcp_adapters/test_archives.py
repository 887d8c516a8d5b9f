"""Archives without torch.save are those of torch.save, to the byte; what is not proven goes to torch.save."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dcp_adapters.plain.plain_memory import memory_of
from dcp_adapters.save import archives
from dcp_adapters.save.archives import LARGEST, MOST, WIDEST, Frames, frame_of, is_framed

NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16"),
    *("float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
DTYPES: list[torch.dtype] = [getattr(torch, name) for name in NAMES]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
SHAPES = [(), (1,), (7,), (1, 5), (33, 64), (3, 1, 2, 5), (64, 1024)]


@pytest.fixture(autouse=True)
def _without_crc32() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    archives._known.clear()
    archives._met.clear()
    yield
    torch.serialization.set_crc32_options(before)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bytes, also those that are no value of the dtype."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(256, (count,), generator=generator, dtype=torch.uint8, device="cpu")
    return torch.empty(0, dtype=dtype, device="cpu").set_(data.untyped_storage(), 0, shape)


def saved(tensor: Any) -> bytes:
    data = io.BytesIO()
    torch.save(tensor, data)
    return data.getvalue()


def framed(frames: Frames, tensor: Tensor) -> bytes:
    frame = frames.of(tensor)
    assert frame is not None
    return frame.head + memory_of(tensor).raw + frame.tail


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_they_are_what_torch_save_writes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    frames = Frames()
    assert frames.of(random(shape, dtype, 0)) is None  # a kind that is seen for the first time
    for seed in range(4):
        tensor = random(shape, dtype, seed)
        assert framed(frames, tensor) == saved(tensor)
    zeros = random(shape, dtype, 0)
    zeros.untyped_storage().fill_(0)
    assert framed(Frames(), zeros) == saved(zeros)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=5), st.sampled_from(DTYPES), st.integers(0, 9))
def test_they_are_for_any_shape(shape: list[int], dtype: torch.dtype, seed: int) -> None:
    frames = Frames()
    frames.of(random(tuple(shape), dtype, seed))
    tensor = random(tuple(shape), dtype, seed + 1)
    assert framed(frames, tensor) == saved(tensor)


def test_strides_of_dims_of_one_element_are_told_apart() -> None:
    """They say nothing about the elements, and are written all the same."""
    usual = torch.arange(5.0).view(1, 5)
    odd = torch.empty(0).set_(torch.arange(5.0).untyped_storage(), 0, (1, 5), (77, 1))
    assert odd.is_contiguous()
    frames = Frames()
    for _ in range(3):
        for tensor in (usual, odd):
            frame = frames.of(tensor)
            assert frame is None or framed(frames, tensor) == saved(tensor)
    assert frames.of(usual) != frames.of(odd)


class Sub(Tensor):
    """A subclass without anything of its own."""


OTHERS: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(0, 3),
    "a subclass": lambda: torch.ones(4).as_subclass(Sub),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(4)),
    "with a gradient": lambda: torch.ones(4, requires_grad=True),
    "transposed": lambda: torch.ones(4, 5).t(),
    "a view into a larger one": lambda: torch.ones(9)[2:6],
    "the first of a larger one": lambda: torch.ones(9)[:4],
    "expanded": lambda: torch.ones(1).expand(4),
    "conjugate": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(4, dtype=torch.complex64).conj().imag.contiguous()._neg_view(),
    "sparse": lambda: torch.ones(4).to_sparse(),
    "meta": lambda: torch.ones(4, device="meta"),
    "large": lambda: torch.empty(LARGEST + 1, dtype=torch.uint8),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_plain_tensor_goes_to_torch_save(name: str) -> None:
    frames, tensor = Frames(), OTHERS[name]()
    assert not is_framed(tensor)
    assert [frames.of(tensor) for _ in range(3)] == [None] * 3
    assert not archives._known


def test_a_tensor_with_attributes_goes_to_torch_save() -> None:
    """They are pickled with it."""
    frames, plain, marked = Frames(), torch.ones(4), torch.ones(4)
    marked.mark = 1  # type: ignore[attr-defined]
    assert frames.of(plain) is None
    assert framed(frames, plain) == saved(plain) != saved(marked)
    assert frames.of(marked) is None


def test_with_crc32_torch_save_writes_all() -> None:
    frames = Frames()
    for _ in range(3):
        frames.of(torch.ones(4))
    torch.serialization.set_crc32_options(True)
    assert frames.of(torch.ones(4)) is None
    assert Frames().of(torch.ones(4)) is None
    assert frame_of(torch.ones(4)) is None  # and no frame could be proven: the archives differ in more than the bytes


def test_frames_of_other_settings_are_not_used() -> None:
    tensor = torch.arange(8.0)
    for _ in range(2):
        Frames().of(tensor)
    usual = framed(Frames(), tensor)
    with torch.utils.serialization.config.patch("save.storage_alignment", 4096):
        assert Frames().of(tensor) is None
        aligned = framed(Frames(), tensor)
        assert aligned == saved(tensor) != usual
    assert framed(Frames(), tensor) == usual == saved(tensor)


def test_a_frame_is_kept_for_the_settings_that_it_was_made_under() -> None:
    frames, tensor = Frames(), torch.arange(8.0)
    frames.of(tensor)  # looks at the settings
    with torch.utils.serialization.config.patch("save.storage_alignment", 4096):
        assert frames.of(tensor) is None
    assert framed(Frames(), tensor) == saved(tensor)


def test_wide_frames_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, made = torch.arange(8.0), []
    monkeypatch.setattr(archives, "frame_of", lambda one: made.append(one) or frame_of(one))
    with torch.utils.serialization.config.patch("save.storage_alignment", 2 << 20):
        assert [Frames().of(tensor) for _ in range(4)] == [None] * 4
    assert len(made) == 1  # asked once, not for each


def test_what_torch_save_puts_elsewhere_is_never_framed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch whose archives hold the time, say, or the elements twice, or in another order."""
    save, calls = torch.save, []

    def timed(tensor: Tensor, file: Any) -> None:
        calls.append(1)
        file.write(b"%4d" % len(calls))
        save(tensor, file)

    def twice(tensor: Tensor, file: Any) -> None:
        save(tensor, file)
        file.write(memory_of(tensor).raw)

    def turned(tensor: Tensor, file: Any) -> None:
        file.write(memory_of(tensor).raw[::-1])

    def longer(tensor: Tensor, file: Any) -> None:
        save(tensor, file)
        file.write(b"x" * len(calls))
        calls.append(1)

    def nothing(tensor: Tensor, file: Any) -> None:
        file.write(b"nothing")

    for other in (timed, twice, turned, longer, nothing):
        monkeypatch.setattr(torch, "save", other)
        frames = Frames()
        assert [frames.of(torch.arange(8.0)) for _ in range(4)] == [None] * 4, other


def test_no_more_kinds_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MOST", 8)
    frames = Frames()
    for size in range(1, 30):
        tensor = torch.ones(size)
        assert frames.of(tensor) is None
        assert framed(frames, tensor) == saved(tensor)
        assert len(archives._known) <= len(archives._met) <= 8
    assert MOST * WIDEST <= 32 << 20
