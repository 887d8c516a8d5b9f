"""Compiled kernels of states give the bytes of eager ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from fsdp_hooks.kernels.compiled import use_kernels
from qtensor import Float8BlockScaling, NVFP4BlockScaling
from qtensor.spec.blocks import BlockFacts
from qtensor.spec.registry import row_multiple, shared_amax
from qtensor.states import moments, remainders
from tests.qtensor.recipes_under_test import same_bytes
from tests.qtensor.states_under_test import KEPT, facts_of, inputs, kept, name_of, nearest, positions, same
from tests.sampling import sampled

if TYPE_CHECKING:
    from torch import Tensor

INPUTS = inputs()
# compiling takes half a minute for each
COMPILED = [NVFP4BlockScaling(), Float8BlockScaling(), *KEPT]
each_compiled = sampled("recipe", COMPILED, COMPILED[:1], ids=[name_of(recipe) for recipe in COMPILED])


def agree(a: tuple[dict[str, Tensor], Tensor, Tensor], b: tuple[dict[str, Tensor], Tensor, Tensor]) -> bool:
    return same(a[0], b[0]) and same_bytes(a[1], b[1]) and same_bytes(a[2], b[2])


@each_compiled
def test_masters(recipe: Any) -> None:
    for name, x in INPUTS.items():
        broken = x.clone()
        broken[5, 5], broken[77, 300] = float("nan"), float("inf")
        for values in (x, broken):
            with use_kernels("compiled"):
                found = kept(values, recipe, positions())
            with use_kernels("eager"):
                assert agree(found, kept(values, recipe, positions())), name


@pytest.mark.full
@pytest.mark.parametrize("recipe", KEPT, ids=map(name_of, KEPT))
def test_masters_to_the_nearest_and_of_cut_blocks(recipe: Any) -> None:
    for name in ("spread", "far below", "ties"):
        x = INPUTS[name]
        facts = facts_of(x, recipe) if row_multiple(recipe) > 1 else None
        blocks = None if facts is None else BlockFacts(facts.amax * 2, facts.broken)
        amax = shared_amax(x, recipe)
        amax = None if amax is None else amax * 2
        with use_kernels("compiled"):
            found = kept(x, recipe, nearest(), amax, blocks)
        with use_kernels("eager"):
            assert agree(found, kept(x, recipe, nearest(), amax, blocks)), name


@pytest.mark.full
@pytest.mark.parametrize("root", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("at", [positions(), nearest()], ids=["drawn", "nearest"])
def test_moments(root: bool, at: Any) -> None:
    for name, x in INPUTS.items():
        values = x * x if root else x
        with use_kernels("compiled"):
            parts = moments.encode_moment(values, at, root=root)
            back = moments.decode_moment(parts, root=root)
        with use_kernels("eager"):
            again = moments.encode_moment(values, at, root=root)
            assert same(parts, again), name
            assert same_bytes(back, moments.decode_moment(again, root=root)), name


@pytest.mark.full
def test_bf16_weights() -> None:
    for name, x in INPUTS.items():
        for at in (positions(), nearest()):
            with use_kernels("compiled"):
                found = remainders.split_dense(x, at)
                back = remainders.join_dense(*found)
            with use_kernels("eager"):
                again = remainders.split_dense(x, at)
                assert same_bytes(found[0], again[0]), name
                assert same_bytes(found[1], again[1]), name
                assert same_bytes(back, remainders.join_dense(*again)), name
