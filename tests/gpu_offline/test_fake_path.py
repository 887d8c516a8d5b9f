"""A quantized weight's way through a gather, on tensors of a GPU that have no memory.

Such a tensor cannot be read, so nothing may depend on its values; an operation on tensors of two devices is an error,
and every result says where it is. What runs here waits for no GPU and forgets no device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import qtensor as qt
from qtensor.products import emulation
from tests.gpu_offline.recipes import RECIPES

ROWS, COLUMNS, TOKENS = 512, 256, 8
DYNAMIC = {
    "float8_row": qt.Float8CurrentScaling(activations="dynamic"),
    "mxfp8_row": qt.MXFP8BlockScaling(activations="dynamic"),
    "mxfp4_up": qt.MXFP4BlockScaling(activations="dynamic"),
    "nvfp4_row": qt.NVFP4BlockScaling(activations="dynamic"),
    "float8_block_square": qt.Float8BlockScaling(activations="dynamic"),
    "float8_block_row": qt.Float8BlockScaling(blocks="row", activations="dynamic"),
}
# of a GPU that multiplies Float8 alone
PRODUCTS = {"float8_row": "_scaled_mm_v2", "float8_block_square": "_scaled_mm_v2", "float8_block_row": "_scaled_mm_v2"}
LOW_PRECISION = {
    "float8_row": qt.Float8CurrentScaling(activations="dynamic", gradients="e5m2"),
    "float8_tensor": qt.Float8CurrentScaling(granularity="tensor", activations="dynamic", gradients="e5m2"),
    "mxfp8_row": qt.MXFP8BlockScaling(activations="dynamic", gradients="e4m3"),
}
every_recipe = pytest.mark.parametrize(
    "recipe", [*RECIPES.values(), *DYNAMIC.values()], ids=[*RECIPES, *(f"{name}_dynamic" for name in DYNAMIC)]
)


@pytest.fixture(autouse=True)
def _without_memory(_gpu_that_is_not_there: None) -> Iterator[None]:
    with FakeTensorMode():
        yield


def on_gpu(value: Any) -> None:
    """Every tensor that a quantized or plain one is made of is there."""
    parts = value.parts().values() if isinstance(value, qt.QuantizedTensor) else [value]
    assert all(part.device == torch.device("cuda", 0) for part in parts)


def layer(recipe: Any) -> nn.Linear:
    with torch.device("cuda"), qt.quantized_model_init(recipe):
        return nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16)


def activations() -> Tensor:
    return torch.empty(TOKENS, COLUMNS, device="cuda", dtype=torch.bfloat16)


def test_a_read_of_a_value_is_found() -> None:
    q = qt.quantize(torch.empty(ROWS, COLUMNS, device="cuda"), RECIPES["mxfp8_row"])
    with pytest.raises(DataDependentOutputException):
        q.dequantize().sum().item()
    with pytest.raises(RuntimeError, match="device"):
        q.dequantize() + torch.empty(ROWS, COLUMNS)


@every_recipe
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_hooks_of_a_gather_keep_to_the_device(recipe: Any, ranks: int) -> None:
    q = layer(recipe).weight.detach()
    assert isinstance(q, qt.QuantizedTensor)
    inputs, metadata = q.fsdp_pre_all_gather(None)
    outputs = [torch.cat([each] * ranks) for each in inputs]
    for each in (*inputs, *outputs):
        on_gpu(each)
    gathered = q.fsdp_post_all_gather(outputs, metadata, torch.bfloat16)
    assert gathered is not None
    on_gpu(gathered[0])
    weight = gathered[0].as_strided((ROWS * ranks, COLUMNS), (COLUMNS, 1))
    on_gpu(F.linear(activations(), weight))
    assert q.fsdp_post_all_gather(outputs, metadata, torch.bfloat16, out=weight) is None


@pytest.mark.parametrize("recipe", LOW_PRECISION.values(), ids=LOW_PRECISION.keys())
@pytest.mark.parametrize("tokens", [TOKENS, 32])
def test_a_low_precision_backward_keeps_to_the_device(recipe: Any, tokens: int) -> None:
    module, x = layer(recipe), torch.empty(tokens, COLUMNS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = module(x)
    y.backward(torch.empty_like(y))
    for grad, like in ((x.grad, x), (module.weight.grad, module.weight)):
        assert grad is not None
        on_gpu(grad)
        assert (grad.shape, grad.dtype) == (like.shape, like.dtype)


class _Products(TorchDispatchMode):
    """The products of matrices that run inside, and the dtypes of what they multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, qt.QuantizedTensor) for kind in types):
            return NotImplemented
        name = func.overloadpacket.__name__
        if "mm" in name:
            self.found.append((name, args[0].dtype))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("tokens", [TOKENS, 33])
def test_no_product_of_bf16_inputs_is_taken_in_fp32(name: str, tokens: int) -> None:
    """By the hardware where it has one, otherwise in bf16, which holds the operands; nothing warns."""
    x = torch.empty(tokens, COLUMNS, device="cuda", dtype=torch.bfloat16)
    module = layer(DYNAMIC[name])
    with torch.no_grad(), _Products() as products:
        y = module(x)
    on_gpu(y)
    assert (y.shape, y.dtype) == ((tokens, ROWS), torch.bfloat16)
    ((product, dtype),) = products.found
    assert product == PRODUCTS.get(name, "mm")
    assert dtype == (torch.float8_e4m3fn if name in PRODUCTS else torch.bfloat16)


def test_what_bf16_does_not_hold_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "_told", set())
    module = layer(qt.Int4GroupScaling(group=32, activations="dynamic"))
    with torch.no_grad(), pytest.warns(UserWarning, match="is emulated on this device"), _Products() as products:
        module(activations())
    assert [dtype for _, dtype in products.found] == [torch.float32]
