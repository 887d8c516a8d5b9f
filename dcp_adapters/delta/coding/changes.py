"""Find what changed between two equal-shaped tensors, as positions and steps, and go back.

A tensor is seen as whole numbers of its bits, its units: as wide as an element of a floating dtype, else single bytes.
A position counts units in the flattened global tensor. A step is the new number minus the old one, wrapping around.
Steps say more than the new bytes: the neighbour of a float, of whatever format, is one step away.

Positions and steps depend on the two global tensors alone. A rank finds those of its own shard, and the sorted union of
all ranks' is what one process finds in whole tensors.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 2**22  # units that are compared at once
WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes -> the whole numbers of a unit


@dataclass(frozen=True)
class Changes:
    """positions: int64 [n], ascending; steps: int8, int16, int32 or int64 [n], none of them 0."""

    positions: Tensor
    steps: Tensor

    def __len__(self) -> int:
        return self.positions.numel()


def unit_of(dtype: torch.dtype) -> torch.dtype:
    """Return the whole numbers as which a dtype is seen.

    Packed codes are stored as uint8 or int32: a changed code changes one byte, so those are seen as bytes.
    """
    wide = dtype.is_floating_point and dtype.itemsize in WIDTHS
    return WIDTHS[dtype.itemsize] if wide else torch.int8


def unit_shape(dtype: torch.dtype, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a tensor in units; that of a 0-dim one is (units,)."""
    *leading, last = shape or (1,)
    return (*leading, last * (dtype.itemsize // unit_of(dtype).itemsize))


def units(tensor: Tensor) -> Tensor:
    """Return the units of a plain tensor, flat [n]: a view if it is contiguous, else a copy."""
    flat = tensor.detach().contiguous().reshape(-1)
    unit = unit_of(flat.dtype)
    return flat if flat.dtype == unit else flat.view(unit)


def changes_between(old: Tensor, new: Tensor) -> Iterator[Changes]:
    """Yield what changed from one plain CPU tensor to another of the same dtype and shape, a piece at a time.

    Raises:
        ValueError: dtypes or shapes differ.
    """
    if old.dtype != new.dtype or old.shape != new.shape:
        raise ValueError(
            f"changes from {old.dtype} {tuple(old.shape)} to {new.dtype} {tuple(new.shape)}: expected equal tensors"
        )
    before, after = units(old), units(new)
    for start in range(0, before.numel(), PIECE):
        found = changed_units(before[start : start + PIECE], after[start : start + PIECE])
        if len(found):
            yield Changes(found.positions + start, found.steps)


def changed_units(x: Tensor, y: Tensor) -> Changes:
    """Find what changed between two flat tensors of as many units; there may be nothing."""
    at = _find_differing(x, y)
    return Changes(at, y[at] - x[at])


def join(found: Iterable[Changes], unit: torch.dtype) -> Changes:
    """Join several to one, sorted by position. Raises ValueError if two change the same unit."""
    pieces = list(found)
    if not pieces:
        return Changes(torch.empty(0, dtype=torch.int64, device="cpu"), torch.empty(0, dtype=unit, device="cpu"))
    positions = torch.cat([piece.positions for piece in pieces])
    steps = torch.cat([piece.steps for piece in pieces])
    if len(pieces) > 1 and bool((positions[1:] <= positions[:-1]).any()):
        positions, order = positions.sort()
        steps = steps[order]
        if bool((positions[1:] == positions[:-1]).any()):
            raise ValueError("two shards change the same unit; expected shards that hold each unit once")
    return Changes(positions, steps)


def global_changes(local: Changes, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Changes:
    """Place the changes of a box by their positions in the whole tensor; all extents in units.

    Ascending positions of the box are ascending in the tensor: both count rows first.
    """
    return Changes(_between_boxes(local.positions, sizes, (0,) * len(shape), shape, offsets), local.steps)


def local_changes(found: Changes, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Changes:
    """Find the changes of a tensor that lie in a box, by their positions in the box; all extents in units."""
    inside = torch.ones_like(found.positions, dtype=torch.bool)
    for coordinate, offset, size in zip(_coordinates(found.positions, shape), offsets, sizes, strict=True):
        inside &= (coordinate >= offset) & (coordinate < offset + size)
    positions = _between_boxes(found.positions[inside], shape, offsets, sizes, (0,) * len(shape))
    return Changes(positions, found.steps[inside])


def _between_boxes(
    positions: Tensor,
    sizes: Sequence[int],
    offsets: Sequence[int],
    new_sizes: Sequence[int],
    new_offsets: Sequence[int],
) -> Tensor:
    """Turn positions in a box of `sizes` into positions in one of `new_sizes`; an element's offset moves, too."""
    there = torch.zeros_like(positions)
    for coordinate, offset, size, new in zip(
        _coordinates(positions, sizes), offsets, new_sizes, new_offsets, strict=True
    ):
        there = there * size + (coordinate - offset + new)
    return there


def _coordinates(positions: Tensor, shape: Sequence[int]) -> list[Tensor]:
    found = []
    below = math.prod(shape)
    # max(.., 1): a tensor without elements has no positions, and must not divide by 0.
    for extent in shape:
        below //= max(extent, 1)
        found.append(positions // max(below, 1) % max(extent, 1))
    return found


def _find_differing(x: Tensor, y: Tensor) -> Tensor:
    """Find where two flat tensors of whole numbers differ, int64, ascending; sparse changes in words of 8 bytes."""
    width = x.element_size()
    # A view as int64 needs a start at a multiple of 8 bytes, which a slice of a tensor may not have.
    words = 0 if (x.storage_offset() * width) % 8 or (y.storage_offset() * width) % 8 else x.numel() * width // 8
    if not words or width == 8:
        return (x != y).nonzero().flatten()
    per = 8 // width
    head = words * per
    found = (x[:head].view(torch.int64) != y[:head].view(torch.int64)).nonzero()
    # Dense changes: to look into each word that differs would take longer than to compare all units.
    if found.numel() * 16 > words:
        return (x != y).nonzero().flatten()
    inside = (found * per + torch.arange(per, dtype=torch.int64, device="cpu")).flatten()
    tail = torch.arange(head, x.numel(), dtype=torch.int64, device="cpu")
    at = torch.cat([inside, tail])
    return at[x[at] != y[at]]
