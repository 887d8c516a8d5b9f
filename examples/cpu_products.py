"""What a CPU multiplies bf16 matrices in: its own bf16 products, or fp32 ones where those are slow.

A CPU without instructions for bf16 (AVX512, AMX) multiplies bf16 matrices a hundred times slower than fp32 ones, and a
training that takes three minutes elsewhere takes an hour there. `probe` measures both in about a second. Inside `Fp32`
each product of bf16 matrices, in forward and in backward, is computed in fp32 and its result rounded to bf16:

    with products.computed():          # nothing, where bf16 is fast
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()

Instructions for bf16 do the same: they add up in fp32 and round once. Only the order of the additions differs. Weights,
gathers, gradients and checkpoints stay what they are, since nothing but the inside of a product changes.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode  # where torch documents it, in "Extending PyTorch"

Kind = Literal["bf16", "fp32"]
aten = torch.ops.aten
TOKENS, N, K = 32, 1536, 576  # of the probe: a few tokens and a linear layer of SmolLM2-135M
SLOWER = 2.0  # casting the operands costs, too: where bf16 takes less than this times fp32's time, it stays


def _multiplications() -> dict[Any, int]:
    """The operations that multiply matrices, and how many of their outputs come in the dtype of their operands."""
    found = {getattr(aten, name).default: 1 for name in ("mm", "addmm", "bmm", "baddbmm")}
    attention = "_scaled_dot_product_flash_attention_for_cpu"  # its second output is fp32 anyway
    return found | {getattr(aten, attention).default: 1, getattr(aten, f"{attention}_backward").default: 3}


MULTIPLICATIONS = _multiplications()


class Fp32(TorchDispatchMode):
    """Computes products of bf16 matrices in fp32 and rounds what comes out to bf16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        plain = all(type(x) in {torch.Tensor, torch.nn.Parameter} for x in tensors)
        if func in MULTIPLICATIONS and plain and torch.bfloat16 in {x.dtype for x in tensors}:
            return _rounded(func(*map(_wide, args), **kwargs), MULTIPLICATIONS[func])
        return func(*args, **kwargs)


def _wide(x: Any) -> Any:
    return x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x


def _rounded(outputs: Any, count: int) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs.bfloat16()
    return tuple(x.bfloat16() if place < count else x for place, x in enumerate(outputs))


@dataclass(frozen=True, kw_only=True)
class Products:
    """What bf16 matrices are multiplied in, and why."""

    kind: Kind
    why: str = ""

    def computed(self) -> contextlib.AbstractContextManager[Any]:
        """Where to compute in."""
        mode: type[Any] = Fp32  # torch's constructor has no types
        return mode() if self.kind == "fp32" else contextlib.nullcontext()

    def __str__(self) -> str:
        how = "bf16" if self.kind == "bf16" else "fp32, the results rounded to bf16"
        return f"{how} ({self.why})" if self.why else how


BF16 = Products(kind="bf16")


def agreed(kind: Kind | None) -> Products:
    """What all ranks multiply in: `kind`, or what rank 0 measures."""
    if kind is not None:
        return Products(kind=kind)
    measured = [probe() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(measured, src=0)
    (products,) = measured
    assert products is not None
    return products


def probe() -> Products:
    """Measure the three products of a linear layer in both dtypes, in one thread as each rank has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        flops = 3 * 2 * TOKENS * N * K
        bf16, fp32 = (flops / _seconds(dtype) / 1e9 for dtype in (torch.bfloat16, torch.float32))
    finally:
        torch.set_num_threads(threads)
    return Products(kind=chosen(bf16, fp32), why=f"measured: bf16 {bf16:.1f}, fp32 {fp32:.1f} GFLOP/s")


def chosen(bf16: float, fp32: float) -> Kind:
    """What to multiply in at these speeds."""
    return "fp32" if fp32 > SLOWER * bf16 else "bf16"


def _seconds(dtype: torch.dtype) -> float:
    """The shortest of two runs after a first one, which may choose or compile kernels."""
    x, w, dy = (torch.ones(shape, dtype=dtype) for shape in ((TOKENS, K), (N, K), (TOKENS, N)))
    products: list[Callable[[], Any]] = [lambda: x @ w.T, lambda: dy @ w, lambda: dy.T @ x]
    times = []
    for _ in range(3):
        began = time.perf_counter()
        for product in products:
            product()
        times.append(time.perf_counter() - began)
    return min(times[1:])
