"""Kernels written by hand that prove themselves, and broken ones; runs in the process of an `Interpreter`.

There, tensors of the CPU are taken for those of a GPU, launches are interpreted, and the definition stands for what
torch.compile makes. A kernel is broken by exchanging a piece of its text: the module is loaded again from a file of the
new text, and its functions take the places of the old ones wherever these are known.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import tempfile
import warnings
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
Broken = tuple[str, str]  # what is taken out of a module's text, and what is put in


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
def broken(module: str, *changes: Broken) -> Iterator[None]:
    """Inside, a module has another text."""
    before = importlib.import_module(module)
    text = inspect.getsource(before)
    for old, new in changes:
        assert text.count(old) == 1, (module, old, text.count(old))
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        file = Path(folder) / f"{module.rpartition('.')[2]}.py"
        file.write_text(text)
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
    # Triton's object around a function has the function's module, or not, as it interprets
    return callable(value) and getattr(getattr(value, "fn", value), "__module__", None) == module


def proofs(make: str, args: tuple[Any, ...], options: dict[str, Any], kind: Any, how: Any = ()) -> str:
    """The first difference that the probes of a kernel find; "" if it is right. `how` it is broken: see `broken`."""
    with as_gpu(), ExitStack() as stack:
        module, _, name = make.rpartition(".")
        kernel = getattr(importlib.import_module(module), name)(*args, **options)
        if how:
            everything()
            stack.enter_context(broken(*how))
        return kernel.probes.difference(kernel.by_hand, CPU, kind)  # type: ignore[no-any-return]


def everything() -> None:
    """Import what may be broken, and all that knows it."""
    from qtensor.numerics import triton_kernels, triton_transposes  # noqa: F401
    from qtensor.optim.fused import kernel  # noqa: F401

    for name in ("float8", "float8_blocks", "int4", "mxfp4", "mxfp8", "nvfp4", "reductions"):
        importlib.import_module(f"{triton_kernels.__name__}.{name}")


def used(recipe: Any, dtype: torch.dtype, how: Any, mode: str = "auto") -> dict[str, Any]:
    """What two calls of quantize and of decode return and say where kernels are broken, and how often they launch."""
    from tests.gpu_offline import interpreted

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator, dtype=torch.float32).to(dtype)
    wanted = kernels.encode(x, recipe)
    values = kernels.decode(wanted, recipe, dtype)
    said: list[str] = []
    launches: list[int] = []
    everything()
    with as_gpu(mode), ExitStack() as stack, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if how:
            stack.enter_context(broken(*how))
        for _ in range(2):
            before = interpreted._launches
            try:
                parts = kernels.encode(x, recipe)
                decoded = kernels.decode(wanted, recipe, dtype)
                right = raw(parts).keys() == raw(wanted).keys() and all(
                    torch.equal(part, raw(parts)[name]) for name, part in raw(wanted).items()
                )
                said.append("right" if right and torch.equal(decoded, values) else "wrong")
            except RuntimeError as error:
                said.append(str(error))
            launches.append(interpreted._launches - before)
    return {"said": said, "warned": [str(each.message) for each in warned], "launches": launches}


def raw(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: part.reshape(-1).view(torch.uint8) for name, part in parts.items()}


def used_while_captured(recipe: Any) -> list[Any]:
    """What a call does while a graph is captured, and behind it: launches, and whether the parts are right."""
    from tests.gpu_offline import interpreted

    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    wanted, found = raw(kernels.encode(x, recipe)), []
    with as_gpu():
        for can in (False, True, False):
            before = interpreted._launches
            with mock.patch.object(compiled, "can_try", return_value=can):
                parts = raw(kernels.encode(x, recipe))
            right = all(torch.equal(part, parts[name]) for name, part in wanted.items())
            found.append((interpreted._launches - before, right))
    return found


def digests_of(how: Any, mode: str = "auto") -> dict[str, Any]:
    """What digests by a launch are where the kernel is broken: (right, what was said) of two calls."""
    from fsdp_hooks.kernels import digest
    from tests.gpu_offline.test_digest_launch import defined

    groups = [[torch.arange(5000)], [torch.ones(7, dtype=torch.uint8)]]
    wanted, found = defined(groups), []
    importlib.import_module(digest.BY_HAND)
    fresh = {"BY_HAND_ON": frozenset({"cpu"}), "ENOUGH": 0, "_stream_to_launch_on": mock.Mock(return_value=0)}
    with ExitStack() as stack, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        stack.enter_context(mock.patch.multiple(digest, _proven=set(), _refused=set(), **fresh))
        stack.enter_context(launches_go_to(_interpret))
        stack.enter_context(use_kernels(mode))
        if how:
            stack.enter_context(broken(digest.BY_HAND, *how))
        for _ in range(2):
            try:
                found.append(str(torch.equal(digest.digests(groups), wanted)))
            except RuntimeError as error:
                found.append(str(error))
    return {"found": found, "warned": [str(each.message) for each in warned]}


# -- the fused step ----------------------------------------------------------------------------------------------------


def step_proofs(recipe: Any, kind_of: tuple[str, torch.dtype, bool], columns: int = 256, how: Any = ()) -> list[str]:
    """What the probes of the kernels of a weight's step find, "" where they are right; recipe: or a dense dtype."""
    from qtensor.optim.fused import decision, probe
    from qtensor.optim.fused.step import run
    from qtensor.optim.fused.tasks import Kind
    from qtensor.spec.registry import format_of, tensor_wide
    from tests.gpu_offline.stepping import on_gpu

    everything()
    rule, grads, aligned = kind_of
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
        if how:
            stack.enter_context(broken(*how))
        for what in [kind, *([output] if output.later else [])]:
            probe._proven.clear()
            try:
                probe.prove(what, CPU, recipe, run)
                found.append("")
            except probe.OtherBytesError as error:
                found.append(str(error))
    return found


def steps_by_a_broken_kernel(recipe: Any, change: Broken) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """What an optimizer writes whose kernel is broken; what the general way writes; warnings."""
    from dataclasses import replace

    from qtensor.optim.fused import probe
    from tests.gpu_offline.stepping import Run, Weight, trained

    run = Run("AdamW", [Weight((16, 64), recipe), Weight((32, 64), recipe)])
    wanted = trained(replace(run, fused_steps=[False] * run.steps))
    everything()
    probe._proven.clear()
    with warnings.catch_warnings(record=True) as warned, broken("qtensor.optim.fused.kernel", change):
        warnings.simplefilter("always", UserWarning)
        found = trained(run)
    return found, wanted, [str(each.message) for each in warned if each.category is UserWarning]
