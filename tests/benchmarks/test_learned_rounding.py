"""Learned rounding stays on the grid, between neighbours, and makes the error smaller."""

from __future__ import annotations

import torch

import qtensor as qt
from benchmarks.learned_rounding import neighbours
from benchmarks.learned_rounding_linears import GRID, RECIPE, error, learned_linear, rounded
from layerwise import Max
from layerwise.algorithms.algorithm import Group, Inputs, Linear
from layerwise.algorithms.solvers.columns import columns_of, rounding_of
from qtensor.spec.registry import shared_amax


def test_learned_codes_are_neighbours_and_better_than_the_nearest() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(16, 32), torch.randn(64, 32) @ torch.randn(32, 32)
    hessian = x.T @ x / 64
    inputs = Inputs(64, x.abs().amax(), hessian=hessian)
    group = Group((Linear("weight", weight, shared_amax(weight, RECIPE)),), inputs)
    rounding = rounding_of(group, RECIPE, [one.quantizer for one in Max().decide(group, RECIPE)])
    aims = columns_of(group)
    learned = learned_linear(aims, hessian, rounding, aims, 200)
    assert torch.equal(rounded(learned, rounding), learned)
    assert error(learned - aims, hessian) < 0.8 * error(rounded(aims, rounding) - aims, hessian)
    widest = 2 * rounding.dec.repeat_interleave(rounding.span, 0)  # from 4 to 6
    assert ((learned - aims).abs() <= widest * 1.0001).all()


def test_the_neighbour_is_the_next_value_on_the_side_of_the_weight() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 64)
    stored = qt.quantize(weight, RECIPE)
    values, step = neighbours(stored, weight)
    assert torch.equal(values, stored.dequantize(torch.float32))
    parts = stored.parts()
    dec = (parts["scale"].float() * parts["global_scale"]).repeat_interleave(16, -1)
    codes, beside = ((each / dec)[..., None].sub(GRID).abs().argmin(-1) for each in (values, values + step))
    moved = codes != beside
    assert moved.float().mean() > 0.9  # all but those at an end of the grid
    assert torch.equal(beside - codes, torch.where(weight > values, 1, -1) * moved)
