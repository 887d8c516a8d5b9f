"""What a CUDA graph captures must not wait for values, take memory of the host, or have shapes that depend on values.

Shown without a GPU, operation by operation: torch marks those whose result, or its shape, depends on values, and
the meta device shows what would be copied from the CPU or to it. Kernels written by hand are no operations;
tests/gpu_offline launches those.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qtensor import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, QuantizedTensor, quantize
from qtensor.products.backward_operands import rotate
from qtensor.spec.codecs import nf4
from qtensor.spec.codecs.rounding import armed, table_of
from qtensor.spec.registry import encode, format_of, shared_amax
from tests.recipes import TABLE

ROWS, COLUMNS, TOKENS = 256, 256, 8
RECIPES = {each.name: each.recipe for each in TABLE}
DYNAMIC = {
    "float8_row_dynamic": Float8CurrentScaling(activations="dynamic"),
    "nvfp4_dynamic": NVFP4BlockScaling(activations="dynamic"),
    "float8_tensor_gradients": Float8CurrentScaling(granularity="tensor", activations="dynamic", gradients="e5m2"),
    "mxfp8_gradients": MXFP8BlockScaling(activations="dynamic", gradients="e4m3"),
    "nvfp4_gradients": NVFP4BlockScaling(blocks="square", activations="dynamic", gradients="nvfp4"),
}


class CannotBeCapturedError(Exception):
    """An operation inside could not be captured."""


class Captured(TorchDispatchMode):
    """Refuses what a capture refuses; `device` is where everything must be, but for numbers that an operation takes."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.operations = device, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for kind in types:
            if issubclass(kind, QuantizedTensor):
                with self:  # else the mode would not see what is done to the parts
                    return kind.__torch_dispatch__(func, types, args, kwargs)
        self.operations += 1
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}:
            raise CannotBeCapturedError(f"{func} depends on values")
        if kwargs.get("pin_memory") or func is torch.ops.aten._pin_memory.default:
            raise CannotBeCapturedError(f"{func} takes page-locked memory")
        result = func(*args, **kwargs)
        given, made = (
            [each for each in tree_leaves(of) if isinstance(each, Tensor)] for of in ((args, kwargs), result)
        )
        elsewhere = [
            each for each in [*(each for each in given if each.ndim), *made] if each.device.type != self.device
        ]
        if elsewhere:
            raise CannotBeCapturedError(f"{func} has {[(each.device.type, each.shape) for each in elsewhere]}")
        return result


class NoTables(TorchFunctionMode):
    """Refuses tensors made of Python's lists, which are copied from the CPU below what `Captured` sees."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy):
            raise CannotBeCapturedError(f"{func} copies from the cpu")
        return func(*args, **(kwargs or {}))


def gathered(q: QuantizedTensor) -> QuantizedTensor:
    """The weight that FSDP2 gathers from two shards like this one, whose scales travel beside them."""
    inputs, metadata = q.fsdp_pre_all_gather(None)
    found = q.fsdp_post_all_gather([torch.cat([each] * 2) for each in inputs], metadata, q.dtype)
    assert found is not None
    return found[0]  # type: ignore[return-value]


def values(*shape: int, device: str) -> Tensor:
    return torch.linspace(-2, 2, torch.Size(shape).numel(), device=device).view(shape).to(torch.bfloat16)


@pytest.mark.parametrize("recipe", [*RECIPES.values(), *DYNAMIC.values()], ids=[*RECIPES, *DYNAMIC])
def test_a_step_of_a_linear_layer_reads_no_value(recipe: Any) -> None:
    q = quantize(values(ROWS, COLUMNS, device="cpu"), recipe)
    for weight in (nn.Parameter(q), nn.Parameter(gathered(q))):
        x = values(TOKENS, COLUMNS, device="cpu").requires_grad_()
        with Captured("cpu") as captured:
            y = F.linear(x, weight)
            y.backward(torch.ones_like(y))
            weight.detach().dequantize(torch.float32)
        assert captured.operations > 10
        assert x.grad is not None
        assert weight.grad is not None


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_definitions_copy_nothing_from_the_cpu(recipe: Any) -> None:
    """Of decoding and encoding. Their callers leave them out on the meta device, where there is nothing to compute."""
    x = torch.empty(ROWS, COLUMNS, device="meta", dtype=torch.float32)
    parts = quantize(x, recipe).parts()
    with NoTables(), Captured("meta") as captured:
        dense = format_of(recipe).decode(parts, recipe)
        made = encode(x, recipe, shared_amax(x, recipe), None)
    assert captured.operations > 5
    assert (dense.shape, dense.dtype) == (x.shape, x.dtype)
    assert {name: part.shape for name, part in made.items()} == {name: part.shape for name, part in parts.items()}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_drawn_writes_copy_nothing_from_the_cpu(recipe: Any) -> None:
    x = torch.empty(ROWS, COLUMNS, device="meta", dtype=torch.float32)
    with armed(torch.Generator("cpu")), NoTables(), Captured("meta") as captured:
        encode(x, recipe, shared_amax(x, recipe), None)
    assert captured.operations > 5


def test_a_rotation_along_tokens_copies_nothing_from_the_cpu() -> None:
    with NoTables(), Captured("meta") as captured:
        rotate(torch.empty(ROWS, COLUMNS, device="meta", dtype=torch.bfloat16))
    assert captured.operations > 5


def test_the_table_of_nf4_is_the_same_where_it_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    made = table_of(nf4.TABLE, torch.device("cpu"))
    monkeypatch.setattr(torch, "full", lambda *args, device, **kwargs: full(*args, device="cpu", **kwargs))
    assert torch.equal(table_of(nf4.TABLE, torch.device("meta")), made)
    assert made.tolist() == [*nf4.TABLE]


full = torch.full


def test_what_cannot_be_captured_is_found() -> None:
    q = quantize(values(ROWS, COLUMNS, device="cpu"), MXFP8BlockScaling())
    reads = (
        lambda: q.dequantize().sum().item(),
        lambda: bool((q.scale == q.scale).all()),
        lambda: torch.equal(q.payload.view(torch.uint8), q.payload.view(torch.uint8)),
        lambda: q.dequantize().nonzero(),
    )
    for read in reads:
        with Captured("cpu"), pytest.raises(CannotBeCapturedError, match="depends on values"):
            read()
    table = [1.0] * COLUMNS
    makes = (
        lambda x: x + torch.ones(COLUMNS),
        lambda x: x + torch.ones(COLUMNS).to("meta"),
        lambda x: x + torch.tensor(table, device="meta"),
    )
    for make in makes:
        with NoTables(), Captured("meta"), pytest.raises(CannotBeCapturedError, match="cpu"):
            make(torch.empty(COLUMNS, device="meta"))
