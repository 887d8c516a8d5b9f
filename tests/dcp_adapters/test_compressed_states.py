"""Compressed states through torch's checkpoints: resharded, saved in the background, and trained on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from tests.fsdp_hooks.cases import RECIPES, Net, build, exchanged, shard
from tests.fsdp_hooks.test_compressed_states import CASES, ROWS, assert_same, built, optimizer_of, train, whole
from tests.optimizer_states import copied
from tests.ranks import own_group, run_ranks, run_ranks_each
from tests.sampling import sampled

Held = dict[str, Any]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
NESTED = StateDictOptions()
WAYS = {"nested": NESTED, "flattened": FLAT}


def state_of(model: nn.Module, optimizer: Any, way: str) -> dict[str, Any]:
    weights, states = get_state_dict(model, optimizer, options=WAYS[way])
    return {"model": weights, "optim": states}


def load(model: nn.Module, optimizer: Any, way: str, path: Path) -> None:
    state = state_of(model, optimizer, way)
    dcp.load(state, checkpoint_id=path, planner=QuantizedLoadPlanner())
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=WAYS[way]
    )


def path_of(base: Path, case: tuple[str | None, str]) -> Path:
    return base / "_".join(map(str, case))


def save(case: tuple[str | None, str], base: Path, way: str) -> tuple[Held, Held]:
    """Returns what there is when it is saved, and two steps later."""
    model = shard(built(*case))
    optimizer = optimizer_of(model)
    train(model, optimizer)
    dcp.save(state_of(model, optimizer, way), checkpoint_id=path_of(base, case), planner=QuantizedSavePlanner())
    saved = whole(model, optimizer)
    train(model, optimizer, range(3, 5))
    return saved, whole(model, optimizer)


def go_on(number: int, cases: list[Any], base: Path, way: str, expected: list[tuple[Held, Held]]) -> None:
    case, (saved, later) = cases[number], expected[number]
    model = shard(built(*case))
    optimizer = optimizer_of(model)
    train(model, optimizer, range(7, 8))
    load(model, optimizer, way, path_of(base, case))
    assert_same(whole(model, optimizer), saved, f"{case}, loaded")
    train(model, optimizer, range(3, 5))
    assert_same(whole(model, optimizer), later, f"{case}, trained on")


@sampled(
    ("ranks", "way"),
    [((2, 3), "nested"), ((3, 1), "flattened"), ((2, 3), "flattened"), ((3, 1), "nested"), ((4, 2), "nested")],
    [((2, 3), "nested"), ((3, 1), "flattened")],
)
def test_training_goes_on_bit_for_bit_on_other_numbers_of_ranks(
    ranks: tuple[int, int], way: str, shared_tmp_path: Path
) -> None:
    cases = [CASES[1], CASES[2], CASES[-1]]
    first, second = ranks
    found = run_ranks_each(first, cases, save, shared_tmp_path, way)
    run_ranks_each(second, range(len(cases)), go_on, cases, shared_tmp_path, way, found[0])


def whole_in_memory(
    case: tuple[str | None, str], places: tuple[str, str] = ("device", "device"), own: dict[str, Any] | None = None
) -> None:
    """Full state dicts, on every rank or on the CPU of the first; torch itself cannot load flattened ones.

    `places`: where the states are that are saved, and those that they are loaded into; `own`: what they are kept in.
    """
    own = own or {}
    model = shard(built(*case))
    optimizer = optimizer_of(model, states=places[0], **own)
    train(model, optimizer)
    saved = whole(model, optimizer)
    fulls = []
    for options in (
        StateDictOptions(full_state_dict=True),
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        StateDictOptions(cpu_offload=True),
    ):
        # torch gives the very tensors of steps, which go on counting
        fulls.append((options, copied(get_optimizer_state_dict(model, optimizer, options=options))))
        assert_same(whole(model, optimizer), saved, "asked for its state")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, range(3, 5))
    later = whole(model, optimizer)
    for options, full in fulls:
        other = shard(built(*case))
        again = optimizer_of(other, states=places[1], **own)
        other.load_state_dict(weights)
        everywhere = full
        if options.full_state_dict:
            options.cpu_offload = False
            everywhere = exchanged(full)[0]  # the first rank alone has what was offloaded
        set_optimizer_state_dict(other, again, everywhere, options=options)
        assert_same(whole(other, again), saved, f"{case}, {places}, {options}")
        train(other, again, range(3, 5))
        assert_same(whole(other, again), later, f"{case}, {places}, {options}, trained on")


def test_whole_states_come_back_into_shards() -> None:
    run_ranks_each(2, [CASES[0], CASES[-1]], whole_in_memory)


def in_the_background(base: Path) -> None:
    case = CASES[2]
    model = shard(built(*case))
    optimizer = optimizer_of(model)
    train(model, optimizer)
    saved = whole(model, optimizer)
    state = state_of(model, optimizer, "nested")
    with own_group(backend="gloo") as upload:
        future: Any = dcp.async_save(
            state, checkpoint_id=path_of(base, case), planner=QuantizedSavePlanner(), process_group=upload
        )
        train(model, optimizer, range(3, 5))  # into the same memory, meanwhile
        future.result()
        go_on(0, [case], base, "nested", [(saved, whole(model, optimizer))])


def test_a_save_in_the_background_holds_the_moment_of_the_call(shared_tmp_path: Path) -> None:
    run_ranks(2, in_the_background, shared_tmp_path)


def fresh_states(base: Path) -> None:
    """Of an optimizer that has not stepped, and weights with initial values."""
    model: Net = shard(build(*_init(), preserve_high_precision_init_val=True))
    optimizer = optimizer_of(model)
    dcp.save(state_of(model, optimizer, "nested"), checkpoint_id=base, planner=QuantizedSavePlanner())
    again: Net = shard(build(*_init()))
    its = optimizer_of(again)
    load(again, its, "nested", base)
    for step in range(2):
        train(model, optimizer, range(step, step + 1))
        train(again, its, range(step, step + 1))
    assert_same(whole(again, its), whole(model, optimizer), "trained")


def _init() -> tuple[Any, tuple[int, ...]]:
    return RECIPES["mxfp8"], ROWS


def test_an_optimizer_that_has_not_stepped_is_saved_with_where_training_starts(shared_tmp_path: Path) -> None:
    run_ranks(2, fresh_states, shared_tmp_path)
