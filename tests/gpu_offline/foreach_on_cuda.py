"""torch's foreach functions as their kernels for CUDA compute, on tensors of the CPU.

On the CPU the same functions round elsewhere: a product of three numbers in another order, vectors of numbers otherwise
than what is left over. What CUDA's do stands in torch's headers (ForeachFunctors.cuh, DeviceAddCmulCdiv.cuh, Lerp.h)
and in the machine code of torch 2.11 for sm_90, where each of the following was looked up:

    add with alpha        FFMA                          addcmul   FMUL, then FFMA
    lerp                  FADD, FFMA; from a weight     addcdiv   a division rounded to nearest, then FFMA
                          of 0.5 on its other form      div, sqrt rounded to nearest
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor


@contextmanager
def foreach_on_cuda() -> Iterator[None]:
    """Inside, the functions that torch's AdamW, Adam and SGD call compute as on CUDA."""
    plain = torch._foreach_add_

    def add_(own: Sequence[Tensor], other: Any, alpha: float = 1) -> None:
        if isinstance(other, Tensor | int | float):  # counts, and eps
            plain(own, other, alpha=alpha) if isinstance(other, Tensor) else plain(own, other)
            return
        for each, by in zip(own, other, strict=True):
            each.copy_(fused(single(alpha), by, each))

    def add(own: Sequence[Tensor], other: Sequence[Tensor], alpha: float = 1) -> list[Tensor]:
        return [fused(single(alpha), by, each) for each, by in zip(own, other, strict=True)]

    def lerp_(own: Sequence[Tensor], end: Sequence[Tensor], weight: float) -> None:
        by = single(weight)
        for each, to in zip(own, end, strict=True):
            each.copy_(fused(by, to - each, each) if by.abs() < 0.5 else fused(-(to - each), 1 - by, to))

    def addcmul_(own: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor], value: float) -> None:
        for each, x, y in zip(own, a, b, strict=True):
            each.copy_(fused(x, y, each) if value == 1 else fused(single(value), x * y, each))

    def addcdiv_(own: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor], values: Sequence[float]) -> None:
        for each, x, y, value in zip(own, a, b, values, strict=True):
            each.copy_(fused(single(value), x / y, each))

    def div_(own: Sequence[Tensor], by: Sequence[float]) -> None:
        for each, one in zip(own, by, strict=True):
            each.copy_(each / torch.full_like(each, one))

    def sqrt(own: Sequence[Tensor]) -> list[Tensor]:
        return [each.double().sqrt().float() for each in own]  # on the CPU fp32's may be off by an ulp

    pairs = {"add_": add_, "add": add, "lerp_": lerp_, "addcmul_": addcmul_, "addcdiv_": addcdiv_}
    made: dict[str, Any] = {**pairs, "div_": div_, "sqrt": sqrt}
    with ExitStack() as stack:
        for name, function in made.items():
            stack.enter_context(mock.patch.object(torch, f"_foreach_{name}", function))
        yield


def single(number: float) -> Tensor:
    """A number as the kernels take it."""
    return torch.tensor(number, dtype=torch.float32)


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c as the interpreter rounds it: in fp64, then in fp32."""
    return (a.double() * b.double() + c.double()).float()
