"""A rank that waits for others says for whom, once; calls that all ranks come to say nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dcp_adapters import HeldVersion, WeightStream, digest, export_hf, import_hf
from fsdp_hooks.ranks import waiting
from fsdp_hooks.ranks.across_ranks import ALONE, chosen_ranks, global_ranks, rank_of, ranks_of
from layerwise import calibrate
from qtensor import MXFP8BlockScaling, quantize_
from tests.ranks import run_ranks, run_ranks_each
from tests.sampling import halves

NOTED, TOLD, LATE = 0.05, 0.6, 1.6


@contextmanager
def soon(told_after: float = TOLD) -> Iterator[list[str]]:
    """The same in less time; the list gets what is logged."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    before = waiting.NOTED, waiting.TOLD
    waiting.NOTED, waiting.TOLD = NOTED, told_after
    waiting.LOG.addHandler(handler)
    try:
        yield told
    finally:
        waiting.NOTED, waiting.TOLD = before
        waiting.LOG.removeHandler(handler)


def linear() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))
    quantize_(model, MXFP8BlockScaling())
    return model


CALLS: dict[str, Callable[[Any, Path], object]] = {
    "digest": lambda model, _: digest(model),
    "export_hf": lambda model, directory: export_hf(model, directory / "out"),
    "WeightStream": lambda model, _: WeightStream(model),
    "HeldVersion": lambda model, _: HeldVersion(model.state_dict()),
    "import_hf": lambda model, directory: import_hf(directory / "out", model),
    "calibrate": lambda model, _: calibrate(model, None, recipe=MXFP8BlockScaling(), layers=(), progress=False),
}


def comes_late(name: str, directory: Path) -> list[str]:
    model = linear()
    with soon() as told:
        if dist.get_rank() == 1:
            time.sleep(LATE)
        CALLS[name](model, directory)
    return told


@halves("names", CALLS, ("digest", "export_hf", "import_hf"))
def test_who_is_waited_for_is_said_once(names: tuple[str, ...], shared_tmp_path: Path) -> None:
    waits, late = run_ranks_each(2, names, comes_late, shared_tmp_path)
    for name, (text,), nothing in zip(names, waits, late, strict=True):
        assert text.startswith(f"{name}: rank 0 waits since 1 s for rank 1 to call it: all ranks of the group call it")
        assert nothing == []


def comes_in_time(directory: Path) -> list[str]:
    with soon(20 * TOLD) as told:  # a loaded machine may keep one of them back for longer than TOLD
        for name in ("digest", "WeightStream"):
            CALLS[name](linear(), directory)
            dist.barrier()
    return told


def test_nothing_is_said_where_all_come(shared_tmp_path: Path) -> None:
    assert run_ranks(2, comes_in_time, shared_tmp_path) == [[], []]


class Clock(threading.Event):
    """An event that nobody sets, and whose time goes by at once; it is the store, too, in which rank 1 notes itself."""

    def __init__(self, noted: float) -> None:
        super().__init__()
        self.now, self.noted = 0.0, noted

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        return timeout is None

    def get_group_store(self) -> Clock:
        return self

    def set(self, *_: str) -> None:
        """Rank 0 notes itself."""

    def check(self, keys: list[str]) -> bool:
        return keys == ["waited_for/it/0"] or self.now >= self.noted


@pytest.mark.parametrize(("came", "told"), [(0.99, False), (1.99, True)])
def test_who_came_before_the_warning_is_not_named(came: float, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank notes itself some time after it came; seconds are parts of TOLD."""
    monkeypatch.setattr(waiting, "global_ranks", lambda _: [0, 1])
    clock = Clock(came * waiting.TOLD + waiting.NOTED)
    said: list[str] = []
    monkeypatch.setattr(waiting.LOG, "warning", lambda text, *args: said.append(text % args))
    waiting._watch(clock, clock, "it", "come")  # type: ignore[arg-type]
    assert said == (["it: rank 0 waits since 10 s for rank 1 to call it: come"] if told else [])


def in_a_group() -> list[str]:
    group = dist.new_group([1, 2])
    with soon() as told:
        if dist.get_rank():
            time.sleep(LATE * (dist.get_rank() - 1))
            digest(linear(), group=group)
        else:
            with pytest.raises(ValueError, match="digest: this rank is not in the group that was given; call it on"):
                digest(linear(), group=group)
    dist.barrier()
    return told


def test_ranks_are_named_by_their_global_numbers() -> None:
    nothing, (text,), none = run_ranks(3, in_a_group)
    assert text.startswith("digest: rank 1 waits since 1 s for rank 2 to call it")
    assert nothing == none == []


def names_ranks() -> None:
    assert chosen_ranks("it", None, no_dist=False) is None
    alone = chosen_ranks("it", None, no_dist=True)
    assert alone is ALONE
    assert (ranks_of(alone), rank_of(alone), global_ranks(alone)) == (1, 0, [dist.get_rank()])
    with pytest.raises(ValueError, match="it: no_dist=True is for this process alone, and there is a group"):
        chosen_ranks("it", dist.group.WORLD, no_dist=True)


def test_ranks_are_those_of_the_arguments() -> None:
    run_ranks(2, names_ranks)
