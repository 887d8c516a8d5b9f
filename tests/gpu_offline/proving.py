"""Kernels written by hand that prove themselves, and broken ones; runs in the process of an `Interpreter`.

There, tensors of the CPU are taken for those of a GPU, launches are interpreted, and the definition stands for what
torch.compile makes. A kernel is broken by exchanging a piece of its text: the module is loaded again from a file of the
new text, and its functions take the places of the old ones wherever these are known.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fsdp_hooks.kernels import compiled
from fsdp_hooks.kernels.compiled import Kernel, use_kernels
from qtensor.numerics import kernels, transposing
from tests.gpu_offline.interpreted import _interpret
from tests.gpu_offline.written import launches_go_to

CPU = torch.device("cpu")
PRODUCT = ("qtensor.", "fsdp_hooks.")
Broken = tuple[str, str, str]  # a module, what is taken out of its text, and what is put in


@contextmanager
def as_gpu(mode: str = "auto") -> Iterator[None]:
    """Inside, kernels written by hand are those of the CPU, none of which was tried, for tensors of any size."""

    def otherwise(kernel: Kernel, args: Any) -> Any:
        return kernel.by_hand if kernel.has_by_hand(args[0]) else kernel.eager

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(compiled, "BY_HAND_ON", frozenset({"cpu"})))
        stack.enter_context(mock.patch.object(compiled, "COMPILED_FROM", 1))
        stack.enter_context(mock.patch.object(kernels, "COMPILED_FROM", 1))
        stack.enter_context(mock.patch.object(Kernel, "compiled_for", otherwise))
        stack.enter_context(use_kernels(mode))
        stack.enter_context(launches_go_to(_interpret))
        forget()
        try:
            yield
        finally:
            forget()


def forget() -> None:
    """As if no kernel had been tried yet."""
    made = (kernels._encode_kernel, kernels._decode_kernel, kernels._amax_kernel)
    for each in (*made, transposing._transpose_kernel, transposing._columns_kernel, transposing._both_kernel):
        each.cache_clear()


@contextmanager
def broken(module: str, old: str, new: str) -> Iterator[None]:
    """Inside, a module has another text."""
    before = sys.modules[module]
    text = inspect.getsource(before)
    assert text.count(old) == 1, (module, old, text.count(old))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        file = Path(folder) / f"{module.rpartition('.')[2]}.py"
        file.write_text(text.replace(old, new))
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        again = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(again)
        names = {id(value): name for name, value in vars(before).items() if defined_in(value, module)}
        for name, other in list(sys.modules.items()):
            if name.startswith(PRODUCT) and other is not None:
                for attribute, value in list(vars(other).items()):
                    if id(value) in names:
                        stack.enter_context(mock.patch.object(other, attribute, getattr(again, names[id(value)])))
        yield


def defined_in(value: Any, module: str) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module


def proofs(make: str, args: tuple[Any, ...], options: dict[str, Any], kind: Any, how: Broken | None = None) -> str:
    """The first difference that the probes of a kernel find; "" if it is right."""
    with as_gpu(), ExitStack() as stack:
        module, _, name = make.rpartition(".")
        kernel = getattr(importlib.import_module(module), name)(*args, **options)
        warm(kernel, kind)
        if how is not None:
            stack.enter_context(broken(*how))
        return kernel.probes.difference(kernel.by_hand, CPU, kind)  # type: ignore[no-any-return]


def warm(kernel: Kernel, kind: Any) -> None:
    """Import what a kernel is made of."""
    from qtensor.numerics import triton_transposes  # noqa: F401
    from qtensor.numerics.triton_kernels import float8, float8_blocks, int4, mxfp4, mxfp8, nvfp4, reductions  # noqa: F401


# -- the fused step ----------------------------------------------------------------------------------------------------


def step_proofs(
    recipe: Any, rule: str, grads: torch.dtype, columns: int = 256, how: Broken | None = None, *, aligned: bool = True
) -> list[str]:
    """What the probes of the kernels of a weight's step find, "" where they are right; recipe: or a dense dtype."""
    from qtensor.optim.fused import decision, probe
    from qtensor.optim.fused.kernel import step  # noqa: F401 - what may be broken is to be known
    from qtensor.optim.fused.tasks import Kind
    from qtensor.optim.fused.step import run
    from qtensor.spec.registry import format_of, tensor_wide
    from tests.gpu_offline.stepping import on_gpu

    if recipe is None or isinstance(recipe, torch.dtype):
        output, recipe = decision.dense(recipe, columns), None
    else:
        wide = tensor_wide(recipe) is not None
        by_row = kernels.shares_amax(recipe) and not wide
        hand = format_of(recipe).by_hand(recipe)
        output = decision.quantized(hand, (128, columns), wide=wide, by_row=by_row)
    here = decision.dense(None, columns).finding_amax() if output.later else output
    kind = Kind(CPU, getattr(decision, rule), here, grads, aligned)
    found = []
    with on_gpu([]), ExitStack() as stack:
        if how is not None:
            stack.enter_context(broken(*how))
        for what in [kind, *([output] if output.later else [])]:
            probe._proven.clear()
            try:
                probe.prove(what, CPU, recipe, run)
                found.append("")
            except probe.OtherBytesError as error:
                found.append(str(error))
    return found
