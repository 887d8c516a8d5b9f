"""Picks one candidate for each group: least error, within a number of bits.

This is the multiple-choice knapsack problem. Its relaxation, in which a group may be split between two candidates, is
solved exactly by going up the lower convex hulls of all groups together, the steepest step first:

    every group begins with its fewest bits; a step of a hull costs bits and takes away error
    steps are taken in the order of error per bit            a hull's own steps come in this order, too
    the first step that is too large, taken in part, gives the optimum of the relaxation: no choice is better (`bound`)
    smaller steps behind it are still taken, and then any candidate that fits, the largest gain first

So the error is above the least possible one by no more than the gain of that one step. With many groups this is
little; `Choice.bound` says how little. Candidates off the hulls matter only for the last bits.

Sums are rounded once (`math.fsum`) and ties go to the first group and the first candidate, so all ranks, which have
the same records, come to the same choice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from layerwise.formats.candidates import Candidate

Options = Sequence[Candidate]  # those of one group


@dataclass(frozen=True)
class Choice:
    """One candidate for each group.

    Attributes:
        picked: the index of each group's candidate.
        bits: of all together.
        error: of all together.
        bound: no choice within the bits has a smaller error.
    """

    picked: tuple[int, ...]
    bits: int
    error: float
    bound: float


@dataclass(frozen=True)
class _Step:
    """From one candidate of a hull to the next: `bits` more, `gain` less error."""

    group: int
    before: int
    after: int
    bits: int
    gain: float


def choose(groups: Sequence[Options], budget: int) -> Choice:
    """Return the choice of least error, or nearly so, within a number of bits.

    Args:
        groups: the candidates of each, at least one; errors are finite.
        budget: bits of all together.

    Raises:
        ValueError: all groups together take more than the budget at the least.
    """
    ladders = [frontier(options) for options in groups]
    picked = [ladder[0] for ladder in ladders]
    left = budget - sum(options[one].bits for options, one in zip(groups, picked, strict=True))
    if left < 0:
        raise ValueError(f"the candidates of fewest bits take {budget - left} bits, and the budget is {budget}")
    bound: float | None = None
    for step in _steps(groups, [_hull(options, ladder) for options, ladder in zip(groups, ladders, strict=True)]):
        if step.bits > left and bound is None:
            bound = math.fsum([*_errors(groups, picked), -step.gain * (left / step.bits)])
        # Behind a step that was too large, those of its own hull start from a candidate that was never taken.
        if step.bits <= left and picked[step.group] == step.before:
            picked[step.group] = step.after
            left -= step.bits
    left = _fill(groups, ladders, picked, left)
    error = math.fsum(_errors(groups, picked))
    # Rounding of sums alone can put the bound above the error.
    return Choice(tuple(picked), budget - left, error, error if bound is None else min(bound, error))


def frontier(options: Options) -> list[int]:
    """Return the candidates worth taking, from the fewest bits on: each further one has a smaller error."""
    kept: list[int] = []
    for one in sorted(range(len(options)), key=lambda one: (options[one].bits, options[one].error, one)):
        if not kept or options[one].error < options[kept[-1]].error:
            kept.append(one)
    return kept


def _hull(options: Options, ladder: Sequence[int]) -> list[int]:
    """Return the lower convex hull of a frontier: each step takes away less error per bit than the one before."""
    hull: list[int] = []
    for one in ladder:
        while len(hull) > 1 and _slope(options, hull[-2], hull[-1]) <= _slope(options, hull[-2], one):
            hull.pop()
        hull.append(one)
    return hull


def _slope(options: Options, before: int, after: int) -> float:
    return (options[before].error - options[after].error) / (options[after].bits - options[before].bits)


def _steps(groups: Sequence[Options], hulls: Sequence[Sequence[int]]) -> list[_Step]:
    """Return the steps of all hulls, the most error per bit first; the steps of one hull stay in order."""
    steps = []
    for group, (options, hull) in enumerate(zip(groups, hulls, strict=True)):
        for before, after in pairwise(hull):
            bits = options[after].bits - options[before].bits
            steps.append(_Step(group, before, after, bits, options[before].error - options[after].error))
    return sorted(steps, key=lambda step: (-step.gain / step.bits, step.group))


def _fill(groups: Sequence[Options], ladders: Sequence[Sequence[int]], picked: list[int], left: int) -> int:
    """Take what still fits, the largest gain first; returns the bits that stay free."""
    while True:
        best: _Step | None = None
        for group, (options, ladder) in enumerate(zip(groups, ladders, strict=True)):
            now = picked[group]
            for after in ladder[ladder.index(now) + 1 :]:
                bits, gain = options[after].bits - options[now].bits, options[now].error - options[after].error
                if bits <= left and (best is None or (gain, -bits) > (best.gain, -best.bits)):
                    best = _Step(group, now, after, bits, gain)
        if best is None:
            return left
        picked[best.group] = best.after
        left -= best.bits


def _errors(groups: Sequence[Options], picked: Sequence[int]) -> list[float]:
    return [options[one].error for options, one in zip(groups, picked, strict=True)]
