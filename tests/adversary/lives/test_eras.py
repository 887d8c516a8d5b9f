"""Short lives on ranks, in eras that take over what the one before has saved."""

from __future__ import annotations

import torch

from tests.adversary.lives.cutting import Style
from tests.adversary.lives.life import Plan, Step
from tests.adversary.lives.models import Layer
from tests.adversary.lives.on_ranks import Era
from tests.adversary.lives.scenarios import live_eras


def test_eras_write_their_deltas_beside_those_of_the_one_before() -> None:
    """They share a directory, and a delta is never written over another one."""
    layers = (Layer("linear", "mxfp8", 8, 64, torch.bfloat16),)
    plan = Plan(1, layers, (Step("delta", 1),), optimizer="adam")
    assert live_eras((Era(Style("fsdp", (2,)), plan), Era(Style("hsdp", (1, 2)), plan))) == [layers, layers]


def test_ranks_that_have_rows_of_a_weight_are_asked_for_their_own_products() -> None:
    """A matrix product of 8 rows adds up in another order than one of 24."""
    recipe = Layer("linear", "mxfp8_e5m2", 37, 64, torch.float16, bias=True, storage="high_precision")
    layers = (Layer("linear", "float8_row", 24, 16, torch.bfloat16, made="after"), recipe)
    first = Plan(975901878164, layers, (Step("convert", 470933795516),), optimizer="radam")
    steps = (Step("gathered", 34227923390), Step("train", 214923449285))
    second = Plan(339768077408, layers, steps, optimizer="momentum")
    left, taken_over = live_eras((Era(Style("tp", (2,)), first), Era(Style("tp", (3,)), second)))
    assert taken_over == left
    assert [layer.kind for layer in left] == ["linear", "linear"]
