"""What a search for better scales tries: quantizers with one candidate for every scale, from large to small.

The candidates depend on the kind of scale:

    E8M0 scales                      the codes that MULTIPLES of a block's amax have
    E4M3 scales of E2M1 elements     all positive codes, under the tensor-wide scale that the amax gives
    any other                        the scales that MULTIPLES of the amax give

A scale is left out if the block decodes the same under another candidate. If every element counts by itself
(`elementwise`), a scale is also left out if no element comes nearer to its value than under another candidate.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from qtensor.spec.blocks import FLT_MAX, block_amax, quotient
from qtensor.spec.codecs import e8m0
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import block_multiple, format_of, row_multiple, specs_of

MULTIPLES = tuple(0.25 + 3.75 * i / 38 for i in range(38, -1, -1))  # of an amax: 4 down to 1/4
LARGEST_E4M3_CODE = 126

Quantizer = dict[str, Tensor]


def candidates(x: Tensor, recipe: Recipe, amax: Tensor | None, *, elementwise: bool = False) -> Iterator[Quantizer]:
    """Yield the candidates for x, fp32 [N, K] and finite; `amax` as `formats.shared_amax` gives it."""
    numbers = {spec.name: spec.numbers for spec in specs_of(recipe)}
    if numbers.get("scale") == torch.float8_e8m0fnu:
        return _powers_of_two(x, recipe, elementwise=elementwise)
    if (numbers.get("scale"), numbers["payload"]) == (torch.float8_e4m3fn, torch.float4_e2m1fn_x2):
        return _e4m3_scales(x, recipe, amax, elementwise=elementwise)
    return (scaled_quantizer(x, recipe, amax, multiple) for multiple in (MULTIPLES if x.numel() else ()))


def scaled_quantizer(x: Tensor, recipe: Recipe, amax: Tensor | None, factor: float | Tensor) -> Quantizer:
    """Return the quantizer of x with every amax multiplied by `factor` first: one number, or one for each scale.

    If blocks have scales of their own, the tensor-wide scale above them does not change.
    """
    fmt = format_of(recipe)
    if any(spec.per_row and spec.block for spec in specs_of(recipe)[1:]):
        factor = spread(factor, recipe, x.shape[-1]) if isinstance(factor, Tensor) else factor
        # A value times 4 may overflow, and no scale can be made from an infinite amax.
        return fmt.quantizer((x * factor).clamp(-FLT_MAX, FLT_MAX), recipe, amax)
    assert amax is not None
    # an infinite one marks a row
    return fmt.quantizer(x, recipe, torch.where(amax < torch.inf, (amax * factor).clamp(max=FLT_MAX), amax))


def spread(scales: Tensor, recipe: Recipe, columns: int) -> Tensor:
    """Spread one value for each scale to a tensor that broadcasts against [N, K]."""
    if scales.ndim == 0 or scales.shape[-1] == 1:
        return scales
    return scales.repeat_interleave(block_multiple(recipe), dim=-1)[..., :columns]  # the last block may be smaller


def _powers_of_two(x: Tensor, recipe: Recipe, *, elementwise: bool) -> Iterator[Quantizer]:
    """Yield all codes, from the one of the largest multiple down to the one of the smallest.

    No multiple is over 1.4 times the next smaller one, so no code in between is skipped.

    Every element of scale 2d that is not above the largest of d is an element of d, too. So if nothing saturates
    under d, nothing comes nearer to its value under 2d: with `elementwise`, the highest code to try is the lowest one
    that does not saturate.
    """
    if x.numel() == 0:
        return
    high, low = (
        scaled_quantizer(x, recipe, None, multiple)["scale"].to(torch.int32)
        for multiple in (MULTIPLES[0], MULTIPLES[-1])
    )
    if elementwise:
        largest = format_of(recipe).snap(x.new_full((), torch.inf), recipe)
        own = block_amax(x, block_multiple(recipe), square=row_multiple(recipe) > 1)
        high = torch.maximum(torch.minimum(high, e8m0.code_up(own * quotient(1.0, largest))), low)
    for below in range(int((high - low).amax()) + 1):
        yield {"scale": torch.maximum(high - below, low).to(torch.uint8)}


def _e4m3_scales(x: Tensor, recipe: Recipe, amax: Tensor | None, *, elementwise: bool) -> Iterator[Quantizer]:
    """Yield the positive E4M3 block scales under the global scale of the amax, up to where the whole block becomes 0.

    The elements of scale 2d up to 6d are elements of d, too, and the next is 8d. So if nothing is above 7d, nothing
    comes nearer to its value under 2d than under d. With `elementwise`, the highest code to try is therefore 7 above
    the lowest d for which nothing is above 7d: 8 codes are a factor of 2. Codes up to 15 are always tried, since half
    of a subnormal scale need not be a code.
    """
    if x.numel() == 0:
        return
    fmt = format_of(recipe)
    own = block_amax(x, block_multiple(recipe), square=row_multiple(recipe) > 1)
    above = {name: part for name, part in fmt.quantizer(x, recipe, amax).items() if name != "scale"}
    codes = torch.arange(1, LARGEST_E4M3_CODE + 1, dtype=torch.uint8, device=x.device)
    _, dec = fmt.grid(recipe, {**above, "scale": codes.view(torch.float8_e4m3fn)})  # [126], ascending
    if elementwise:
        high = (torch.searchsorted(dec * 7.0, own) + 1 + 7).clamp(min=15)
    else:
        # 0.25, half of the smallest element, is rounded to 0; the slack exceeds the rounding error of enc.
        high = torch.searchsorted(dec * (0.25 * (1 - 2.0**-20)), own) + 1
    high = high.clamp(max=LARGEST_E4M3_CODE)
    for below in range(int(high.amax())):
        code = (high - below).clamp(min=1).to(torch.uint8)
        yield {"scale": code.view(torch.float8_e4m3fn), **above}
