"""Quantizers: what decides the scales, apart from the rounding of elements under them.

Two equations tie them to the bytes: `encode` is `encode_with` the own quantizer, and what `decode` makes of it is
`snap(x * enc) * dec`, so that an error can be computed without a payload.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from qtensor import Float8DelayedScaling, NVFP4BlockScaling
from qtensor.formats import format_of
from tests.qtensor.recipes_under_test import (
    RECIPES,
    all_recipes,
    every_recipe,
    same_bytes,
    weight,
)
from tests.recipes import E8M0, FP8, facts, recipes

INF, NAN = float("inf"), float("nan")
# magnitudes of weights, of the smallest and of the largest fp32 numbers, where scales saturate
EXPONENTS = [0, -130, 125]


def values(exponent: int = 0, rows: int = 64) -> Tensor:
    """fp32 [rows, 96] of all magnitudes: outliers, subnormals of the element and of fp32, zeros of both signs."""
    generator = torch.Generator().manual_seed(rows + exponent)
    x = weight(rows, 96, torch.float32)
    x *= torch.exp2(-torch.randint(0, 20, x.shape, generator=generator).float())
    x[:, 5], x[:, 6], x[0, 7] = 0.0, -0.0, 2.0**-149
    x[32:, :32] *= 2.0**-30
    x[:32, 64:] = 0.0
    return torch.ldexp(x, torch.tensor(exponent))


def spread(scale: Tensor, like: Tensor) -> Tensor:
    """One entry for each scale -> one for each element."""
    if scale.ndim and scale.shape[-1] > 1:
        scale = scale.repeat_interleave(like.shape[-1] // scale.shape[-1], dim=-1)
    return scale.expand(like.shape)


def other_quantizer(x: Tensor, recipe: Any, factor: float) -> dict[str, Tensor]:
    """A quantizer that x did not choose: that of x * factor, so that elements saturate or vanish."""
    fmt, y = format_of(recipe), x * factor
    return fmt.quantizer(y, recipe, fmt.shared_amax(y, recipe))


@every_recipe
@pytest.mark.parametrize("x", [values(), values(125), values(0, 40), values().view(4, 16, 96)[:, :, :64]])
@pytest.mark.parametrize("broken", [False, True])
def test_encode_is_encode_with_the_own_quantizer(recipe: Any, x: Tensor, broken: bool) -> None:
    fmt, x = format_of(recipe), x.clone()
    if broken:
        x[..., 3, 5], x[..., 2, 40], x[..., 1, 33] = NAN, INF, -INF
    amax = fmt.shared_amax(x, recipe)
    expected, quantizer = fmt.encode(x, recipe, amax), fmt.quantizer(x, recipe, amax)
    assert all(part.isfinite().all() for part in quantizer.values() if part.dtype == torch.float32)
    found = fmt.encode_with(x, recipe, quantizer)
    assert found.keys() == expected.keys()
    for name, part in expected.items():
        assert same_bytes(found[name], part), name


@every_recipe
@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("factor", [0.3, 2.0**12])
def test_decoded_values_are_those_snapped_to_the_grid(recipe: Any, exponent: int, factor: float) -> None:
    fmt, x = format_of(recipe), values(exponent)
    quantizer = other_quantizer(x, recipe, factor)
    enc, dec = fmt.grid(recipe, quantizer)
    assert enc.dtype == dec.dtype == torch.float32
    decoded = fmt.decode(fmt.encode_with(x, recipe, quantizer), recipe)
    assert same_bytes(decoded, fmt.snap(x * spread(enc, x), recipe) * spread(dec, x))


@pytest.mark.parametrize("name", ["float8_row", "float8_row_e5m2", "nvfp4"])
def test_snapping_agrees_with_the_elements_around_every_tie(name: str) -> None:
    """A few ulps around all elements and midpoints, under the scale 1."""
    recipe = RECIPES[name]
    fmt, largest = format_of(recipe), facts(recipe).element.largest
    every = torch.cat([torch.linspace(0, 8, 513), torch.logspace(-18, 17, 36 * 64 + 1, base=2.0)])
    elements = fmt.snap(every, recipe).unique()
    assert elements[0] == 0
    assert elements[-1] == largest
    exact = torch.cat([elements, (elements[1:] + elements[:-1]) / 2])
    near = [exact]
    for direction in (-INF, INF):
        y = exact
        for _ in range(3):
            y = torch.nextafter(y, torch.tensor(direction))
            near.append(y)
    x = torch.cat([*near, torch.tensor([largest * 1.5, 3e38, INF])])
    x = torch.cat([x, -x])
    nearest = elements[(x.abs().clamp(max=largest).double()[:, None] - elements.double()).abs().argmin(dim=1)]
    ties = (x.abs()[:, None] == exact[len(elements) :]).any(dim=1)
    found = fmt.snap(x, recipe)
    assert torch.equal(found[~ties].abs(), nearest[~ties])
    assert torch.equal(torch.signbit(found), torch.signbit(x))
    if name == "nvfp4":  # ties to the even code
        tied = fmt.snap(torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]), recipe)
        assert tied.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


@all_recipes
def test_a_quantizer_holds_the_scales_unmarked(recipe: Any) -> None:
    """What is not finite is marked in the parts, and the scale beneath is that of the finite elements."""
    fmt, x = format_of(recipe), values()
    without, x = x.clone(), x.clone()
    x[3, 5], without[3, 5] = NAN, 0.0
    for name, part in fmt.quantizer(x, recipe, fmt.shared_amax(x, recipe)).items():
        assert same_bytes(part, fmt.quantizer(without, recipe, fmt.shared_amax(without, recipe))[name]), name


def test_a_delayed_quantizer_begins_a_history() -> None:
    recipe = Float8DelayedScaling(amax_history_len=3, margin=1)
    fmt, x = format_of(recipe), values()
    parts = fmt.encode_with(x, recipe, {"amax": torch.tensor(7.0)})
    assert parts["amax_history"].tolist() == [7.0, 0.0, 0.0]
    assert parts["scale"].item() == 1 / (torch.tensor(224.0) / 7.0).item()


def test_a_block_scale_of_zero_decodes_to_zeros() -> None:
    recipe = NVFP4BlockScaling()
    fmt, x = format_of(recipe), torch.tensor([[1.0, -1.0] * 8])
    quantizer = {"scale": torch.zeros(1, 1).to(torch.float8_e4m3fn), "global_scale": torch.tensor(1.0)}
    enc, dec = fmt.grid(recipe, quantizer)
    assert enc.item() == torch.finfo(torch.float32).max
    assert same_bytes(fmt.snap(x * enc, recipe) * dec, torch.tensor([[0.0, -0.0] * 8]))


# -- candidates of a search ------------------------------------------------------------------------------------------

BLOCK_RECIPES = recipes(lambda each: each.block > 1)
MULTIPLES = torch.linspace(0.25, 4, 39, dtype=torch.float64)


def tried(x: Tensor, recipe: Any, **how: bool) -> Tensor:
    """[candidates, N, scales] fp32: what `grid` says of all candidates."""
    fmt = format_of(recipe)
    return torch.stack(
        [fmt.grid(recipe, each)[1] for each in fmt.candidates(x, recipe, fmt.shared_amax(x, recipe), **how)]
    )


@every_recipe
@pytest.mark.parametrize("elementwise", [False, True])
def test_candidates_fall_and_are_like_the_own_quantizer(recipe: Any, elementwise: bool) -> None:
    fmt, x = format_of(recipe), values()
    own = fmt.quantizer(x, recipe, fmt.shared_amax(x, recipe))
    for each in fmt.candidates(x, recipe, fmt.shared_amax(x, recipe), elementwise=elementwise):
        assert {name: (part.shape, part.dtype) for name, part in each.items()} == {
            name: (part.shape, part.dtype) for name, part in own.items()
        }
    dec = tried(x, recipe, elementwise=elementwise)
    assert (dec.diff(dim=0) <= 0).all()


@pytest.mark.parametrize("name", recipes(lambda each: each.block == 1 and not each.history))
def test_float8_candidates_are_multiples_of_the_amax(name: str) -> None:
    recipe = RECIPES[name]
    fmt, x = format_of(recipe), values(125)
    amax = fmt.shared_amax(x, recipe)
    assert amax is not None
    for elementwise in (False, True):
        found = torch.stack([each["amax"] for each in fmt.candidates(x, recipe, amax, elementwise=elementwise)])
        expected = torch.stack([amax.double() * multiple for multiple in MULTIPLES.float().double().flip(0)])
        assert torch.equal(found, expected.clamp(max=torch.finfo(torch.float32).max).float())


@pytest.mark.parametrize("name", recipes(lambda each: each.scale is E8M0))
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_mxfp8_candidates_are_the_codes_of_the_multiples(name: str, exponent: int) -> None:
    recipe = RECIPES[name]
    fmt, x = format_of(recipe), values(exponent)
    found = torch.stack([each["scale"] for each in fmt.candidates(x, recipe, None)])
    largest = torch.finfo(torch.float32).max
    amax = x.double().unflatten(-1, (-1, 32)).abs().amax(dim=-1)
    scaled = [(amax * multiple).clamp(max=largest).float() for multiple in MULTIPLES]
    # a block that holds nothing but the amax has the code of that amax
    expected = torch.stack([fmt.quantizer(spread(each, x), recipe, None)["scale"] for each in scaled])
    for row in range(0, 64, 9):
        for column in range(3):
            assert set(found[:, row, column].tolist()) == set(expected[:, row, column].tolist())


@pytest.mark.parametrize("name", recipes(lambda each: each.scale is FP8))
def test_nvfp4_candidates_are_all_scales_up_to_one_that_leaves_zeros(name: str) -> None:
    recipe = RECIPES[name]
    fmt, x = format_of(recipe), values()
    found = [each["scale"].view(torch.uint8) for each in fmt.candidates(x, recipe, fmt.shared_amax(x, recipe))]
    codes, own = torch.stack(found), fmt.quantizer(x, recipe, fmt.shared_amax(x, recipe))
    highest = codes[0]
    assert highest.min() < 40, "no block of this test leaves anything out"
    assert highest.max() == 126
    for row in range(0, 64, 9):
        for column in range(6):
            assert codes[:, row, column].unique().tolist() == list(range(1, int(highest[row, column]) + 1))
    for above in range(126):
        scale = (highest.int() + above).clamp(max=126).to(torch.uint8).view(torch.float8_e4m3fn)
        decoded = fmt.decode(fmt.encode_with(x, recipe, {**own, "scale": scale}), recipe)
        assert not decoded.unflatten(-1, (-1, 16))[highest < 126].any()


@pytest.mark.parametrize("name", BLOCK_RECIPES)
def test_what_is_left_out_of_an_elementwise_search_is_nowhere_nearer(name: str) -> None:
    """Each such scale has another that is kept, mostly its half, under which no element has a larger error."""
    recipe = RECIPES[name]
    fmt, x, block = format_of(recipe), values(), facts(recipe).block
    x[::2] = fmt.decode(fmt.encode(x, recipe, fmt.shared_amax(x, recipe)), recipe)[::2]  # many ties
    blocks = x.unflatten(-1, (-1, block))

    def errors(dec: Tensor) -> Tensor:  # [candidates, N, scales, block]
        scaled = blocks.double() / dec.double().unsqueeze(-1)
        return ((fmt.snap(scaled.float(), recipe).double() - scaled) * dec.double().unsqueeze(-1)).abs()

    every, kept = tried(x, recipe), tried(x, recipe, elementwise=True)
    assert kept.shape[0] < every.shape[0] or facts(recipe).scale is FP8
    left_out = ~(every.unsqueeze(1) == kept).any(dim=1)
    assert left_out.any()
    largest = x.abs().max() * 2.0**-22
    near = errors(kept)
    for dec, out in zip(every, left_out, strict=True):
        worse = (near <= errors(dec.unsqueeze(0)) * (1 + 2.0**-20) + largest * 2.0**-20).all(dim=-1).any(dim=0)
        assert worse[out].all()


def test_a_tensor_without_elements_has_no_blocks_to_try() -> None:
    for name in BLOCK_RECIPES:
        fmt, empty = format_of(RECIPES[name]), torch.zeros(0, 64)
        assert list(fmt.candidates(empty, RECIPES[name], fmt.shared_amax(empty, RECIPES[name]))) == []
