"""Stochastic rounding: only the two neighbours, the value on average, from the given generator and nothing else.

Averages are compared within Hoeffding's bound at a failure probability of 1e-9; the seeds are fixed, so that a test
that passes once passes always.
"""

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fsdp_hooks import sync_scales
from qtensor import (
    Float8CurrentScaling,
    Int4GroupScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    QuantizedTensor,
    quantize,
    quantized_model_init,
    stochastic_rounding,
)
from qtensor.tensor.contents import initial_value, preserve
from tests.qtensor.recipes_under_test import RECIPES, all_recipes, same_bytes, same_parts, unit, weight
from tests.recipes import MAIN, facts
from tests.sampling import sampled

FAILURE = 1e-9
SLACK = 2.0**-20  # relative: the fp32 roundings of 1 / scale, x / scale, q * scale, and 2^-24 of the draw
MXFP8 = MXFP8BlockScaling()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def hoeffding(width: float, draws: float, events: int = 1) -> float:
    """What the mean of `draws` independent numbers, each in an interval of `width`, differs by from its expectation."""
    return width * math.sqrt(math.log(2 * events / FAILURE) / (2 * draws))


def grid(recipe: Any, sign: int = 1) -> Tensor:
    """fp64: every finite magnitude of the element of a sign, ascending, read from its codes."""
    element = facts(recipe).element
    if element.table:
        return torch.tensor([sign * value for value in element.table if sign * value >= 0], dtype=torch.float64).sort()[
            0
        ]
    codes = np.arange(2 ** (element.bits - 1) + element.uniform, dtype=np.uint8)  # 0 .. 8 of whole numbers
    values = torch.from_numpy(codes.astype(np.float64) if element.uniform else element.values(codes))
    return values[values.isfinite()]


def neighbours(y: Tensor, recipe: Any, sign: int) -> tuple[Tensor, Tensor]:
    """The grid points around y >= 0 (fp64, in units), those around all that fp32 roundings can make of it."""
    values = grid(recipe, sign)
    lower = values[(torch.searchsorted(values, y * (1 - SLACK), right=True) - 1).clamp(min=0)]
    upper = values[torch.searchsorted(values, y * (1 + SLACK)).clamp(max=len(values) - 1)]
    return lower, upper


def wide_ranging() -> Tensor:
    """fp32 [32, 64] of all magnitudes from outliers to subnormals of every format, zeros of both signs, tiny blocks."""
    x = weight(32, 64, torch.float32)
    x *= torch.exp2(-torch.randint(0, 14, x.shape, generator=seeded(1)).float())
    x[:, 5], x[:, 6] = 0.0, -0.0
    x[16:, :32] *= 2.0**-18
    return x


def stochastically(x: Tensor, recipe: Any, seed: int = 0) -> QuantizedTensor:
    q = quantize(torch.zeros_like(x), recipe)
    with stochastic_rounding(seeded(seed)):
        q.copy_(x)
    return q


# -- what one write does ---------------------------------------------------------------------------------------------


@all_recipes
def test_elements_become_either_neighbour_and_on_average_the_value(recipe: Any) -> None:
    parts, copies, x = 50, 20, wide_ranging()  # 1000 draws, as many at a time as a cache holds
    one = unit(stochastically(x, recipe))  # equal in all copies, since scales are not drawn
    element = facts(recipe).element
    clamped = x.double().clamp(one * element.least, one * element.largest).abs()
    y = torch.where(one > 0, clamped / one, 0)
    around = [torch.stack(neighbours(y, recipe, sign)) for sign in (1, -1)]
    lower, upper = torch.where(x < 0, around[1], around[0])
    upper = upper.minimum(torch.where(x < 0, -element.least, element.largest))
    total = torch.zeros_like(y)
    for part in range(parts):
        q = stochastically(x.expand(copies, *x.shape), recipe, part)
        assert torch.equal(unit(q), one.expand(copies, *one.shape))
        found = q.dequantize(torch.float32).double()
        magnitude = torch.where(one > 0, found.abs() / one, found.abs())
        near_lower, near_upper = ((magnitude - near).abs() <= near * SLACK for near in (lower, upper))
        assert (near_lower | near_upper).all()
        signed = (found != 0) | element.floating  # the others have one zero
        assert torch.equal(torch.signbit(found)[signed], torch.signbit(x).expand(found.shape)[signed])
        total += (magnitude - y).sum(0)

    draws, width = parts * copies, upper - lower  # in units
    assert ((total / draws).abs() <= hoeffding(1.0, draws, x.numel()) * width + y * SLACK).all()
    inside = width > 0
    assert inside.sum() > x.numel() / 2
    ratio = (total / draws / width)[inside].mean().item()
    bound = hoeffding(1.0, draws * int(inside.sum())) + (y / width)[inside].mean().item() * SLACK
    assert abs(ratio) <= bound


@pytest.mark.parametrize(("name", "smallest_normal"), [("float8_row", 2.0**-6), ("mxfp8", 2.0**-6), ("nvfp4", 1.0)])
def test_the_values_of_the_test_above_reach_into_the_subnormals(name: str, smallest_normal: float) -> None:
    y = wide_ranging().double().abs() / unit(quantize(wide_ranging(), RECIPES[name]))
    assert ((y > 0) & (y < smallest_normal)).sum() > 100


@all_recipes
def test_scales_are_those_of_rounding_to_nearest(recipe: Any) -> None:
    q, nearest = stochastically(weight(), recipe), quantize(weight(), recipe)
    assert not same_parts(q, nearest)
    for name, part in nearest.parts().items():
        if name != "payload":
            assert same_bytes(q.parts()[name], part)


@all_recipes
def test_equal_seeds_give_equal_bytes(recipe: Any) -> None:
    assert same_parts(stochastically(weight(), recipe, 3), stochastically(weight(), recipe, 3))
    assert not same_parts(stochastically(weight(), recipe, 3), stochastically(weight(), recipe, 4))


@all_recipes
@pytest.mark.parametrize("foreach", [False, True])
def test_the_global_random_state_is_not_used_nor_moved(recipe: Any, foreach: bool) -> None:
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        parameter = nn.Parameter(quantize(weight(), recipe))
        parameter.grad = weight(seed=1)
        with stochastic_rounding(seeded()):
            torch.optim.AdamW([parameter], lr=0.01, foreach=foreach).step()
            parameter.detach().copy_(parameter.dequantize(torch.float32) * 1.01)
        assert torch.equal(torch.get_rng_state(), before)
        results.append(parameter)
    assert same_parts(*results)


@all_recipes
def test_zeros_stay_zeros_and_keep_their_signs(recipe: Any) -> None:
    zeros = torch.zeros(32, 64)
    zeros[1::2] = -0.0
    assert same_parts(stochastically(zeros, recipe), quantize(zeros, recipe))
    x = weight(dtype=torch.float32)
    x[:, ::3] = 0.0
    q = stochastically(x, recipe)
    assert (q.dequantize()[:, ::3] == 0).all()
    with stochastic_rounding(seeded()):
        q.zero_()
    assert (q.dequantize() == 0).all()


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp8_square", "float8_tensor_power_of_two"])
def test_representable_values_are_not_moved(name: str) -> None:
    """Where scales are powers of two the decoded values are on the grid exactly."""
    q = quantize(weight(), RECIPES[name])
    values = q.dequantize(torch.float32)
    for seed in range(5):
        assert torch.equal(stochastically(values, q.recipe, seed).dequantize(torch.float32), values)


@all_recipes
def test_what_is_not_finite_is_contained_as_ever(recipe: Any) -> None:
    x = weight(dtype=torch.float32)
    x[0, 0], x[40, 50], x[63, 95] = math.nan, math.inf, -math.inf
    found, nearest = stochastically(x, recipe), quantize(x, recipe)
    assert torch.equal(found.dequantize().isnan(), nearest.dequantize().isnan())
    assert same_bytes(found.scale, nearest.scale)


# -- where it holds --------------------------------------------------------------------------------------------------


def test_the_inner_generator_holds_and_an_exception_restores_the_outer_one() -> None:
    outer, inner, q = seeded(1), seeded(2), quantize(weight(), MXFP8)

    def used() -> str:
        before = outer.get_state(), inner.get_state()
        q.mul_(0.9)
        moved = [not torch.equal(g.get_state(), b) for g, b in zip((outer, inner), before, strict=True)]
        return {(True, False): "outer", (False, True): "inner", (False, False): "nearest"}[moved[0], moved[1]]

    assert used() == "nearest"
    with stochastic_rounding(outer):
        assert used() == "outer"
        with stochastic_rounding(inner):
            assert used() == "inner"
        assert used() == "outer"
        with pytest.raises(KeyError), stochastic_rounding(inner):
            raise KeyError
        with pytest.raises(RuntimeError, match="slice of columns"), stochastic_rounding(inner):
            q[:, :32].zero_()  # a write that fails half way
        assert used() == "outer"
        state = outer.get_state()
        quantize(weight(), MXFP8)
        assert torch.equal(outer.get_state(), state)
    assert used() == "nearest"


def test_other_threads_round_to_nearest() -> None:
    q, found = quantize(weight(), MXFP8), []
    with stochastic_rounding(seeded()):
        thread = threading.Thread(target=lambda: found.append(quantize(weight(), MXFP8).mul_(0.9)))
        thread.start()
        thread.join()
        assert not same_parts(q.mul_(0.9), found[0])
    assert same_parts(found[0], quantize(weight(), MXFP8).mul_(0.9))


@all_recipes
def test_nothing_but_the_op_table_is_affected(recipe: Any) -> None:
    """quantize, MasterWeightOptimizer, sync_scales, random fills and copies of bytes draw nothing."""

    def everything() -> Iterator[QuantizedTensor]:
        yield quantize(weight(), recipe)
        parameter = nn.Parameter(quantize(weight(), recipe))
        parameter.grad = weight(seed=1)
        MasterWeightOptimizer(torch.optim.AdamW, [parameter], lr=0.01).step()
        sync_scales([parameter])
        yield parameter.detach()
        torch.manual_seed(0)
        yield quantize(weight(), recipe).normal_()
        yield quantize(weight(), recipe).uniform_(-1, 1)
        yield quantize(weight(seed=2), recipe).copy_(quantize(weight(), recipe))

    expected, generator = list(everything()), seeded()
    before = generator.get_state()
    with stochastic_rounding(generator):
        found = list(everything())
    assert all(same_parts(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(generator.get_state(), before)


def test_something_else_than_a_generator_is_refused() -> None:
    with pytest.raises(TypeError) as error, stochastic_rounding(0):  # type: ignore[arg-type]
        pass
    assert str(error.value) == (
        "stochastic_rounding expects a torch.Generator, got int; make one on the device of the parameters: "
        "torch.Generator(device).manual_seed(seed)"
    )


@pytest.mark.parametrize(
    "update",
    [
        lambda plain, q: torch._foreach_add_([plain, q], 1.0),
        lambda plain, q: q.add_(1.0),
        lambda plain, q: q.copy_(plain),
    ],
)
def test_a_generator_on_another_device_is_refused_before_anything_is_written(update: Callable[..., Any]) -> None:
    plain, generator = torch.zeros(64, 96, dtype=torch.bfloat16), seeded()
    q, before = quantize(weight(), MXFP8).to("meta"), generator.get_state()
    with pytest.raises(ValueError, match="stochastic_rounding") as error, stochastic_rounding(generator):
        update(plain, q)
    assert str(error.value) == (
        f"stochastic_rounding: the generator is on cpu and a quantized weight of shape (64, 96) ({MXFP8}) is on meta; "
        "nothing was written; use torch.Generator('meta')"
    )
    assert (plain == 0).all()
    assert torch.equal(generator.get_state(), before)


def test_a_write_can_not_be_compiled() -> None:
    torch.compiler.reset()
    q = quantize(weight(), MXFP8)
    compiled = torch.compile(lambda q: q.add_(1.0), backend="eager")
    with pytest.raises(Exception, match="stochastic_rounding can not be compiled"), stochastic_rounding(seeded()):
        compiled(q)
    assert same_parts(q, quantize(weight(), MXFP8))
    torch.compiler.reset()


# -- what is computed ------------------------------------------------------------------------------------------------


@all_recipes
@pytest.mark.parametrize("foreach", [False, True])
def test_values_are_computed_in_fp32(recipe: Any, foreach: bool) -> None:
    """A step smaller than bf16 can hold beside the weight; plain members of the same lists are updated as usual."""
    q, grad = quantize(weight(), recipe), weight(seed=1)
    parameter, plain = nn.Parameter(q.clone()), nn.Parameter(torch.ones(64, 96, dtype=torch.bfloat16))
    parameter.grad, plain.grad = grad, grad.clone()
    with stochastic_rounding(seeded()):
        torch.optim.SGD([parameter, plain], lr=1e-4, foreach=foreach).step()
    expected = stochastically(q.dequantize(torch.float32).add_(grad, alpha=-1e-4), recipe)
    assert same_parts(parameter, expected)
    assert same_bytes(plain, torch.ones(64, 96, dtype=torch.bfloat16).add_(grad, alpha=-1e-4))


@all_recipes
def test_operands_that_are_quantized_count_in_fp32_too(recipe: Any) -> None:
    a, b = quantize(weight(), recipe), quantize(weight(seed=1), recipe)
    plain, end = weight(seed=2), weight(seed=3)
    expected = stochastically(torch.lerp(a.dequantize(torch.float32), b.dequantize(torch.float32), 0.01), recipe)
    single, several, kept = a.clone(), a.clone(), plain.clone()
    with stochastic_rounding(seeded()):
        single.lerp_(b, 0.01)
    with stochastic_rounding(seeded()):
        torch._foreach_lerp_([kept, several], [end, b], 0.01)
    assert same_parts(single, expected)
    assert same_parts(several, expected)
    assert same_bytes(kept, plain.lerp(end, 0.01))


def test_a_preserved_initial_value_is_overwritten_by_what_was_computed() -> None:
    with quantized_model_init(MXFP8, preserve_high_precision_init_val=True):
        q: Any = nn.Linear(96, 64, bias=False).weight.detach()
    values = q.dequantize(torch.float32) + 0.001
    expected = stochastically(values, MXFP8)
    with stochastic_rounding(seeded()):
        q.add_(0.001)
    assert same_parts(q, expected)
    assert torch.equal(initial_value(q).view(64, 96), values)


@all_recipes
def test_copying_from_another_recipe_is_rounded_too(recipe: Any) -> None:
    """Where the target cannot hold the values; it can hold none of another kind under scales of 24 bits, or 8."""
    other = Float8CurrentScaling(element="e5m2") if facts(recipe).element.uniform else Int4GroupScaling()
    source = quantize(weight(dtype=torch.float32), other)
    q = quantize(torch.zeros(64, 96), recipe)
    with stochastic_rounding(seeded()):
        q.copy_(source)
    assert same_parts(q, stochastically(source.dequantize(torch.float32), recipe))


# -- what it is for --------------------------------------------------------------------------------------------------

STEPS, UPDATE, LARGE = 100, 0.0006, 0.75


def starting_point(recipe: Any) -> tuple[nn.Parameter, Tensor]:
    """bf16 [256, 64]: every 16th element is large and gets no gradient, so that scales stay; 1 where one gets one."""
    x = torch.full((256, 64), 0.08, dtype=torch.bfloat16)
    x[:, ::16] = LARGE
    return nn.Parameter(quantize(x, recipe)), (x < 0.5).to(torch.bfloat16)


def _keeps_scales(recipe: Any) -> bool:
    """Whether a block has the same scale as long as its largest element stays.

    A group of INT4 has another one, smaller by 14 / 15, where its largest value is decoded and quantized again; 4over6
    chooses one of two by the elements.
    """
    return not facts(recipe).element.uniform and getattr(recipe, "scale_choice", None) is None


@sampled(
    "recipe",
    [recipe for recipe in RECIPES.values() if _keeps_scales(recipe)],
    [recipe for recipe in MAIN.values() if _keeps_scales(recipe)],
)
def test_a_sum_of_tiny_updates_arrives_on_average_and_to_nearest_not_at_all(recipe: Any) -> None:
    """Each write errs by a martingale difference inside one step of the grid: Azuma's bound for all of them together.

    Elements only climb, and so the widest step is one below where they ended.
    """
    parameter, mask = starting_point(recipe)
    moving, start = mask.bool(), parameter.detach().clone()
    optimizer = torch.optim.SGD([parameter], lr=UPDATE)
    parameter.grad = -mask
    for _ in range(STEPS):
        optimizer.step()
    assert same_parts(parameter, start)

    with stochastic_rounding(seeded(1)):  # with which none of the 15,360 climbs to the largest
        for _ in range(STEPS):
            optimizer.step()
    moved = (parameter.dequantize(torch.float32) - start.dequantize(torch.float32)).double()[moving]
    one = unit(start).max().item()
    top = one * grid(recipe)[-2].item() if facts(recipe).element.table else LARGE * 4 / 6
    assert ((unit(parameter) / unit(start) - 1).abs() <= SLACK).all()
    assert (parameter.dequantize(torch.float32)[moving] <= top * (1 + SLACK)).all()
    values = grid(recipe)
    width = one * values[values <= top / one * (1 + SLACK)].diff().max().item()
    bound = hoeffding(width, moved.numel() / STEPS)  # a mean of sums of STEPS each
    expected = STEPS * UPDATE
    assert bound < expected * 0.7
    assert abs(moved.mean().item() - expected) <= bound + STEPS * SLACK


def test_averages_with_a_preserved_value_move_alike_in_all_forms() -> None:
    averages = []
    for update in (
        lambda q, end: q.lerp_(end, 0.01),
        lambda q, end: torch._foreach_lerp_([q], [end], 0.01),
    ):
        q = quantize(torch.zeros(4, 64), MXFP8BlockScaling())
        preserve(q, torch.zeros(4, 64))
        for _ in range(50):
            update(q, torch.ones(4, 64))
        averages.append(q)
    assert torch.equal(initial_value(averages[0]), initial_value(averages[1]))
    assert averages[0].dequantize().min() > 0.3


def test_a_small_weight_in_a_tensor_is_refused_too() -> None:
    q = quantize(torch.ones(4, 64), MXFP8BlockScaling())
    with pytest.raises(RuntimeError, match=r"^lerp_ with weight 0\.01 on a quantized weight of shape \(4, 64\)"):
        q.lerp_(torch.zeros(4, 64), torch.tensor(0.01))
