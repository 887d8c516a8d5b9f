"""What the tests of qtensor/states share: recipes, inputs, positions, and what a step of a lattice is.

The step is told from the stored scales and the definition of the lattice, not from the implementation.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Int4GroupScaling,
    Int8RowScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NF4BlockScaling,
    NVFP4BlockScaling,
)
from qtensor.spec.blocks import BlockFacts, scatter_blocks
from qtensor.spec.registry import block_facts, encode, row_multiple, shared_amax
from qtensor.states import remainders
from qtensor.states.draws import Positions, key_of, row_keys
from tests.qtensor.recipes_under_test import same_bytes
from tests.sampling import sampled

ROWS, COLUMNS = 256, 512  # whole square blocks of all formats, and less than what is compiled
CHOICES: dict[type[Any], dict[str, tuple[Any, ...]]] = {
    Float8CurrentScaling: {
        "element": ("e4m3", "e5m2"),
        "granularity": ("row", "tensor"),
        "power_of_two": (False, True),
    },
    Float8BlockScaling: {"element": ("e4m3", "e5m2"), "blocks": ("row", "square"), "power_of_two": (False, True)},
    MXFP8BlockScaling: {"element": ("e4m3", "e5m2"), "blocks": ("row", "square"), "scale_rounding": ("up", "floor")},
    MXFP4BlockScaling: {"scale_rounding": ("up", "floor")},
    NVFP4BlockScaling: {"blocks": ("row", "square")},
    Int4GroupScaling: {"group": (32, 64, 128)},
    Int8RowScaling: {},
    NF4BlockScaling: {"block": (32, 64, 128)},
}
RECIPES = [
    kind(**dict(zip(options, values, strict=True)))
    for kind, options in CHOICES.items()
    for values in itertools.product(*options.values())
]
# each lattice, each kind of scale, square blocks
KEPT = [
    Float8CurrentScaling(),
    Float8CurrentScaling(element="e5m2", granularity="tensor"),
    MXFP8BlockScaling(scale_rounding="floor"),
    MXFP8BlockScaling(blocks="square"),
    MXFP4BlockScaling(scale_rounding="floor"),
    NVFP4BlockScaling(blocks="square"),
    Int4GroupScaling(),
    Int8RowScaling(),
    NF4BlockScaling(),
]


def name_of(recipe: Any) -> str:
    return "-".join((type(recipe).__name__, *(str(getattr(recipe, field)) for field in CHOICES[type(recipe)])))


each_recipe = sampled("recipe", RECIPES, KEPT, ids=[name_of(recipe) for recipe in RECIPES])


def positions(rows: int = ROWS, step: int = 0, *, start: int = 0, first: int = 0) -> Positions:
    """Of rows from `start` on and columns from `first` on."""
    keys = row_keys(key_of(7, "weight", step), torch.arange(start, start + rows))
    return Positions(keys, torch.full((1,), first, dtype=torch.int32))


def nearest() -> Positions:
    first = torch.zeros(1, dtype=torch.int32)
    return Positions(first, first)


def kept(
    x: Tensor, recipe: Any, at: Positions, amax: Tensor | None = None, blocks: BlockFacts | None = None
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Parts, remainders and the master that they say, as an optimizer keeps x."""
    master = remainders.rounded(x, recipe, at)
    amax = shared_amax(master, recipe) if amax is None else amax
    parts, remainder = remainders.split(master, recipe, amax, blocks, at)
    return parts, remainder, remainders.join(parts, remainder, recipe)


def quantized(x: Tensor, recipe: Any) -> dict[str, Tensor]:
    return encode(x, recipe, shared_amax(x, recipe))


def facts_of(x: Tensor, recipe: Any) -> BlockFacts:
    """Those of the square blocks of a whole weight, for each of its rows."""
    return BlockFacts(*(scatter_blocks(fact, row_multiple(recipe)) for fact in block_facts(x, recipe)))


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bytes(part, b[name]) for name, part in a.items())


def step_of(x: Tensor, parts: Mapping[str, Tensor], recipe: Any) -> Tensor:
    """fp64: the distance of two masters around each x, by what is stored."""
    e5m2 = getattr(recipe, "element", "e4m3") == "e5m2"
    if "scale" in parts and parts["scale"].dtype == torch.uint8:
        unit = torch.exp2(parts["scale"].double() - 127)
    else:
        unit = parts["scale"].double()
    if isinstance(recipe, NVFP4BlockScaling):
        wide = parts["global_scale"].double()
        unit = torch.where(unit <= 2.0**-9, 2.0**-5, unit) * wide
    if isinstance(recipe, (MXFP4BlockScaling, NVFP4BlockScaling)):
        bits, least = 16, 0
    elif isinstance(recipe, Int4GroupScaling):
        bits, least = 17, 2
    elif isinstance(recipe, Int8RowScaling):
        bits, least = 21, 6
    elif isinstance(recipe, NF4BlockScaling):
        bits, least = 16, -2
    else:
        saturates = isinstance(recipe, MXFP8BlockScaling) and not e5m2 and recipe.scale_rounding == "floor"
        bits, least = (17, -14) if e5m2 else (18 - saturates, -6)
    if unit.ndim == 2:
        columns = x.shape[-1]
        unit = unit.repeat_interleave(-(-columns // unit.shape[-1]), -1)[:, :columns]
    # a unit nearly a power of two counts as that
    floor = (exponent(unit * (1 + 2.0**-14 + 2.0**-20)) + least).clamp(min=-126)
    return torch.exp2(torch.maximum(exponent(x.double().abs()), floor) - bits)


def exponent(x: Tensor) -> Tensor:
    """fp64: of the power of two below each x; that of 0 is -1023."""
    return torch.frexp(x.double()).exponent.double() - 1 - 1022.0 * (x == 0)


def inputs() -> dict[str, Tensor]:
    """Finite fp32 [ROWS, COLUMNS] of many kinds."""
    torch.manual_seed(0)
    size = (ROWS, COLUMNS)
    normal = torch.randn(size)
    raw = torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int64).to(torch.int32).view(torch.float32)
    zeros = torch.zeros(size)
    ones = torch.ones(ROWS, 1)
    zeros[::3, 64:80] = normal[::3, 64:80]
    zeros[128:, :] = -0.0
    return {
        "normal": normal * 0.02,
        "bf16": normal.bfloat16().float(),
        "spread": normal * torch.exp2(torch.randn(size) * 6),
        "wide rows": normal * torch.exp2((torch.rand(ROWS, 1) * 40 - 30).round()),
        "wide blocks": normal * torch.exp2((torch.rand(ROWS, COLUMNS // 16) * 30 - 30).repeat_interleave(16, 1)),
        "subnormal": normal * torch.exp2((torch.rand(ROWS, 1) * 40 - 150).round()),
        "huge": (torch.rand(size) * 2 - 1) * 3.4028e38,
        "any bits": raw.nan_to_num(1.0, 1.0, 1.0),
        "ties": torch.randint(-4096, 4096, size).float() / 512,
        "zero blocks": zeros,
        "few": torch.where(torch.rand(size) < 0.01, normal, 0.0),
        "borders of scales": _at_borders(normal),
        "nearly powers of two": _nearly(),
        "far below": torch.cat([ones, _far_below(size)[:, 1:]], 1),
    }


def _at_borders(normal: Tensor) -> Tensor:
    """Amaxes of blocks of 16 that are a few fp32 numbers around those where scales change."""
    tops = torch.tensor([448.0, 57344.0, 6.0, 7.5, 256.0, 32768.0, 4.0, 3.0]).repeat(ROWS, COLUMNS // 128)
    tops = tops * torch.exp2(torch.randint(-2, 2, tops.shape).float())
    tops = (tops.view(torch.int32) + torch.randint(-40, 40, tops.shape, dtype=torch.int32)).view(torch.float32)
    blocks = (normal.clamp(-3, 3) / 3.001).view(ROWS, -1, 16) * tops.unsqueeze(-1)
    blocks[..., 5] = tops
    return blocks.view(ROWS, COLUMNS)


def _nearly() -> Tensor:
    """Scales just below a power of two, and elements around the middle of two of their equally distant codes."""
    short = 1 - torch.exp2(-torch.arange(ROWS, dtype=torch.float64).remainder(22) - 3).unsqueeze(-1)
    spacing = torch.tensor([2.0**-9, 2.0**-16, 0.5, 0.5])[torch.arange(COLUMNS) % 4].double()
    middle = (torch.randint(0, 6, (ROWS, COLUMNS)) + 0.5) * spacing * 2 * short
    counts = (middle / (spacing * 2.0**-15)).round() + torch.randint(-2, 3, (ROWS, COLUMNS))
    x = counts * spacing * 2.0**-15
    tops = torch.tensor([448.0, 57344.0, 2688.0, 6.0]).double()[torch.arange(ROWS) % 4].unsqueeze(-1)
    return torch.cat([tops * 2 * short, x[:, 1:]], 1).float()


def _far_below(size: tuple[int, int]) -> Tensor:
    """Blocks of 16 around the least scales that NVFP4 has under an amax of 1."""
    amax = 2.0**-9 / 448 * torch.exp2(torch.rand(size[0], size[1] // 16) * 8 - 4).repeat_interleave(16, 1)
    return amax * (torch.rand(size) * 2 - 1)
