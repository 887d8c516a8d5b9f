"""Kernels written by hand pass what Triton checks before it launches one: the globals that it names.

Triton compares each with what it was when the kernel was compiled, by `!=`, and so refuses a NaN, which never equals
itself. Its interpreter does not look.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from qtensor.numerics import kernels
from tests.gpu_offline.recipes import RECIPES

MISSING = object()


def functions() -> dict[str, Any]:
    """All functions that Triton compiles, by the place where they are defined."""
    from triton.runtime.jit import JITFunction

    found: dict[str, Any] = {}
    for name in _kernel_modules():
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, JITFunction):
                found[f"{value.__module__}.{value.__name__}"] = value
    return found


def _kernel_modules() -> list[str]:
    """The modules of the product that have functions for Triton to compile."""
    root = Path(__file__).resolve().parents[2]
    files = [file for package in ("fsdp_hooks", "qtensor") for file in sorted((root / package).rglob("*.py"))]
    return [
        ".".join(file.relative_to(root).with_suffix("").parts) for file in files if "@triton.jit" in file.read_text()
    ]


def named(function: Any) -> dict[str, tuple[Any, Any]]:
    """Each global that a function names, or one that it calls: as Triton noted it, and as it is now."""
    assert function.cache_key  # for which Triton looks for them
    return {
        f"{scope.get('__name__')}.{name}": (was, scope.get(name, MISSING))
        for (name, _), (was, scope) in function.used_global_vals.items()
    }


def changed(function: Any) -> list[str]:
    """Those for which Triton would refuse to launch it."""
    return [name for name, (was, now) in named(function).items() if now != was]


def test_every_global_equals_itself_and_is_a_constant() -> None:
    import triton.language as tl

    found = functions()
    assert {
        "fsdp_hooks.kernels.digest_triton._add_digests",
        "qtensor.numerics.triton_kernels.mxfp8._decode",
        "qtensor.numerics.triton_kernels.fp8.e4m3_value",
    } <= found.keys()
    assert {name: changed(function) for name, function in found.items() if changed(function)} == {}
    kinds = {name: type(was) for function in found.values() for name, (was, _) in named(function).items()}
    assert kinds["qtensor.numerics.triton_kernels.pairs.NAN_BITS"] is tl.constexpr
    # what is no tl.constexpr a kernel may not read; dtypes of Triton's own language are constants, too
    assert {name: kind for name, kind in kinds.items() if not issubclass(kind, tl.constexpr | tl.dtype)} == {}


def test_a_nan_among_them_is_found() -> None:
    import triton.language as tl

    function = functions()["qtensor.numerics.triton_kernels.fp8.e4m3_value"]
    with mock.patch.dict(function.__globals__, {"NAN_BITS": tl.constexpr(float("nan"))}):
        again = type(function)(function.fn)
        assert changed(again) == ["qtensor.numerics.triton_kernels.fp8.NAN_BITS"]
        with pytest.raises(RuntimeError, match="Global variable NAN_BITS has changed since we compiled this kernel"):
            launched(again, (torch.empty(16, dtype=torch.uint8),), {})


class Compiled:
    """What stands for machine code: nothing runs."""


def launched(function: Any, args: tuple[Any, ...], options: dict[str, Any], run: Any = None) -> None:
    """Go through Triton's own launch (`run`), twice, but for the compiler and the GPU."""
    run = run or type(function).run

    def compiles(self: Any, *_: Any) -> Compiled:
        assert self.cache_key
        return Compiled()

    with mock.patch.object(type(function), "_do_compile", compiles):
        for _ in range(2):
            assert isinstance(run(function, *args, grid=(1,), warmup=True, **options), Compiled)


@pytest.mark.parametrize("name", RECIPES)
def test_every_launch_passes_the_checks_of_tritons_own(name: str) -> None:
    from triton.runtime.jit import JITFunction

    from tests.gpu_offline.measured import gathered_of, on_gpu
    from tests.gpu_offline.written import WrittenKernel

    recipe, seen, run = RECIPES[name], [], JITFunction.run  # before that of `launches_go_to` takes its place

    def launch(kernel: Any, args: tuple[Any, ...]) -> None:
        assert isinstance(kernel, WrittenKernel)
        seen.append(kernel.name)
        launched(kernel.function, args, dict((*kernel.constants, *kernel.options)), run)

    from tests.gpu_offline.emitted import Launching

    taken = Launching(launch)
    with torch.no_grad(), on_gpu(taken), mock.patch.object(Launching, "takes_by_hand", by_hand_alone):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            parts = kernels.encode(torch.ones(64, 512, dtype=dtype), recipe)
            kernels.decode(parts, recipe, dtype)
        if kernels.tensor_wide(recipe):
            gathered_of(recipe).dequantize()
    assert seen


def by_hand_alone(self: Any, kernel: Any) -> bool:
    return kernel.by_hand is not None


def test_kernels_of_inductors_name_no_global_that_is_refused() -> None:
    from tests.gpu_offline.measured import Meter

    calls = Meter(by_hand=False).calls(RECIPES["mxfp8_row"])
    kernels_made = [launch.kernel for call in calls.values() for launch in call.launches if launch.kernel is not None]
    assert kernels_made
    assert {kernel.name: changed(kernel.tuner.fn) for kernel in kernels_made if changed(kernel.tuner.fn)} == {}
