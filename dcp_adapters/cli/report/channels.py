"""Rows and columns of a matrix that stand out: outlier channels, and rows of zeros.

A channel is a row (an output of a linear) or a column (an input); dims before the last are rows. Its amax is the
largest finite |value| in it. It is an outlier if its amax is more than FACTOR times the median of those of its axis
(of an even number the lower of the two in the middle), not counting channels of zeros. With fewer than CHANNELS others
there is no meaningful median, and no channel is an outlier.
"""

from typing import Literal

import torch
from torch import Tensor

from dcp_adapters.cli.report.records import Outlier, Profile
from dcp_adapters.cli.report.tiles import Tile

FACTOR = 4.0
CHANNELS = 8
LISTED = 8  # of a tensor's outliers, the largest are named
BINS = 120  # of a profile

Axis = Literal["row", "column"]


class Channels:
    """The amaxes of all rows and columns of one tensor, from its pieces."""

    def __init__(self, rows: int, columns: int) -> None:
        self._amax: dict[Axis, Tensor] = {
            "row": torch.zeros(rows, dtype=torch.float64, device="cpu"),
            "column": torch.zeros(columns, dtype=torch.float64, device="cpu"),
        }
        self._broken = torch.zeros(rows, dtype=torch.bool, device="cpu")
        self.not_finite = 0

    def add(self, tile: Tile) -> None:
        """Add one piece."""
        finite = tile.values.isfinite()
        # one infinity would hide every other value of its row and its column
        magnitudes = torch.where(finite, tile.values.abs(), 0.0)  # [rows, columns]
        rows, columns = self._amax["row"][tile.rows], self._amax["column"][tile.columns]
        rows.copy_(torch.maximum(rows, magnitudes.amax(1).double()))
        columns.copy_(torch.maximum(columns, magnitudes.amax(0).double()))
        self.not_finite += int((~finite).sum())
        self._broken[tile.rows] |= ~finite.all(1)

    @property
    def zero_rows(self) -> int:
        """Rows of zeros alone, and of at least one."""
        return int(((self._amax["row"] == 0) & ~self._broken).sum()) if len(self._amax["column"]) else 0

    def outliers(self, axis: Axis) -> tuple[int, tuple[Outlier, ...]]:
        """Return how many there are, and the largest of them, the first of equals first."""
        amax, median = self._amax[axis], self._median(axis)
        if median is None:
            return 0, ()
        beyond = (amax > FACTOR * median).nonzero().flatten()
        order = beyond[amax[beyond].argsort(descending=True, stable=True)][:LISTED]
        return len(beyond), tuple(
            Outlier(axis, index, float(amax[index]), float(amax[index] / median)) for index in order.tolist()
        )

    def profile(self, axis: Axis) -> Profile | None:
        """Return the amaxes over their median; None if there is none."""
        median = self._median(axis)
        if median is None:
            return None
        relative = self._amax[axis] / median
        bins = tuple(float(piece.max()) for piece in relative.tensor_split(min(BINS, len(relative))))
        return Profile(axis, len(relative), bins)

    def _median(self, axis: Axis) -> Tensor | None:
        usual = self._amax[axis][self._amax[axis] > 0]
        return usual.median() if len(usual) >= CHANNELS else None
