"""What a shard keeps: under scales that were agreed on, and cut anywhere, the bytes are those of the whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from qtensor import NVFP4BlockScaling
from qtensor.spec.blocks import BlockFacts
from qtensor.spec.registry import block_multiple, encode, row_multiple, shared_amax
from qtensor.states import remainders
from tests.qtensor.recipes_under_test import same_bytes
from tests.qtensor.states_under_test import (
    COLUMNS,
    RECIPES,
    ROWS,
    each_recipe,
    facts_of,
    inputs,
    kept,
    name_of,
    positions,
    same,
    step_of,
)

INPUTS = inputs()
KINDS = ("normal", "spread", "far below", "wide blocks")
SQUARE = [recipe for recipe in RECIPES if row_multiple(recipe) > 1]
SHARED = [recipe for recipe in RECIPES if shared_amax(torch.ones(1, 128), recipe) is not None]


@pytest.mark.parametrize("recipe", SHARED, ids=map(name_of, SHARED))
def test_an_amax_may_be_that_of_others(recipe: Any) -> None:
    for name in KINDS:
        x = INPUTS[name]
        for factor in (1.7, 300.0):
            amax = shared_amax(x, recipe) * factor
            parts, _, master = kept(x, recipe, positions(), amax)
            assert same(parts, encode(master, recipe, amax)), name
            assert ((master.double() - x.double()).abs() / step_of(x, parts, recipe)).max() < 1, name


@pytest.mark.parametrize("recipe", SQUARE, ids=map(name_of, SQUARE))
def test_facts_of_blocks_may_be_those_of_others(recipe: Any) -> None:
    """Larger than their own: as on a rank that has some rows of a block."""
    for name in KINDS:
        x = INPUTS[name]
        master = remainders.rounded(x, recipe, positions())
        own, amax = facts_of(master, recipe), shared_amax(master, recipe)
        for factor in (1.0, 1.3, 50.0):
            blocks = BlockFacts(own.amax * factor, own.broken)
            amax = None if amax is None else torch.maximum(amax, blocks.amax.max())
            parts, remainder = remainders.split(master, recipe, amax, blocks, positions())
            back = remainders.join(parts, remainder, recipe)
            assert same(parts, encode(back, recipe, amax, blocks)), name
            assert ((back.double() - x.double()).abs() / step_of(x, parts, recipe)).max() < 1, name
            if factor == 1.0:  # and the facts are theirs, then
                assert same(parts, encode(back, recipe, amax)), name


@each_recipe
def test_pieces_are_those_of_the_whole(recipe: Any) -> None:
    """Rows and columns cut unevenly, square blocks too, and dealt out in any order."""
    step = math.lcm(32, block_multiple(recipe))
    rows = [(0, 40), (40, 41), (41, 137), (137, ROWS)]
    columns = [(0, step), (step, COLUMNS - step), (COLUMNS - step, COLUMNS)]
    for name in KINDS:
        x = INPUTS[name]
        master = remainders.rounded(x, recipe, positions())
        amax = shared_amax(master, recipe)
        blocks = facts_of(master, recipe) if row_multiple(recipe) > 1 else None
        parts, remainder = remainders.split(master, recipe, amax, None, positions())
        remainders.join(parts, remainder, recipe)
        for top, bottom in reversed(rows):
            for left, right in columns:
                at = positions(bottom - top, start=top, first=left)
                piece = remainders.rounded(x[top:bottom, left:right].contiguous(), recipe, at)
                assert same_bytes(piece, master[top:bottom, left:right]), name
                scales = slice(left // block_multiple(recipe), right // block_multiple(recipe))
                facts = None if blocks is None else BlockFacts(*(fact[top:bottom, scales] for fact in blocks))
                shared = amax[top:bottom] if amax is not None and amax.ndim else amax
                own, theirs = remainders.split(piece, recipe, shared, facts, at)
                assert same_bytes(theirs, remainder[top:bottom, left:right]), name
                for part, values in own.items():
                    whole = parts[part]
                    if whole.ndim and whole.shape[1] > 1:
                        scale = whole.shape[1] / COLUMNS
                        whole = whole[:, int(left * scale) : int(right * scale)]
                    whole = whole[top:bottom] if whole.ndim else whole
                    assert same_bytes(values, whole), (name, part)
                assert same_bytes(
                    remainders.join(own, theirs, recipe),
                    remainders.join(parts, remainder, recipe)[top:bottom, left:right],
                )


def test_pieces_of_bf16_weights_are_those_of_the_whole() -> None:
    tie = torch.full((ROWS, COLUMNS), 0x3F808000, dtype=torch.int32).view(torch.float32)
    weight, remainder = remainders.split_dense(tie, positions())
    own = remainders.split_dense(tie[40:77, 32:96].contiguous(), positions(37, start=40, first=32))
    assert same_bytes(own[0], weight[40:77, 32:96])
    assert same_bytes(own[1], remainder[40:77, 32:96])


@pytest.mark.parametrize("blocks", ["row", "square"])
def test_blocks_far_below_keep_the_scale_that_decided_their_codes(blocks: str) -> None:
    """NVFP4 blocks whose scale is 0 or the least: rounding does not carry their amax over the border of a scale."""
    recipe = NVFP4BlockScaling(blocks=blocks)
    enc = torch.tensor(2688.0) * (1 / 6)
    # scales change at half and at 1.5 of the least; a step is 2^-12 of the least
    borders = torch.tensor([0.5, 1.5]) * 2.0**-9 / enc
    size = (256, 512)
    torch.manual_seed(0)
    which = torch.randint(0, 2, (16, 32)).repeat_interleave(16, 0).repeat_interleave(16, 1)
    x = borders[which] * (1 + (torch.rand(size) - 0.5) * 2.0**-13)
    x = x * torch.where(torch.rand(size) < 0.5, 1.0, -1.0)
    # one number a block, less than a step from a border
    x = torch.zeros(size).index_put((torch.arange(0, 256, 16)[:, None], torch.arange(0, 512, 16)), x[::16, ::16])
    x[0, 0] = 1.0
    for step in range(8):
        master = remainders.rounded(x, recipe, positions(step=step))
        before = encode(master, recipe, shared_amax(master, recipe))
        parts, _, back = kept(x, recipe, positions(step=step))
        assert same_bytes(parts["scale"], before["scale"])
        assert same(parts, encode(back, recipe, shared_amax(back, recipe)))
        assert ((back.double() - x.double()).abs() / step_of(x, parts, recipe)).max() < 1
        assert set(parts["scale"].float().unique().tolist()) >= {0.0, 2.0**-9, 2.0**-8}
        assert not torch.equal(back, master)
