"""INT4: the whole numbers -8 .. 7, stored as q + 8, two in a byte. No NaN."""

import torch
from torch import Tensor

from qtensor.spec.codecs.nibbles import packed, unpacked
from qtensor.spec.codecs.rounding import onto_grid

SMALLEST, LARGEST = -8.0, 7.0
# Added to a fp32 number it leaves no bits for less than 1, so it rounds, ties to even: the last bits are q + 8.
_WHOLE = 1.5 * 2.0**23
_OFFSET = 8.0


def encode(scaled: Tensor, whole: Tensor) -> Tensor:
    """`scaled` (values over their scale, [.., 8 n]) as a payload [.., 4 n]; 0 where they are not `whole`."""
    bounded = torch.where(whole, scaled.clamp(SMALLEST, LARGEST), 0.0)
    numbers = onto_grid(bounded, 1 / 8, 8.0) + (_WHOLE + _OFFSET)  # steps of 1 everywhere
    return packed((numbers.view(torch.int32) & 0xF).to(torch.uint8))


def decode(payload: Tensor) -> Tensor:
    """The fp32 values [.., K] of a payload [.., K // 2]."""
    return unpacked(payload).to(torch.int32).to(torch.float32) - _OFFSET


def snapped(scaled: Tensor) -> Tensor:
    """`scaled` rounded to INT4, saturating, but still fp32; zeros are positive, for the element has one zero."""
    return scaled.clamp(SMALLEST, LARGEST).add_(_WHOLE).sub_(_WHOLE)
