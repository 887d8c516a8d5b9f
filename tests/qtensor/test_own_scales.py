"""Scales that were made by quantizing are never doubted, and a scale that its values cannot have asked for is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize, stochastic_rounding
from qtensor.numerics.own_scales import OwnScales
from tests.recipes import TABLE

ROWS, COLUMNS = 128, 256
EACH = pytest.mark.parametrize("recipe", [pytest.param(each.recipe, id=each.name) for each in TABLE])
JUDGED = pytest.mark.parametrize(
    "recipe", [pytest.param(each.recipe, id=each.name) for each in TABLE if not each.history]
)


def judged(parts: dict[str, Tensor], recipe: Any, *, step: int = ROWS) -> OwnScales:
    found = OwnScales(recipe)
    for start in range(0, ROWS, step):
        found.see({name: part[start : start + step] if part.ndim > 1 else part for name, part in parts.items()})
    found.judge_tensor_wide()
    return found


def inputs(magnitude: float) -> dict[str, Tensor]:
    draw = torch.Generator("cpu").manual_seed(7)

    def normal() -> Tensor:
        return torch.randn(ROWS, COLUMNS, generator=draw, dtype=torch.float32, device="cpu")

    spread = normal() * torch.exp(4 * normal())  # blocks of very different amax: NVFP4's least scales
    spread[5] = 0
    broken = normal().bfloat16().float()
    broken[0, 0], broken[:, :128] = float("nan"), 0
    return {"normal": normal() * magnitude, "spread": spread * magnitude, "broken": broken * magnitude}


@EACH
@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1.0, 1e20])
def test_no_scale_that_quantizing_made_is_doubted(recipe: Any, magnitude: float) -> None:
    draw = torch.Generator("cpu").manual_seed(3)
    for name, x in inputs(magnitude).items():
        q = quantize(x, recipe)
        assert judged(q.parts(), recipe).others == 0, name
        with stochastic_rounding(draw), torch.no_grad():
            q.mul_(1.3)
        assert judged(q.parts(), recipe).others == 0, name
        with torch.no_grad():
            q.add_(0.01)
            q.copy_(q.dequantize(torch.float32) * 3)
        assert judged(q.parts(), recipe).others == 0, name


@JUDGED
def test_zeros_under_the_scales_of_values_are_found(recipe: Any) -> None:
    """A payload of a step before the weight had values, with scales of a later step."""
    old = quantize(torch.zeros(ROWS, COLUMNS, dtype=torch.float32, device="cpu"), recipe).parts()
    new = quantize(inputs(1.0)["normal"], recipe).parts()
    found = judged({**new, "payload": old["payload"]}, recipe)
    wide = 1 if "global_scale" in new else 0  # its scales are of values, as it is
    assert found.others == found.scales - wide > 0


@JUDGED
def test_values_far_below_what_the_scale_is_for_are_found(recipe: Any) -> None:
    """Under a scale 16 times as large as the values ask for: that of another weight, or of a smaller cut."""
    x = inputs(1.0)["normal"]
    own = quantize(x, recipe)
    small = quantize(torch.cat([x / 16, x], dim=0), recipe).parts()  # tensor-wide scales are those of both halves
    if any(part.ndim < 2 for part in small.values()):
        half = {name: part[:ROWS] if part.ndim > 1 else part for name, part in small.items()}
        assert judged(half, recipe).others == 1
    else:
        decoded = {**own.parts(), "payload": _shrunk(x, own, recipe)}
        found = judged(decoded, recipe)
        assert found.others == found.scales > 0


def _shrunk(x: Tensor, own: Any, recipe: Any) -> Tensor:
    """The payload of x / 16 beside a value in each block that makes the scale of x, which is then taken out."""
    columns = next(each.block for each in TABLE if each.recipe == recipe)
    columns = COLUMNS if columns == 1 else columns
    blocks = (x / 16).reshape(ROWS, -1, columns).clone()
    blocks[..., 0] = x.reshape(ROWS, -1, columns).abs().amax(dim=-1)
    payload = quantize(blocks.reshape(x.shape), recipe).parts()["payload"].view(torch.uint8).clone()
    zero = quantize(torch.zeros_like(x), recipe).parts()["payload"].view(torch.uint8)
    per = payload.shape[-1] // (COLUMNS // columns)
    where = torch.zeros(ROWS, COLUMNS // columns, per, dtype=torch.bool, device="cpu")
    where[..., 0] = True
    return torch.where(where.reshape(payload.shape), zero, payload).view(own.parts()["payload"].dtype)


def test_rows_of_a_square_block_with_scales_of_their_own_are_found() -> None:
    recipe = MXFP8BlockScaling(blocks="square")
    parts = dict(quantize(inputs(1.0)["normal"], recipe).parts())
    parts["scale"] = parts["scale"].clone()
    parts["scale"][40:50, 3] += 1
    assert judged(parts, recipe).others == 32


def test_a_global_scale_that_no_block_scale_fills_is_found() -> None:
    recipe = NVFP4BlockScaling()
    parts = dict(quantize(inputs(1.0)["normal"], recipe).parts())
    top = parts["scale"].float().amax()
    parts["scale"] = torch.where(parts["scale"].float() == top, 416.0, parts["scale"].float()).to(torch.float8_e4m3fn)
    assert judged(parts, recipe).others == 1


def test_scales_that_an_exact_conversion_kept_are_told_apart() -> None:
    """They are no fault of the weight, which is why nobody else than the caller can make an error of them."""
    a = quantize(inputs(1.0)["normal"], Float8CurrentScaling(granularity="tensor"))
    b = quantize(torch.zeros(ROWS, COLUMNS, dtype=torch.float32, device="cpu"), Float8CurrentScaling())
    with torch.no_grad():
        b.copy_(a)
    assert torch.equal(b.dequantize(torch.float32), a.dequantize(torch.float32))
    assert 0 < judged(b.parts(), b.recipe).others < ROWS
    assert judged(a.parts(), a.recipe).others == 0
