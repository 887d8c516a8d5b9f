"""Which cases of a table `make test` runs, and which it leaves to `make test-all`.

    pairwise(STORAGES, MESHES, WAYS)                   enough cases for every two values of two axes to meet

    @sampled("mesh", MESHES, kept=[(3,), (2, 2)])      parametrize, where all cases but these carry the mark `full`
    @halves("names", RECIPES, kept=STAND_INS)          the same of two cases, each the names of what runs in one call of
                                                       ranks: those that are kept, and, with the mark, the others

An axis on which the code under test depends together with another one stays crossed with it; the tests say so. Of
numbers of ranks the one is kept that cuts unevenly or leaves ranks with nothing, where that matters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases, a value of each axis in each, in which any two values of two axes meet; the same ones each time.

    Greedy: of the whole product, again and again the first case that brings most pairs together which have not met.
    """
    product = list(itertools.product(*axes))
    pairs = {case: {*itertools.combinations(enumerate(case), 2)} for case in product}
    missing = set().union(*pairs.values())
    cases = []
    while missing:
        best = max(product, key=lambda case: len(pairs[case] & missing))
        cases.append(best)
        missing -= pairs[best]
    return cases


def sampled(
    names: str | tuple[str, ...], cases: Iterable[Any], kept: Iterable[Any], *, ids: Iterable[str] | None = None
) -> Any:
    """`pytest.mark.parametrize(names, cases)`, in which cases that are not kept carry the mark `full`."""
    cases, kept = list(cases), list(kept)
    _check(cases, kept)
    params = []
    for case, its in zip(cases, ids if ids is not None else [None] * len(cases), strict=True):
        values = case if isinstance(names, tuple) else (case,)
        params.append(pytest.param(*values, id=its, marks=() if case in kept else pytest.mark.full))
    return pytest.mark.parametrize(names, params)


def halves(name: str, cases: Iterable[Any], kept: Iterable[Any]) -> Any:
    """`pytest.mark.parametrize` of two tuples: the cases that are kept, and, with the mark `full`, the others."""
    cases, kept = list(cases), list(kept)
    _check(cases, kept)
    others = tuple(case for case in cases if case not in kept)
    first, second = pytest.param(tuple(kept), id="kept"), pytest.param(others, id="others", marks=pytest.mark.full)
    return pytest.mark.parametrize(name, [first, second])


def _check(cases: list[Any], kept: list[Any]) -> None:
    unknown = [case for case in kept if case not in cases]
    assert not unknown, f"kept, but no cases: {unknown}"
