"""Reductions of tensors that their group cannot reach: weights offloaded to the CPU, ranks that talk by GPUs alone."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_hooks import scale_sync
from fsdp_hooks.ranks import across_ranks, gathering
from fsdp_hooks.scale_sync import sum_over_groups
from tests.ranks import run_ranks


def test_a_tensor_that_the_group_cannot_reduce_travels_to_its_device_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def reduce(tensor: torch.Tensor, **_: object) -> None:
        seen.append(tensor.device.type)

    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", reduce)
    with FakeTensorMode():
        offloaded, there = torch.ones(4, device="cpu"), torch.ones(4, device="cuda")
        across_ranks.all_reduce(offloaded, dist.ReduceOp.MAX, None)
        across_ranks.all_reduce(there, dist.ReduceOp.MAX, None)
    assert seen == ["cuda", "cuda"]
    assert offloaded.device.type == "cpu"


def test_a_tensor_that_the_group_can_reduce_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: seen.append(tensor))
    tensor = torch.ones(4)
    across_ranks.all_reduce(tensor, dist.ReduceOp.SUM, None)
    assert seen[0] is tensor


def _checks_what_ranks_hold() -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    for value in (0, -(1 << 62), 1 << 62):
        across_ranks.check_same(world, torch.tensor(value), "never")
        with pytest.raises(RuntimeError, match="ranks differ"):
            across_ranks.check_same(world, torch.tensor(value + (rank == 1)), "ranks differ")
    across_ranks.check_same(None, torch.tensor(rank), "never: there is nobody to compare with")


def test_ranks_that_hold_different_values_all_raise() -> None:
    run_ranks(3, _checks_what_ranks_hold)


@pytest.mark.parametrize(
    ("backends", "expected"), [("cuda:nccl", "meta"), ("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo", "cpu")]
)
def test_shards_are_gathered_from_where_they_are_if_the_group_reaches_it(
    backends: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = object()
    monkeypatch.setattr(dist, "get_backend_config", lambda asked: backends if asked is group else "")
    monkeypatch.setattr(gathering, "device_of", lambda asked: torch.device("meta" if asked is group else "cpu"))
    assert gathering._device(torch.zeros(1), group).type == expected


def test_values_of_several_devices_are_summed_in_one_message_and_each_stays_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a model of which only some groups are offloaded."""
    seen = []
    monkeypatch.setattr(scale_sync, "all_reduce", lambda total, *_: seen.append((total.device.type, total.shape)))
    group: Any = object()
    values = [torch.ones(3, device="meta"), torch.ones(2, device="cpu")]
    with pytest.raises(NotImplementedError, match="meta"):  # the way back: "meta" has nothing to copy
        sum_over_groups([("a",), ("b",)], values, [[group], [group]])
    assert seen == [("meta", (5,))]


def _fails(rank: int) -> None:
    if dist.get_rank() == rank:
        raise LookupError("nothing there")


def _steps(failing: int) -> list[str]:
    """What is shown of an error of one rank, for each way to run a step."""
    shown = []
    ways: list[Callable[[], object]] = [lambda: across_ranks.on_all(dist.group.WORLD, lambda: _fails(failing))]
    if failing == 0:
        ways.append(lambda: across_ranks.on_first(dist.group.WORLD, lambda: _fails(failing)))
    ways.append(lambda: _together(failing))
    for way in ways:
        try:
            way()
        except Exception as error:
            shown.append("".join(traceback.format_exception(error)))
    assert len(shown) == len(ways)
    return shown


def _together(failing: int) -> None:
    with across_ranks.raise_together(dist.group.WORLD):
        _fails(failing)


@pytest.mark.parametrize("failing", [0, 1])
def test_every_rank_shows_where_an_error_of_one_rank_was_raised(failing: int) -> None:
    for rank, shown in enumerate(run_ranks(3, _steps, failing)):
        for text in shown:
            assert "LookupError: nothing there" in text
            assert 'raise LookupError("nothing there")' in text  # the line, and so the place
            assert (f"ElsewhereError: on rank {failing}:" in text) is (rank != failing)


class _NoTextError(Exception):
    """Fails to make its text, as classes do whose constructor was not called."""

    def __str__(self) -> str:
        raise AttributeError("message")


def _fails_without_a_text() -> list[str]:
    def step() -> None:
        if dist.get_rank() == 0:
            error = _NoTextError()
            error.add_note("a note")
            raise error

    shown = []
    for way in (across_ranks.on_all, across_ranks.on_first):
        with pytest.raises(RuntimeError) as caught:
            way(dist.group.WORLD, step)
        shown.append(str(caught.value))
    kind = _NoTextError if dist.get_rank() == 0 else RuntimeError
    with pytest.raises(kind) as raised, across_ranks.raise_together(dist.group.WORLD):
        step()
    return [*shown, "its own" if kind is _NoTextError else str(raised.value)]


def test_an_error_without_a_text_reaches_all_ranks() -> None:
    text = "_NoTextError: (its class has no text for it)"
    for rank, shown in enumerate(run_ranks(2, _fails_without_a_text)):
        assert shown == [f"rank 0: {text}", text, f"rank 0: {text} (a note)" if rank else "its own"]


def _own_error(text: str) -> None:
    raise ValueError(f"{text} of rank {dist.get_rank()}")


def _all_fail() -> str:
    with pytest.raises(ValueError, match=r"^rank 0: trouble of rank 0$") as caught:
        across_ranks.on_all(dist.group.WORLD, lambda: _own_error("trouble"))
    return "".join(traceback.format_exception(caught.value))


def test_where_several_ranks_fail_each_shows_its_own_error_too() -> None:
    for rank, text in enumerate(run_ranks(2, _all_fail)):
        assert f"ValueError: trouble of rank {rank}" in text
        assert ("on rank 0:" in text) is (rank != 0)


def test_of_a_long_traceback_the_end_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across_ranks, "LONGEST", 12)
    assert across_ranks.trace_of(ValueError("the end")) == "[..]ror: the end"
