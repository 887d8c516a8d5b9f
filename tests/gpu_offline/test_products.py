"""What forward and backward of a linear with quantized inputs launch on a GPU that is not there, one by one."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from qtensor import Float8CurrentScaling, quantize
from qtensor.products import dynamic, gradients

TOKENS, INPUTS, OUTPUTS = 256, 512, 384
RECIPES = {
    "row": Float8CurrentScaling(activations="dynamic", gradients="e5m2"),
    "tensor": Float8CurrentScaling(granularity="tensor", activations="dynamic", gradients="e5m2"),
}
every = pytest.mark.parametrize("name", RECIPES)
PRODUCT = "_scaled_mm_v2"


@functools.cache
def launches(name: str, *, of_x: bool = True, of_weight: bool = True) -> tuple[str, ...]:
    """The names of those of forward and backward, whichever gradients are wanted."""
    from tests.gpu_offline.measured import Meter

    weight = quantize(torch.randn(OUTPUTS, INPUTS).bfloat16(), RECIPES[name]).requires_grad_(of_weight)
    x = torch.randn(TOKENS, INPUTS).bfloat16().requires_grad_(of_x)
    dy = torch.randn(TOKENS, OUTPUTS).bfloat16()

    def call() -> None:
        torch.autograd.backward(F.linear(x, weight), dy)

    hardware = {"return_value": (True, "")}
    with (
        mock.patch.object(dynamic, "scaled_mm_support", **hardware),
        mock.patch.object(gradients, "scaled_mm_support", **hardware),
    ):
        return tuple(each.name for each in Meter(grad=True).launches(call))


@every
def test_each_operand_is_made_by_kernels_that_read_it_as_it_lies(name: str) -> None:
    """No elementwise transpose, and no fp32 copy of a gradient: the amaxes in one pass, the codes in another."""
    forward = ("float8._encode", *(("clone",) if name == "tensor" else ()), PRODUCT)  # the scale of w, once a column
    amaxes_and_codes = ("zeros", "triton_transposes._both_amax", "triton_transposes._encode_both")
    of_input = ("ones", "triton_transposes._transpose", *amaxes_and_codes, PRODUCT)
    of_weight = ("zeros", "triton_transposes._column_amax", "triton_transposes._encode_columns", PRODUCT)
    assert launches(name) == forward + of_input + of_weight


def test_what_is_frozen_costs_nothing() -> None:
    assert launches("row", of_x=False).count(PRODUCT) == launches("row", of_weight=False).count(PRODUCT) == 2
    assert "triton_transposes._transpose" not in launches("row", of_x=False)
    assert [each for each in launches("row", of_weight=False) if "transposes" in each] == [
        "triton_transposes._transpose"
    ]
