"""Which deltas apply to which state, when a full version is due, and what may be removed: decided without reading."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_adapters.delta.chain import Anchors, check_chain, deltas_left, removable
from dcp_adapters.delta.patches.layout import StateLayout
from dcp_adapters.delta.patches.patch import Delta


def step(number: int, **other: Any) -> Delta:
    fields: dict[str, Any] = {
        "base": f"s{number - 1}",
        "result": f"s{number}",
        "version": number,
        "where": f"d{number}",
    }
    return Delta(**({"layout": StateLayout({}), "frames": (), "blobs": (), "read": {}.__getitem__} | fields | other))


def test_a_state_needs_the_deltas_after_it() -> None:
    deltas = [step(1), step(2), step(3)]
    for number in range(4):
        assert deltas_left(deltas, f"s{number}", "the target") == deltas[number:]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([], "no delta to apply; give at least one"),
        ([1, 3], r"d3 \(to version 3\) starts from s2, and d1 \(to version 1\) leads to s1; one in between is missing"),
        ([1, 1], r"d1 \(to version 1\) is d1 \(to version 1\) once more; give each delta once"),
        ([1, 3, 2], r"d3 .* starts from s2, .*; d2 \(to version 2\) leads there: put the deltas in the order in which"),
    ],
)
def test_a_chain_with_a_gap_a_repeat_or_another_order_is_refused(numbers: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_chain([step(number) for number in numbers])


def test_another_base_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"the target has digest s7, and d1 \(to version 1\) applies to s0 alone: it is"
    ):
        deltas_left([step(1), step(2)], "s7", "the target")


def test_a_step_back_is_a_delta_like_any_other() -> None:
    there, back = step(1), step(2, result="s0")
    assert deltas_left([there, back], "s0", "the target") == []  # it is the result already
    assert deltas_left([there, back], "s1", "the target") == [back]


def test_full_versions_come_every_so_often() -> None:
    since: int | None = None
    kinds = []
    for _ in range(7):
        full = Anchors(every=3).is_full(since)
        since = 0 if full else (since or 0) + 1
        kinds.append("full" if full else "delta")
    assert kinds == ["full", "delta", "delta", "full", "delta", "delta", "full"]
    assert Anchors(every=1).is_full(0)
    with pytest.raises(ValueError, match="every=0: expected a whole number from 1 on; 1 makes every version full"):
        Anchors(every=0)


def test_what_a_version_is_built_on_stays() -> None:
    bases = {"0": None, "1": "0", "2": "1", "3": None, "4": "3"}
    assert removable(bases, {"2"}) == {"3", "4"}
    assert removable(bases, {"4"}) == {"0", "1", "2"}
    assert removable(bases, {"3"}) == {"0", "1", "2", "4"}
    assert removable(bases, set()) == set(bases)


def test_nothing_is_removed_where_a_base_is_missing() -> None:
    with pytest.raises(ValueError, match="0 is not there, which 1 is a delta to; nothing can be removed safely"):
        removable({"1": "0"}, {"1"})
    with pytest.raises(ValueError, match="5 is not there; nothing can be removed safely"):
        removable({"1": None}, {"5"})
    with pytest.raises(ValueError, match="1 is a delta to itself through 1, 2; nothing can be removed safely"):
        removable({"1": "2", "2": "1"}, {"1"})
