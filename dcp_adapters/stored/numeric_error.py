"""How far one tensor's values are from another's, added up piece by piece.

    max |B - A|        |B - A| / |A|  (Frobenius)        SNR = -20 log10 of that, in dB

Elements that are not finite on either side would make all three useless: they are left out, and counted apart if
they differ.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtensor.tensor.quantized_tensor import QuantizedTensor

SLICE = 1 << 20  # elements that are decoded, and widened to float64, at once; one entry of dim 0 at least is decoded


@dataclass(frozen=True)
class Error:
    """How far the values of B are from those of A.

    max_abs, relative: over the elements that are finite on both sides; relative is None if A is 0 and B is not, if
    squares overflow, and if elements differ and none is finite on both sides.
    not_finite: the number of other elements that differ.
    """

    max_abs: float
    relative: float | None
    not_finite: int

    @property
    def snr_db(self) -> float | None:
        """None if it would be infinite (no error) or is not defined."""
        return -20 * math.log10(self.relative) if self.relative else None

    @property
    def exact(self) -> bool:
        """Whether all values are equal."""
        return self.max_abs == 0 and self.not_finite == 0

    def to_json(self) -> dict[str, Any]:
        """Return plain data; None if something does not apply."""
        return {
            "max_abs": self.max_abs,
            "relative": self.relative,
            "snr_db": self.snr_db,
            "not_finite": self.not_finite,
        }

    def cells(self) -> tuple[str, str, str]:
        """Return max_abs, relative and snr_db, for people."""
        relative = "inf" if self.relative is None else f"{self.relative:.3g}"
        return f"{self.max_abs:.3g}", relative, "-" if self.snr_db is None else f"{self.snr_db:.1f}"


class ErrorSum:
    """The error of tensors that are given in pieces."""

    def __init__(self) -> None:
        self._largest, self._squares, self._reference, self._broken = 0.0, 0.0, 0.0, 0
        self._compared = False  # whether any element is finite on both sides

    def add(self, left: Tensor, right: Tensor) -> None:
        """Add one piece of both, of equal shapes; `left` is the reference."""
        if not left.numel():
            return
        # fp64 holds the square of every fp32 value
        left, right = left.reshape(-1).to(torch.float64), right.reshape(-1).to(torch.float64)
        distance = right - left
        squares = float(distance.dot(distance))
        # a finite sum means that every element of both is finite, which spares a look at each
        if math.isfinite(squares):
            self._add(distance, squares, left)
            return
        finite = torch.isfinite(left) & torch.isfinite(right)
        same = (left == right) | (left.isnan() & right.isnan())
        self._broken += int((~finite & ~same).sum())
        left, distance = left[finite], distance[finite]
        if left.numel():
            self._add(distance, float(distance.dot(distance)), left)

    def _add(self, distance: Tensor, squares: float, left: Tensor) -> None:
        self._compared = True
        least, most = (float(end) for end in distance.aminmax())
        self._largest = max(self._largest, most, -least)
        self._squares += squares
        self._reference += float(left.dot(left))

    def error(self) -> Error:
        """Return the error over all pieces."""
        relative = math.sqrt(self._squares / self._reference) if self._reference else (None if self._squares else 0.0)
        if self._broken and not self._compared:
            # nothing is known of any element
            relative = None
        if relative is not None and not math.isfinite(relative):
            # the squares of such values overflow
            relative = None
        return Error(self._largest, relative, self._broken)


def error_between(left: Tensor, right: Tensor) -> Error:
    """Return how far the values of `right` are from those of `left`, both quantized or dense, of one shape."""
    total = ErrorSum()
    for one, other in zip(_values(left), _values(right), strict=True):
        total.add(one, other)
    return total.error()


def _values(x: Tensor) -> Iterator[Tensor]:
    """Yield the values, some at a time, flat."""
    x = x if x.ndim else x.reshape(1)
    size = max(SLICE // max(math.prod(x.shape[1:]), 1), 1)
    for start in range(0, x.shape[0], size):
        piece = x[start : start + size]
        dense = piece.dequantize(torch.float32) if isinstance(piece, QuantizedTensor) else piece
        yield from (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1).split(SLICE)
