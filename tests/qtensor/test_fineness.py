"""Facts of fp32 values against Python's exact fractions, down to the least subnormal number."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from qtensor.numerics.fineness import ORIGIN, fineness, fits

MANTISSA = 3
ENDS = [2.0**-149, 3 * 2.0**-149, 2.0**-127, 2.0**-126, 1.0, 1.5, 15.0, 17.0, 448.0, 2.0**127, float(2**24 - 1)]


def odd_and_power(value: float) -> tuple[int, int]:
    """value = odd * 2^power."""
    fraction = Fraction(value)
    odd, power = abs(fraction.numerator), -(fraction.denominator.bit_length() - 1)
    while odd % 2 == 0:
        odd, power = odd // 2, power + 1
    return odd, power


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("value", ENDS)
def test_one_value(value: float, sign: int) -> None:
    odd, power = odd_and_power(value)
    found = fineness(torch.tensor([[0.0, sign * value, 0.0, 0.0]]), 0, MANTISSA)
    assert found.amax.item() == value
    assert found.depth.item() == ORIGIN - power
    assert found.broken.item() == (odd >= 2 ** (MANTISSA + 1))
    assert (found.nan.item(), found.number.item()) == (0, 1)


def test_random_bits_by_rows_and_blocks() -> None:
    bits = torch.randint(-(2**31), 2**31, (16, 64), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    x = (bits & ~0x7FF00).view(torch.float32)  # some values of few digits
    x[:4] = (bits[:4] & 0x807FFFFF - 2**32).view(torch.float32)  # subnormal ones
    x = torch.where(x.isfinite(), x, 0.0)
    for block in (0, 16):
        pieces = x.view(16, -1, block or 64)
        expected = [
            [max((ORIGIN - odd_and_power(value)[1] for value in piece if value), default=0) for piece in row]
            for row in pieces.tolist()
        ]
        assert fineness(x, block, MANTISSA).depth.tolist() == expected


def test_a_scale_that_is_no_normal_number_never_fits() -> None:
    facts = fineness(torch.tensor([[2.0**-127]]), 0, MANTISSA)
    assert fits(torch.tensor([[2.0**126]]), facts, 9)
    assert not fits(torch.tensor([[2.0**127]]), facts, 9)  # 2^-127
