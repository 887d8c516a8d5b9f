"""Compressed states of parameters of every layout and number of dims: those of the same weight in one piece."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtensor import MasterWeightOptimizer, QuantizedTensor, quantize
from qtensor.optim.compressed.masters import expand_master
from tests.optimizer_states import assert_same_state, copied
from tests.qtensor.recipes_under_test import same_bytes, same_parts
from tests.recipes import recipes
from tests.sampling import pairwise, sampled

SMALL: dict[str, Any] = {"masters": "remainder", "moments": "float8"}
FORMS: dict[str, dict[str, Any]] = {
    "small": {},
    "half": {"moments": "bfloat16"},
    "nearest": {"moments": "fp32", "rounding": "nearest"},
}
EXPERTS = recipes(lambda each: each.remainders)


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape))).to(torch.bfloat16)


# another layout of the same numbers, and these
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "channels_last": lambda: bf16(8, 32, 3, 3).to(memory_format=torch.channels_last),
    "channels_last, rows of blocks": lambda: bf16(8, 4, 3, 32).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: bf16(4, 3, 2, 2, 32).to(memory_format=torch.channels_last_3d),
    "contiguous convolution": lambda: bf16(8, 32, 3, 3),
    "transposed": lambda: bf16(64, 32).t(),
    "every other column": lambda: bf16(32, 128)[:, ::2],
    "some rows": lambda: bf16(64, 64)[3:35],
    "every other element": lambda: bf16(128)[::2],
    "vector": lambda: bf16(64),
    "one element": lambda: bf16(1),
    "scalar": lambda: torch.tensor(0.7, dtype=torch.bfloat16),
    "three dims": lambda: bf16(3, 5, 64),
    "five dims": lambda: bf16(2, 2, 3, 5, 64),
    "no rows": lambda: bf16(0, 64),
    "no columns": lambda: bf16(4, 0),
}


class One:
    """A parameter and its optimizer."""

    def __init__(self, value: Tensor, form: str, **options: Any) -> None:
        self.param = nn.Parameter(value)
        named = [("w", self.param)]
        self.optimizer = MasterWeightOptimizer(
            torch.optim.AdamW, named, **(SMALL | {"lr": 0.01} | FORMS[form] | options)
        )

    def train(self, *steps: int) -> None:
        for step in steps:
            draw = torch.Generator().manual_seed(step)
            self.param.grad = torch.randn(self.param.shape, generator=draw).to(torch.bfloat16)
            self.optimizer.step()

    def master(self) -> Tensor:
        return expand_master(self.param, self.optimizer.state[self.param]["master_remainder"])

    def state(self) -> Any:
        return copied(self.optimizer.state_dict())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_how_a_weight_lies_in_memory_makes_no_difference(layout: str, form: str) -> None:
    own = LAYOUTS[layout]()
    strides = own.stride()
    found, expected = One(own, form), One(own.clone(memory_format=torch.contiguous_format), form)
    for each in (found, expected):
        each.train(0, 1, 2)
    assert found.param.stride() == strides
    assert torch.equal(found.param, expected.param)
    assert same_bytes(found.master().contiguous(), expected.master())
    assert torch.equal(found.master().to(torch.bfloat16), found.param)
    assert_same_state(found.state(), expected.state(), layout)
    if found.param.numel():
        assert not torch.equal(found.param, LAYOUTS[layout]())  # it moved


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "scalar", "three dims", "no rows"])
def test_a_weight_of_any_layout_is_resumed_and_converted(layout: str) -> None:
    source = One(LAYOUTS[layout](), "small")
    source.train(0, 1)
    again, wide = (
        One(source.param.detach().clone(), "small"),
        One(source.param.detach().clone(), "small", masters="fp32", moments="fp32"),
    )
    again.optimizer.load_state_dict(source.state())
    wide.optimizer.load_state_dict(source.state())
    assert same_bytes(
        wide.optimizer.state_dict()["state"][0]["master_weight"].contiguous(), source.master().contiguous()
    )
    for each in (source, again):
        each.train(2)
    assert torch.equal(again.param, source.param)
    assert_same_state(again.state(), source.state(), layout)


def test_what_others_write_into_a_weight_in_channels_last_is_seen() -> None:
    """It is told by digests, which read bytes in the order of elements."""
    found = One(LAYOUTS["channels_last"](), "small")
    found.train(0)
    with torch.no_grad():
        found.param[3, 5, 1, 2] = 7.0
    found.optimizer.state_dict()
    assert not found.optimizer.state[found.param]["master_remainder"].any()
    assert torch.equal(found.master(), found.param.float())


@sampled(
    ("recipe", "form"),
    [(recipe, form) for recipe in EXPERTS for form in FORMS],
    pairwise(("mxfp8", "nvfp4", "float8_tensor", "mxfp8_square"), ("small", "half")),
)
def test_stacked_experts_hold_the_masters_of_their_weights(recipe: str, form: str) -> None:
    found = One(quantize(bf16(3, 128, 128), EXPERTS[recipe]), form)
    before = found.param.detach().dequantize()
    for step in range(3):
        found.train(step)
        assert isinstance(found.param, QuantizedTensor)
        assert same_parts(quantize(found.master(), EXPERTS[recipe]), found.param.detach())
    assert not torch.equal(found.param.detach().dequantize(), before)
    assert found.optimizer.state[found.param]["master_remainder"].shape == (3, 128, 128)
