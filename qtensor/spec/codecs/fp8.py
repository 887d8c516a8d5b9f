"""E4M3 and E5M2: elements that saturate at the largest finite number, and are NaN for what is not finite."""

import math

import torch
from torch import Tensor

from qtensor.spec.codecs.rounding import nearest, onto_grid

# element name -> (dtype, largest finite value)
ELEMENTS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
MANTISSA = {"e4m3": 3, "e5m2": 2}  # bits
GRAIN = {"e4m3": (18, -6), "e5m2": (17, -14)}  # of qtensor.spec.format.Grain: 15 bits behind those of the element
STEP = {"e4m3": 9, "e5m2": 16}  # the least element is 2^-STEP


def encode(scaled: Tensor, whole: Tensor, element: str) -> Tensor:
    """`scaled` (values over their scale) as float8 of the same shape; NaN where they are not `whole`."""
    dtype, largest = ELEMENTS[element]
    bounded = onto_grid(scaled.clamp(-largest, largest), torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal)
    return torch.where(whole, bounded, math.nan).to(dtype)


def snapped(scaled: Tensor, element: str) -> Tensor:
    """`scaled` rounded to float8, saturating, but still fp32."""
    dtype, largest = ELEMENTS[element]
    return nearest(scaled, largest, torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal)
