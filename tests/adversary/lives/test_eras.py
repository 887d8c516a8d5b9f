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
    live_eras((Era(Style("fsdp", (2,)), plan), Era(Style("hsdp", (1, 2)), plan)))
