"""States in host memory under FSDP2 and HSDP: every rank holds the bytes of states on the device."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from qtensor import Float8DelayedScaling
from qtensor.optim import inner_step
from tests.fsdp_hooks.cases import Collectives, mesh_of, shard
from tests.fsdp_hooks.test_compressed_states import (
    CASES,
    RECIPES,
    ROWS,
    assert_same,
    build,
    built,
    gradients,
    local,
    optimizer_of,
    tensors_of,
    train,
)
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each

FORMS: list[dict[str, Any]] = [
    {"masters": "remainder", "moments": "float8"},
    {"masters": "fp32", "moments": "float8"},
    {"masters": "fp32", "moments": "fp32"},
]


def model_of(case: tuple[str | None, str]) -> Any:
    delayed = case[0] == "float8_delayed"  # which has masters in fp32 alone
    return shard(build(Float8DelayedScaling(), ROWS) if delayed else built(*case))


def steps_alike(case: tuple[str | None, str], options: dict[str, Any], elements: int) -> None:
    """With and without gradients on all ranks, of chunks of so many elements."""
    pairs = []
    for states in ("device", "host"):
        model = model_of(case)
        pairs.append((model, optimizer_of(model, states=states, **options)))
    counts = []
    for step in range(4):
        for number, (model, optimizer) in enumerate(pairs):
            gradients(model, step)
            if step == 2 and dist.get_rank() == 1:
                optimizer.zero_grad()
            if step == 3:
                next(iter(model.parameters())).requires_grad_(False)
            with patch.dict(inner_step.CHUNK, {"cpu": elements if number else 2**22}), Collectives() as comms:
                optimizer.step()
            counts.append(dict(comms.counts))
        assert counts[-1] == counts[-2]
        assert_same(tensors_of(*pairs[1]), tensors_of(*pairs[0]), f"{case}, {options}, step {step}")
    for param, own in pairs[1][1].state.items():
        for value in own.values():
            assert not isinstance(param, DTensor) or value.ndim == 0 or isinstance(value, DTensor)
            assert local(value).device.type == "cpu"


@pytest.mark.parametrize("options", FORMS, ids=["small", "half", "wide"])
def test_every_rank_holds_what_it_holds_with_states_on_the_device(options: dict[str, Any]) -> None:
    more = [("float8_delayed", "quantized")] if options["masters"] == "fp32" else []
    run_ranks_each(2, [*CASES, *more], steps_alike, options, 2**22)


@pytest.mark.parametrize("options", [FORMS[0], FORMS[2]], ids=["small", "wide"])
def test_so_do_empty_shards_and_chunks_of_a_weight(options: dict[str, Any]) -> None:
    run_ranks_each(4, [CASES[1], CASES[2], CASES[-1]], steps_alike, options, 1)


def replicas_alike(options: dict[str, Any]) -> None:
    found = []
    for states in ("device", "host"):
        model = shard(built("nvfp4", "quantized"), mesh=mesh_of(2, 2))
        optimizer = optimizer_of(model, states=states, check_replicas=True, **options)
        train(model, optimizer)
        found.append(tensors_of(model, optimizer))
    assert_same(found[1], found[0], str(options))


def test_replicas_are_compared_as_ever() -> None:
    run_ranks_each(4, [FORMS[0], FORMS[2]], replicas_alike)


def fails_on_one_rank(options: dict[str, Any]) -> None:
    model = shard(build(RECIPES["nvfp4"], (96, 32)))
    optimizer = optimizer_of(model, states="host", **options)
    train(model, optimizer, range(1))
    before = {key: value for key, value in tensors_of(model, optimizer).items() if "step" not in key}

    def fails(*_: Any) -> None:
        raise FloatingPointError("no such step")

    if dist.get_rank() == 1:
        assert optimizer._inner is not None
        optimizer._inner.register_step_pre_hook(fails)
    try:
        train(model, optimizer, range(1, 2))
    finally:
        now = tensors_of(model, optimizer)
        own = [key for key in before if "linear.weight|" in key or dist.get_rank() == 1]
        assert any("master" in key for key in own)
        assert all(torch.equal(now[key], before[key]) for key in own)


@pytest.mark.parametrize("options", [FORMS[0], FORMS[2]], ids=["small", "wide"])
def test_a_rank_that_fails_tells_the_others_and_nothing_quantized_moves(options: dict[str, Any]) -> None:
    """Not even masters in fp32, which on the device have moved by then: copies have, and are not sent home."""
    found = run_ranks_catching(2, fails_on_one_rank, options)
    assert found[1] == "FloatingPointError: no such step"
    assert found[0].startswith("RanksDifferError: MasterWeightOptimizer.step: rank 1 failed"), found[0]


def test_ranks_are_told_of_a_form_that_is_refused() -> None:
    for message in run_ranks_catching(2, refused):
        assert "ValueError: MasterWeightOptimizer(states='disk'): expected one of 'device', 'host'" in message


def refused() -> None:
    optimizer_of(shard(built("mxfp8", "quantized")), states="disk")


def written_outside(options: dict[str, Any]) -> None:
    found = []
    for states in ("device", "host"):
        model = shard(built("mxfp8", "quantized"))
        optimizer = optimizer_of(model, states=states, **options)
        train(model, optimizer)
        other = shard(built("mxfp8", "quantized"))
        model.load_state_dict(other.state_dict())
        train(model, optimizer, range(5, 7))
        found.append(tensors_of(model, optimizer))
    assert_same(found[1], found[0], str(options))


def test_masters_begin_anew_where_others_wrote_weights() -> None:
    run_ranks(2, written_outside, FORMS[0])
    run_ranks(2, written_outside, FORMS[2])
