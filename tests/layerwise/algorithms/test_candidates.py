"""Candidates of a search: what they are in each format, and that nothing better is left out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from layerwise.algorithms.solvers.candidates import candidates
from qtensor.spec.registry import encode, format_of, shared_amax
from tests.qtensor.recipes_under_test import RECIPES, every_recipe
from tests.qtensor.test_quantizers import EXPONENTS, spread, values
from tests.recipes import E8M0, FP8, facts, recipes

BLOCK_RECIPES = list(recipes(lambda each: each.scale in (E8M0, FP8)))  # not multiples alone
MULTIPLES = torch.linspace(0.25, 4, 39, dtype=torch.float64)


def tried(x: Tensor, recipe: Any, **how: bool) -> Tensor:
    """[candidates, N, scales] fp32: what `grid` says of all candidates."""
    fmt = format_of(recipe)
    return torch.stack([fmt.grid(recipe, each)[1] for each in candidates(x, recipe, shared_amax(x, recipe), **how)])


@every_recipe
@pytest.mark.parametrize("elementwise", [False, True])
def test_candidates_fall_and_are_like_the_own_quantizer(recipe: Any, elementwise: bool) -> None:
    fmt, x = format_of(recipe), values()
    own = fmt.quantizer(x, recipe, shared_amax(x, recipe))
    for each in candidates(x, recipe, shared_amax(x, recipe), elementwise=elementwise):
        assert {name: (part.shape, part.dtype) for name, part in each.items()} == {
            name: (part.shape, part.dtype) for name, part in own.items()
        }
    dec = tried(x, recipe, elementwise=elementwise)
    assert (dec.diff(dim=0) <= 0).all()


@pytest.mark.parametrize("name", recipes(lambda each: each.block == 1 and each.element.floating and not each.history))
def test_float8_candidates_are_multiples_of_the_amax(name: str) -> None:
    recipe, x = RECIPES[name], values(125)
    amax = shared_amax(x, recipe)
    assert amax is not None
    for elementwise in (False, True):
        found = torch.stack([each["amax"] for each in candidates(x, recipe, amax, elementwise=elementwise)])
        expected = torch.stack([amax.double() * multiple for multiple in MULTIPLES.float().double().flip(0)])
        assert torch.equal(found, expected.clamp(max=torch.finfo(torch.float32).max).float())


@pytest.mark.parametrize("name", recipes(lambda each: each.scale is E8M0))
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_e8m0_candidates_are_the_codes_of_the_multiples(name: str, exponent: int) -> None:
    recipe = RECIPES[name]
    fmt, x = format_of(recipe), values(exponent)
    found = torch.stack([each["scale"] for each in candidates(x, recipe, None)])
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
    found = [each["scale"].view(torch.uint8) for each in candidates(x, recipe, shared_amax(x, recipe))]
    codes, own = torch.stack(found), fmt.quantizer(x, recipe, shared_amax(x, recipe))
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


@pytest.mark.parametrize("name", recipes(lambda each: each.block > 1 and each.scale in (E8M0, FP8)))
def test_what_is_left_out_of_an_elementwise_search_is_nowhere_nearer(name: str) -> None:
    """Each such scale has another that is kept, mostly its half, under which no element has a larger error."""
    recipe = RECIPES[name]
    fmt, x, block = format_of(recipe), values(), facts(recipe).block
    x[::2] = fmt.decode(encode(x, recipe, shared_amax(x, recipe)), recipe)[::2]  # many ties
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
        empty = torch.zeros(0, 64)
        assert list(candidates(empty, RECIPES[name], shared_amax(empty, RECIPES[name]))) == []
