"""Digests tell writes apart that a sum of weighted words would not."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_hooks.kernels import digest as definition
from fsdp_hooks.kernels.compiled import use_kernels
from fsdp_hooks.kernels.digest import digest, digests
from tests.devices import told_of_waits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_signs_of_any_column_show(dtype: torch.dtype) -> None:
    weight = (torch.arange(64 * 8).reshape(64, 8) + 1).to(dtype)
    before = digest([weight])
    found = []
    for column in range(8):
        weight[:, column] *= -1
        found.append(int(digest([weight])))
        weight[:, column] *= -1
    if dtype is torch.int64:  # their highest bits alone
        found.append(int(digest([weight ^ -(2**63)])))
    assert len({int(before), *found}) == 1 + len(found)
    assert torch.equal(digest([weight]), before)


def bits(*tensors: torch.Tensor) -> int:
    return int(digest(tensors))


@pytest.mark.parametrize("size", [1, 7, 512, 4096, 3 * 2**18 + 5])
def test_any_single_change_shows(size: int) -> None:
    """Also where old ^ new has all bits set, and wherever the byte lies."""
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    before = bits(data)
    for place in {0, size // 2, size // 512 * 512 - 1, size - 1} - {-1}:
        for change in (1, 128, 255):
            data[place] ^= change
            assert bits(data) != before
            data[place] ^= change
    assert bits(data) == before


def test_a_word_and_its_complement_differ_at_every_place() -> None:
    words = torch.arange(130)
    complemented = torch.where(torch.eye(130, dtype=torch.bool), ~words, words)
    assert len({bits(row) for row in complemented} | {bits(words)}) == 131


@pytest.mark.parametrize("size", [512, 4096, 2**18])
@pytest.mark.parametrize("count", [2, 3])
def test_blocks_that_change_places_show(size: int, count: int) -> None:
    data = torch.randint(0, 256, (count, size), dtype=torch.uint8)
    assert len({bits(data), bits(data.roll(1, 0)), bits(data[[1, 0, *range(2, count)]])}) == (2 if count == 2 else 3)


def test_tensors_that_change_places_and_sizes_show() -> None:
    one, other = torch.arange(64), torch.arange(64) + 1
    zeros = [torch.zeros(n, dtype=torch.uint8) for n in (0, 1, 2, 512, 1024)]
    groups = [[one, other], [other, one], [one], [one, one], [torch.cat([one, other])], *([zero] for zero in zeros)]
    assert len(set(digests(groups).tolist())) == len(groups)


def test_digests_of_many_are_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large and small, stacked at once or a few at a time, at odd addresses, not contiguous, empty and 0-D."""
    large = torch.randn(300, 300)
    groups = [
        [large, torch.tensor(3.0)],
        [torch.arange(5, dtype=torch.int8), large.to(torch.bfloat16)],
        [torch.empty(0)],
        [torch.arange(700_001, dtype=torch.uint8)[1:], torch.ones(3, dtype=torch.bool)],
        [large.t()],
        [torch.zeros(2, 3, dtype=torch.complex64), large.to(torch.float8_e4m3fn)],
    ]
    expected = [bits(*group) for group in groups]
    assert digests(groups).tolist() == expected
    assert bits(large.t()) == bits(large.t().contiguous())
    images = torch.randn(4, 3, 2, 2)
    assert bits(images.to(memory_format=torch.channels_last)) == bits(images)
    assert bits(groups[3][0], groups[3][1]) == bits(groups[3][0].clone(), groups[3][1])
    monkeypatch.setattr("fsdp_hooks.kernels.digest.STACK", 1)
    assert digests(groups).tolist() == expected
    monkeypatch.setattr("fsdp_hooks.kernels.digest.EAGER", 2048)
    assert digests(groups).tolist() == expected


def test_compiled_digests_are_those_of_eager_ones() -> None:
    data = [torch.randint(-(2**63), 2**63 - 1, (64 * rows,)) for rows in (512, 700, 3, 5)]
    with use_kernels("eager"):
        expected = digests([data, data[:1], data[1:]])
    with use_kernels("compiled"):
        assert torch.equal(digests([data, data[:1], data[1:]]), expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float16, torch.bfloat16])
def test_autocast_changes_no_digest(dtype: torch.dtype) -> None:
    data = torch.randn(8, 8).abs().to(dtype)
    for tensors in ([data], [data, data.clone(), data.clone()]):  # equal ones are read together
        expected = digest(tensors)
        with torch.autocast("cpu"):
            assert torch.equal(digest(tensors), expected)


class Operations(TorchDispatchMode):
    """Counts them, and the bytes of the largest tensor that one of them makes."""

    count = largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.largest = max(self.largest, out.nbytes)
        return out


def test_no_copy_of_a_large_tensor_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_hooks.kernels.digest.EAGER", 4096)
    large = torch.randn(2**18)
    with use_kernels("eager"), Operations() as operations:
        digest([large])
    assert 0 < operations.largest <= 4096 * 8 < large.nbytes


def test_many_small_tensors_take_as_many_operations_as_a_few() -> None:
    counts = []
    for number in (5, 50):
        groups = [[torch.randn(8, 8), torch.randn(8, 8).to(torch.float8_e4m3fn)] for _ in range(number)]
        with Operations() as operations:
            digests(groups)
        counts.append(operations.count)
    assert counts[0] == counts[1] > 0


def test_digests_of_tensors_on_several_devices_come_to_the_first() -> None:
    """The other device is "meta", which computes nothing, and refuses to compute with tensors of the CPU."""
    groups = [[torch.zeros(8, dtype=torch.uint8, device=kind)] for kind in ("meta", "cpu", "meta")]
    found = digests([*groups, []])
    assert (found.device.type, found.shape) == ("meta", (4,))


# -- by one launch on a GPU; its values are compared in tests/gpu_offline/test_digest_launch.py ------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The places that were given to a launch, which takes those of the CPU and returns zeros."""
    seen: list[Any] = []

    def launched(places: Any, device: torch.device, stream: int) -> torch.Tensor:
        seen.append(places)
        return torch.zeros(len(places), dtype=torch.int64)

    take_place_of_launches(monkeypatch, launched)
    return seen


def take_place_of_launches(monkeypatch: pytest.MonkeyPatch, launched: Any) -> None:
    stub = types.SimpleNamespace(digests=launched)
    found = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: stub if "digest_triton" in name else found(name))
    monkeypatch.setattr(definition, "BY_HAND_ON", frozenset({"cpu"}))
    monkeypatch.setattr(definition, "_has_triton", lambda: True)
    monkeypatch.setattr(definition, "_stream_to_launch_on", lambda device: 0)
    monkeypatch.setattr(definition, "_launch_failed", set())
    monkeypatch.setattr(definition, "_proven", {torch.device("cpu")})
    monkeypatch.delitem(sys.modules, definition.BY_HAND, raising=False)


@pytest.mark.parametrize(
    ("mode", "size", "taken"),
    [("eager", 2**18, False), ("auto", 2**18 - 1, False), ("auto", 2**18, True), ("compiled", 1, True)],
)
def test_one_launch_is_taken_under_the_rules_of_kernels(
    launches: list[Any], mode: str, size: int, *, taken: bool
) -> None:
    with use_kernels(mode):
        digest([torch.zeros(size, dtype=torch.uint8)])
    assert len(launches) == taken


def test_what_is_compiled_already_serves_few_bytes_too(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, definition.BY_HAND, types.ModuleType("compiled"))
    with use_kernels("auto"):
        digest([torch.zeros(1, dtype=torch.uint8)])
    assert len(launches) == 1


def test_a_launch_reads_tensors_in_place_where_memory_holds_their_values(launches: list[Any]) -> None:
    numbers = torch.randn(4, 3, dtype=torch.complex64)
    param = nn.Parameter(torch.ones(2))
    with use_kernels("compiled"):
        digests([[numbers, param], [numbers.t(), numbers.conj(), numbers.conj().imag]])
    (((whole, held), copied),) = launches
    assert (whole, held) == ((numbers.data_ptr(), 96), (param.data_ptr(), 8))
    assert numbers.data_ptr() not in [address for address, _ in copied]
    assert [size for _, size in copied] == [96, 96, 48]


def test_nothing_fake_or_watched_is_launched(launches: list[Any]) -> None:
    with use_kernels("compiled"):
        digest([torch.ones(3).as_subclass(Strange)])
        with Operations():
            digest([torch.ones(3)])
    assert launches == []


class Strange(torch.Tensor):
    """Of another library."""


def test_no_launch_is_made_into_a_graph_that_is_captured(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "_stream_to_launch_on", lambda device: None)
    with use_kernels("compiled"):
        digest([torch.ones(3)])
    assert launches == []


def test_a_launch_that_fails_gives_way_to_the_definition_once(monkeypatch: pytest.MonkeyPatch) -> None:
    take_place_of_launches(monkeypatch, lambda *_: 1 // 0)
    large = torch.ones(2**18)
    with use_kernels("eager"):
        expected = digest([large])
    with use_kernels("auto"):
        with pytest.warns(UserWarning, match=r"failed \(ZeroDivisionError\).*same values, dozens of launches"):
            assert torch.equal(digest([large]), expected)
        assert torch.equal(digest([large]), expected)  # without a warning, which would be an error here
    with use_kernels("compiled"), pytest.raises(ZeroDivisionError):
        digest([large])


def test_memory_that_runs_out_is_no_failure_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any) -> None:
        raise torch.OutOfMemoryError

    take_place_of_launches(monkeypatch, exhausted)
    with use_kernels("auto"), pytest.raises(torch.OutOfMemoryError):
        digest([torch.ones(2**18)])
    assert definition._launch_failed == set()


def awkward_groups() -> list[list[torch.Tensor]]:
    """Odd addresses and sizes, narrow and wide blocks, several programs, views, nothing."""
    generator = torch.Generator().manual_seed(0)
    sizes = (0, 1, 9, 512, 65537, 2**18 - 1, 2**18, 3 * 2**18 + 5)
    data = [torch.randint(0, 256, (size + 8,), generator=generator, dtype=torch.uint8) for size in sizes]
    groups = [[each[offset : offset + size]] for each, size in zip(data, sizes, strict=True) for offset in (0, 1, 8)]
    return [*groups, [one for (one,) in groups], [], [data[-1][: 2**18].view(512, 512).t()]]


@pytest.mark.gpu
def test_digests_on_a_gpu_are_those_of_the_cpu() -> None:
    groups = awkward_groups()
    there = [[tensor.cuda() for tensor in group] for group in groups]
    shifted = [[torch.cat([one.new_zeros(3), one.reshape(-1)]).cuda()[3:] for one in group] for group in groups[:-1]]
    expected = digests(groups).tolist()
    with use_kernels("compiled"):
        assert digests(there).tolist() == expected
        assert digests(shifted).tolist() == expected[:-1]
    with use_kernels("eager"):
        assert digests(there).tolist() == expected


@pytest.mark.gpu
def test_digests_on_a_gpu_wait_for_nothing_and_follow_changes() -> None:
    tensors = [torch.arange(2**20, dtype=torch.int32, device="cuda"), torch.ones(77, device="cuda")]
    with use_kernels("compiled"):
        digest(tensors)  # compiles
        with told_of_waits("error"):
            digest(tensors[::-1])
            found = digest(tensors)
        assert int(found) == bits(*(tensor.cpu() for tensor in tensors))
        tensors[0].data = torch.zeros(2**20, dtype=torch.int32, device="cuda")
        assert int(digest(tensors)) == bits(*(tensor.cpu() for tensor in tensors))
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            assert int(digest(tensors)) == bits(*(tensor.cpu() for tensor in tensors))


@pytest.mark.gpu
def test_digests_on_a_gpu_reach_beyond_two_gigabytes() -> None:
    large = torch.zeros(2**31 + 12345, dtype=torch.uint8, device="cuda")
    large[-5:] = 3
    with use_kernels("compiled"):
        found = digest([large])
    with use_kernels("eager"):
        assert torch.equal(digest([large]), found)
