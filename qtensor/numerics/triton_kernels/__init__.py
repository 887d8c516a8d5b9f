"""Kernels for NVIDIA GPUs, written by hand in Triton, by which every value goes through memory once.

inductor reads values again for the scale of a row or block, packs two codes into a byte in a launch of its own, through
an integer for each element, and computes in fp64 what it must divide. Here a program holds whole blocks (a row is one,
if rows have scales) in registers, from their amax to their codes. If two codes make a byte, a thread reads both
numbers as one word. The definition in torch operations stays what the bytes are; a kernel here gives the same, and is
one more way to run it.

    qtensor/formats/nvfp4.py  --by_hand(recipe)-->  ByHand  --first call-->  nvfp4.py beside it, which imports triton

Who decides. `Kernel` (fsdp_hooks/kernels) runs `ByHand.encode` and `ByHand.decode` in place of what inductor
would make, under the same rule of modes and sizes: on CUDA alone, never while traced or watched, on fake or meta
tensors, nor if rounding is stochastic. One that fails is dropped with a warning, and inductor's code takes its
place; in the mode "compiled" it raises. So is, on one device, what makes other bytes there of the numbers that it is
tried with before it runs for the first time (qtensor/probes). Blocks whose facts are given (cut square blocks) and
dtypes that no weight has stay inductor's. Nothing but a first call on such a GPU imports triton.

What is given. Values and parts as kernels.py makes them: contiguous rows (others are copied first, as for inductor) of
whole blocks, aligned to 8 bytes. Neighbouring rows follow each other, so a stack [E, N, K] is a matrix of E * N rows,
and a matrix is a list of blocks. Blocks are counted in 32 bits, which reaches beyond 2^34 elements (a tensor with more
raises, and goes to inductor); where one begins in memory, in 64. Launches are made on the device and the stream of the
values.

Where it is written. Into new parts, or into those that are there (`out` of kernels.encode, see in_place.py): to
quantize again copies nothing, and takes the same launches.

Passes. One, but for two if a tensor-wide scale needs an amax that is not known: its parts (reductions.py), one for each
program, then encode, whose programs begin with the largest of them. Codes of one pass cannot wait for the largest value
of all. Float8 rows of more than 2^15 elements take two as well.

Host. Launches of code that Triton has compiled go past its binder (launching.py), and calls whose tensors lie in memory
as those of an earlier one are replayed (fsdp_hooks/kernels).

Files. One for each format: float8, float8_blocks, int4, mxfp4, mxfp8, nvfp4. One for each kind of element or scale:
fp8, e2m1, e8m0. What they share: launching, pairs (blocks, two codes at a time), reductions. Matrices the other way
round are written by ../triton_transposes.py.

How bytes stay the same. No operation is contracted unless the code says `fma`, denormals are kept, divisions round
once, and signs are bits. From compute capability 9.0 on the hardware converts to fp8; the kernel asks for which part it
is compiled. Older GPUs have the kernels, too, with fp8 numbers made of integers.

What they wait for. A multiprocessor of Hopper has 128 units for sums and products of fp32, and half as many for
integers, comparisons, selections and conversions, while memory gives it an element in 11 of these half-rate
instructions (bf16 to fp8) or 10 (to packed codes). So what is not finite becomes NaN by a product with 0, maxima leave
NaN out by themselves, and codes of E2M1 are sums (e2m1.py).
"""

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.kernels.replays import attended

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def available() -> bool:
    """Return whether this process could run them: Triton is there, and CUDA is not another name for ROCm."""
    return torch.version.hip is None and importlib.util.find_spec("triton") is not None


def amax(x: Tensor) -> Tensor:
    """Return fp32 []: the largest finite magnitude of values [elements]."""
    return _module("reductions").amax(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ByHand:
    """The kernels of a recipe.

    Attributes:
        module: the one in this folder, with functions `encode` and `decode`. Imported by the first call.
        options: what the recipe says, for both.
        turns: whether ../triton_transposes.py takes the options, too.
        wide: all values share one amax.
    """

    module: str
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    turns: bool = False
    wide: bool = False

    def encode(
        self, x: Tensor, amax: Tensor | None = None, *, out: Mapping[str, Tensor] | None = None
    ) -> tuple[dict[str, Tensor], None]:
        """Return the parts [rows, ..] of values [rows, blocks, block]; of square blocks, [groups, rows, blocks, block].

        Values of formats without blocks are [rows, K]. `amax` is None if no scale is shared, or for the values' own.
        `out` are contiguous parts that the last launch writes, if it can write all of them; they are then returned.
        """
        with attended():
            if amax is None and self.wide:
                amax = _module("reductions").amax_parts(x)
            return _module(self.module).encode(x, amax, out=out, **self.options), None

    def decode(self, payload: Tensor, *others: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values [rows, K] of parts, ordered as their specs; the payload is [rows, blocks, bytes of one]."""
        with attended():
            return _module(self.module).decode(payload, *others, dtype=dtype, **self.options)  # type: ignore[no-any-return]


@functools.cache
def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")
