"""States in host memory through torch's checkpoints: saved there and loaded on the device, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcp_adapters import QuantizedSavePlanner, QuantizedStager
from tests.dcp_adapters.test_compressed_states import Held, load, path_of, state_of, whole_in_memory
from tests.fsdp_hooks.cases import shard
from tests.fsdp_hooks.test_compressed_states import CASES, assert_same, built, optimizer_of, train, whole
from tests.ranks import own_group, run_ranks, run_ranks_each
from tests.sampling import sampled

HOST, DEVICE = "host", "device"
SMALL: dict[str, Any] = {"masters": "remainder", "moments": "float8"}
WIDE: dict[str, Any] = {"masters": "fp32", "moments": "fp32"}
HERE = [CASES[1], CASES[2], CASES[-1]]
each_form = pytest.mark.parametrize("options", [SMALL, WIDE], ids=["small", "wide"])


def save(
    case: tuple[str | None, str], base: Path, way: str, options: dict[str, Any], how: str = "sync"
) -> tuple[Held, Held]:
    """Returns what there is when it is saved, and two steps later; those behind an asynchronous save run beside it."""
    model = shard(built(*case))
    optimizer = optimizer_of(model, **options)
    train(model, optimizer)
    state, saved = state_of(model, optimizer, way), whole(model, optimizer)
    to: dict[str, Any] = {"checkpoint_id": path_of(base, case), "planner": QuantizedSavePlanner()}
    if how == "sync":
        dcp.save(state, **to)
        train(model, optimizer, range(3, 5))
        return saved, whole(model, optimizer)
    stager = {"async_stager": QuantizedStager()} if how == "staged" else {}
    with own_group(backend="gloo") as upload:
        future: Any = dcp.async_save(state, **to, process_group=upload, **stager)
        train(model, optimizer, range(3, 5))  # into the same memory, meanwhile
        (getattr(future, "upload_completion", future)).result()
    return saved, whole(model, optimizer)


def go_on(number: int, base: Path, way: str, options: dict[str, Any], expected: dict[Any, tuple[Held, Held]]) -> None:
    case, (saved, later) = list(expected.items())[number]
    model = shard(built(*case))
    optimizer = optimizer_of(model, **options)
    train(model, optimizer, range(7, 8))
    load(model, optimizer, way, path_of(base, case))
    assert_same(whole(model, optimizer), saved, f"{case}, loaded")
    train(model, optimizer, range(3, 5))
    assert_same(whole(model, optimizer), later, f"{case}, trained on")


@each_form
@sampled(
    ("ranks", "way", "places"),
    [
        (ranks, way, places)
        for ranks in ((2, 3), (3, 2), (2, 2))
        for way in ("nested", "flattened")
        for places in ((HOST, DEVICE), (DEVICE, HOST), (HOST, HOST))
    ],
    [((2, 3), "nested", (HOST, DEVICE)), ((2, 3), "flattened", (DEVICE, HOST))],
)
def test_training_goes_on_bit_for_bit_from_one_place_to_the_other(
    ranks: tuple[int, int], way: str, places: tuple[str, str], options: dict[str, Any], shared_tmp_path: Path
) -> None:
    found = run_ranks_each(ranks[0], HERE, save, shared_tmp_path, way, options | {"states": places[0]})
    loaded = options | {"states": places[1]}
    expected = dict(zip(HERE, found[0], strict=True))
    run_ranks_each(ranks[1], range(len(HERE)), go_on, shared_tmp_path, way, loaded, expected)


@each_form
@pytest.mark.parametrize("how", ["async", "staged"])
def test_a_save_in_the_background_holds_the_moment_of_the_call(
    how: str, options: dict[str, Any], shared_tmp_path: Path
) -> None:
    host = options | {"states": HOST}
    found = run_ranks_each(2, HERE[1:2], save, shared_tmp_path, "nested", host, how)
    run_ranks_each(2, range(1), go_on, shared_tmp_path, "nested", host, {HERE[1]: found[0][0]})


def whole_elsewhere(case: tuple[str | None, str], options: dict[str, Any]) -> None:
    """Full and offloaded state dicts of one place, loaded into the other."""
    for places in ((HOST, DEVICE), (DEVICE, HOST)):
        whole_in_memory(case, places, options)


@each_form
def test_whole_states_come_back_into_shards(options: dict[str, Any]) -> None:
    run_ranks_each(2, [CASES[0], CASES[-1]], whole_elsewhere, options)


def loads_another_form(base: Path) -> None:
    """A checkpoint of fp32 states on the device, into compressed ones in host memory."""
    case = CASES[1]
    (saved, _) = save(case, base, "nested", WIDE)
    found = []
    for states in (DEVICE, HOST):
        model = shard(built(*case))
        optimizer = optimizer_of(model, states=states, **SMALL)
        with optimizer.expecting_states(**WIDE):
            load(model, optimizer, "nested", path_of(base, case))
        own = whole(model, optimizer)
        assert {key for key in own if "master_weight" in key} == {key for key in saved if "master_weight" in key}
        train(model, optimizer, range(3, 5))
        found.append(whole(model, optimizer))
    assert_same(found[1], found[0], "trained on")


def test_states_of_another_form_are_expected_there(shared_tmp_path: Path) -> None:
    run_ranks(2, loads_another_form, shared_tmp_path)
