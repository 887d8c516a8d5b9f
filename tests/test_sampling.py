"""Samples of tables: pairwise covers, and what is left to `make test-all`."""

import itertools
from typing import Any

import pytest

from tests.sampling import halves, pairwise, sampled


@pytest.mark.parametrize(
    ("axes", "most"), [((2, 2), 4), ((2, 2, 2), 4), ((3, 3, 3), 10), ((3, 2, 2, 2), 7), ((4, 3, 2, 2), 13), ((5, 1), 5)]
)
def test_any_two_values_of_two_axes_meet_in_few_cases(axes: tuple[int, ...], most: int) -> None:
    cases = pairwise(*(range(count) for count in axes))
    for (one, its), (other, others) in itertools.combinations(enumerate(axes), 2):
        assert {(case[one], case[other]) for case in cases} == {*itertools.product(range(its), range(others))}
    assert len(cases) == len({*cases}) <= most
    assert cases == pairwise(*(range(count) for count in axes))


def _cases(mark: Any, *, full: bool) -> list[Any]:
    return [param.values for param in mark.args[1] if (pytest.mark.full in param.marks) is full]


def test_what_is_not_kept_is_left_to_test_all() -> None:
    one = sampled("shape", [(1,), (2, 3), (4,)], [(2, 3)], ids="abc")
    assert (_cases(one, full=False), _cases(one, full=True)) == ([((2, 3),)], [((1,),), ((4,),)])
    assert [param.id for param in one.args[1]] == [*"abc"]
    two = sampled(("a", "b"), [(1, 2), (3, 4)], [(1, 2)])
    assert (_cases(two, full=False), _cases(two, full=True)) == ([(1, 2)], [(3, 4)])
    some = halves("letters", "abc", "b")
    assert (_cases(some, full=False), _cases(some, full=True)) == ([(("b",),)], [(("a", "c"),)])


@pytest.mark.parametrize("make", [sampled, halves])
def test_what_is_kept_must_be_a_case(make: Any) -> None:
    with pytest.raises(AssertionError, match=r"kept, but no cases: \[3\]"):
        make("number", [1, 2], [1, 3])
