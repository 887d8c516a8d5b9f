"""Kernels written by hand for GPUs (qtensor/numerics/triton_kernels), launched where there is none.

    Kernel.by_hand(*args)  ->  the product's launch  ->  JITFunction.run(*args)  ->  launch(WrittenKernel, args)

Whoever gets a launch counts what the kernel costs (assembled.py) or, in a process in which Triton interprets, runs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

POINTERS = {
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
}


@dataclass(frozen=True)
class WrittenKernel:
    """A kernel and the constants that it was launched with."""

    function: Any  # triton's JITFunction
    constants: tuple[tuple[str, Any], ...]
    programs: int
    options: tuple[tuple[str, Any], ...]  # and Triton's own
    run: Callable[[], object]

    @property
    def warps(self) -> int:
        """Of a program."""
        return int(dict(self.options)["num_warps"])

    @property
    def name(self) -> str:
        """Where it stands: `nvfp4._encode`."""
        return f"{self.function.__module__.rpartition('.')[2]}.{self.function.__name__}"

    @property
    def source(self) -> str:
        """Its text, without that of functions that it calls."""
        return self.function.src

    def arguments(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """Those that are no constants, by name."""
        return dict(zip(self.function.arg_names, args, strict=False))


def specialized(given: dict[str, Any]) -> tuple[dict[str, str], dict[str, list[Any]]]:
    """Types and attributes of arguments as Triton takes them from a call: memory and numbers in multiples of 16."""
    types = {name: POINTERS[arg.dtype] if isinstance(arg, Tensor) else "i32" for name, arg in given.items()}
    multiples = [name for name, arg in given.items() if isinstance(arg, Tensor) or arg % 16 == 0]
    return types, {name: [["tt.divisibility", 16]] for name in multiples}


@contextlib.contextmanager
def launches_go_to(launch: Callable[[WrittenKernel, tuple[Any, ...]], None]) -> Iterator[None]:
    """Inside, kernels written by hand are launched by this function, whatever device their arguments are on."""
    from qtensor.numerics.triton_kernels import nvfp4

    kind = type(nvfp4._encode)  # another where Triton interprets
    run = kind.run

    def launched(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = WrittenKernel(
            self,
            tuple((name, value) for name, value in options.items() if name in self.arg_names),
            grid[0],
            tuple((name, value) for name, value in options.items() if name not in self.arg_names),
            lambda: run(self, *args, grid=grid, warmup=warmup, **options),
        )
        launch(kernel, args)

    with mock.patch.object(kind, "run", launched), mock.patch.object(torch.cuda, "device", contextlib.nullcontext):
        yield
