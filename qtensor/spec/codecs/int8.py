"""INT8: the whole numbers -128 .. 127. No NaN."""

import torch
from torch import Tensor

from qtensor.spec.codecs.rounding import onto_grid

SMALLEST, LARGEST = -128.0, 127.0
# Added to a fp32 number it leaves no bits for less than 1, so it rounds, ties to even: the last bits are q.
_WHOLE = 1.5 * 2.0**23


def encode(scaled: Tensor, whole: Tensor) -> Tensor:
    """`scaled` (values over their scale) as int8 of the same shape; 0 where they are not `whole`."""
    bounded = torch.where(whole, scaled.clamp(SMALLEST, LARGEST), 0.0)
    numbers = onto_grid(bounded, 1 / 128, 128.0) + _WHOLE  # steps of 1 everywhere
    return (numbers.view(torch.int32) & 0xFF).to(torch.uint8).view(torch.int8)


def snapped(scaled: Tensor) -> Tensor:
    """`scaled` rounded to INT8, saturating, but still fp32; zeros are positive, for the element has one zero."""
    return scaled.clamp(SMALLEST, LARGEST).add_(_WHOLE).sub_(_WHOLE)
