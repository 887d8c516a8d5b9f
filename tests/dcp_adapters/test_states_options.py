"""Every option of torch's StateDictOptions with compressed states: they come back whole, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp_state
from torch.distributed.checkpoint.state_dict import StateDictOptions

from qtensor import Float8CurrentScaling, quantize
from tests.fsdp_hooks.cases import shard
from tests.fsdp_hooks.test_compressed_states import assert_same, built, optimizer_of, tensors_of, train
from tests.optimizer_states import assert_same_model, assert_same_state, bytes_of, copied
from tests.qtensor import test_compressed_states as alone
from tests.ranks import run_ranks, run_ranks_catching

FULL = {"full_state_dict": True}
FROM_RANK_0 = FULL | {"broadcast_from_rank0": True}
FLAT = {"flatten_optimizer_state_dict": True}

# what the state is taken with, and whether a weight is frozen
TAKEN: dict[str, tuple[dict[str, Any], bool]] = {
    "nothing": ({}, False),
    "ignore_frozen_params": ({"ignore_frozen_params": True, "strict": False}, True),
    "ignore_frozen_params, flat": ({"ignore_frozen_params": True, "strict": False} | FLAT, True),
    "frozen": ({}, True),
    "frozen, flat": (FLAT, True),
    "keep_submodule_prefixes": ({"keep_submodule_prefixes": False}, False),
    "strict": ({"strict": False}, False),
    "cpu_offload": ({"cpu_offload": True}, False),
    "cpu_offload, flat": ({"cpu_offload": True} | FLAT, False),
    "full": (FULL, False),
    "full, cpu_offload": (FULL | {"cpu_offload": True}, False),
}


def _step(model: Any, optimizer: Any, step: int) -> None:
    alone.gradients(model, step)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", TAKEN)
def test_states_taken_with_any_option_come_back_whole(name: str) -> None:
    given, frozen = TAKEN[name]
    options = StateDictOptions(**given)
    models = [alone.Model() for _ in range(2)]
    for model in models:
        model.b.requires_grad_(not frozen)
    (model, other), optimizers = models, [alone.optimizer_of(model) for model in models]
    optimizer, its = optimizers
    for step in range(2):
        _step(model, optimizer, step)
    taken = copied(dcp_state.get_state_dict(model, optimizer, options=options))
    _step(other, its, 9)
    dcp_state.set_state_dict(other, its, model_state_dict=taken[0], optim_state_dict=taken[1], options=options)
    for step in (2, 3):
        assert_same_model(other, bytes_of(model), name)
        # torch's whole states have lists in the place of tuples
        assert_same_state(alone.state_of(its)["state"], alone.state_of(optimizer)["state"], name)
        for net, each in ((model, optimizer), (other, its)):
            _step(net, each, step)
    assert_same_model(other, bytes_of(model), f"{name}, trained on")
    assert (not optimizer.state.get(model.b)) == frozen


def _trained(form: dict[str, Any]) -> tuple[Any, Any]:
    model = shard(built("mxfp8", "quantized"))
    optimizer = optimizer_of(model, **form)
    train(model, optimizer, range(2))
    return model, optimizer


def comes_from_rank_0(form: dict[str, Any], into: dict[str, Any]) -> None:
    model, optimizer = _trained(form)
    full = copied(dcp_state.get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**FULL)))
    other, its = _trained(form)
    train(other, its, range(5, 6))
    other.load_state_dict(copied(model.state_dict()))
    given = full if dist.get_rank() == 0 or "broadcast_from_rank0" not in into else {}
    dcp_state.set_optimizer_state_dict(other, its, given, options=StateDictOptions(**into))
    assert_same(tensors_of(other, its), tensors_of(model, optimizer), "loaded")
    for net, each in ((model, optimizer), (other, its)):
        train(net, each, range(2, 4))
    assert_same(tensors_of(other, its), tensors_of(model, optimizer), "trained on")


@pytest.mark.parametrize("moments", ["bfloat16", "fp32"])
def test_remainders_come_from_rank_0(moments: str) -> None:
    run_ranks(2, comes_from_rank_0, {"moments": moments}, FROM_RANK_0)


def test_whole_moments_in_8_bits_come_back_on_every_rank() -> None:
    run_ranks(2, comes_from_rank_0, {}, FULL)


def refuses_to_broadcast() -> None:
    comes_from_rank_0({}, FROM_RANK_0)


def test_moments_in_8_bits_are_not_broadcast_as_if_they_were_dense() -> None:
    (error,) = run_ranks_catching(1, refuses_to_broadcast)  # others would wait for what rank 0 never sends
    assert "With broadcast_from_rank0=True: give every rank the full state dict and leave that option off" in error


# -- a state dict is held on to, loaded twice, or is another's ---------------------------------------------------------


def test_a_state_dict_aliases_what_is_trained_and_loads_more_than_once() -> None:
    model, optimizer = alone.trained()
    state, weights, before = optimizer.state_dict(), copied(model.state_dict()), bytes_of(model)
    kept = copied(state)
    for _ in range(2):
        other, its = alone.trained()
        _step(other, its, 5)
        other.load_state_dict(weights)
        for _ in range(2):
            its.load_state_dict(copied(state))
        assert_same_state(alone.state_of(its), kept, "loaded twice")
        assert_same_model(other, before, "loaded twice")
    _step(model, optimizer, 2)
    # as torch's own: who wants to keep it copies it
    live = optimizer.state_dict()["state"]
    for number, entries in state["state"].items():
        for name, value in entries.items():
            assert name == "master_recipe" or value is live[number][name], name
    _step(other, its, 2)
    assert_same_model(other, bytes_of(model), "trained on")


def test_an_optimizer_loads_its_own_state_dict() -> None:
    (model, optimizer), (other, its) = alone.trained(), alone.trained()
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same_state(alone.state_of(optimizer), alone.state_of(its), "loaded")
    for net, each in ((model, optimizer), (other, its)):
        _step(net, each, 2)
    assert_same_model(model, bytes_of(other), "trained on")


def test_a_tensor_that_was_loaded_is_not_written_by_steps() -> None:
    """But for counters of steps, which torch's optimizers take as they are."""
    _, source = alone.trained()
    state = copied(source.state_dict())
    kept = copied(state)
    model, optimizer = alone.trained()
    optimizer.load_state_dict(state)
    _step(model, optimizer, 2)
    for entries in (*state["state"].values(), *kept["state"].values()):
        entries.pop("step")
    assert_same_state(state["state"], kept["state"], "what was loaded")


def _without_a_parameter(state: dict[str, Any]) -> None:
    first = next(iter(state["state"]))
    del state["state"][first]
    state["param_groups"][0]["params"].remove(first)


def _with_another(state: dict[str, Any]) -> None:
    first = next(iter(state["state"]))
    other = 99 if isinstance(first, int) else "more.weight"
    state["state"][other] = state["state"][first]
    state["param_groups"][0]["params"].append(other)


def _without_a_state(state: dict[str, Any]) -> None:
    del state["state"][next(iter(state["state"]))]


@pytest.mark.parametrize(
    ("form", "damage"),
    [
        ("torch", _without_a_parameter),
        ("torch", _with_another),
        ("nested", _without_a_parameter),
        ("nested", _without_a_state),
    ],
)
def test_a_state_dict_of_other_parameters_is_refused_and_nothing_is_lost(form: str, damage: Any) -> None:
    model, optimizer = alone.trained()
    state = alone.get(form, model, optimizer)
    damage(state)
    _step(model, optimizer, 2)
    before, states = bytes_of(model), alone.state_of(optimizer)
    with pytest.raises((ValueError, RuntimeError), match=r"load_state_dict: state|match the size|Missing"):
        alone.put(form, model, optimizer, state)
    assert_same_model(model, before, "refused")
    assert_same_state(alone.state_of(optimizer), states, "refused")
    other, its = alone.trained()
    _step(other, its, 2)
    for net, each in ((model, optimizer), (other, its)):
        _step(net, each, 3)
    assert_same_model(model, bytes_of(other), "trained on")


def test_a_parameter_without_a_saved_state_starts_anew() -> None:
    model, optimizer = alone.trained()
    state = alone.state_of(optimizer)
    number = [name for name, _ in model.named_parameters()].index("a.weight")
    del state["state"][number]
    other, its = alone.trained()
    other.load_state_dict(model.state_dict())
    its.load_state_dict(state)
    assert number not in its.state_dict()["state"]
    _step(other, its, 2)
    assert its.state[other.a.weight]["step"] == 1
    assert its.state[other.b]["step"] == 3
    alone.assert_bytes_say_masters(other, its, "a step later")


@pytest.mark.parametrize(
    "kept", [torch.float32, torch.bfloat16, Float8CurrentScaling()], ids=["fp32", "bf16", "float8"]
)
def test_roots_that_were_converted_on_disk_are_squared(kept: Any) -> None:
    """Whatever they are stored in: the name says what they are."""
    model, optimizer = alone.trained()
    state = alone.state_of(optimizer)
    number = [name for name, _ in model.named_parameters()].index("a.weight")
    root = state["state"][number]["exp_avg_sq_root"].dequantize(torch.float32)
    stored = root.to(kept) if isinstance(kept, torch.dtype) else quantize(root, kept)
    state["state"][number]["exp_avg_sq_root"] = stored
    wide = alone.in_fp32(model)
    wide.load_state_dict(state)
    values = stored.to(torch.float32) if isinstance(kept, torch.dtype) else stored.dequantize(torch.float32)
    assert torch.equal(wide.state[model.a.weight]["exp_avg_sq"], values * values)
    optimizer.load_state_dict(state)
    torch.testing.assert_close(
        optimizer.state[model.a.weight]["exp_avg_sq_root"].dequantize(torch.float32), root, rtol=2.0**-3, atol=2.0**-9
    )
