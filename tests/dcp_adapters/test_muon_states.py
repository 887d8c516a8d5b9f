"""Muon's states through torch's checkpoints: resharded, and between fp32 and compressed ones, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_optimizer_state_dict, set_state_dict

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from qtensor.optim.compressed.entries import expand
from tests.fsdp_hooks.test_muon import CASES, SMALL, assert_same, built, everything, optimizer_of, sharded, train
from tests.ranks import run_ranks, run_ranks_each

Held = dict[str, Tensor]
KINDS = [CASES[0], CASES[5], CASES[7]]  # MXFP8 with states in fp32, NVFP4 with small ones, bf16 with moments in bf16


def path_of(base: Path, case: Any) -> Path:
    return base / str(KINDS.index(case))


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optim": states}


def save(case: Any, base: Path) -> tuple[Held, Held]:
    """Returns what there is when it is saved, and two steps later."""
    name, storage, options = case
    model = sharded(built(name, storage), "fsdp")
    optimizer = optimizer_of(model, **options)
    train(model, optimizer, range(2))
    dcp.save(state_of(model, optimizer), checkpoint_id=path_of(base, case), planner=QuantizedSavePlanner())
    saved = everything(model, optimizer)
    train(model, optimizer, range(2, 4))
    return saved, everything(model, optimizer)


def go_on(number: int, base: Path, expected: list[tuple[Held, Held]]) -> None:
    case, (saved, later) = KINDS[number], expected[number]
    name, storage, options = case
    model = sharded(built(name, storage), "fsdp")
    optimizer = optimizer_of(model, **options)
    train(model, optimizer, range(7, 8))
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path_of(base, case), planner=QuantizedLoadPlanner())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert_same(everything(model, optimizer), saved, f"{case}, loaded")
    train(model, optimizer, range(2, 4))
    assert_same(everything(model, optimizer), later, f"{case}, trained on")


def test_training_goes_on_bit_for_bit_on_other_numbers_of_ranks(shared_tmp_path: Path) -> None:
    found = run_ranks_each(2, KINDS, save, shared_tmp_path)[0]
    for ranks in (3, 1):
        run_ranks_each(ranks, list(range(len(KINDS))), go_on, shared_tmp_path, found)


def loads_the_other_form(base: Path) -> None:
    """From 2 ranks' states: MXFP8's in fp32 into small ones, and these back."""
    saved = run_into(SMALL, base / "fp32", base / "small", {"masters": "fp32", "moments": "fp32"})
    for name, param in saved["model"].named_parameters():
        own = saved["optimizer"].state[param]
        assert own["momentum_buffer"].to_local().recipe is not None, name
    wide = run_into({}, base / "small", None, SMALL)
    for one, other in zip(saved["model"].parameters(), wide["model"].parameters(), strict=True):
        small, plain = saved["optimizer"].state[one], wide["optimizer"].state[other]
        momentum = expand({"momentum_buffer": small["momentum_buffer"].to_local()}, one.to_local())["momentum_buffer"]
        assert torch.equal(plain["momentum_buffer"].to_local(), momentum)
        assert plain["master_weight"].dtype == torch.float32
    train(wide["model"], wide["optimizer"], range(2, 3))


def run_into(options: dict[str, Any], source: Path, target: Path | None, form: dict[str, str]) -> dict[str, Any]:
    model = sharded(built("mxfp8"), "fsdp")
    optimizer = optimizer_of(model, **options)
    with optimizer.expecting_states(**form):
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=source, planner=QuantizedLoadPlanner())
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
    if target is not None:
        train(model, optimizer, range(2, 3))
        dcp.save(state_of(model, optimizer), checkpoint_id=target, planner=QuantizedSavePlanner())
    return {"model": model, "optimizer": optimizer}


def save_in_fp32(base: Path) -> None:
    model = sharded(built("mxfp8"), "fsdp")
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    dcp.save(state_of(model, optimizer), checkpoint_id=base / "fp32", planner=QuantizedSavePlanner())


def test_either_form_of_states_loads_the_other(shared_tmp_path: Path) -> None:
    run_ranks(2, save_in_fp32, shared_tmp_path)
    run_ranks(3, loads_the_other_form, shared_tmp_path)
