"""AWQ: what it finds is what a search over the inputs themselves finds, and never worse than Max."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from layerwise.algorithms.algorithm import COLUMNS, HESSIAN, LOCAL_HESSIAN, Decision, Group, Inputs
from layerwise.algorithms.awq import AWQ
from layerwise.algorithms.solvers.clipping import local_hessian_of
from layerwise.folding.folds import transform_inputs
from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from qtensor.spec.registry import block_multiple, format_of, row_multiple, shared_amax
from tests.fsdp_hooks.cases import assert_same_bytes
from tests.layerwise.explicit import (
    K,
    as_max,
    factors_of,
    group_of,
    inputs_of,
    output_error,
    stored,
    tokens,
    weights_for,
)
from tests.qtensor.recipes_under_test import DELAYED, MAIN, RECIPES, every_recipe
from tests.sampling import sampled

RECIPE = NVFP4BlockScaling()
EVERY = RECIPES | DELAYED
TENSOR = Float8CurrentScaling(granularity="tensor")


def _naive_factors(x: Tensor, weights: list[Tensor], block: int, alpha: float) -> Tensor:
    act = x.double().abs().mean(0)
    rows = torch.cat(weights).double().abs()
    sizes = torch.zeros(K, dtype=torch.float64)
    for row in rows:
        for start in range(0, K, block):
            sizes[start : start + block] += row[start : start + block] / row[start : start + block].max() / len(rows)
    s = (act**alpha / sizes ** (1 - alpha)).clamp(1e-4, 1e4)
    return s / (s.max() * s.min()).sqrt()


def _folded(group: Group, recipe: Any, s: Tensor | None, *, agreed: bool = False) -> Group:
    """The group as the driver hands it to `decide`: weights scaled, amaxes taken and agreed anew."""
    if s is None:
        return group
    weights = [(one.weight.float() * s).to(one.weight.dtype) for one in group.linears]
    assert group.inputs is not None
    return group_of(weights, recipe, transform_inputs(group.inputs, s), agreed=agreed)


def _error(x: Tensor, weights: list[Tensor], s: Tensor | None, values: Sequence[Tensor]) -> float:
    """The output error of stored values with their columns scaled by s, in fp64, over all linears."""
    factors = torch.ones(K, dtype=torch.float64) if s is None else s.double()
    return sum(output_error(x, value / factors - w.double()) for w, value in zip(weights, values, strict=True))


def _values(group: Group, recipe: Any, decisions: Sequence[Decision]) -> list[Tensor]:
    return [stored(one.weight, recipe, d.quantizer) for one, d in zip(group.linears, decisions, strict=True)]


def _max_error(x: Tensor, group: Group, recipe: Any) -> float:
    return sum(output_error(x, as_max(one, recipe) - one.weight.double()) for one in group.linears)


# -- scaling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agreed", [False, True])
@every_recipe
def test_the_best_alpha_is_the_one_that_inputs_themselves_choose(recipe: Any, agreed: bool) -> None:
    x, weights = tokens(1, correlated=0.5), weights_for(2)
    amax = group_of(weights, recipe, None).linears[0].amax
    agreed = agreed and amax is not None and amax.ndim == 0  # where there is something to agree on
    group = group_of(weights, recipe, inputs_of(x), agreed=agreed)
    block = block_multiple(recipe) if block_multiple(recipe) > 1 else K
    naive: dict[float | None, float] = {None: _max_error(x, group, recipe)}
    for alpha in [i / 10 for i in range(11)]:
        s = _naive_factors(x, weights, block, alpha).float()
        folded = _folded(group, recipe, s, agreed=agreed)
        naive[alpha] = _error(x, weights, s, [as_max(one, recipe) for one in folded.linears])
    awq = AWQ(variant="lite")
    alpha, s = awq.search(group, recipe)
    assert naive[alpha] <= min(naive.values()) * (1 + 1e-3)
    if alpha is None:
        assert agreed, "on these inputs every format gains by scaling; one scale for two weights need not"
        assert s is None
    else:
        torch.testing.assert_close(s.double(), _naive_factors(x, weights, block, alpha), rtol=1e-4, atol=0)
        assert_same_bytes(factors_of(awq.smooth(group, recipe)), s, "smooth")


@pytest.mark.parametrize("seed", range(4))
@every_recipe
def test_never_worse_than_max(recipe: Any, seed: int) -> None:
    """Nor is clipping after scaling worse than scaling, on inputs whose blocks have much in common."""
    x, weights = tokens(seed, correlated=2.0), weights_for(10 + seed)
    group = group_of(weights, recipe, inputs_of(x))
    s = factors_of(AWQ().smooth(group, recipe))
    folded = _folded(group, recipe, s)
    lite, full = AWQ(variant="lite").decide(folded, recipe), AWQ().decide(folded, recipe)
    scaled = _error(x, weights, s, _values(folded, recipe, lite))
    assert scaled <= _max_error(x, group, recipe) * (1 + 1e-5)
    assert _error(x, weights, s, _values(folded, recipe, full)) <= scaled * (1 + 1e-5)
    for one, decision in zip(folded.linears, lite, strict=True):
        assert_same_bytes(stored(one.weight, recipe, decision.quantizer), as_max(one, recipe), one.name)


def test_no_factors_where_none_are_best() -> None:
    """Values that the format holds exactly lose by any scaling."""
    weight = torch.full((32, K), 0.5)
    weight[:, ::16] = 6.0
    assert AWQ().search(group_of([weight], RECIPE, inputs_of(tokens(1))), RECIPE) == (None, None)


def test_columns_without_a_value_take_no_part() -> None:
    x, weights = tokens(1), weights_for(2)
    x[:, 3] = 0
    for w in weights:
        w[:, 7] = 0
    s = factors_of(AWQ().smooth(group_of(weights, RECIPE, inputs_of(x)), RECIPE))
    assert s is not None
    assert s[3] == 1
    assert s[7] == 1
    live = torch.tensor([k not in (3, 7) for k in range(K)])
    assert float((s[live].max() * s[live].min()).sqrt()) == pytest.approx(1, rel=1e-5)
    nothing = inputs_of(torch.zeros(5, K))
    assert AWQ().smooth(group_of(weights, RECIPE, nothing), RECIPE) is None


def test_weights_that_are_not_finite_or_would_not_be_decide_nothing() -> None:
    x, weights = tokens(1), weights_for(2)
    weights[0][2, 5] = float("nan")
    s = factors_of(AWQ().smooth(group_of(weights, RECIPE, inputs_of(x)), RECIPE))
    assert s is not None
    assert torch.isfinite(s).all()
    near_the_end = (weights_for(2, torch.float32)[0] * 4e4).clamp(-65e3, 65e3)
    for dtype, scales in ((torch.float32, True), (torch.float16, False)):  # in which a factor of 1.01 overflows
        s = factors_of(AWQ().smooth(group_of([near_the_end.to(dtype)], RECIPE, inputs_of(x)), RECIPE))
        assert (s is not None) == scales, dtype


# -- clipping ----------------------------------------------------------------------------------------------------


def _naive_clips(x: Tensor, group: Group, recipe: Any, index: int) -> tuple[Tensor, Tensor]:
    """(least local error of every scale, its ratio), from bytes and inputs: [row groups, column groups] in fp64."""
    one, fmt = group.linears[index], format_of(recipe)
    block = block_multiple(recipe) if block_multiple(recipe) > 1 else K
    height = row_multiple(recipe)
    if fmt.parts(recipe)[1].per_row is False:
        height = len(one.weight)
    w = one.weight.float()
    tiles = [(slice(r, r + height), slice(c, c + block)) for r in range(0, len(w), height) for c in range(0, K, block)]
    least = torch.full((len(tiles),), torch.inf, dtype=torch.float64)
    ratios = torch.zeros(len(tiles), dtype=torch.float64)
    for ratio in [i / 20 for i in range(20, 9, -1)]:
        bounded = w.clone()
        for where in tiles:
            # 4over6 chooses between the scales of a block by the errors of all its elements, times the ratio
            bounded[where] = w[where] * torch.tensor(ratio)
        amax = one.amax if block < K else shared_amax(bounded, recipe)
        off = stored(w, recipe, fmt.quantizer(bounded, recipe, amax)) - w.double()
        for t, (rows, columns) in enumerate(tiles):
            error = 0.0
            for c in range(columns.start, columns.stop, 16):
                error += output_error(x[:, c : c + 16], off[rows, c : c + 16]) / len(x)
            if error < least[t] * (1 - 1e-6):
                least[t], ratios[t] = error, ratio
    return least, ratios


# Which scales are tried depends on what shares one, and not on the element.
@sampled("recipe", EVERY.values(), MAIN.values(), ids=EVERY)
def test_every_scale_gets_the_ratio_that_inputs_themselves_choose(recipe: Any) -> None:
    x = tokens(3)
    group = group_of([w[:32] for w in weights_for(4)], recipe, inputs_of(x))
    for index, decision in enumerate(AWQ(variant="clip").decide(group, recipe)):
        least, ratios = _naive_clips(x, group, recipe, index)
        w = group.linears[index].weight
        off = stored(w, recipe, decision.quantizer) - w.double()
        got = sum(output_error(x[:, c : c + 16], off[:, c : c + 16]) / len(x) for c in range(0, K, 16))
        assert got == pytest.approx(float(least.sum()), rel=1e-5)
        assert decision.notes["clip"] == pytest.approx(float(ratios.mean()), abs=0.01)
        assert decision.weight is None


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_square", "float8_row", "float8_row_e5m2", "float8_tensor"])
def test_an_outlier_that_hardly_any_input_meets_is_clipped(name: str) -> None:
    recipe = RECIPES[name]
    x, weight = torch.ones(20, K), weights_for(5)[0].float()
    x[:, 0] = 1e-6
    weight[:, 0] = 1.9 * weight.abs().max()
    (decision,) = AWQ(variant="clip").decide(group_of([weight], recipe, inputs_of(x)), recipe)
    assert isinstance(decision.notes["clip"], float)
    assert decision.notes["clip"] < 1


def test_linears_with_one_scale_get_one_ratio() -> None:
    weights = weights_for(6)
    weights[0][0, 0] = 3 * weights[0].abs().max()  # this one alone would be clipped, the other not
    x = tokens(7)
    x[:, 0] *= 1e-3
    alone = AWQ(variant="clip").decide(group_of(weights, TENSOR, inputs_of(x)), TENSOR)
    assert alone[0].notes["clip"] != alone[1].notes["clip"]
    group = group_of(weights, TENSOR, inputs_of(x), agreed=True)
    together = AWQ(variant="clip").decide(group, TENSOR)
    assert torch.equal(together[0].quantizer["amax"], together[1].quantizer["amax"])
    assert together[0].notes == together[1].notes
    assert together[0].notes["clip"] < 1


def test_a_clip_leaves_the_tensor_wide_scale() -> None:
    group = group_of(weights_for(4), RECIPE, inputs_of(tokens(3)))
    for one, decision in zip(group.linears, AWQ().decide(group, RECIPE), strict=True):
        plain = format_of(RECIPE).quantizer(one.weight.float(), RECIPE, one.amax)
        assert_same_bytes(decision.quantizer["global_scale"], plain["global_scale"], one.name)
        assert not torch.equal(decision.quantizer["scale"].float(), plain["scale"].float())


def test_clips_that_only_look_good_block_by_block_are_dropped() -> None:
    """Every block gets the same 16 columns, so that what they clip off their first ones adds up in the output."""
    dropped = 0
    for seed in range(8):
        x = torch.randn(100, 16, generator=torch.Generator().manual_seed(seed)).repeat(1, K // 16)
        weights = [torch.rand(8, K, generator=torch.Generator().manual_seed(40 + seed)) for _ in range(2)]
        for w in weights:
            w[:, ::16] = 1.2
        group = group_of(weights, RECIPE, inputs_of(x))
        clip, full = AWQ(variant="clip").decide(group, RECIPE), AWQ().decide(group, RECIPE)
        for one, local, whole in zip(group.linears, clip, full, strict=True):
            unclipped = output_error(x, as_max(one, RECIPE) - one.weight.double())
            worse = output_error(x, stored(one.weight, RECIPE, local.quantizer) - one.weight.double()) > unclipped
            assert local.notes["clip"] < 1
            assert (whole.notes["clip"] == 1) == worse
            dropped += worse
    assert dropped > 0


@pytest.mark.parametrize("columns", [16, 48, 40])
def test_the_local_hessian_lies_in_the_full_one(columns: int) -> None:
    inputs = inputs_of(torch.randn(30, columns))
    torch.testing.assert_close(local_hessian_of(inputs.hessian), inputs.local_hessian)


def test_columns_need_not_come_in_sixteens() -> None:
    recipe, x = Float8CurrentScaling(), torch.randn(50, 40)
    group = group_of([torch.randn(8, 40)], recipe, inputs_of(x))
    for variant in ("clip", "full"):
        (decision,) = AWQ(variant=variant).decide(group, recipe)
        off = stored(group.linears[0].weight, recipe, decision.quantizer) - group.linears[0].weight.double()
        assert output_error(x, off) <= _max_error(x, group, recipe) * (1 + 1e-5) or variant == "clip"


# -- what it is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["full", "lite", "clip"])
@every_recipe
def test_without_a_token_it_is_max_and_says_so(recipe: Any, variant: str) -> None:
    awq, group = AWQ(variant=variant), group_of(weights_for(2), recipe, None)
    assert awq.smooth(group, recipe) is None
    for one, decision in zip(group.linears, awq.decide(group, recipe), strict=True):
        assert_same_bytes(stored(one.weight, recipe, decision.quantizer), as_max(one, recipe), one.name)
        assert decision.notes == {"warning": "no token reached it: quantized without activations, as Max does"}


@pytest.mark.parametrize(
    ("variant", "needs"),
    [("full", {COLUMNS, HESSIAN}), ("lite", {COLUMNS, HESSIAN}), ("clip", {LOCAL_HESSIAN})],
)
def test_it_asks_for_no_more_than_it_reads(variant: str, needs: set[str]) -> None:
    awq, known = AWQ(variant=variant), inputs_of(tokens(1))
    assert awq.needs == needs
    asked = Inputs(
        known.tokens,
        known.amax,
        column_mean=known.column_mean if COLUMNS in needs else None,
        local_hessian=known.local_hessian if LOCAL_HESSIAN in needs else None,
        hessian=known.hessian if HESSIAN in needs else None,
    )
    group = group_of(weights_for(2), MXFP8BlockScaling(), asked)
    assert (awq.smooth(group, MXFP8BlockScaling()) is None) == (variant == "clip")
    assert len(awq.decide(group, MXFP8BlockScaling())) == 2


def test_its_options() -> None:
    assert AWQ.writes_weights
    assert AWQ().alphas == (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
    assert AWQ().ratios == (1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
    assert AWQ(least_clip=0.9).ratios == (1, 0.95, 0.9)
    assert AWQ(variant="lite").to_json() == {
        "type": "AWQ",
        "variant": "lite",
        "alpha_step": 0.1,
        "least_clip": 0.5,
        "clip_step": 0.05,
    }
    with pytest.raises(ValueError, match=re.escape("AWQ: variant='best' is not one of 'full', 'lite', 'clip'")):
        AWQ(variant="best")
    for name in ("alpha_step", "least_clip", "clip_step"):
        with pytest.raises(ValueError, match=re.escape(f"AWQ: {name}=0 is not above 0 and at most 1")):
            AWQ(**{name: 0})
