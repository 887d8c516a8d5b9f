"""E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. No NaN and no infinity."""

import torch
from torch import Tensor

from qtensor.spec.codecs.nibbles import packed, unpacked
from qtensor.spec.codecs.rounding import nearest, onto_grid

LARGEST = 6.0
MANTISSA = 1  # bits
GRAIN = (16, 0)  # of qtensor.spec.format.Grain: 15 bits behind those of the element
EPS, SMALLEST_NORMAL = 0.5, 1.0  # one mantissa bit, and 0.5 as the only subnormal


def encode(scaled: Tensor, whole: Tensor) -> Tensor:
    """`scaled` (values over their scale, [.., 8 n]) as a payload [.., 4 n]; 0 where they are not `whole`."""
    bounded = torch.where(whole, scaled.clamp(-LARGEST, LARGEST), 0.0)
    return packed(_nearest_code(onto_grid(bounded, EPS, SMALLEST_NORMAL)))


def decode(payload: Tensor) -> Tensor:
    """The fp32 values [.., K] of a payload [.., K // 2]."""
    return _value(unpacked(payload))


def snapped(scaled: Tensor) -> Tensor:
    """`scaled` rounded to E2M1, saturating, but still fp32."""
    return nearest(scaled, LARGEST, EPS, SMALLEST_NORMAL)


def _nearest_code(scaled: Tensor) -> Tensor:
    """E2M1 code (uint8) nearest to each value of at most 6 in magnitude, ties to the even code.

    From 1 on, the code is the upper bits of the fp32 number, rounded, less the exponent's bias. Below 1 it is the
    number of halves, which the last bits of a sum with 2^22 hold.
    """
    magnitude = scaled.abs()
    bits = magnitude.view(torch.int32)
    normal = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252
    halves = (magnitude + 2.0**22).view(torch.int32) - 0x4A800000
    sign = (scaled.view(torch.int32) >> 28) & 8
    return (torch.where(magnitude < SMALLEST_NORMAL, halves, normal) | sign).to(torch.uint8)


def _value(codes: Tensor) -> Tensor:
    """The fp32 values of E2M1 codes; the inverse of `_nearest_code`.

    The sign is a bit, not a negation: Triton computes -x as 0 - x, which has no negative zero.
    """
    codes = codes.to(torch.int32)
    magnitude = codes & 7
    normal = ((magnitude << 22) + (126 << 23)).view(torch.float32)
    value = torch.where(magnitude < 2, magnitude.to(torch.float32) * 0.5, normal)
    return (value.view(torch.int32) | ((codes & 8) << 28)).view(torch.float32)
