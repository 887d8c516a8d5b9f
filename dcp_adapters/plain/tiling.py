"""Do the chunks of a tensor cover it exactly: no gap, no overlap, nothing outside?

Nearly all tensors are cut along one dim only. Their chunks are sorted, and each must begin where the last one ended.

Comparing other chunks with each other would be quadratic in their number. Instead, each box adds +1 or -1 at its
corners (+ at the one where all coordinates are lower bounds, the sign changing with each upper bound), which is the
mixed derivative of "how many boxes cover this point". Boxes cover the tensor exactly once if, and only if, all corners
cancel against those of the whole tensor. A gap or an overlap begins at the first corner, in row-major order, that does
not cancel.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

# What hostile metadata may cost: a chunk has 2^(dims that are cut) corners, each of which is kept for a while.
MOST_CUT_DIMS = 8
MOST_CORNERS = 2**20  # of chunks that are cut along more than FEW_DIMS
FEW_DIMS = 3

Box = tuple[Sequence[int], Sequence[int]]  # offsets, sizes


def is_inside(size: Sequence[int], box: Box) -> bool:
    """Tell whether a box lies inside of a tensor of shape `size`; an empty one may lie at its end."""
    offsets, sizes = box
    return len(size) == len(offsets) == len(sizes) and all(
        offset >= 0 <= extent and offset + extent <= full
        for full, offset, extent in zip(size, offsets, sizes, strict=True)
    )


def tiling_fault(size: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Say what is wrong with `boxes` as a partition of a tensor of shape `size`; None if nothing is.

    Empty boxes cover nothing.
    """
    outside = next((box for box in boxes if not is_inside(size, box)), None)
    full = [box for box in boxes if 0 not in box[1]]
    if outside is not None or 0 in size:
        return outside and f"a chunk of {tuple(outside[1])} at {tuple(outside[0])} is not inside of it"
    if not size:
        return None if len(full) == 1 else f"{len(full)} chunks of a tensor without dims, expected one"
    # Dims along which no chunk is cut say nothing about gaps; each of them would double the corners of every chunk.
    cut = [dim for dim in range(len(size)) if any(sizes[dim] != size[dim] for _, sizes in full)]
    if len(cut) > MOST_CUT_DIMS:
        return f"chunks are cut along {len(cut)} dims, expected at most {MOST_CUT_DIMS}"
    if len(cut) > FEW_DIMS and len(full) << len(cut) > MOST_CORNERS:
        return f"{len(full)} chunks are cut along {len(cut)} dims, expected at most {MOST_CORNERS >> len(cut)} of them"
    # FSDP shards, and so nearly all tensors. A fault is left to the corners, which say where it begins.
    if len(cut) == 1:
        pieces = sorted((offsets[cut[0]], sizes[cut[0]]) for offsets, sizes in full)
        ends = [start + length for start, length in pieces]
        if [start for start, _ in pieces] + [size[cut[0]]] == [0, *ends]:
            return None
    return _corner_fault(size, full, cut)


def is_tiled(tensors: Iterable[tuple[Sequence[int], Sequence[Box]]]) -> bool:
    """Whether the boxes of each tensor, given with its shape, are a partition of it."""
    return all(tiling_fault(size, boxes) is None for size, boxes in tensors)


def _corner_fault(size: Sequence[int], full: Sequence[Box], cut: Sequence[int]) -> str | None:
    """Say what is wrong with boxes that are cut along these dims, by their corners."""
    corners: defaultdict[tuple[int, ...], int] = defaultdict(int)
    for offsets, sizes in full:
        _add(corners, [(offsets[dim], offsets[dim] + sizes[dim]) for dim in cut], 1)
    _add(corners, [(0, size[dim]) for dim in cut], -1)
    # All corners before this one cancel, so its count is that of the boxes that hold the point, less 1.
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
