"""A master is its weight's bytes and 16 bits: the bytes are those of quantizing it, it moves by less than a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_hooks.kernels.compiled import use_kernels
from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    Int4GroupScaling,
    Int8RowScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NF4BlockScaling,
    NVFP4BlockScaling,
)
from qtensor.spec.registry import format_of
from qtensor.states import remainders
from tests.qtensor.recipes_under_test import same_bytes
from tests.qtensor.states_under_test import (
    COLUMNS,
    ROWS,
    each_recipe,
    exponent,
    inputs,
    kept,
    nearest,
    positions,
    quantized,
    same,
    step_of,
)

INPUTS = inputs()
each_rounding = pytest.mark.parametrize("at", [positions(), nearest()], ids=["drawn", "nearest"])


def largest(recipe: Any) -> int:
    """Remainder, see docs/numerics.md."""
    if "floor" in repr(recipe):
        return 2**15 - 1
    if isinstance(recipe, (MXFP8BlockScaling, MXFP4BlockScaling)) or getattr(recipe, "power_of_two", False):
        return 2**14
    if isinstance(recipe, NF4BlockScaling):
        return 26128
    # the unit of INT4 has 8 bits: it is at most 2 - 2^-7 powers of two
    return 2**15 - 2**7 if isinstance(recipe, Int4GroupScaling) else 2**15 - 1


@each_recipe
@each_rounding
def test_a_master_is_what_its_weight_was_quantized_from(recipe: Any, at: Any) -> None:
    for name, x in INPUTS.items():
        parts, remainder, master = kept(x, recipe, at)
        assert same(parts, quantized(master, recipe)), name
        assert remainder.dtype == torch.int16, name
        assert remainder.int().abs().max() <= largest(recipe), name
        # a clamped one would be a step away, of a number that needs no rounding
        error = (master.double() - x.double()).abs() / step_of(x, parts, recipe)
        assert error.max() < 1, name
        again, theirs, back = kept(master, recipe, positions(step=1))
        assert same({**parts, "remainder": remainder, "master": master}, {**again, "remainder": theirs, "master": back})


@each_recipe
def test_signs_stay_and_zeros_are_positive(recipe: Any) -> None:
    for name, x in INPUTS.items():
        parts, _, master = kept(x, recipe, positions())
        assert (master * x.sign() >= 0).all(), name
        assert not (torch.signbit(master) & (master == 0)).any(), name
        if "float8" in str(parts["payload"].dtype):
            negative = parts["payload"].view(torch.uint8) >= 128
            assert not (negative & (master == 0)).any(), name  # a step of 0 would make it +0.0, another code


@each_recipe
def test_what_is_not_finite_is_lost_and_nothing_else(recipe: Any) -> None:
    x = INPUTS["normal"].clone()
    x[3, 40], x[70, 100], x[200, 300] = float("nan"), float("inf"), -float("inf")
    parts, remainder, master = kept(x, recipe, positions())
    marks = ~x.isfinite()
    assert master[marks].isnan().all()
    assert (remainder[marks] == 0).all()
    if isinstance(recipe, Int8RowScaling):  # which computes with the scale NaN
        assert (remainder[master.isnan()] == 0).all()
    assert not master.isinf().any()
    assert torch.equal(master.isnan(), decoded(parts, recipe).isnan())
    # other blocks are what they are without it
    clean = x.where(~marks, 0.0)
    _, _, other = kept(clean, recipe, positions())
    assert torch.equal(master.where(~master.isnan(), 0.0), other.where(~master.isnan(), 0.0))
    _, theirs, back = kept(master, recipe, positions(step=1))
    assert torch.equal(master.isnan(), back.isnan())
    assert same_bytes(master.nan_to_num(0.0), back.nan_to_num(0.0))
    assert (theirs[back.isnan()] == 0).all()


def decoded(parts: dict[str, Tensor], recipe: Any) -> Tensor:
    return format_of(recipe).decode(parts, recipe)


@pytest.mark.parametrize(
    ("recipe", "top", "code"),
    [
        (MXFP8BlockScaling(scale_rounding="floor"), 512.0, 448.0),
        (MXFP8BlockScaling(element="e5m2", scale_rounding="floor"), 65536.0, 57344.0),
        (MXFP4BlockScaling(scale_rounding="floor"), 8.0, 6.0),
    ],
    ids=["e4m3", "e5m2", "e2m1"],
)
def test_the_largest_remainder_is_a_legal_value(recipe: Any, top: float, code: float) -> None:
    """The last number before the next scale: 2^15 - 1 steps above the code that it saturates at."""
    step = (top - code) * 2.0**-15
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = top - step, -(top - step)
    parts, remainder, master = kept(x, recipe, positions(1))
    assert remainder[0, :3].tolist() == [32767, -32767, 0]
    assert torch.equal(master, x)
    assert same(parts, quantized(x, recipe))


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_units_just_below_a_power_of_two_leave_room(element: str) -> None:
    """All masters between the codes that are equally far apart: the middle of two is nearly 2^15 steps from them."""
    short = torch.exp2(-torch.arange(10, 24).float()).unsqueeze(-1)
    top, low = (448.0, -6) if element == "e4m3" else (57344.0, -14)
    bits = 18 if element == "e4m3" else 17
    x = (torch.arange(2**bits).float() * 2.0 ** (low - bits)).expand(len(short), -1).clone()
    x[:, 0] = (top * (2 - short.double())).float()[:, 0]
    parts, remainder, master = kept(x, Float8CurrentScaling(element=element), nearest())
    moved = (master.double() - x.double()).abs() / step_of(x, parts, Float8CurrentScaling(element=element))
    assert moved.max() < 1
    assert remainder.int().abs().max() < 2**15 - 1  # where a larger one would be clamped


def test_int4_leaves_room_at_the_largest_numbers() -> None:
    """Codes 2 and 3 lie between 2^126 and 2^127 there, in steps that are those of the numbers above."""
    unit = (torch.tensor(3.4e38) / 7.5).bfloat16().float().item()
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 31] = 3.4e38, -3.4e38
    x[0, 1:31] = 2.5 * unit + (torch.arange(30) - 15) * 2.0 ** (127 - 17)
    parts, _, master = kept(x, Int4GroupScaling(), nearest())
    assert torch.equal(master[:, 1:31], x[:, 1:31])
    assert same(parts, quantized(master, Int4GroupScaling()))


def test_what_is_nothing_beside_a_step_is_never_rounded_up() -> None:
    """Under a scale of 1, which INT4 gives to blocks whose own would be 0, a step is 2^-15."""
    _, _, master = kept(torch.full((4096, 4096), 2e-40), Int4GroupScaling(), positions(4096))
    assert (master == 0).all()


def test_numbers_whose_code_says_infinity_are_kept() -> None:
    """4 * 2^126 is 2^128, which fp32 calls inf; its remainders are negative."""
    x = torch.full((1, 32), 3.2e38)
    x[0, 1] = 3.4e38
    for recipe in (MXFP4BlockScaling(), MXFP8BlockScaling(), MXFP8BlockScaling(element="e5m2")):
        parts, _, master = kept(x, recipe, positions(1))
        assert master.isfinite().all()
        assert decoded(parts, recipe).isinf().any()


def test_a_last_block_may_hold_fewer_elements() -> None:
    x = INPUTS["spread"][:200, :300]
    for recipe in (Float8BlockScaling(), Float8BlockScaling(blocks="row", element="e5m2")):
        parts, _, master = kept(x, recipe, positions(200))
        assert same(parts, quantized(master, recipe))
        whole = torch.nn.functional.pad(x, (0, 84))
        assert torch.equal(kept(whole, recipe, positions(200))[2][:, :300], master)


@each_recipe
def test_a_shard_may_have_no_rows(recipe: Any) -> None:
    parts, remainder, master = kept(torch.zeros(0, COLUMNS), recipe, positions(0))
    assert remainder.shape == master.shape == (0, COLUMNS)
    assert same(parts, quantized(torch.zeros(0, COLUMNS), recipe))


def test_pieces_of_rows_give_the_bytes_of_the_whole() -> None:
    """More rows than eager code takes at a time, with a part that is the tensor's."""
    x = torch.randn(1000, COLUMNS)
    with use_kernels("eager"):
        for recipe in (NVFP4BlockScaling(), MXFP8BlockScaling(blocks="square"), Float8CurrentScaling()):
            rows = 992 if "square" in repr(recipe) else 1000
            parts, remainder, master = kept(x[:rows], recipe, positions(rows))
            assert same(parts, quantized(master, recipe))
            assert remainder.shape == (rows, COLUMNS)


def test_other_recipes_are_refused_by_name() -> None:
    said = remainders.refuse_recipe(Float8DelayedScaling())
    assert said is not None
    assert said.startswith("Float8DelayedScaling(")
    assert "amax" in said
    with pytest.raises(ValueError, match="values of any size"):
        remainders.rounded(torch.zeros(1, 32), Float8DelayedScaling(), nearest())
    assert remainders.refuse_recipe(MXFP8BlockScaling()) is None


def test_activations_do_not_matter() -> None:
    recipe = MXFP8BlockScaling(activations="dynamic")
    found = kept(INPUTS["normal"], recipe, positions())
    assert same(found[0], kept(INPUTS["normal"], MXFP8BlockScaling(), positions())[0])


# -- bf16 weights ------------------------------------------------------------------------------------------------------


def all_kinds() -> Tensor:
    torch.manual_seed(1)
    raw = torch.randint(-(2**31), 2**31 - 1, (ROWS, COLUMNS), dtype=torch.int64).to(torch.int32)
    raw[0, :4] = torch.tensor([0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 1], dtype=torch.int32)
    raw[1] = torch.arange(COLUMNS, dtype=torch.int32) * 0x10000 + 0x8000  # the middles of two bf16 numbers
    raw[2] = -(2**31) + torch.arange(COLUMNS, dtype=torch.int32)
    return raw.view(torch.float32)


def test_bf16_and_16_bits_are_fp32_but_for_some_ties() -> None:
    x = all_kinds()
    weight, remainder = remainders.split_dense(x, positions())
    back = remainders.join_dense(weight, remainder)
    tie = (x.view(torch.int32) & 0x1FFFF == 0x8000) & ~x.isnan()
    assert tie.sum() > COLUMNS // 2 - 8
    assert same_bytes(back[~tie & ~x.isnan()], x[~tie & ~x.isnan()])
    assert back[x.isnan()].isnan().all()
    moved = back.view(torch.int32)[tie] - x.view(torch.int32)[tie]
    assert set(moved.tolist()) == {-1, 1}
    assert same_bytes(weight[~x.isnan()], back.bfloat16()[~x.isnan()])
    assert remainder.dtype == torch.int16
    assert weight.dtype == torch.bfloat16


def test_ties_of_bf16_go_both_ways_alike() -> None:
    tie = torch.full((ROWS, COLUMNS), 0x3F808000, dtype=torch.int32).view(torch.float32)
    back = remainders.join_dense(*remainders.split_dense(tie, positions()))
    up = (back > tie).double().mean().item()
    assert abs(up - 0.5) < 6 * 0.5 / (ROWS * COLUMNS) ** 0.5
    assert len(set(remainders.split_dense(tie, nearest())[1].flatten().tolist())) == 1


def test_infinities_of_bf16_weights_stay() -> None:
    x = torch.tensor([[float("inf"), -float("inf"), float("nan"), -0.0]])
    weight, remainder = remainders.split_dense(x, positions(1))
    back = remainders.join_dense(weight, remainder)
    assert back[0, :2].tolist() == [float("inf"), -float("inf")]
    assert back[0, 2].isnan()
    assert torch.signbit(back[0, 3])


def test_the_helper_knows_exponents() -> None:
    assert exponent(torch.tensor([1.0, 0.75, 2.0**-149, 3e38])).tolist() == [0, -1, -149, 127]


def test_nan_of_any_bits_stays_nan_in_bf16() -> None:
    """CUDA's NaN is 0x7FFFFFFF, half-way between two bf16 by its bits, and the number behind it is -0.0."""
    bits = [0x7FFFFFFF, 0x7FC00000, 0x7F800001, 0x7FFF8000, -1, -0x400000]
    x = torch.tensor(bits, dtype=torch.int32).view(torch.float32).repeat(ROWS, 1)
    for at in (positions(), nearest()):
        weight, remainder = remainders.split_dense(x, at)
        assert weight.isnan().all()
        assert remainders.join_dense(weight, remainder).isnan().all()
        assert not remainder.any()
