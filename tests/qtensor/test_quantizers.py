"""Quantizers: what decides the scales, apart from the rounding of elements under them.

Two equations tie them to the bytes: `encode` is `encode_with` the own quantizer, and what `decode` makes of it is
`snap(x * enc) * dec`, so that an error can be computed without a payload.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from qtensor import Float8DelayedScaling, NVFP4BlockScaling
from qtensor.spec.registry import encode, format_of, shared_amax
from tests.qtensor.recipes_under_test import RECIPES, all_recipes, every_recipe, same_bytes, weight
from tests.recipes import BF16, facts

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
    """One entry for each scale -> one for each element; only where K is a multiple of the block, or one block."""
    if scale.ndim and scale.shape[-1] > 1:
        scale = scale.repeat_interleave(like.shape[-1] // scale.shape[-1], dim=-1)
    return scale.expand(like.shape)


def other_quantizer(x: Tensor, recipe: Any, factor: float) -> dict[str, Tensor]:
    """A quantizer that x did not choose: that of x * factor, so that elements saturate or vanish."""
    fmt, y = format_of(recipe), x * factor
    return fmt.quantizer(y, recipe, shared_amax(y, recipe))


@every_recipe
@pytest.mark.parametrize("x", [values(), values(125), values(0, 40), values().view(4, 16, 96)[:, :, :64]])
@pytest.mark.parametrize("broken", [False, True])
def test_encode_is_encode_with_the_own_quantizer(recipe: Any, x: Tensor, broken: bool) -> None:
    fmt, x = format_of(recipe), x.clone()
    if broken:
        x[..., 3, 5], x[..., 2, 40], x[..., 1, 33] = NAN, INF, -INF
    amax = shared_amax(x, recipe)
    expected, quantizer = encode(x, recipe, amax), fmt.quantizer(x, recipe, amax)
    scales = [part for part in quantizer.values() if part.dtype == torch.float32]
    assert all(part.isfinite().all() for part in scales) or (broken and fmt.marks_rows)
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
    assert dec.dtype == torch.float32
    assert enc.dtype == (torch.float64 if facts(recipe).scale is BF16 else torch.float32)
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
    """What is not finite is marked in the parts, and the scale beneath is that of the finite elements.

    Amaxes tell of it where one scale of a row does, since pieces of the row may be elsewhere.
    """
    fmt, x = format_of(recipe), values()
    if fmt.marks_rows:
        x[3, 5] = NAN
        amax = shared_amax(x, recipe)
        assert amax.isinf().flatten().nonzero().tolist() == [[3]]
        assert fmt.quantizer(x, recipe, amax)["scale"].isnan().flatten().nonzero().tolist() == [[3]]
        return
    without, x = x.clone(), x.clone()
    x[3, 5], without[3, 5] = NAN, 0.0
    for name, part in fmt.quantizer(x, recipe, shared_amax(x, recipe)).items():
        assert same_bytes(part, fmt.quantizer(without, recipe, shared_amax(without, recipe))[name]), name


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
