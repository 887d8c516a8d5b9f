"""One warning tells that products of quantized inputs are emulated where that is slow; on a CPU it is what is meant."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from qtensor import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, quantize
from qtensor.products import emulation

RECIPES: list[Any] = [
    Float8BlockScaling(activations="dynamic"),
    MXFP8BlockScaling(activations="dynamic"),
    NVFP4BlockScaling(activations="dynamic"),
]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=repr)


@pytest.fixture
def slow_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This CPU counts as a device on which emulation was not meant, in a process that has not been told yet."""
    monkeypatch.setattr(emulation, "MEANT_ON", ())
    monkeypatch.setattr(emulation, "_told", set())


def told(recipe: Any, dtype: torch.dtype = torch.bfloat16, rows: int = 256) -> list[str]:
    """The warnings of a linear of this recipe, forward and backward."""
    w = quantize(torch.randn(rows, 128), recipe).requires_grad_()
    x = torch.randn(32, 128, dtype=dtype, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        F.linear(x, w).sum().backward()
    return [str(one.message) for one in caught]


@pytest.mark.usefixtures("slow_here")
@every_recipe
def test_it_is_told_once_with_the_device_the_reason_the_cost_and_the_way_out(recipe: Any) -> None:
    (text,) = told(recipe)
    name = type(recipe).__name__
    assert text.startswith(f'{name}(activations="dynamic") is emulated on this device (cpu): scaled_mm ')
    for words in (
        "15 times",
        'Leave activations="dynamic" out',
        "Float8CurrentScaling",
        "set_float32_matmul_precision",
    ):
        assert words in text
    assert told(recipe) == told(recipe, rows=384) == []


@pytest.mark.usefixtures("slow_here")
def test_each_recipe_and_each_reason_is_told() -> None:
    assert [len(told(recipe)) for recipe in RECIPES] == [1, 1, 1]
    for reason, warns in (("not N=5 and K=64", 1), ("not N=7 and K=64", 0), ("not for torch.float32", 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            emulation.tell_of_emulation(torch.device("cpu"), "MXFP8BlockScaling", reason)
        assert len(caught) == warns, reason


@pytest.mark.usefixtures("slow_here")
def test_so_are_products_of_a_backward_in_low_precision() -> None:
    """Under its own name, as it is another product: of E5M2 gradients, say, which may have no kernel."""
    assert len(told(Float8CurrentScaling(activations="dynamic", gradients="e5m2"))) == 1


@every_recipe
def test_a_cpu_says_nothing(recipe: Any) -> None:
    assert told(recipe) == []


@pytest.mark.usefixtures("slow_here")
def test_a_compiled_graph_tells_it_while_it_is_traced() -> None:
    torch.compiler.reset()
    w, x = quantize(torch.randn(256, 128), RECIPES[1]), torch.randn(32, 128, dtype=torch.bfloat16)

    def forward(x: torch.Tensor, w: Any) -> torch.Tensor:
        return F.linear(x, w)

    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        compiled(x, w)
        compiled(x, w)
    torch.compiler.reset()
    assert ["is emulated on this device" in str(one.message) for one in caught].count(True) == 1
