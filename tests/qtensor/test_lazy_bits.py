"""Plain operands whose memory holds other values: lazy negatives and conjugates, and zeros without memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import fsdp_hooks.kernels.digest
from fsdp_hooks.kernels.byte_sums import TensorPiece, byte_sums
from fsdp_hooks.kernels.compiled import Kernel
from fsdp_hooks.lazy_bits import is_lazy
from qtensor import (
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
    stochastic_rounding,
    use_kernels,
)
from qtensor.numerics import kernels
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.registry import format_of
from qtensor.tensor.quantized_tensor import OPS
from tests.qtensor.recipes_under_test import every_recipe, same_bytes, same_parts, weight

MXFP8, NVFP4 = MXFP8BlockScaling(), NVFP4BlockScaling()
MEMBERS = 3  # of a list


def lazy(kind: str, values: Tensor) -> Tensor:
    """The same values as `values`, behind a lazy bit."""
    if kind == "neg":
        return torch._neg_view(-values)
    if kind == "imag":
        return torch.complex(torch.zeros_like(values), -values).conj().imag
    return torch.complex(values, torch.ones_like(values)).conj().real  # which carries no bit, whatever it is made from


class Box(Tensor):
    """Another library's wrapper: what stands inside of it is seen by no one before the op runs on it."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(opened, args), **tree_map(opened, kwargs or {}))


def opened(value: Any) -> Any:
    return value.inner if isinstance(value, Box) else value


def boxed(value: Any) -> Any:
    return Box(value) if isinstance(value, Tensor) else value


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_write_a_lazy_negative_writes_its_values(recipe: Any, dtype: torch.dtype) -> None:
    values = weight(64, 96, dtype)
    expected = quantize(values, recipe)
    for kind in ("neg", "imag") if dtype is torch.float32 else ("neg",):
        x = lazy(kind, values)
        assert x.is_neg()
        assert same_parts(quantize(x, recipe), expected)
        copied, listed, from_another = (quantize(torch.zeros_like(values), recipe) for _ in range(3))
        copied.copy_(x)
        torch._foreach_copy_([listed], [x])
        from_another.copy_(x[:1].expand(64, 96))
        assert same_parts(copied, expected)
        assert same_parts(listed, expected)
        assert same_parts(from_another, quantize(values[:1].repeat(64, 1), recipe))


def test_rows_and_stochastic_writes_of_a_lazy_negative() -> None:
    values = weight(64, 96, torch.float32)
    q = quantize(torch.zeros_like(values), MXFP8)
    q[:32] = lazy("neg", values[:32])
    assert torch.equal(q[:32].dequantize(), quantize(values[:32], MXFP8).dequantize())
    found = []
    for x in (values, lazy("neg", values)):
        with stochastic_rounding(torch.Generator().manual_seed(3)):
            found.append(quantize(torch.zeros_like(values), MXFP8).copy_(x))
    assert same_parts(*found)


def _operands(op: Any, make: Callable[[Tensor], Tensor]) -> list[Any] | None:
    """Arguments by the schema: a quantized weight (or a list) in front, every other tensor made by `make`."""
    values = iter(weight(64, 64, torch.float32, seed=seed) for seed in range(1, 20))
    given: list[Any] = []
    for number, argument in enumerate(op._schema.arguments):
        kind = str(argument.type)
        if number == 0:
            qs = [quantize(weight(64, 64, torch.float32, seed=50 + one), MXFP8) for one in range(MEMBERS)]
            given.append(qs if "List" in kind else qs[0])
        elif kind == "Tensor" and (
            argument.name == "value" or (argument.name == "other" and isinstance(given[0], list))
        ):
            given.append(make(torch.tensor(2.5)))
        elif argument.name == "scalars" and kind == "Tensor":
            given.append(torch.tensor([0.5, 0.25, 2.0]))
        elif kind == "List[Tensor]":
            given.append([make(next(values)) for _ in range(MEMBERS)])
        elif kind == "Tensor":
            given.append(make(next(values)))
        elif argument.has_default_value():
            break
        else:
            given.append([0.5, 0.25, 2.0] if "List" in kind else 0.5)
    return given


PRODUCTS: dict[str, Callable[[Callable[[Tensor], Tensor]], tuple[Any, ...]]] = {
    "aten::mm": lambda make: (make(weight(8, 64)), quantize(weight(32, 64), MXFP8).t()),
    "aten::addmm": lambda make: (make(weight(1, 32)[0]), make(weight(8, 64)), quantize(weight(32, 64), MXFP8).t()),
    "aten::bmm": lambda make: (make(weight(8, 64)[None]), quantize(weight(32, 64)[None], MXFP8).transpose(1, 2)),
    "aten::baddbmm": lambda make: (
        quantize(weight(32, 64)[None], MXFP8),
        make(weight(32, 4)[None]),
        make(weight(4, 64)[None]),
    ),
    "aten::mv": lambda make: (quantize(weight(32, 64), MXFP8), make(weight(1, 64)[0])),
    "aten::_grouped_mm": lambda make: (
        make(weight(8, 64)),
        quantize(weight(32, 64)[None], MXFP8).transpose(1, 2),
        torch.tensor([8], dtype=torch.int32),
    ),
    "aten::add": lambda make: (make(weight(32, 64)), quantize(weight(32, 64, seed=1), MXFP8)),
    "aten::_foreach_add": lambda make: ([make(weight(32, 64))], [quantize(weight(32, 64, seed=1), MXFP8)]),
}
# take no plain operand: these refuse, join quantized pieces, or move bytes between ranks (tests/fsdp_hooks)
WITHOUT = {"aten::cat", "c10d::scatter_", "c10d::broadcast_"} | {
    f"aten::_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad")
}
TAKES_PLAIN = [
    op
    for op in OPS
    if sum("Tensor" in str(argument.type) for argument in op._schema.arguments) > 1 and op._schema.name not in WITHOUT
]


@pytest.mark.parametrize("op", TAKES_PLAIN, ids=str)
def test_no_op_of_the_table_reads_behind_a_lazy_bit(op: Any) -> None:
    def run(make: Callable[[Tensor], Tensor]) -> Any:
        args = PRODUCTS[op._schema.name](make) if op._schema.name in PRODUCTS else _operands(op, make)
        result = op(*tree_map(boxed, args))
        written = result if result is not None else args[0]
        return [one.dequantize() if isinstance(one, QuantizedTensor) else one for one in _flat(opened(written))]

    expected = run(lambda values: values)
    assert all(map(torch.equal, run(lambda values: lazy("neg", values)), expected))


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


@pytest.mark.parametrize("dense", [False, True], ids=["quantized", "high_precision"])
def test_a_plain_tensor_with_a_lazy_bit_is_written_itself(dense: bool) -> None:
    q = quantize(weight(32, 64, torch.float32), MXFP8)
    source = HighPrecisionWeight(q.dequantize(), MXFP8) if dense else q
    for op in (torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor, torch.ops.aten._foreach_copy_.default):
        memory = weight(32, 64, torch.float32, seed=1)
        target = torch._neg_view(memory)
        expected = q.dequantize() + (target if op is torch.ops.aten.add_.Tensor else 0)
        args = ([target], [source]) if op is torch.ops.aten._foreach_copy_.default else (target, source)
        op(*tree_map(boxed, args))
        assert torch.equal(target, expected)
        assert torch.equal(memory, -expected)


def test_dense_weights_of_high_precision_storage_hold_no_bit() -> None:
    values = weight(32, 64, torch.float32)
    made = HighPrecisionWeight(lazy("neg", values), MXFP8)
    assert not made.dense.is_neg()
    assert same_parts(made.quantize(), quantize(values, MXFP8))
    other = HighPrecisionWeight(torch.zeros_like(values), MXFP8)
    other.copy_(lazy("neg", values))
    Box(other).mul_(Box(lazy("neg", values)))  # type: ignore[attr-defined]
    assert torch.equal(other.dense, values * values)


def test_zeros_without_memory_and_complex_values_are_what_they_are_in_dense_tensors() -> None:
    zeros = torch._efficientzerotensor((64, 96))
    q = quantize(weight(64, 96, torch.float32), MXFP8)
    q.copy_(zeros)
    assert not q.dequantize().any()
    assert same_parts(quantize(zeros, MXFP8), quantize(torch.zeros(64, 96), MXFP8))
    assert int(fsdp_hooks.kernels.digest.digest([zeros])) == int(
        fsdp_hooks.kernels.digest.digest([torch.zeros(64, 96)])
    )
    x = torch.complex(weight(64, 96, torch.float32), torch.ones(64, 96)).conj()
    with pytest.warns(UserWarning, match="discards the imaginary part"):
        q.copy_(x)
    assert same_parts(q, quantize(x.real, MXFP8))
    with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
        q.add_(x)


def test_no_kernel_gets_a_tensor_with_a_lazy_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(kernel: Kernel, *args: Any) -> Any:  # compiled code and code written by hand read memory
        assert not any(is_lazy(arg) for arg in args if isinstance(arg, Tensor))
        return kernel.eager(*args)

    monkeypatch.setattr(Kernel, "__call__", called)
    values = weight(128, 128, torch.float32)
    square, delayed = MXFP8BlockScaling(blocks="square"), Float8DelayedScaling(amax_history_len=4)
    state = kernels.encode(values, delayed)
    amax = kernels.shared_amax(values, NVFP4)
    quantizer = format_of(NVFP4).quantizer(values, NVFP4, amax)

    def read(x: Tensor) -> list[Tensor]:
        return [
            *kernels.encode(x, MXFP8).values(),
            *kernels.encode_rows(x, NVFP4).values(),
            *kernels.encode_under(x, NVFP4, quantizer).values(),
            *kernels.encode_step(x, delayed, amax, state["scale"], state["amax_history"]).values(),
            *kernels.block_facts(x, square),
            kernels.row_amaxes(x, MXFP8),
            kernels.shared_amax(x, NVFP4),
        ]

    with use_kernels("compiled"):
        assert all(map(same_bytes, read(lazy("neg", values)), read(values)))


@pytest.mark.parametrize("rows", [4, 4096], ids=["small", "large"])
def test_digests_and_sums_of_bytes_are_those_of_the_values(rows: int) -> None:
    values = weight(rows, 96, torch.float32)
    x = lazy("neg", values)
    assert int(fsdp_hooks.kernels.digest.digest([x])) == int(fsdp_hooks.kernels.digest.digest([values]))
    assert torch.equal(*(byte_sums([TensorPiece.whole(one)]) for one in (x, values)))


def test_parts_with_a_lazy_bit_are_refused() -> None:
    q = quantize(weight(32, 64, torch.float32), NVFP4)
    parts = q.parts() | {"global_scale": torch._neg_view(-q.global_scale)}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"'global_scale' is a lazy negative.*resolve_neg"):
        QuantizedTensor.from_parts(parts, NVFP4, torch.float32)
