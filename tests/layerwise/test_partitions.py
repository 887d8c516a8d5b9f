"""However batches are spread over ranks, the same bytes: every decision rests on all of them, in no order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerwise import AWQ, GPTAQ, GPTQ, Max, Qronos, SmoothQuant
from tests.layerwise.algorithm_table import MAIN, TABLE
from tests.layerwise.models import ALGORITHMS, RECIPES, assert_same, batches, outcome, reference, run, shard, toy
from tests.ranks import run_ranks_each

MXFP8, NVFP4, FLOAT8 = RECIPES["mxfp8"], RECIPES["nvfp4"], RECIPES["float8_row"]
COUNT = 5

# The algorithms that the statistics of inputs decide something in, static scales of inputs and all.
METHODS: dict[str, tuple[Any, Any, str]] = {
    **{name: (algorithm, NVFP4, "static") for name, algorithm in ALGORITHMS.items()},
    "Mse": (ALGORITHMS["Mse"], FLOAT8, "static"),
    "LocalHessian": (ALGORITHMS["LocalHessian"], FLOAT8, "dynamic"),
    "AWQ": (ALGORITHMS["AWQ"], MXFP8, "dynamic"),
    "GPTQ, one Hessian at a time": (GPTQ(hessians="one_at_a_time", smoothing=SmoothQuant()), NVFP4, "dynamic"),
    "Qronos, one Hessian at a time": (Qronos(hessians="one_at_a_time", descent=1), MXFP8, "dynamic"),
    "AWQ, then GPTAQ": (GPTAQ(smoothing=AWQ(alpha_step=0.25), descent=1), NVFP4, "dynamic"),
    "GPTAQ, one Hessian at a time": (GPTAQ(hessians="one_at_a_time", smoothing=SmoothQuant()), MXFP8, "dynamic"),
}
Deal = Callable[[list[Tensor], int, int], list[Tensor]]
DEALS: dict[str, Deal] = {
    "interleaved": lambda data, rank, ranks: data[rank::ranks],
    "all but one on the last": lambda data, rank, ranks: (
        data[1:] if rank == ranks - 1 else data[:1] if rank == 0 else []
    ),
    "the last has none": lambda data, rank, ranks: data[rank :: ranks - 1] if rank < ranks - 1 else [],
}


def two_layers() -> nn.Module:
    return toy(layers=2, bias=False)


def _dealt(case: tuple[str, str], *, sharded: bool) -> dict[str, dict[str, str]]:
    method, deal = case
    algorithm, recipe, inputs = METHODS[method]
    data = DEALS[deal](batches(COUNT), dist.get_rank(), dist.get_world_size())
    model = shard(two_layers()) if sharded else two_layers()
    return outcome(model, run(model, data, recipe, algorithm, inputs=inputs))


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_batches_does_not_matter(method: str) -> None:
    algorithm, recipe, inputs = METHODS[method]
    model = two_layers()
    data = batches(COUNT)
    found = outcome(model, run(model, [data[i] for i in (3, 0, 4, 2, 1)], recipe, algorithm, inputs=inputs))
    assert_same(found, reference(two_layers, recipe, algorithm, COUNT, inputs=inputs), method)


@pytest.mark.parametrize("method", MAIN)
def test_the_batches_of_one_rank_alone_would_give_other_bytes(method: str) -> None:
    algorithm, recipe, inputs = METHODS[method]
    expected = reference(two_layers, recipe, algorithm, COUNT, inputs=inputs)
    for rank in (0, 1):
        model = two_layers()
        data = DEALS["interleaved"](batches(COUNT), rank, 2)
        assert outcome(model, run(model, data, recipe, algorithm, inputs=inputs)) != expected, f"rank {rank}"


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "sharded"), [(2, True), (3, False)])
def test_however_batches_are_dealt_out(world_size: int, sharded: bool) -> None:
    """On three ranks plain replicas, for which nothing but the statistics is exchanged: one method of each of those."""
    cases = [(method, "interleaved") for method in METHODS if sharded or method not in ("Mse", "SmoothQuant", "AWQ")]
    cases += [
        *((name, "all but one on the last") for name in MAIN if TABLE[name].onward),
        ("SmoothQuant" if sharded else "AWQ", "the last has none"),
    ]
    per_rank = run_ranks_each(world_size, cases, _dealt, sharded=sharded)
    for rank, outcomes in enumerate(per_rank):
        for (method, deal), found in zip(cases, outcomes, strict=True):
            algorithm, recipe, inputs = METHODS[method]
            expected = reference(two_layers, recipe, algorithm, COUNT, inputs=inputs)
            assert_same(found, expected, f"{method}, {deal}, rank {rank} of {world_size}")


def _fp16() -> nn.Module:
    """With one norm whose outputs are so small that whatever batch is probed has some below the normal range."""
    model = toy(layers=2, dtype=torch.float16)
    with torch.no_grad():
        model.get_parameter("layers.0.attn_norm.weight").mul_(2.0**-12)
    return model


def _dealt_in_fp16(method: str) -> dict[str, dict[str, str]]:
    algorithm, recipe, _ = METHODS[method]
    model = _fp16()
    return outcome(model, run(model, batches(COUNT)[dist.get_rank() :: 2], recipe, algorithm))


def test_which_factors_are_folded_does_not_depend_on_who_has_which_batch() -> None:
    """In fp16 small values leave the normal range in some batches, and there a fold is seen not to be exact."""
    folded = set()
    for outcomes in run_ranks_each(2, ["SmoothQuant", "AWQ"], _dealt_in_fp16):
        for method, found in zip(["SmoothQuant", "AWQ"], outcomes, strict=True):
            algorithm, recipe, _ = METHODS[method]
            expected = reference(_fp16, recipe, algorithm, COUNT)
            assert_same(found, expected, method)
            model = _fp16()
            backwards = outcome(model, run(model, batches(COUNT)[::-1], recipe, algorithm))
            assert_same(backwards, expected, f"{method}, backwards")
            folded |= {name for name in expected["result"] if name.endswith("norm.weight")}
    assert folded, "nothing was folded at all"
    assert len(folded) < 5, "nothing was refused"


def _none_anywhere(method: str) -> dict[str, dict[str, str]]:
    algorithm, recipe, _ = {**METHODS, "GPTQ on the scales of Max": (GPTQ(scales=Max()), NVFP4, "")}[method]
    model = shard(two_layers())
    data = None if dist.get_rank() else []
    if method == "Max":
        return outcome(model, run(model, data, recipe, algorithm))
    with pytest.warns(UserWarning, match="no rank has a batch"):
        return outcome(model, run(model, data, recipe, algorithm))


def test_no_data_on_any_rank_leaves_scales_that_come_from_the_weights() -> None:
    """What the scales of the algorithm are without inputs, here those of Max; every linear is named."""
    methods = ["Max", "GPTQ on the scales of Max", "SmoothQuant"]
    model = two_layers()
    result = run(model, None, NVFP4, ALGORITHMS["Max"])
    linears = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert list(result.starved) == linears
    expected = outcome(model, result)
    for outcomes in run_ranks_each(2, methods, _none_anywhere):
        for method, found in zip(methods, outcomes, strict=True):
            assert_same(found, expected, method)


def _half(rank_data: str) -> dict[str, dict[str, str]]:
    """A group of some ranks only: what the others have is none of its business."""
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    own = groups[dist.get_rank() % 2]
    data = batches(COUNT)[dist.get_rank() // 2 :: 2] if dist.get_rank() % 2 == 0 else batches(COUNT - 1)
    model = two_layers()
    algorithm, recipe, inputs = METHODS[rank_data]
    return outcome(model, run(model, data, recipe, algorithm, inputs=inputs, process_group=own))


def test_a_group_of_some_ranks_reduces_over_those() -> None:
    algorithm, recipe, inputs = METHODS["GPTQ"]
    for rank, (found,) in enumerate(run_ranks_each(3, ["GPTQ"], _half)):
        count = COUNT - 1 if rank == 1 else COUNT
        assert_same(found, reference(two_layers, recipe, algorithm, count, inputs=inputs), f"rank {rank}")


def _loops(*, callable_data: bool) -> list[dict[str, dict[str, str]]]:
    algorithm, recipe, inputs = METHODS["GPTQ"]
    data = batches(COUNT)[dist.get_rank() :: dist.get_world_size()]

    def loop(model: nn.Module) -> None:
        for ids in data:
            model(ids)

    forms: list[Any] = [loop] if callable_data else [[(ids,) for ids in data], ({"ids": ids} for ids in data)]
    found = []
    for form in forms:
        model = shard(two_layers())
        found.append(outcome(model, run(model, form, recipe, algorithm, inputs=inputs)))
    return found


def test_data_of_every_form() -> None:
    algorithm, recipe, inputs = METHODS["GPTQ"]
    expected = reference(two_layers, recipe, algorithm, COUNT, inputs=inputs)
    for outcomes in run_ranks_each(2, [False, True], _forms):
        for found in (one for several in outcomes for one in several):
            assert_same(found, expected, "tuples, dicts or a loop")


def _forms(callable_data: bool) -> list[dict[str, dict[str, str]]]:
    return _loops(callable_data=callable_data)


def test_threads_are_left_as_they_were() -> None:
    threads = torch.get_num_threads()
    run(two_layers(), batches(1), MXFP8, ALGORITHMS["GPTQ"])
    assert torch.get_num_threads() == threads
