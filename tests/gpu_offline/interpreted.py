"""Runs the Triton code of kernels for GPUs on the CPU, in Triton's interpreter, in a process of its own.

Triton decides when it is imported whether it interprets, so `Interpreter` starts a process for it. There, the product's
own functions are called with tensors of the CPU; the kernels that they call are compiled as for a GPU (emitted.py), and
their launches interpreted.

The interpreter's arithmetic is numpy's, in the dtypes that the code names. Its conversions between floating dtypes are
torch's here, for its own do not round to nearest even, and lose denormal numbers; those to fp8 saturate as a GPU's do,
and make one NaN of all (`to_float8`). The larger of a number and NaN is the number, unless the code says otherwise, as
PTX has it. A NaN that becomes bf16 keeps its upper bits: where it was bf16 before, Triton's compiler drops both
conversions, as test_budgets.py shows. Reductions go through arrays where its own go through single numbers, and fused
products and sums through fp64, for its own round twice; their NaN is the one that CUDA's guide names, 0x7FFFFFFF. And
fp32 division in Triton's code may be off by an ulp on a GPU, which numpy's is not: inductor's kernels divide in fp64,
those written by hand ask for a quotient that is rounded once.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.gpu_offline.written import WrittenKernel, launches_go_to

PROGRAM = 4096  # elements, about, of one program: each costs the interpreter the same, whatever its size
FLOATS = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}
# PTX that looks numbers up -> the power of its operand
APPROXIMATIONS = {"rcp.approx.ftz.f32 $0, $1;": -1.0, "rsqrt.approx.ftz.f32 $0, $1;": -0.5}
FLOAT8 = ("fp8e4nv", "fp8e5")


class Interpreter:
    """A process in which kernels for GPUs are interpreted."""

    def __init__(self) -> None:
        # read by the process when it imports Triton
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            spawn = multiprocessing.get_context("spawn")
            self._process = ProcessPoolExecutor(1, mp_context=spawn, initializer=begin)
            self._process.submit(int).result()
        finally:
            os.environ.pop("TRITON_INTERPRET")
            if before is not None:
                os.environ["TRITON_INTERPRET"] = before

    def encode(self, x: Tensor, recipe: Any, amax: Tensor | None = None, *, by_hand: bool = True) -> dict[str, Tensor]:
        """`kernels.encode` on a GPU; `by_hand`: with the kernels written by hand, where there are such."""
        return self._process.submit(_encode, x, recipe, amax, by_hand).result()

    def decode(self, parts: Mapping[str, Tensor], recipe: Any, dtype: torch.dtype, *, by_hand: bool = True) -> Tensor:
        """`kernels.decode` on a GPU, likewise."""
        return self._process.submit(_decode, dict(parts), recipe, dtype, by_hand).result()

    def transposing(self, name: str, *args: Any) -> Any:
        """The function of that name in `qtensor.numerics.transposing`, on a GPU."""
        return self._process.submit(_transposing, name, args).result()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function returns in that process."""
        return self._process.submit(function, *args).result()

    def interpret(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function of a module returns there; launches of kernels written by hand are interpreted."""
        return self._process.submit(_interpreted, function, args).result()

    def on_gpu(self, function: Callable[..., Any], *args: Any) -> Any:
        """The same, where the product takes tensors of the CPU for those of a GPU."""
        return self._process.submit(_called_on_gpu, function, args).result()

    def launches(self) -> int:
        """How many launches were interpreted so far."""
        return self._process.submit(_launched).result()

    def close(self) -> None:
        """End the process."""
        self._process.shutdown()


# -- in that process ---------------------------------------------------------------------------------------------------


def begin() -> None:
    from tests.gpu_offline.pretended import pretend_gpu

    pretend_gpu()
    import numpy as np
    from triton.runtime import interpreter

    interpreter._convert_float = functools.partial(_converted, interpreter._convert_float)
    interpreter.ReduceOps.generic_reduce = _reduced
    interpreter.InterpreterBuilder.create_fma = _fused
    interpreter.InterpreterBuilder.create_inline_asm = _assembled
    interpreter.InterpreterBuilder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)
    interpreter.InterpreterBuilder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)


def _converted(otherwise: Any, data: Any, given: Any, wanted: Any, rounding: Any) -> Any:
    import numpy as np

    if not {str(given), str(wanted)} <= FLOATS.keys():
        return otherwise(data, given, wanted, rounding)
    bits = np.ascontiguousarray(data).view(f"int{given.primitive_bitwidth}")
    values = torch.from_numpy(bits).view(FLOATS[str(given)])
    values = to_float8(values, FLOATS[str(wanted)]) if str(wanted) in FLOAT8 else values.to(FLOATS[str(wanted)])
    if (str(given), str(wanted)) == ("fp32", "bf16"):
        kept = torch.from_numpy(bits >> 16).to(torch.int16).view(torch.bfloat16)
        values = torch.where(values.isnan(), kept, values)
    return (
        values.view(getattr(torch, f"int{wanted.primitive_bitwidth}")).numpy().view(f"uint{wanted.primitive_bitwidth}")
    )


def to_float8(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What cvt.rn.satfinite makes of fp32 numbers. Which NaN of E5M2's is not documented: here it is none of ours."""
    largest = torch.finfo(dtype).max
    codes = values.clamp(-largest, largest).to(dtype).view(torch.uint8)
    return torch.where(values.isnan(), 0x7F if dtype == torch.float8_e4m3fn else 0x7E, codes).view(dtype)


def to_e2m1(values: Tensor) -> Tensor:
    """What cvt.rn.satfinite.e2m1x2 makes of each of two fp32 numbers, uint8: the largest code of NaN, says PTX."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float32)  # between neighbouring codes
    up = torch.tensor([False, True] * 3 + [False])  # which of them go to the larger code, since it is even
    magnitudes = values.abs().unsqueeze(-1)
    codes = ((magnitudes > ties) | ((magnitudes == ties) & up)).sum(-1)
    codes = torch.where(values.signbit(), codes | 8, codes)
    return torch.where(values.isnan(), 7, codes).to(torch.uint8)


def _assembled(builder: Any, *given: Any) -> Any:
    """The pieces of PTX that kernels have: four bytes, a high and a low number in each; reciprocals."""
    asm, constraints, numbers, types, _, pack = given
    if asm in APPROXIMATIONS:
        assert (constraints, pack) == ("=f,f", 1)
        made = type(numbers[0])(approximated(numbers[0].data, APPROXIMATIONS[asm]), types[0].scalar)
        return SimpleNamespace(get_result=lambda number: made)
    assert re.findall(r"(cvt\.\S+) (\w), (\$\d), (\$\d);", asm) == [
        ("cvt.rn.satfinite.e2m1x2.f32", *registers)
        for registers in (("a", "$5", "$1"), ("b", "$6", "$2"), ("c", "$7", "$3"), ("d", "$8", "$4"))
    ]
    assert "mov.b32 $0, {a, b, c, d};" in asm
    assert (constraints, pack) == ("=r" + ",f" * 8, 4)
    low, high = (to_e2m1(torch.from_numpy(each.data)) for each in numbers)
    made = type(numbers[0])((low | high << 4).numpy(), types[0].scalar)
    return SimpleNamespace(get_result=lambda number: made)


def approximated(x: Any, power: float) -> Any:
    """x to that power as the hardware looks it up: denormal numbers are 0, and each result may be off by an ulp."""
    import numpy as np

    normal = np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x).astype(np.float64)
    with np.errstate(all="ignore"):
        found = (normal**power).astype(np.float32)
    found = np.where(np.abs(found) < 2.0**-126, np.copysign(np.float32(0), found), found)
    # up, down or neither, as the bits of x happen to be
    off = (np.asarray(x).view(np.uint32) * np.uint32(0x9E3779B9) >> np.uint32(16)).astype(np.int32) % 3 - 1
    usual = np.isfinite(found) & (found != 0)
    return np.where(usual, (found.view(np.int32) + off).view(np.float32), found)


def _fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    import numpy as np

    wide = [np.asarray(each.data, dtype=np.float64) for each in (x, y, z)]
    found = (wide[0] * wide[1] + wide[2]).astype(x.data.dtype)
    if found.dtype == np.float32:
        found = np.where(np.isnan(found), np.uint32(0x7FFFFFFF).view(np.float32), found)
    return type(x)(found, x.dtype.scalar)


def _reduced(reduction: Any, given: Any) -> Any:
    """As the interpreter does it, by the function that combines two values, but whole arrays of them at a time."""
    import numpy as np

    axis, dtypes = reduction.axis, [each.dtype for each in given]
    values = [np.moveaxis(each.handle.data, axis, 0) for each in given]
    while (length := values[0].shape[0]) > 1:
        half = length // 2
        sides = [value[start : start + half] for start in (0, half) for value in values]
        pair = [reduction.to_tensor(side, dtype) for side, dtype in zip(sides, dtypes * 2, strict=True)]
        made = reduction.combine_fn.fn(*pair)
        made = made if isinstance(made, tuple) else (made,)
        values = [np.concatenate([new.handle.data, old[2 * half :]]) for new, old in zip(made, values, strict=True)]
    kept = [np.moveaxis(value, 0, axis) if reduction.keep_dims else value[0] for value in values]
    return [reduction.to_tensor(value, dtype) for value, dtype in zip(kept, dtypes, strict=True)]


_launches = 0


@functools.cache
def _launching() -> Any:
    from tests.gpu_offline.emitted import Launching

    return Launching(_interpret)


def _interpret(kernel: Any, args: tuple[Any, ...]) -> None:
    global _launches
    _launches += 1
    if isinstance(kernel, WrittenKernel):
        import numpy as np

        with np.errstate(all="ignore"):
            kernel.run()
        return
    tuner = kernel.tuner
    assert tuner.inductor_meta["grid_type"] == "Grid1D", tuner.inductor_meta["grid_type"]
    blocks = dict(tuner.configs[0].kwargs)
    names = [name for name in tuner.triton_meta["signature"] if name not in blocks]
    given = dict(zip(names, args, strict=True))
    if "R0_BLOCK" in blocks:
        blocks["R0_BLOCK"] = min(PROGRAM, 1 << (given["r0_numel"] - 1).bit_length())
    row = blocks.get("R0_BLOCK", given.get("r0_numel", 1))
    blocks["XBLOCK"] = max(PROGRAM // (1 << (row - 1).bit_length()), 1) if given["xnumel"] > 1 else 1
    tuner.fn[(-(-given["xnumel"] // blocks["XBLOCK"]),)](**given, **blocks)


@contextmanager
def _on_gpu(by_hand: bool) -> Iterator[None]:
    from tests.gpu_offline.measured import on_gpu

    _launching().by_hand = by_hand
    with on_gpu(_launching()), torch.no_grad():
        yield


def _encode(x: Tensor, recipe: Any, amax: Tensor | None, by_hand: bool) -> dict[str, Tensor]:
    from qtensor.numerics import kernels

    with _on_gpu(by_hand):
        return kernels.encode(x, recipe, amax)


def _decode(parts: dict[str, Tensor], recipe: Any, dtype: torch.dtype, by_hand: bool) -> Tensor:
    from qtensor.numerics import kernels

    with _on_gpu(by_hand):
        return kernels.decode(parts, recipe, dtype)


def _transposing(name: str, args: tuple[Any, ...]) -> Any:
    from qtensor.numerics import transposing

    with _on_gpu(by_hand=True):
        return getattr(transposing, name)(*args)


def _interpreted(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    from fsdp_hooks.kernels.compiled import use_kernels

    with use_kernels("compiled"), launches_go_to(_interpret):
        return function(*args)


def _called_on_gpu(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with _on_gpu(by_hand=True):
        return function(*args)


def _launched() -> int:
    return _launches
