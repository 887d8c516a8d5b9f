"""Which calls may be replayed: those that made new tensors, and launched kernels over these and what was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from fsdp_hooks.kernels import replays
from fsdp_hooks.kernels.replays import Heard, Launch, Replay, attended, hear, listening, replay_of
from fsdp_hooks.torch_private import is_watched

Call = Callable[[Tensor, Tensor], Sequence[Tensor]]


class Doubling:
    """Stands for compiled code: writes twice the first tensor, times a number, into the second."""

    grids: ClassVar[list[tuple[int, ...]]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def run(first: Tensor, _: Tensor, into: Tensor, number: int, constant: int) -> None:
            self.grids.append(grid)
            into.view(-1).copy_(2 * number * constant * first.view(-1))

        return run


CODE = Doubling()
ELSEWHERE = torch.ones(32)


def launch(*args: Tensor) -> None:
    CODE[3, 1, 1](*args, 5, 7)
    hear(Launch(CODE, (3, 1, 1), (*args, 5), (7,)))


def plain(a: Tensor, b: Tensor) -> list[Tensor]:
    made = torch.empty(4, 8)
    launch(a.view(4, 8).to(torch.float32), b.expand(1).unsqueeze(0), made)
    return [made]


def heard(call: Call, a: Tensor, b: Tensor) -> tuple[Heard, Sequence[Tensor]]:
    with torch.no_grad(), listening() as found, attended():
        made = call(a, b)
    return found, made


def given() -> tuple[Tensor, Tensor]:
    return torch.arange(32.0), torch.ones(1)


@pytest.fixture(autouse=True)
def _launches_are_no_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the code does is none of the call's operations."""
    run = Doubling.__getitem__

    def unheard(self: Doubling, grid: tuple[int, int, int]) -> Callable[..., None]:
        def call(*args: object) -> None:
            with torch.utils._python_dispatch._disable_current_modes():
                run(self, grid)(*args)

        return call

    monkeypatch.setattr(Doubling, "__getitem__", unheard)


def test_a_replay_launches_the_same_over_new_memory() -> None:
    a, b = given()
    found, made = heard(plain, a, b)
    replay = replay_of(found, (a, b), made)
    assert isinstance(replay, Replay)
    again = replay.again((a + 1, b))
    assert again is not None
    assert torch.equal(again[0], (70 * (a + 1)).view(4, 8))
    assert torch.equal(made[0], (70 * a).view(4, 8))
    assert [(each.grid, each.rest) for each in replay.launches] == [((3, 1, 1), (5, 7))]


def in_two(a: Tensor, b: Tensor) -> list[Tensor]:
    between = torch.empty(32)
    launch(a, b, between)
    made = torch.empty(4, 8)
    launch(between, b, made)
    return [made]


def test_launches_are_made_again_in_their_order() -> None:
    """What is between them is new memory, too, and not returned."""
    a, b = given()
    found, made = heard(in_two, a, b)
    replay = replay_of(found, (a, b), made)
    assert replay is not None
    again = replay.again((a + 1, b))
    assert again is not None
    assert len(again) == 1
    assert torch.equal(again[0], (70 * 70 * (a + 1)).view(4, 8))
    assert torch.equal(made[0], (70 * 70 * a).view(4, 8))


def test_memory_that_a_call_gives_back_is_not_taken_for_that_of_the_next() -> None:
    """An allocator hands the same address out again: the second launch may read what the first one wrote, or not."""
    addresses = []

    def reused(a: Tensor, b: Tensor) -> list[Tensor]:
        for _ in range(2):
            between = torch.empty(32)
            launch(a, b, between)
            addresses.append(between.data_ptr())
            del between
        made = torch.empty(4, 8)
        launch(a, b, made)
        return [made]

    a, b = given()
    found, made = heard(reused, a, b)
    assert len({*addresses}) == 2
    replay = replay_of(found, (a, b), made)
    assert replay is not None
    assert len(replay.made) == 3


def filled(a: Tensor, b: Tensor) -> list[Tensor]:
    made = torch.zeros(4, 8)
    launch(a, b, made)
    return [made]


def copied(a: Tensor, b: Tensor) -> list[Tensor]:
    made = torch.empty(4, 8)
    launch(a.clone(), b, made)
    return [made]


def from_elsewhere(a: Tensor, b: Tensor) -> list[Tensor]:
    made = torch.empty(4, 8)
    launch(a, b, made)
    launch(ELSEWHERE, b, made)
    return [made]


def through_another(a: Tensor, b: Tensor) -> list[Tensor]:
    launch(a, b, torch.empty(4, 8))
    return [torch.empty(4, 8)]


def never(a: Tensor, b: Tensor) -> list[Tensor]:
    return [torch.empty(4, 8)]


def unknown(a: Tensor, b: Tensor) -> list[Tensor]:
    made = plain(a, b)
    hear(None)
    return made


def a_piece(a: Tensor, b: Tensor) -> list[Tensor]:
    made = torch.empty(5, 8)
    launch(a, b, made[:4])
    return [made]


@pytest.mark.parametrize("call", [filled, copied, from_elsewhere, through_another, never, unknown, a_piece])
def test_what_does_more_is_not_kept(call: Call) -> None:
    a, b = given()
    found, made = heard(call, a, b)
    assert replay_of(found, (a, b), made) is None


def of_both(a: Tensor, b: Tensor) -> list[Tensor]:
    made = torch.empty(4, 8)
    launch(a, b, made)
    return [made]


def test_tensors_that_share_memory_are_not_kept() -> None:
    """Which of them a launch was given, nobody could tell."""
    a = torch.arange(32.0)
    one, other = a, a.clone()
    found, made = heard(of_both, one, other)
    assert replay_of(found, (one, other), made) is not None
    found, made = heard(of_both, a, a.view(4, 8))
    assert replay_of(found, (a, a.view(4, 8)), made) is None


def test_code_written_by_hand_is_watched_alone() -> None:
    """torch.compile, which takes its place where it fails, would compile nothing that is."""
    with listening() as found:
        with attended():
            assert is_watched()
        assert not is_watched()
    with attended():
        assert not is_watched()
    assert not found.launches


def test_nobody_listens_behind_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as outer:
        with listening() as inner:
            launch(torch.ones(1), torch.ones(1), torch.empty(1))
        hear(None)
    assert (len(inner.launches), inner.others, len(outer.launches), outer.others) == (1, False, 0, True)
    hear(None)
    assert getattr(replays._hearing, "heard", None) is None


def test_new_memory_that_is_not_aligned_is_not_launched_over(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = given()
    found, made = heard(plain, a, b)
    replay = replay_of(found, (a, b), made)
    assert replay is not None
    odd = torch.empty(33)[1:].view(4, 8)
    monkeypatch.setattr(torch, "empty", lambda *args, **options: odd)
    launched = len(CODE.grids)
    assert replay.again((a, b)) is None
    assert len(CODE.grids) == launched
