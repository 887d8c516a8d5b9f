"""Short lives of which most steps are saves as deltas, or saves that ask whether all is of one step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.adversary.lives.life import Plan, Step, live
from tests.adversary.lives.models import Layer
from tests.adversary.lives.plans import planned
from tests.adversary.lives.scenarios import TABLE


@pytest.mark.parametrize("seed", [1, 7])
def test_a_life_goes_through_deltas_to_its_older_saves(seed: int) -> None:
    steps = tuple(Step("since_base", number) for number in range(4))
    assert live(replace(planned(seed), steps=steps), TABLE) == {"since_base": 4}


def test_saves_that_ask_go_through_and_are_refused() -> None:
    """Some of the steps write behind the optimizer, which the one after that takes back."""
    layers = (Layer("linear", "mxfp8", 8, 64, torch.bfloat16), Layer("dense", "mxfp8", 4, 8, torch.bfloat16))
    trained = [Step("train", 1), Step("step", 2)]
    steps = [*trained, *(Step("audited", number) for number in range(4)), *trained, Step("audited", 5)]
    taken = live(Plan(1, layers, tuple(steps), optimizer="adam"), TABLE)
    assert 0 < taken["audited"] < 5
