"""The choice fits the budget, is never below the bound, and is as good as the best one up to the gain of one step."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.formats.candidates import Candidate
from layerwise.formats.solver import choose, frontier

# errors are whole numbers of 1/64, so that all sums are exact and can be compared exactly
CANDIDATES = st.builds(
    lambda bits, error: Candidate(None, bits, error / 64), st.integers(1, 60), st.integers(0, 64 * 20)
)
GROUPS = st.lists(st.lists(CANDIDATES, min_size=1, max_size=4), min_size=1, max_size=6)


def best(groups: Sequence[Sequence[Candidate]], budget: int) -> float:
    """The least error of all choices within the budget, by trying all of them."""
    return min(
        sum(one.error for one in choice)
        for choice in itertools.product(*groups)
        if sum(one.bits for one in choice) <= budget
    )


def least_bits(groups: Sequence[Sequence[Candidate]]) -> int:
    return sum(min(one.bits for one in options) for options in groups)


def largest_step(groups: Sequence[Sequence[Candidate]]) -> float:
    """More than any step of a hull gains: the largest fall of error inside one group."""
    ladders = [[options[one].error for one in frontier(options)] for options in groups]
    return max(errors[0] - errors[-1] for errors in ladders)


@settings(max_examples=200, deadline=None)
@given(groups=GROUPS, more=st.integers(0, 120))
def test_against_brute_force(groups: list[list[Candidate]], more: int) -> None:
    budget = least_bits(groups) + more
    found = choose(groups, budget)
    taken = [options[one] for options, one in zip(groups, found.picked, strict=True)]
    assert found.bits == sum(one.bits for one in taken) <= budget
    assert found.error == sum(one.error for one in taken)
    optimum = best(groups, budget)
    # the bound divides once; one rounding of a sum below 2^7 is less than 2^-44
    assert found.bound <= optimum + 2.0**-44
    assert optimum <= found.error <= found.bound + largest_step(groups) + 2.0**-44


def test_the_gap_of_many_groups_is_small() -> None:
    """Its bound is one step, so with 200 groups of like errors it is at most about a 200th of what there is to gain."""
    draw = random.Random(1)
    groups = []
    for _ in range(200):
        size, error = draw.choice([3, 4, 9, 16]), draw.uniform(0.5, 2.0)
        groups.append([Candidate(None, size * bits, error * 4.0 ** (4 - bits)) for bits in (4, 8, 16)])
    budget = round(1.3 * least_bits(groups))
    found = choose(groups, budget)
    everything = choose(groups, least_bits(groups)).error
    assert 0 <= found.error - found.bound <= (everything - found.bound) / 50
    left = budget - found.bits
    taken = [options[one] for options, one in zip(groups, found.picked, strict=True)]
    better = [
        (now, one) for options, now in zip(groups, taken, strict=True) for one in options if one.error < now.error
    ]
    assert better
    assert all(one.bits - now.bits > left for now, one in better), "nothing that is better fits"


def test_the_relaxation_is_that_of_the_definition() -> None:
    """Two groups, by hand: steps of 4 errors for 2 bits, 3 for 3, 1 for 2; 6 bits are left at first."""
    groups = [
        [Candidate(None, 1, 8.0), Candidate(None, 3, 4.0), Candidate(None, 5, 3.0)],
        [Candidate(None, 1, 3.0), Candidate(None, 4, 0.0)],
    ]
    assert choose(groups, 2).error == 11.0
    found = choose(groups, 6)  # 2 for the first step, and 2 are too few for the second, which needs 3: 4 + 3 - 3 * 2/3
    assert (found.picked, found.error, found.bits) == ((2, 0), 6.0, 6)
    assert found.bound == 5.0
    assert choose(groups, 9) == choose(groups, 100)
    assert choose(groups, 9).bound == choose(groups, 9).error == 3.0


def test_candidates_off_the_hull_fill_the_rest() -> None:
    """Of 5 bits more, 4 buy less error than the step of the hull would, which takes 10."""
    options = [Candidate(None, 1, 10.0), Candidate(None, 5, 9.0), Candidate(None, 11, 0.0)]
    assert choose([options], 6).picked == (1,)
    assert choose([options], 11).picked == (2,)


def test_ties_go_to_the_first() -> None:
    same = [Candidate(None, 4, 1.0), Candidate(None, 4, 1.0), Candidate(None, 8, 0.5)]
    assert frontier(same) == [0, 2]
    assert choose([same, same, same], 16).picked == (2, 0, 0)
    assert choose([same, same, same], 20).picked == (2, 2, 0)


def test_dominated_candidates_are_not_taken() -> None:
    options = [Candidate(None, 8, 0.5), Candidate(None, 4, 0.5), Candidate(None, 6, 0.7)]
    assert frontier(options) == [1]
    assert choose([options], 100).picked == (1,)


def test_a_budget_below_the_least_is_refused() -> None:
    with pytest.raises(ValueError, match="the candidates of fewest bits take 9 bits, and the budget is 8"):
        choose([[Candidate(None, 4, 1.0)], [Candidate(None, 5, 1.0), Candidate(None, 7, 0.0)]], 8)


def test_sums_do_not_depend_on_the_order_of_groups() -> None:
    draw = random.Random(2)
    groups = [[Candidate(None, 4, draw.random()), Candidate(None, 8, draw.random() / 100)] for _ in range(50)]
    shuffled = draw.sample(groups, len(groups))
    assert choose(groups, 300).error == choose(shuffled, 300).error
    assert math.isclose(choose(groups, 300).bound, choose(shuffled, 300).bound)
