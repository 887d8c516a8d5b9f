"""Gaps and overlaps of chunks, found without comparing chunks with each other."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_adapters.plain.tiling import tiling_fault

Box = tuple[tuple[int, ...], tuple[int, ...]]

FAULTS: dict[str, tuple[tuple[int, ...], list[Box], str | None]] = {
    "one chunk": ((3, 4), [((0, 0), (3, 4))], None),
    "uneven rows": ((5, 4), [((0, 0), (3, 4)), ((3, 0), (2, 4))], None),
    "a grid": ((4, 4), [((r, c), (2, 2)) for r in (0, 2) for c in (0, 2)], None),
    "empty chunks": ((3, 4), [((0, 0), (3, 4)), ((3, 0), (0, 4)), ((0, 0), (0, 0))], None),
    "an empty tensor": ((0, 4), [], None),
    "an empty tensor with a chunk": ((0, 4), [((0, 0), (0, 4))], None),
    "no dims": ((), [((), ())], None),
    "a pinwheel": (
        (3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))], None,
    ),
    "no chunk": ((3, 4), [], "no chunk holds the elements from (0, 0) on"),
    "a gap": ((5, 4), [((0, 0), (2, 4)), ((3, 0), (2, 4))], "no chunk holds the elements from (2, 0) on"),
    "a gap at the end": ((5,), [((0,), (4,))], "no chunk holds the elements from (4,) on"),
    "an overlap": ((5, 4), [((0, 0), (3, 4)), ((2, 0), (3, 4))], "2 chunks hold the elements from (2, 0) on"),
    "one chunk thrice": ((2,), [((0,), (2,))] * 3, "3 chunks hold the elements from (0,) on"),
    "gap and overlap of one size": ((4,), [((0,), (2,)), ((1,), (2,))], "2 chunks hold the elements from (1,) on"),
    "no dims, twice": ((), [((), ()), ((), ())], "2 chunks of a tensor without dims, expected one"),
    "many dims": ((2,) * 9, [((0,) * 9, (1,) * 9)], "chunks are cut along 9 dims, expected at most 8"),
    "many dims that are whole": ((2,) * 64, [((0,) * 64, (2,) * 64)], None),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_gaps_and_overlaps_are_told_with_their_place(name: str) -> None:
    size, boxes, expected = FAULTS[name]
    assert tiling_fault(size, boxes) == expected


@settings(max_examples=80, deadline=None, database=None, derandomize=True)
@given(data=st.data())
def test_the_answer_is_that_of_counting_every_element(data: st.DataObject) -> None:
    size = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    boxes = tiles(size, data)
    for _ in range(data.draw(st.integers(0, 2))):
        boxes[data.draw(st.integers(0, len(boxes) - 1))] = box(size, data)
    count = np.zeros(size, dtype=int)
    for offsets, sizes in boxes:
        count[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    fault = tiling_fault(size, boxes)
    wrong = np.argwhere(count != 1)
    if not len(wrong):
        assert fault is None
        return
    first = tuple(int(at) for at in wrong[0])
    held = int(count[first])
    assert fault == f"{f'{held} chunks hold' if held else 'no chunk holds'} the elements from {first} on"


def tiles(size: tuple[int, ...], data: Any) -> list[Box]:
    """A grid with cuts anywhere."""
    cuts = [sorted({0, extent, *data.draw(st.lists(st.integers(0, extent), max_size=2))}) for extent in size]
    spans = [list(itertools.pairwise(cut)) for cut in cuts]
    return [
        (tuple(start for start, _ in cell), tuple(end - start for start, end in cell))
        for cell in itertools.product(*spans)
    ]


def box(size: tuple[int, ...], data: Any) -> Box:
    offsets = tuple(data.draw(st.integers(0, extent)) for extent in size)
    return offsets, tuple(data.draw(st.integers(0, extent - o)) for extent, o in zip(size, offsets, strict=True))


def test_many_chunks_take_time_in_proportion() -> None:
    """Thirty thousand columns of one row: comparing them in pairs would take many minutes."""
    boxes = [((0, column), (1, 1)) for column in range(30000)]
    assert tiling_fault((1, 30000), boxes) is None
    assert tiling_fault((1, 30000), [*boxes, ((0, 77), (1, 1))]) == "2 chunks hold the elements from (0, 77) on"


def test_many_chunks_that_are_cut_along_many_dims_are_refused_before_they_take_memory() -> None:
    """A metadata file of a few megabytes could ask for gigabytes of corners."""
    boxes = [((place,) * 8, (1,) * 8) for place in range(4097)]
    assert tiling_fault((4097,) * 8, boxes) == "4097 chunks are cut along 8 dims, expected at most 4096 of them"
    grid = [(start, (1,) * 8) for start in itertools.product((0, 1), repeat=8)]
    assert tiling_fault((2,) * 8, grid) is None
