"""Max, Mse and LocalHessian: the scales of the definitions, found without trying all of them."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layerwise.algorithms.algorithm import LOCAL_HESSIAN, Decision, Group, Inputs, Linear
from layerwise.algorithms.local_hessian import LocalHessian
from layerwise.algorithms.maximum import Max
from layerwise.algorithms.mse import Mse
from layerwise.algorithms.solvers import search as search_module
from layerwise.algorithms.solvers.search import search
from qtensor import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize
from qtensor.spec.registry import format_of, shared_amax
from tests.layerwise.algorithms import naive_scales as naive
from tests.qtensor.recipes_under_test import RECIPES, all_recipes, same_bytes, weight
from tests.recipes import WIDER_BLOCKS, facts
from tests.sampling import sampled

# What fp32 sums of 16 terms can be off by (and, with a Hessian, what cancels in them): closer errors are equal.
CLOSE = 1e-5


def trained(rows: int = 64, columns: int = 96, seed: int = 0) -> Tensor:
    """bf16: channels of different sizes, outliers, zeros, blocks of zeros and of tiny values."""
    generator = torch.Generator().manual_seed(seed)
    x = weight(rows, columns, torch.float32, seed=seed) * torch.exp(torch.randn(columns, generator=generator) / 2)
    x[:, 5] = 0.0
    x[:32, :32] = 0.0
    x[32:, 32:64] *= 2.0**-12
    return x.bfloat16()


def on_the_grid(recipe: Any) -> Tensor:
    """Values that quantize exactly, so that many scales have the same errors."""
    return quantize(trained(), recipe).dequantize(torch.float32)


def hessian(columns: int = 96, seed: int = 0) -> Tensor:
    """Of inputs with correlated channels of very different sizes; the last block has fewer tokens than columns."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, -(-columns // 16) * 16, generator=generator)
    x = (x + x.roll(1, 1)) * torch.exp(torch.randn(x.shape[1], generator=generator))
    x[:, columns:] = 0.0
    x[7:, -16:] = 0.0
    blocks = x.view(256, -1, 16)
    return torch.einsum("tbi,tbj->bij", blocks, blocks) / 256


def linear(x: Tensor, recipe: Any) -> Linear:
    return Linear("layers.0.weight", x, shared_amax(x.detach().float(), recipe))


def decided(algorithm: Any, x: Tensor, recipe: Any, inputs: Inputs | None = None) -> Decision:
    (decision,) = algorithm.decide(Group((linear(x, recipe),), inputs), recipe)
    return decision


def inputs_with(local_hessian: Tensor) -> Inputs:
    return Inputs(tokens=256, amax=torch.tensor(1.0), local_hessian=local_hessian)


def one_a_block(scale: Tensor, x: Tensor, recipe: Any) -> np.ndarray:
    """[.., N, K // block] as the formats have it -> one entry for each scale; rows of a square block must agree."""
    rows, columns = naive.block_shape(x, recipe)
    if scale.ndim == 0:
        return scale.reshape(1, 1).numpy()
    assert scale.shape == (len(x), -(-x.shape[1] // columns))
    first = scale[::rows]
    assert torch.equal(scale, first.repeat_interleave(rows, 0)[: len(x)])
    return first.numpy()


def grid_of(quantizer: Any, x: Tensor, recipe: Any) -> tuple[np.ndarray, np.ndarray]:
    enc, dec = (one_a_block(scale, x, recipe) for scale in format_of(recipe).grid(recipe, quantizer))
    return enc, dec


# -- Max -----------------------------------------------------------------------------------------------------------


@all_recipes
def test_max_gives_the_bytes_of_quantize(recipe: Any) -> None:
    x = trained()
    x[3, 7], x[40, 70] = torch.nan, torch.inf
    decision = decided(Max(), torch.nn.Parameter(x), recipe)
    parts, expected = format_of(recipe).encode_with(x.float(), recipe, decision.quantizer), quantize(x, recipe).parts()
    assert parts.keys() == expected.keys()
    for name, part in expected.items():
        assert same_bytes(parts[name], part), name
    assert decision.weight is None
    assert not any(part.requires_grad for part in decision.quantizer.values())


def test_max_takes_the_amax_that_siblings_agreed_on() -> None:
    recipe, x = NVFP4BlockScaling(), trained()
    agreed = Linear("q.weight", x, torch.tensor(100.0))
    (decision,) = Max().decide(Group((agreed,)), recipe)
    assert decision.quantizer["global_scale"] == torch.tensor(1.0) / (torch.tensor(2688.0) / torch.tensor(100.0))


# -- the scales of the definitions -------------------------------------------------------------------------------------


def assert_best(x: Tensor, recipe: Any, quantizer: Any, weights: Tensor | None = None) -> None:
    """The chosen scales are candidates or Max's, none has a smaller error; of equal ones Max's, else the smallest."""
    array, h = x.float().numpy(), None if weights is None else weights.numpy()
    with np.errstate(all="ignore"):
        own = naive.own_scale(array, recipe)
        tried = [own, *naive.candidate_scales(array, recipe)]
        errors = np.stack([naive.errors(array, recipe, *each, h) for each in tried])  # [candidates, .., ..]
        enc, dec = grid_of(quantizer, x, recipe)
        chosen = naive.errors(array, recipe, enc, dec, h)
    scales = np.stack([each[1] for each in tried])
    assert (scales == dec).any(axis=0).all(), "a scale that is no candidate"
    assert (chosen <= errors[0] * (1 if h is None else 1 + CLOSE)).all(), "worse than Max"
    least = errors.min(axis=0)
    assert (chosen <= least * (1 + CLOSE)).all(), "not the least error"
    others = np.where(scales == dec, np.inf, errors)
    kept = (others.min(axis=0) >= errors[0]) & (errors[0] <= least)
    assert (dec[kept] == own[1][kept]).all(), "not Max's, though none is better"
    tied = (errors == least) & (least * (1 + CLOSE) < errors[0])
    smallest = np.where(tied, scales, np.inf).min(axis=0)
    several = np.isfinite(smallest) & (np.where(tied, np.inf, errors).min(axis=0) > least * (1 + CLOSE))
    assert (dec[several] == smallest[several]).all(), "not the smallest of equal ones"


@all_recipes
@pytest.mark.parametrize("kind", ["trained", "on the grid"])
def test_mse_finds_what_trying_every_candidate_finds(recipe: Any, kind: str) -> None:
    x = trained() if kind == "trained" else on_the_grid(recipe) * 1.25
    assert_best(x, recipe, decided(Mse(), x, recipe).quantizer)


@all_recipes
def test_local_hessian_finds_what_trying_every_candidate_finds(recipe: Any) -> None:
    x, h = trained(), hessian()
    decision = decided(LocalHessian(), x, recipe, inputs_with(h))
    assert_best(x, recipe, decision.quantizer, h)
    assert decision.notes.keys() == {"clip"}


@pytest.mark.parametrize("recipe", WIDER_BLOCKS.values(), ids=WIDER_BLOCKS)
def test_wider_blocks_are_searched_for_alike(recipe: Any) -> None:
    x, h = trained(64, 256), hessian(256)
    assert_best(x, recipe, decided(Mse(), x, recipe).quantizer)
    assert_best(x, recipe, decided(LocalHessian(), x, recipe, inputs_with(h)).quantizer, h)


def test_inputs_change_what_is_best() -> None:
    """One column of the inputs is all there is, so its weights become exact, or as near as any scale brings them."""
    recipe, h = NVFP4BlockScaling(), torch.zeros(1, 16, 16)
    x = torch.rand(64, 16, generator=torch.Generator().manual_seed(0)) + 0.5
    h[:, 9, 9] = 1.0
    fmt, quantizer = format_of(recipe), decided(LocalHessian(), x, recipe, inputs_with(h)).quantizer
    decoded = fmt.decode(fmt.encode_with(x, recipe, quantizer), recipe)
    by_weights = quantize(x, recipe).dequantize()
    mine, theirs = (decoded - x).abs(), (by_weights - x).abs()
    assert (mine[:, 9] <= theirs[:, 9]).all()
    assert (mine[:, 9] < theirs[:, 9] / 4).sum() > 24
    assert mine.norm() > theirs.norm()


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8CurrentScaling(granularity="tensor")])
def test_columns_that_are_no_multiple_of_a_sub_block_take_part(recipe: Any) -> None:
    x, h = trained(48, 41), hessian(41)
    assert_best(x, recipe, decided(Mse(), x, recipe).quantizer)
    assert_best(x, recipe, decided(LocalHessian(), x, recipe, inputs_with(h)).quantizer, h)


@pytest.mark.parametrize("recipe", [Float8BlockScaling(), Float8BlockScaling(blocks="row")])
def test_blocks_that_are_smaller_at_the_ends_get_their_own_scales(recipe: Any) -> None:
    x, h = trained(200, 331), hessian(331)
    assert_best(x, recipe, decided(Mse(), x, recipe).quantizer)
    assert_best(x, recipe, decided(LocalHessian(), x, recipe, inputs_with(h)).quantizer, h)


# -- what must not change the outcome --------------------------------------------------------------------------------


@sampled(("name", "seed"), itertools.product(RECIPES, [0, 1]), [(name, i % 2) for i, name in enumerate(RECIPES)])
def test_leaving_out_what_can_not_win_changes_nothing(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hessian of 1 gives the same sums, under all candidates of the format."""
    recipe = RECIPES[name]
    cases = [trained(256, 192, seed), on_the_grid(recipe) * 0.7, torch.randn(32, 64).abs() + 1]
    amaxes = [linear(x, recipe).amax for x in cases]

    def found(*hessians: Tensor | None) -> list[Any]:
        return [search(x, recipe, a, h) for x, a, h in zip(cases, amaxes, hessians, strict=True)]

    inputs, ones = [[make(x.shape[1]) for x in cases] for make in (hessian, one)]
    by_weights, by_inputs = found(None, None, None), found(*inputs)
    monkeypatch.setattr(search_module._Span, "least_errors", lambda *_: torch.zeros(()))
    for pruned, full in zip([*by_weights, *by_inputs], [*found(*ones), *found(*inputs)], strict=True):
        assert pruned[1] == full[1]
        for part, value in full[0].items():
            assert same_bytes(pruned[0][part], value), part


def one(columns: int) -> Tensor:
    return torch.eye(16).expand(columns // 16, 16, 16)


@all_recipes
@pytest.mark.parametrize("h", [None, hessian()], ids=["weights", "inputs"])
def test_no_error_is_below_what_it_is_said_to_be_at_least(recipe: Any, h: Tensor | None) -> None:
    """Down to scales so small that everything saturates, where the two come close."""
    fmt, x = format_of(recipe), trained().float()
    own, unit = fmt.quantizer(x, recipe, linear(x, recipe).amax), torch.ones(())
    span = search_module._Span(x, recipe, own, unit, h)
    nearest = torch.zeros(())
    for exponent in range(1, 12):
        y = torch.ldexp(x, torch.tensor(-exponent))
        smaller = fmt.quantizer(y, recipe, linear(y, recipe).amax)
        least, errors = span.least_errors(smaller), span.errors(smaller)
        assert (least <= errors * (1 + CLOSE)).all()
        nearest = torch.maximum(nearest, (least / errors).nan_to_num(0.0).max())
    assert nearest > 0.1


def test_a_scale_that_saturates_is_tried_while_that_alone_can_win() -> None:
    """One block, under the global scale 1: Max has 1.125, errors 0.35 and 0.5; under 1 the largest alone has 0.4."""
    x = torch.tensor([[6.4, 4.0] + 14 * [0.0]])
    quantizer, clip = search(x, NVFP4BlockScaling(), torch.tensor(2688.0))
    assert quantizer["scale"].float().tolist() == [[1.0]]
    assert clip == pytest.approx(1 / 1.125)


def test_a_candidate_must_win_by_more_than_rounding() -> None:
    """A sum that is off by as much as sums in fp32 can be must not take the place of Max's."""

    class Given:
        hessian = torch.ones(())

        def errors(self, quantizer: dict[str, Tensor]) -> Tensor:
            return quantizer["errors"]

        def least_errors(self, quantizer: dict[str, Tensor]) -> Tensor:
            return torch.zeros(())

    own, close, better, equal = (
        {"errors": torch.tensor([1.0, 1.0 - less], dtype=torch.float64), "scale": torch.tensor([scale, scale])}
        for scale, less in ((3, 0.0), (4, 2.0**-19), (2, 2.0**-17), (1, 2.0**-17))
    )
    for candidates, scales in (([close], [3, 3]), ([close, better], [3, 2]), ([better, equal, close], [3, 1])):
        assert search_module._best(Given(), own, iter(candidates))["scale"].tolist() == scales


@all_recipes
def test_the_number_of_rows_at_once_changes_nothing(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, h = trained(176, 96), hessian()
    amax = linear(x, recipe).amax
    whole = [search(x, recipe, amax)[0], search(x, recipe, amax, h)[0]]
    monkeypatch.setattr(search_module, "CPU_ELEMENTS", 1)
    for expected, found in zip(whole, [search(x, recipe, amax)[0], search(x, recipe, amax, h)[0]], strict=True):
        for name, part in expected.items():
            assert same_bytes(found[name], part), name


@all_recipes
@pytest.mark.parametrize("exponent", [-70, 70])
def test_the_magnitude_of_weights_changes_nothing(recipe: Any, exponent: int) -> None:
    """Squares of such errors are beyond fp32."""
    x = trained().float()
    far = torch.ldexp(x, torch.tensor(exponent))
    near, moved = decided(Mse(), x, recipe), decided(Mse(), far, recipe)
    assert moved.notes == near.notes
    dec, expected = (format_of(recipe).grid(recipe, each.quantizer)[1].double() for each in (moved, near))
    # have the smallest scale there is, or 1 in INT4, whatever the exponent
    blocks_of_zeros = expected == 1 if facts(recipe).element.uniform else expected <= 2.0**-126
    expected = torch.where(blocks_of_zeros, expected, torch.ldexp(expected, torch.tensor(exponent)))
    assert torch.equal(dec, expected)


@all_recipes
def test_elements_that_are_not_finite_do_not_count(recipe: Any) -> None:
    x = trained()
    without, broken = x.clone(), x.clone()
    without[40, 50], broken[40, 50] = 0.0, torch.nan
    without[41, 90], broken[41, 90] = 0.0, -torch.inf
    expected, found = decided(Mse(), without, recipe), decided(Mse(), broken, recipe)
    for name, part in expected.quantizer.items():
        if format_of(recipe).marks_rows:
            part[40:42] = torch.nan
        assert same_bytes(found.quantizer[name], part), name


@all_recipes
def test_weights_that_quantize_exactly_keep_their_scales(recipe: Any) -> None:
    """All that other scales could do is as well, and Max's is kept."""
    x = on_the_grid(recipe)
    assert_best(x, recipe, decided(Mse(), x, recipe).quantizer)
    zeros = torch.zeros(32, 64)
    decision = decided(Mse(), zeros, recipe)
    for name, part in decided(Max(), zeros, recipe).quantizer.items():
        assert same_bytes(decision.quantizer[name], part), name
    assert decision.notes == {"clip": 1.0}


@all_recipes
def test_a_weight_without_rows_has_a_quantizer(recipe: Any) -> None:
    empty = torch.zeros(0, 64)
    decision = decided(Mse(), empty, recipe)
    parts = format_of(recipe).encode_with(empty, recipe, decision.quantizer)
    assert parts["payload"].shape[0] == 0


# -- notes ---------------------------------------------------------------------------------------------------------


def test_the_clip_is_the_mean_ratio_of_scales() -> None:
    recipe, x = MXFP8BlockScaling(scale_rounding="floor"), trained(64, 64)
    own, decision = decided(Max(), x, recipe), decided(Mse(), x, recipe)
    moved = decision.quantizer["scale"].double() - own.quantizer["scale"].double()
    assert moved.unique().numel() > 1
    assert decision.notes["clip"] == pytest.approx(torch.exp2(moved).mean().item(), rel=1e-12)


def test_local_hessian_falls_back_to_the_weights_and_says_so() -> None:
    recipe, x = RECIPES["nvfp4"], trained()
    expected, found = decided(Mse(), x, recipe), decided(LocalHessian(), x, recipe)
    for name, part in expected.quantizer.items():
        assert same_bytes(found.quantizer[name], part), name
    assert found.notes == {
        **expected.notes,
        "warning": "no token reached it; its scales have the least weight error",
    }


def test_what_the_algorithms_are() -> None:
    assert [kind.writes_weights for kind in (Max, Mse, LocalHessian)] == [False, False, False]
    assert [kind().needs for kind in (Max, Mse, LocalHessian)] == [frozenset(), frozenset(), frozenset({LOCAL_HESSIAN})]
    assert [kind().to_json() for kind in (Max, Mse)] == [{"type": "Max"}, {"type": "Mse"}]
    x = trained()
    several = Group((linear(x, RECIPES["nvfp4"]), linear(x * 2, RECIPES["nvfp4"])), inputs_with(hessian()))
    for algorithm in (Max(), Mse(), LocalHessian()):
        one, two = algorithm.decide(several, RECIPES["nvfp4"])
        assert same_bytes(one.quantizer["scale"], two.quantizer["scale"])
        assert one.quantizer["global_scale"] * 2 == two.quantizer["global_scale"]
