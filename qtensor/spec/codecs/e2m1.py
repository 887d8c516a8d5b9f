"""E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. No NaN and no infinity."""

import torch
from torch import Tensor

from qtensor.spec.codecs.nibbles import packed, unpacked
from qtensor.spec.codecs.rounding import nearest, onto_grid

LARGEST = 6.0
MANTISSA = 1  # bits
GRAIN = (16, 0)  # of qtensor.spec.format.Grain: 15 bits behind those of the element
EPS, SMALLEST_NORMAL = 0.5, 1.0  # one mantissa bit, and 0.5 as the only subnormal


def encode(scaled: Tensor, whole: Tensor, drawn: Tensor | None = None) -> Tensor:
    """`scaled` (values over their scale, [.., 8 n]) as a payload [.., 4 n]; 0 where they are not `whole`.

    `drawn`, int32, are random bits for each: they decide between its two neighbours, see `_neighbour`.
    """
    bounded = torch.where(whole, scaled.clamp(-LARGEST, LARGEST), 0.0)
    onto = onto_grid(bounded, EPS, SMALLEST_NORMAL) if drawn is None else _neighbour(bounded, drawn)
    return packed(_nearest_code(onto))


def decode(payload: Tensor) -> Tensor:
    """The fp32 values [.., K] of a payload [.., K // 2]."""
    return _value(unpacked(payload))


def snapped(scaled: Tensor) -> Tensor:
    """`scaled` rounded to E2M1, saturating, but still fp32."""
    return nearest(scaled, LARGEST, EPS, SMALLEST_NORMAL)


def rounded(scaled: Tensor) -> Tensor:
    """The same by the codes: in compiled code, too, no product is contracted with what rounds it."""
    return _value(_nearest_code(scaled.clamp(-LARGEST, LARGEST)))


def _neighbour(bounded: Tensor, drawn: Tensor) -> Tensor:
    """Each number of at most 6 in magnitude as one of its two neighbours in E2M1, signs kept; the mean is the number.

    The upper one where 24 of the random bits, as a fraction of 2^24, are below the distance from the lower one in
    steps. They are taken as an odd number: the mean is exact up to 2^-24 of a step, and nothing is rounded up to a step
    whose distance is less than that.
    """
    magnitude = bounded.abs()
    # powers of two: quotients and products are exact; `one` is fp32, whatever torch's default dtype is
    one = torch.ones_like(magnitude)
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, one, 2.0))
    steps = magnitude * torch.where(magnitude < 2.0, 2.0, torch.where(magnitude < 4.0, one, 0.5))
    lower = steps.floor()
    chance = (((drawn >> 8) & 0xFFFFFF) | 1).to(torch.float32) * 2.0**-24
    up = (chance < steps - lower).to(torch.float32)
    return torch.copysign((lower + up) * step, bounded)


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
