"""Moments in 8 bits: unbiased, never a vanished second one, the same for every cut."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qtensor import MXFP8BlockScaling
from qtensor.spec.registry import encode
from qtensor.states.moments import decode_moment, encode_moment, root_of
from tests.qtensor.recipes_under_test import same_bytes
from tests.qtensor.states_under_test import COLUMNS, ROWS, inputs, nearest, positions, same

if TYPE_CHECKING:
    from qtensor.states.draws import Positions

INPUTS = inputs()
each_root = pytest.mark.parametrize("root", [False, True], ids=["first", "second"])


def through(x: Tensor, at: Positions, *, root: bool) -> Tensor:
    return decode_moment(encode_moment(x, at, root=root), root=root)


def units(x: Tensor) -> Tensor:
    """fp64: the scale of each element's block, [rows, K]."""
    scale = encode(x, MXFP8BlockScaling(), None)["scale"]
    return torch.exp2(scale.double() - 127).repeat_interleave(32, -1)


@each_root
def test_an_element_becomes_one_of_its_two_neighbours(root: bool) -> None:
    for name, x in INPUTS.items():
        held = x.clamp(-1e18, 1e18) ** 2 if root else x
        values = held.sqrt() if root else x
        parts = encode_moment(held, positions(), root=root)
        found = decode_moment(parts, root=False).double()
        unit = units(values)
        # from 2^-6 units on 3 bits of mantissa, multiples of 2^-9 units below; fp32 ends at 2^-126
        floor = (torch.log2(unit).floor() - 6).clamp(min=-126)
        exponent = torch.frexp(values.double().abs()).exponent - 1.0
        step = torch.exp2(torch.maximum(exponent, floor) - 3)
        assert ((found - values.double()).abs() / step).nan_to_num(0.0).max() <= 1, name
        assert not torch.signbit(found[found == 0]).any(), name
        assert (found * values >= 0).all(), name
        # what was encoded is what is encoded again, whatever is drawn
        again = through(decode_moment(parts, root=False), positions(step=1), root=False)
        assert torch.equal(again.double(), found), name


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)], ids=["eager", "compiled"])
def test_roots_are_the_nearest_numbers(compiled: bool) -> None:
    """torch's own fp32 `sqrt` on a CPU is not, for one number in six: whoever compiles would get other codes."""
    x = torch.rand(2**20, generator=torch.Generator().manual_seed(0)) * 1e-8
    x[:8] = torch.tensor([0.0, 2.0**-149, 3 * 2.0**-149, 2.0**-126, 3.4e38, math.inf, math.nan, 1.0])
    root: Any = torch.compile(root_of) if compiled else root_of
    expected = torch.from_numpy(np.sqrt(x.double().numpy()).astype(np.float32))
    torch.testing.assert_close(root(x), expected, rtol=0, atol=0, equal_nan=True)


def test_a_positive_second_moment_never_becomes_zero() -> None:
    torch.manual_seed(0)
    v = torch.exp2(torch.rand(ROWS, COLUMNS) * 120 - 126)
    v[:, ::7] = 0.0
    v[3, :32] = torch.tensor([1e30] + [1e-45] * 31)
    for at in (positions(), nearest()):
        parts = encode_moment(v, at, root=True)
        code = parts["payload"].view(torch.uint8)
        assert torch.equal(code > 0, v > 0)
    assert encode_moment(v, positions(), root=False)["payload"].view(torch.uint8).eq(0).sum() > (v == 0).sum()


def test_steps_grow_no_more_than_the_bound() -> None:
    """m / sqrt(v) of Adam, beside that of fp32: see docs/numerics.md for 81/64, 9/4 and 4 c."""
    torch.manual_seed(0)
    m, v = torch.zeros(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS)
    wide = torch.exp2((torch.rand(ROWS, COLUMNS) * 30 - 30).round())
    for _ in range(20):
        gradient = torch.randn(ROWS, COLUMNS) * wide * (torch.rand(ROWS, COLUMNS) < 0.3)
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient * gradient
    held = v > 0
    root = v.double().sqrt()
    for step in range(8):
        first = through(m, positions(step=step), root=False).double()
        second = decode_moment(encode_moment(v, positions(step=100 + step), root=True), root=False).double()
        ratio = (first.abs() / second / (m.double().abs() / root))[held & (m != 0)]
        least, normal = first.abs() / second, root >= units(v.sqrt()) * 2.0**-6
        large = m.double().abs() >= units(m) * 2.0**-6
        assert (ratio[(normal & large)[held & (m != 0)]] <= 81 / 64 * (1 + 2.0**-20)).all()
        assert (ratio[large[held & (m != 0)]] <= 9 / 4 * (1 + 2.0**-20)).all()
        # |m| <= c sqrt(v), by Cauchy and Schwarz
        c = 0.1 / math.sqrt(0.001 * (1 - 0.81 / 0.999))
        assert (m.double().abs() <= c * root * (1 + 1e-4)).all()
        assert (least[held] <= 4 * c).all()


@each_root
def test_the_mean_of_many_roundings_is_the_moment(root: bool) -> None:
    torch.manual_seed(1)
    x = torch.rand(64, 128) * torch.exp2(torch.randn(64, 128) * 2) + 2.0**-4
    held = x * x if root else x * torch.randn(64, 128).sign()
    values = held.sqrt() if root else held
    found = [decode_moment(encode_moment(held, positions(64, step), root=root), root=False) for step in range(256)]
    step = torch.exp2(torch.maximum(values.double().abs().log2().floor(), units(values).log2() - 6) - 3)
    error = (torch.stack(found).double().mean(0) - values.double()) / step
    assert error.abs().max() < 6 * 0.5 / 256**0.5
    assert (error * values.sign()).mean().abs() < 6 * 0.5 / (256 * x.numel()) ** 0.5


@pytest.mark.parametrize("steps", [400, pytest.param(5000, marks=pytest.mark.full)])
def test_a_second_moment_decays_where_rounding_to_the_nearest_stalls(steps: int) -> None:
    """sqrt(v) falls by a factor 1 - d, d = 0.0005, a step, and is rounded to one of two elements 1/16 to 1/8 apart.

    The variance of one rounding is at most d / 8 of the square, so after n steps the mean square is at most
    exp(n d / 8) of the square of the mean: the relative error of the mean of N elements is sqrt((that - 1) / N).
    """
    start = torch.ones(64, 512) * (1 + torch.arange(8).repeat(64) / 8)
    v, stalled = start**2, start**2
    for step in range(steps):
        v = through(v * 0.999, positions(64, step), root=True)
        if step < 400:
            stalled = through(stalled * 0.999, nearest(), root=True)
    assert torch.equal(stalled, start**2)
    found = (v.double().sqrt() / start).mean().item()
    noise = math.sqrt(math.expm1(steps * 0.0005 / 8) / v.numel())
    assert abs(found / 0.999 ** (steps / 2) - 1) < 6 * noise


@each_root
def test_pieces_are_those_of_the_whole(root: bool) -> None:
    x = INPUTS["spread"].abs()
    whole = encode_moment(x, positions(), root=root)
    for top, bottom, left, right in [(100, 256, 32, 512), (0, 7, 0, 96), (7, 100, 480, 512)]:
        at = positions(bottom - top, start=top, first=left)
        own = encode_moment(x[top:bottom, left:right].contiguous(), at, root=root)
        assert same_bytes(own["payload"], whole["payload"][top:bottom, left:right])
        assert same_bytes(own["scale"], whole["scale"][top:bottom, left // 32 : right // 32])


def test_what_is_not_finite_marks_its_block() -> None:
    x = INPUTS["normal"].clone()
    x[3, 40], x[9, 9] = float("nan"), float("inf")
    found = through(x, positions(), root=False)
    assert found[3, 32:64].isnan().all()
    assert found.isnan().sum() == 64
    negative = through(torch.full((1, 32), -1.0), positions(1), root=True)
    assert negative.isnan().all()


@each_root
def test_shards_without_rows_and_columns_that_are_no_blocks(root: bool) -> None:
    assert same(
        encode_moment(torch.zeros(0, 64), positions(0), root=root),
        encode(torch.zeros(0, 64), MXFP8BlockScaling(), None),
    )
    assert through(torch.zeros(0, 64), positions(0), root=root).shape == (0, 64)
    with pytest.raises(ValueError, match="48 columns, expected a multiple of 32"):
        encode_moment(torch.zeros(2, 48), positions(2), root=root)
