"""Whether the chunks of a tensor cover it exactly: no gap, no overlap.

Comparing chunks with each other is quadratic in their number. Instead, each box adds +1 or -1 at its corners (+ at the
one where all coordinates are lower bounds, the sign changing with each upper bound), which is the mixed derivative of
"how many boxes cover this point". Boxes cover the tensor exactly once if, and only if, all corners cancel against
those of the whole tensor. At the first corner that does not, in row-major order, a gap or an overlap begins.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence

__all__ = ["tiling_fault"]

MOST_CUT_DIMS = 16  # 2^16 corners a chunk

Box = tuple[Sequence[int], Sequence[int]]  # offsets, sizes


def tiling_fault(size: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """What is wrong with `boxes` as a partition of a tensor of shape `size`; None where nothing is.

    All boxes lie inside of the tensor. Empty ones cover nothing.
    """
    full = [box for box in boxes if 0 not in box[1]]
    if not size:
        return None if len(full) == 1 else f"{len(full)} chunks of a tensor without dims, expected one"
    # dims along which no chunk is cut say nothing about gaps
    cut = [dim for dim in range(len(size)) if any(sizes[dim] != size[dim] for _, sizes in full)]
    if 0 in size or len(cut) > MOST_CUT_DIMS:
        return None if 0 in size else f"chunks are cut along {len(cut)} dims, expected at most {MOST_CUT_DIMS}"
    corners: defaultdict[tuple[int, ...], int] = defaultdict(int)
    for offsets, sizes in full:
        _add(corners, [(offsets[dim], offsets[dim] + sizes[dim]) for dim in cut], 1)
    _add(corners, [(0, size[dim]) for dim in cut], -1)
    wrong = min((corner for corner, count in corners.items() if count), default=None)
    if wrong is None:
        return None
    at = dict(zip(cut, wrong, strict=True))
    place = tuple(at.get(dim, 0) for dim in range(len(size)))
    if corners[wrong] < 0:
        return f"no chunk holds the elements from {place} on"
    return f"{corners[wrong] + 1} chunks hold the elements from {place} on"


def _add(corners: defaultdict[tuple[int, ...], int], bounds: list[tuple[int, int]], weight: int) -> None:
    for ends in itertools.product((0, 1), repeat=len(bounds)):
        corners[tuple(bound[end] for bound, end in zip(bounds, ends, strict=True))] += weight * (-1) ** sum(ends)
