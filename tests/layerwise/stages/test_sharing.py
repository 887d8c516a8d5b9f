"""Who decides about which group: balanced, the same on all ranks, and bounded in memory."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise import GPTQ, LocalHessian, Max, Mse
from layerwise.algorithms.algorithm import Linear
from layerwise.stages.sharing import naming, rounds_of, share_out
from layerwise.stages.stage import Method
from qtensor import NVFP4BlockScaling
from tests.layerwise.algorithm_table import ALGORITHMS, TABLE

COSTS = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


class Ranks:
    """As much of a process group as sharing asks for."""

    def __init__(self, count: int, rank: int = 0) -> None:
        self.size, self.rank = lambda: count, lambda: rank


def method(algorithm: Any, ranks: int = 1, rank: int = 0) -> Method:
    group: Any = Ranks(ranks, rank) if ranks > 1 else None
    return Method(algorithm, NVFP4BlockScaling(), quantized_onward=False, group=group)


def linears(*shapes: tuple[int, int]) -> tuple[Linear, ...]:
    return tuple(Linear(f"w{n}", torch.empty(shape, device="meta")) for n, shape in enumerate(shapes))


# tokens and linears of the groups of a decoder layer: q, k, v; o; gate, up; down
LAYER = [
    (100, linears((576, 576), (192, 576), (192, 576))),
    (100, linears((576, 576))),
    (100, linears((1536, 576), (1536, 576))),
    (100, linears((576, 1536))),
]
EXPERTS = [
    (7, group) for _ in range(256) for group in (linears((96, 64), (96, 64)), linears((64, 96)))
]  # gate, up; down


@settings(max_examples=200, deadline=None, derandomize=True)
@given(COSTS, st.integers(1, 9))
def test_every_group_has_one_owner_and_none_has_far_more_than_its_share(costs: list[int], ranks: int) -> None:
    shares = share_out(costs, ranks)
    assert sorted(index for share in shares for index in share) == [*range(len(costs))]
    # The last group of the busiest rank went to it when it had no more than the mean of all others.
    assert max(sum(costs[index] for index in share) for share in shares) <= sum(costs) / ranks + max(costs)
    for share in shares:
        assert [costs[index] for index in share] == sorted((costs[index] for index in share), reverse=True)
    assert shares == share_out(list(map(float, costs)), ranks)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("groups", [LAYER, EXPERTS], ids=["a decoder layer", "experts"])
def test_rounds_hold_no_more_than_the_largest_group(groups: list[Any], ranks: int, name: str) -> None:
    algorithm = ALGORITHMS[name]
    rounds = rounds_of(method(algorithm, ranks), groups)
    assert all(len(turn) == ranks for turn in rounds)
    assert sorted(index for turn in rounds for indices in turn for index in indices) == [*range(len(groups))]
    assert rounds == rounds_of(method(algorithm, ranks, rank=ranks - 1), groups), "on whichever rank"

    def nbytes(index: int) -> int:
        own = groups[index][1]
        columns = own[0].weight.shape[1]
        return sum(4 * one.weight.numel() for one in own) + TABLE[name].matrices * 8 * columns**2

    largest = max(nbytes(index) for index in range(len(groups)))
    for turn in rounds:
        for indices in turn:
            assert sum(map(nbytes, indices)) <= largest


def test_small_groups_of_one_rank_are_in_the_round_of_a_large_one_of_another() -> None:
    """Else a rank with a large group would wait in every later round."""
    assert rounds_of(method(GPTQ(scales=Max()), 2), LAYER) == [[[3], [2, 0, 1]]]


def test_no_round_takes_longer_than_the_longest_group() -> None:
    """Else 2 and 0 would be in one round, for which 3 would wait, and then 0 for 1."""
    assert rounds_of(method(GPTQ(), 2), LAYER) == [[[3], [2]], [[1], [0]]]


# Seconds of one core for the groups of LAYER in NVFP4: of GPTQ by itself, of a round of descent, and of the scales.
COMPENSATION, DESCENT = (0.10, 0.09, 0.11, 0.45), (0.34, 0.21, 0.47, 0.87)
SEARCHES = {Max(): (0.0, 0.0, 0.0, 0.0), Mse(): (0.18, 0.11, 0.49, 0.15), LocalHessian(): (0.42, 0.21, 1.40, 0.49)}


@pytest.mark.parametrize("descent", [0, 1])
@pytest.mark.parametrize("scales", SEARCHES, ids=lambda one: type(one).__name__)
def test_the_cost_of_gptq_shares_what_it_takes_with_any_scales_and_descent(scales: Any, descent: int) -> None:
    """Even if ranks waited for each other only in the end, no division among two would be more than a fifth faster."""
    seconds = [
        own + descent * more + search for own, more, search in zip(COMPENSATION, DESCENT, SEARCHES[scales], strict=True)
    ]
    rounds = rounds_of(method(GPTQ(scales=scales, descent=descent), 2), LAYER)
    found = sum(max(sum(seconds[index] for index in indices) for indices in turn) for turn in rounds)
    divisions = [[seconds[index] for index in range(4) if chosen >> index & 1] for chosen in range(16)]
    best = min(max(sum(first), sum(seconds) - sum(first)) for first in divisions)
    assert found <= 1.2 * best


def test_a_group_without_tokens_costs_no_factorisation() -> None:
    """Three of four down projections are starved: the one that is not takes longer than all of them."""
    groups = [(tokens, linears((64, 512))) for tokens in (0, 5, 0, 0)]
    assert rounds_of(method(GPTQ(), 2), groups) == [[[1], [0, 2, 3]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slow(Max):
    """Says which of its groups takes long."""

    def cost(self, rows: int, columns: int, tokens: int) -> float:
        return 1e9 if rows == 576 else super().cost(rows, columns, tokens)


def test_an_algorithm_can_tell_what_a_group_costs() -> None:
    def owners(algorithm: Any) -> list[set[int]]:
        turns = rounds_of(method(algorithm, 2), LAYER)
        return [{index for turn in turns for index in turn[rank]} for rank in (0, 1)]

    assert owners(Max()) == [{2}, {0, 1, 3}]
    assert owners(Slow()) == [{1, 2}, {0, 3}]


def test_no_group_is_no_round() -> None:
    assert rounds_of(method(Max(), 2), []) == []


def test_an_error_tells_what_was_calibrated() -> None:
    for count, words in ((2, "w0, w1"), (7, "w0, w1, w2, w3, w4 and 2 more")):
        with pytest.raises(KeyError) as caught, naming(linears(*[(1, 1)] * count)):
            raise KeyError("it")
        assert caught.value.__notes__ == [f"while calibrating {words}"]
