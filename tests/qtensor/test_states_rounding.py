"""Rounding of masters is fair: unbiased, never stuck where a code ends, independent in its two places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qtensor import Int8RowScaling, MXFP8BlockScaling, NVFP4BlockScaling
from qtensor.spec.registry import format_of
from qtensor.states import lattice, remainders
from qtensor.states.draws import HALF
from tests.qtensor.states_under_test import (
    KEPT,
    RECIPES,
    each_recipe,
    kept,
    name_of,
    nearest,
    positions,
    quantized,
    step_of,
)
from tests.sampling import sampled

KEYS = 128
each_drift = sampled("recipe", RECIPES, KEPT[3:6], ids=[name_of(recipe) for recipe in RECIPES])


@each_recipe
def test_the_mean_of_many_roundings_is_the_master(recipe: Any) -> None:
    """One rounding errs by at most half a step in the root of the mean square, so a mean of n by 0.5 / sqrt(n)."""
    torch.manual_seed(2)
    x = torch.randn(128, 128) * torch.exp2(torch.randn(128, 128) * 4 - 6)
    total = torch.zeros(128, 128, dtype=torch.float64)
    for step in range(KEYS):
        parts, _, master = kept(x, recipe, positions(128, step))
        total += master.double() - x.double()
    error = total / KEYS / step_of(x, parts, recipe)
    # blocks that NVFP4 scales by the least scale or 0 do not round across the borders of their scale
    if isinstance(recipe, NVFP4BlockScaling):
        low = (parts["scale"].float() <= 2.0**-9).repeat_interleave(16, -1)
        error = error.where(~low, 0.0)
    assert error.abs().max() < 6 * 0.5 / KEYS**0.5
    assert (error * x.sign()).mean().abs() < 6 * 0.5 / (KEYS * x.numel()) ** 0.5


def at_ends(recipe: Any) -> tuple[Tensor, Tensor]:
    """Masters ten steps before the middle of two codes, in blocks with a 1, which decides all scales; and where."""
    some = torch.exp2(torch.linspace(-40, 0, 64 * 120))
    x = with_ones(torch.cat([some, -some]))
    found = format_of(recipe).decode(quantized(x, recipe), recipe)
    codes = found[found.abs() < 1].double().unique()
    middles = (codes[1:] + codes[:-1]) / 2
    middles = middles[torch.arange(128 * 120) % len(middles)].view(128, 120)
    parts, _, _ = kept(with_ones(middles.float()), recipe, nearest())
    step = step_of(with_ones(middles.float()), parts, recipe)
    start = with_ones(middles.float()).double() - 10 * step
    _, _, start = kept(with_ones(start[~ones()].view(128, 120).float()), recipe, nearest())
    return start, step


def ones() -> Tensor:
    """Bool [128, 128]: the first of each 16."""
    return (torch.arange(128) % 16 == 0).expand(128, 128)


def with_ones(x: Tensor) -> Tensor:
    """[128, 120] -> [128, 128]."""
    full = torch.ones(128, 128)
    full[~ones()] = x.flatten()
    return full


@each_drift
def test_small_updates_carry_masters_over_the_end_of_a_code(recipe: Any) -> None:
    """240 updates of 1/8 step each: 30 steps, give or take sqrt(240 * 7/64) = 5.1, so 20 beyond the end.

    INT8's step may be 4 of fp32, so that 1/8 would be lost in the master itself: 120 updates of 1/4, 4.7.
    """
    start, step = at_ends(recipe)
    share = 4 if isinstance(recipe, Int8RowScaling) else 8
    update = (step / share).where(~ones(), 0.0)
    master, code = start, format_of(recipe).decode(quantized(start, recipe), recipe)
    for number in range(30 * share):
        parts, _, master = kept((master.double() + update).float(), recipe, positions(128, number))
    moved = ((master.double() - start.double()) / step)[~ones()]
    assert abs(moved.mean().item() - 30) < 0.75 + 6 * 5.1 / moved.numel() ** 0.5
    after = format_of(recipe).decode(parts, recipe)
    assert (after > code)[~ones()].double().mean() > 0.99
    stuck = start
    for _ in range(20):
        stuck = kept((stuck.double() + update).float(), recipe, nearest())[2]
    assert torch.equal(stuck, start)


def test_two_roundings_of_one_number_are_independent() -> None:
    """Below 2^E numbers are rounded twice. From 3/4 of a step: to 1/2 or 1, then from 1/2 to 0 or 1; so 3/4 go up.

    With the same bits in both, all of them would.
    """
    x = torch.full((256, 512), 2.0**-15 + 0.75 * 2.0**-32)
    x[:, ::32] = 1.0  # a unit of 2^-8: steps are 2^-32 up to 2^-14
    first = remainders.rounded(x, MXFP8BlockScaling(), positions())
    _, _, master = kept(x, MXFP8BlockScaling(), positions())
    inner = torch.arange(512) % 32 > 0
    assert set(master[:, inner].unique().tolist()) == {2.0**-15, 2.0**-15 + 2.0**-32}
    for found, want in ((first, 0.5), (master, 0.75)):
        up = (found > x)[:, inner].double()
        assert abs(up.mean() - want) < 6 * 0.5 / up.numel() ** 0.5


# -- the lattice by itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [3, 15, 16, 17, 18, 20, 22])
@pytest.mark.parametrize("floor", [-126, -20, 0, 100])
def test_numbers_of_the_lattice_are_counted(bits: int, floor: int) -> None:
    where = torch.tensor(floor, dtype=torch.int32)
    number = torch.cat([torch.arange(-(2**bits) * 3, 2**bits * 3, max(1, 2 ** (bits - 12))), torch.arange(-9, 10)])
    number = number.to(torch.int32)
    value = lattice.value(number, bits, where)
    assert torch.equal(lattice.count(value, bits, where), number)
    order = number.argsort()
    assert (value[order].diff() >= 0).all()
    linear = number.abs() <= 2**bits
    assert torch.equal(value.double()[linear], number.double()[linear] * 2.0 ** (floor - bits))
    assert not torch.signbit(value[number == 0]).any()
    ends = lattice.value(torch.tensor([1, 2**bits, 2 ** (bits + 1)], dtype=torch.int32), bits, where).double()
    assert ends.tolist() == [2.0 ** (floor - bits), 2.0**floor, 2.0 ** (floor + 1)]


def test_a_count_is_that_of_the_nearest() -> None:
    floor = torch.tensor(0, dtype=torch.int32)
    x = torch.tensor([1 + 0.4 * 2.0**-16, 1 + 0.6 * 2.0**-16, 0.4 * 2.0**-16, 0.6 * 2.0**-16, -0.6 * 2.0**-16])
    assert lattice.count(x, 16, floor).tolist() == [2**16, 2**16 + 1, 0, 1, -1]


def test_floors_of_units() -> None:
    unit = torch.tensor([1.0, 2.0 - 2.0**-12, 2.0 - 2.0**-13, 2.0**-130, 2.0**-149, 2.0**-120, 2.0**127])
    assert lattice.floor_of(unit, 2).tolist() == [2, 2, 3, -126, -126, -118, 127]
    assert lattice.floor_of(torch.tensor([2.0**-127]), 2).tolist() == [-125]


def test_the_largest_numbers_do_not_become_infinite() -> None:
    x = torch.tensor([3.4028234e38, -3.4028234e38, float("inf")])
    up = torch.full((3,), -1, dtype=torch.int32)
    found = lattice.by_mantissa(x, 3, up)
    assert found[:2].tolist() == [1.875 * 2.0**127, -1.875 * 2.0**127]
    assert found[2].item() == float("inf")


def test_halves_round_to_the_nearest() -> None:
    half = torch.tensor(HALF, dtype=torch.int32)
    x = torch.tensor([1 + 0.49 * 2.0**-3, 1 + 0.51 * 2.0**-3])
    assert lattice.by_mantissa(x, 3, half).tolist() == [1.0, 1.125]
    low, other = lattice.below(torch.tensor([0.49, 0.51, 3.0]), 3, torch.tensor(3, dtype=torch.int32), half)
    assert low.tolist() == [0.0, 1.0, 3.0]
    assert other[:2].tolist() == [1.0, 0.0]
