"""A step on compressed states that fails on one rank: all ranks hear of it, and a load mends what it left."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from qtensor.optim import inner_step
from tests.fsdp_hooks.cases import exchanged, shard
from tests.fsdp_hooks.test_compressed_states import assert_same, built, gradients, optimizer_of, tensors_of, train
from tests.optimizer_states import copied
from tests.ranks import run_ranks_each

STEP = "qtensor.optim.compressed.step"
NO_MEMORY = "OutOfMemoryError: no memory"
BROKEN = 1  # the rank


class Failing:
    """Counts calls, and fails in one of them."""

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == self.number:
            raise torch.OutOfMemoryError("no memory")


@contextmanager
def failing(optimizer: Any, where: str, number: int) -> Iterator[Failing]:
    """Inside, what is called `where` fails when it is called for the n-th time; 0: never."""
    fails = Failing(number)
    if where == "inner":
        handle = optimizer._inner.register_step_pre_hook(fails)
        yield fails
        handle.remove()
        return
    module = importlib.import_module(STEP)
    original: Callable[..., Any] = getattr(module, where)

    def called(*args: Any, **options: Any) -> Any:
        fails()
        return original(*args, **options)

    with patch.object(module, where, called):
        yield fails


def stepped(optimizer: Any) -> list[str]:
    """What each rank's step raises."""
    try:
        optimizer.step()
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    else:
        told = ""
    return exchanged(told)


def quantized_bytes(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Of all that is kept of quantized weights, without what counts steps."""
    held = tensors_of(model, optimizer)
    own = {name.split("|")[0] for name in held if "||scale" in name}
    return {name: value for name, value in held.items() if name.split("|")[0] in own and "|step|" not in name}


def breaks_and_is_mended(case: tuple[str, str, str, int, int]) -> None:
    """Of a recipe: what fails, before or behind the agreement, in which call (negative: from the last), by chunks."""
    name, where, when, number, elements = case
    with patch.dict(inner_step.CHUNK, {"cpu": elements}):
        model, twin = (shard(built(name, "quantized")) for _ in range(2))
        optimizer, its = optimizer_of(model), optimizer_of(twin)
        train(model, optimizer, range(2))
        weights, states = copied(model.state_dict()), copied(optimizer.state_dict())
        train(twin, its, range(2))
        with failing(its, where, 0) as counted:
            train(twin, its, range(2, 3))
        train(twin, its, range(3, 4))
        number = number if number > 0 else counted.calls + 1 + number
        assert 0 < number <= counted.calls, counted.calls
        before = quantized_bytes(model, optimizer)
        gradients(model, 2)
        with failing(optimizer, where, number if dist.get_rank() == BROKEN else 0):
            told = stepped(optimizer)
        assert told[BROKEN] == NO_MEMORY, told
        others = [text for rank, text in enumerate(told) if rank != BROKEN]
        if when == "before":
            assert all(
                text.startswith("RanksDifferError: MasterWeightOptimizer.step: rank 1 failed") for text in others
            )
            assert_same(quantized_bytes(model, optimizer), before, f"{case}: nothing quantized is written")
        else:
            assert others == [""] * len(others)
            # the others have written theirs, and hear of it before they write anything more
            halted = tensors_of(model, optimizer)
            gradients(model, 3)
            told = stepped(optimizer)
            assert told[BROKEN].startswith(
                "RuntimeError: MasterWeightOptimizer.step: an earlier step failed on this rank"
            )
            others = [text for rank, text in enumerate(told) if rank != BROKEN]
            assert all(
                text.startswith("RanksDifferError: MasterWeightOptimizer.step: rank 1 failed") for text in others
            )
            if dist.get_rank() == BROKEN:
                assert_same(tensors_of(model, optimizer), halted, f"{case}: it stands still")
            else:
                now = quantized_bytes(model, optimizer)
                assert_same(now, {key: halted[key] for key in now}, f"{case}: nothing more is written")
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        train(model, optimizer, range(2, 4))
        assert_same(tensors_of(model, optimizer), tensors_of(twin, its), f"{case}: trained on")


LARGE, SMALL_CHUNKS = 2**30, 100
CASES = [
    ("mxfp8", "inner", "before", 1, LARGE),
    ("nvfp4", "inner", "before", -1, LARGE),  # which all step before ranks agree
    ("mxfp8", "inner", "behind", -1, LARGE),
    ("nvfp4", "inner", "behind", -1, SMALL_CHUNKS),  # the second time that they step
    ("nvfp4", "claim_of", "before", -1, LARGE),
    ("mxfp8", "write_dense", "before", -1, LARGE),
    ("mxfp8", "compress", "behind", -1, LARGE),
    ("nvfp4", "write_master", "behind", -1, LARGE),
    ("mxfp8_square", "compress", "behind", -1, LARGE),
]


def test_a_rank_that_fails_in_a_step_stops_all_and_a_load_mends_them() -> None:
    run_ranks_each(2, CASES, breaks_and_is_mended)
