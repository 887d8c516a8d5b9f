"""merge_ in one process: the bytes of requantizing the sum, the numbers of its report, what it warns of and refuses.

Sharded weights are in tests/fsdp_hooks/test_merging_shards.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtensor import (
    Float8BlockScaling,
    Int4GroupScaling,
    LowRankUpdate,
    MasterWeightOptimizer,
    MergeReport,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    QuantizedTensor,
    high_precision_init_val,
    merge_,
    quantize,
    quantized_model_init,
)
from tests.qtensor.recipes_under_test import every_recipe, same_bytes, same_parts, weight

MXFP8 = MXFP8BlockScaling()


def factors(rows: int, columns: int, *, seed: int = 1, rank: int = 3, scaling: float = 0.5) -> LowRankUpdate:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator) / 4
    return LowRankUpdate(a=a, b=b, scaling=scaling)


def whole(update: LowRankUpdate) -> Tensor:
    """The update as the docstring of LowRankUpdate defines it."""
    total = torch.zeros(update.shape)
    for j in range(update.a.shape[-2]):
        total = total + update.b[..., j : j + 1] * update.a[..., j : j + 1, :]
    return total * update.scaling


def merged(recipe: Any, values: Tensor, update: Any) -> tuple[QuantizedTensor, QuantizedTensor, MergeReport]:
    """(before, after, report) of a merge into quantized values."""
    before = quantize(values, recipe)
    after = before.clone()
    return before, after, merge_([("w", after)], {"w": update})


@every_recipe
def test_the_bytes_are_those_of_requantizing_the_sum(recipe: Any) -> None:
    update = factors(64, 96)
    before, after, _ = merged(recipe, weight(), update)
    assert same_parts(after, quantize(before.dequantize(torch.float32) + whole(update), recipe))
    assert not same_parts(after, before)


@every_recipe
def test_the_report_is_a_reference_in_fp64(recipe: Any) -> None:
    update = factors(64, 96)
    before, after, report = merged(recipe, weight(), update)
    old, new, change = before.dequantize(torch.float32), after.dequantize(torch.float32), whole(update)
    wanted, moved = old.double() + change.double(), new.double() - old.double()
    found = report["w"]
    # sums of 6144 terms, each rounded to fp64: 6144 * 2^-53 < 1e-12
    survived = (change.double() * moved).sum() / change.double().square().sum()
    assert found.survived == pytest.approx(float(survived), rel=1e-12)
    assert found.error_norm == pytest.approx(float((new.double() - wanted).norm()), rel=1e-12)
    assert found.merged_norm == pytest.approx(float(wanted.norm()), rel=1e-12)
    assert found.update_norm == pytest.approx(float(change.double().norm()), rel=1e-12)
    assert found.relative_error == found.error_norm / found.merged_norm
    assert (found.name, found.elements, found.changed) == ("w", 64 * 96, int((new != old).sum()))


def test_the_report_has_a_line_for_each_update() -> None:
    weights = {name: quantize(torch.ones(4, 32), MXFP8) for name in "ab"}
    ones = LowRankUpdate(a=torch.ones(1, 32), b=torch.ones(4, 1))
    report = merge_(weights.items(), {"b": ones, "a": LowRankUpdate(a=ones.a, b=ones.b * 0)})
    assert str(report) == (
        "b: survived 1, relative error 0.0e+00, 128 of 128 elements changed\n"
        "a: survived 1, relative error 0.0e+00, 0 of 128 elements changed"
    )
    assert torch.equal(weights["b"].dequantize(), torch.full((4, 32), 2.0))
    with pytest.raises(KeyError, match="c"):
        report["c"]


# -- kinds of weights and updates --------------------------------------------------------------------------------------


def test_an_update_of_zeros_keeps_the_bytes() -> None:
    """They would not stay otherwise: no value reaches the 7.5 that a scale of INT4 groups is made from."""
    recipe, update = Int4GroupScaling(), factors(64, 96)
    before, after, report = merged(recipe, weight(), LowRankUpdate(a=update.a, b=torch.zeros_like(update.b)))
    assert not same_parts(before, quantize(before.dequantize(torch.float32), recipe))
    assert same_parts(before, after)
    assert (report["w"].survived, report["w"].error_norm, report["w"].changed) == (1.0, 0.0, 0)


def test_a_piece_of_an_update_has_the_bits_of_the_whole() -> None:
    update = factors(3000, 301, rank=7)  # several chunks
    assert same_bytes(update((slice(0, 3000), slice(0, 301))), whole(update))
    for rows, columns in ((slice(0, 1), slice(0, 301)), (slice(1537, 3000), slice(13, 14)), (slice(9, 9), slice(0, 5))):
        assert same_bytes(update((rows, columns)), whole(update)[rows, columns])


def test_experts_take_factors_of_three_dims() -> None:
    generator = torch.Generator().manual_seed(0)
    update = LowRankUpdate(
        a=torch.randn(4, 2, 64, generator=generator).bfloat16(), b=torch.randn(4, 8, 2, generator=generator).bfloat16()
    )
    before, after, _ = merged(MXFP8, torch.randn(4, 8, 64, generator=generator), update)
    each = torch.stack(
        [whole(LowRankUpdate(a=a.float(), b=b.float())) for a, b in zip(update.a, update.b, strict=True)]
    )
    assert same_parts(after, quantize(before.dequantize(torch.float32) + each, MXFP8))


def test_a_callable_gets_the_place_of_the_piece() -> None:
    update, asked = whole(factors(64, 96)).bfloat16(), []

    def piece(index: tuple[slice, ...]) -> Tensor:
        asked.append(index)
        return update[index]

    before, after, _ = merged(MXFP8, weight(), piece)
    assert same_parts(after, quantize(before.dequantize(torch.float32) + update.float(), MXFP8))
    assert asked == [(slice(0, 64), slice(0, 96))] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dense_weights_are_rounded_to_their_dtype(dtype: torch.dtype) -> None:
    model = nn.Linear(96, 64, dtype=dtype)
    update, before = factors(64, 96), model.weight.detach().clone()
    report = merge_(model, {"weight": update})
    assert torch.equal(model.weight, (before.float() + whole(update)).to(dtype))
    assert report["weight"].changed == int((model.weight != before).sum()) > 0
    error = (model.weight.detach().double() - (before.double() + whole(update).double())).norm()
    assert report["weight"].error_norm == pytest.approx(float(error), rel=1e-12)


def test_weights_that_are_gathered_quantized_stay_dense() -> None:
    with quantized_model_init(MXFP8, storage="high_precision"):
        model = nn.Linear(96, 64, dtype=torch.bfloat16)
    update, before = factors(64, 96), model.weight.dense.detach().clone()
    merge_(model, {"weight": update})
    assert torch.equal(model.weight.dense, (before.float() + whole(update)).bfloat16())


def test_a_preserved_initial_value_becomes_the_merged_value() -> None:
    with quantized_model_init(MXFP8, preserve_high_precision_init_val=True):
        model = nn.Linear(96, 64, dtype=torch.bfloat16)
    update, before = factors(64, 96), model.weight.dequantize(torch.float32)
    merge_(model, {"weight": update})
    kept = high_precision_init_val(model.weight)
    assert kept is not None
    assert torch.equal(kept, (before + whole(update)).bfloat16())


def test_masters_follow() -> None:
    with quantized_model_init(MXFP8):
        model = nn.Linear(96, 64, bias=False)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, model.parameters(), lr=0.0)
    for merges in (False, True):
        if merges:
            merge_(model, {"weight": factors(64, 96)})
        model.weight.grad = torch.ones(64, 96)
        optimizer.step()
        assert torch.equal(optimizer.state[model.weight]["master_weight"], model.weight.dequantize())


def test_backward_sees_a_merge_between() -> None:
    with quantized_model_init(MXFP8):
        model = nn.Linear(32, 4, bias=False)
    x = torch.ones(1, 32, requires_grad=True)
    y = model(x)
    merge_(model, {"weight": factors(4, 32)})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# -- warnings ----------------------------------------------------------------------------------------------------------


def test_an_update_that_is_rounded_to_nothing_warns_by_name() -> None:
    """Half a step of E2M1 is at least a quarter of the scale, which is 1 here; the update is a hundredth."""
    values = torch.tensor([4.0, 3.0, 2.0, 1.5, 1.0, 0.5, -0.5, -4.0] * 4).repeat(2, 1)
    q = quantize(values, MXFP4BlockScaling())
    held = q.clone()
    tiny = LowRankUpdate(a=torch.full((1, 32), -0.1), b=torch.full((2, 1), 0.1))
    with pytest.warns(UserWarning, match="merge_") as caught:
        report = merge_([("layers.0.w", q)], {"layers.0.w": tiny})
    assert str(caught.pop().message) == (
        "merge_: rounding took the update back from layers.0.w: nearly all of it is smaller than half a step of the "
        "format. Keep the adapter beside the weight, or merge into the dense weight and quantize that"
    )
    assert not caught
    assert same_parts(q, held)
    found = report["layers.0.w"]
    assert (found.survived, found.changed, found.lost, found.worse) == (0.0, 0, True, False)
    assert found.error_norm == found.update_norm


def test_scales_that_follow_the_amax_do_not_hide_a_lost_update() -> None:
    q = quantize(weight(128, 256, dtype=torch.float32), Float8BlockScaling())
    update = factors(128, 256, scaling=1e-5)
    with pytest.warns(UserWarning, match="took the update back from w:"):
        report = merge_([("w", q)], {"w": update})
    assert report["w"].changed > 0


def test_a_merge_that_costs_more_than_the_update_warns_by_name() -> None:
    """The scale of an INT4 group is amax / 7.5, and no value is larger than 7 times it: requantizing rounds again."""
    q = quantize(weight(), Int4GroupScaling())
    with pytest.warns(UserWarning, match="merge_") as caught:
        report = merge_([("w", q)], {"w": factors(64, 96, scaling=1e-6)})
    assert str(caught.pop().message) == (
        "merge_: w are farther from weight + update than before the merge: rounding under new scales cost more than "
        "the update is worth. Keep the adapter beside the weight, or merge into the dense weight and quantize that"
    )
    assert not caught
    assert report["w"].worse
    assert not report["w"].lost


# -- refusals ----------------------------------------------------------------------------------------------------------


def _nan(update: LowRankUpdate) -> LowRankUpdate:
    b = update.b.clone()
    b[7, 0] = torch.nan
    return LowRankUpdate(a=update.a, b=b)


NOT_FINITE = (
    "merge_: up: the update, or the weight with it, is not finite; look for NaN, inf or an overflow in the adapter. No "
    "weight was written"
)
REFUSED: dict[str, tuple[str, Callable[[], Any], str]] = {
    "a name": (
        "upp",
        lambda: factors(64, 96),
        "merge_: upp: no parameter has this name; take those of named_parameters(). No weight was written",
    ),
    "a shape": (
        "up",
        lambda: factors(96, 64),
        "merge_: up: the update has shape (96, 64), the weight (64, 96). No weight was written",
    ),
    "the shape of a piece": (
        "up",
        lambda: lambda _index: torch.ones(1, 96),
        "merge_: up: the update returned (1, 96) for [0:64, 0:96], expected (64, 96). No weight was written",
    ),
    "NaN": ("up", lambda: _nan(factors(64, 96)), NOT_FINITE),
    "an overflow in the update": ("up", lambda: factors(64, 96, scaling=1e39), NOT_FINITE),
    "an overflow in the sum": ("up", lambda: lambda _index: torch.full((64, 96), 3.4e38), NOT_FINITE),
    "an integer weight": (
        "codes",
        lambda: factors(64, 96),
        "merge_: codes: it holds torch.int64; expected bf16, fp16, fp32 or a quantized weight. No weight was written",
    ),
    "the meta device": (
        "meta",
        lambda: factors(64, 96),
        "merge_: meta: it is on the meta device; call to_empty() and load it first. No weight was written",
    ),
    "one weight twice": (
        "again",
        lambda: factors(64, 96),
        "merge_: again is the same parameter as down; give one update for both. No weight was written",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_is_refused_before_anything_is_written(case: str) -> None:
    name, update, text = REFUSED[case]
    up = quantize(torch.full((64, 96), 3e38) if "sum" in case else weight(), MXFP8)
    down = quantize(weight(seed=3), MXFP8)
    held = up.clone(), down.clone()
    named = {"up": up, "down": down, "again": down}
    named |= {"codes": torch.zeros(64, 96, dtype=torch.int64), "meta": torch.empty(64, 96, device="meta")}
    with pytest.raises(ValueError, match="No weight was written") as caught:
        merge_(named.items(), {"down": factors(64, 96), name: update()})
    assert str(caught.value) == text
    assert same_parts(up, held[0])
    assert same_parts(down, held[1])


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"x: no parameter.*; w: the update has shape"):
        merge_([("w", quantize(weight(), MXFP8))], {"x": factors(64, 96), "w": factors(3, 5)})


def test_fp16_weights_that_would_overflow_are_refused() -> None:
    held = torch.full((2, 4), 65000.0, dtype=torch.float16)
    with pytest.raises(ValueError, match="w: the update, or the weight with it, is not finite"):
        merge_([("w", held)], {"w": LowRankUpdate(a=torch.full((1, 4), 100.0), b=torch.full((2, 1), 10.0))})
    assert torch.equal(held, torch.full((2, 4), 65000.0, dtype=torch.float16))


def test_a_weight_that_holds_nan_is_merged_elsewhere_and_reported_as_nan() -> None:
    values = weight()
    values[3, 5] = torch.nan  # its block
    before, after, report = merged(MXFP8, values, factors(64, 96))
    assert same_parts(after, quantize(before.dequantize(torch.float32) + whole(factors(64, 96)), MXFP8))
    assert report["w"].survived != report["w"].survived
    assert report["w"].changed <= 64 * 96 - 32


@pytest.mark.parametrize(
    ("a", "b", "scaling", "kind", "text"),
    [
        ((3, 96), (64, 2), 1.0, ValueError, "a is (3, 96) and b is (64, 2); expected [.., r, K] and [.., N, r]"),
        ((96,), (64,), 1.0, ValueError, "a is (96,) and b is (64,); expected [.., r, K] and [.., N, r]"),
        ((2, 3, 96), (4, 64, 3), 1.0, ValueError, "a is (2, 3, 96) and b is (4, 64, 3); expected [.., r, K]"),
        ((3, 96), (64, 3), float("inf"), ValueError, "scaling=inf is not a finite number"),
    ],
)
def test_factors_that_do_not_fit_are_refused(a: Any, b: Any, scaling: float, kind: Any, text: str) -> None:
    with pytest.raises(kind) as caught:
        LowRankUpdate(a=torch.ones(a), b=torch.ones(b), scaling=scaling)
    assert text in str(caught.value)


def test_factors_that_are_not_plain_numbers_are_refused() -> None:
    b = torch.ones(64, 32)
    with pytest.raises(TypeError, match=r"a is a MXFP8Tensor; give the full factor as a plain tensor \(full_tensor"):
        LowRankUpdate(a=quantize(torch.ones(32, 96), MXFP8), b=b)
    with pytest.raises(TypeError, match=r"a holds torch.int64; expected bf16, fp16, fp32 or fp64 values"):
        LowRankUpdate(a=torch.ones(32, 96, dtype=torch.int64), b=b)
    with pytest.raises(TypeError, match=r"a holds torch.float8_e4m3fn; expected"):
        LowRankUpdate(a=torch.ones(32, 96).to(torch.float8_e4m3fn), b=b)
