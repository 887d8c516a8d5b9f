"""The Triton code that torch.compile makes of a kernel for a GPU that is not there, and what it launches.

A kernel (`fsdp_hooks.kernels.compiled.Kernel`) is compiled as it is for a GPU, by dynamo and inductor, for tensors
that say that they are on one. inductor then calls its own code, which allocates and launches; this goes to tensors
in the CPU's memory, and each launch to whoever asks (`Launching`):

    Kernel(*args)  ->  dynamo  ->  inductor's code  ->  TritonKernel.run(*args)  ->  launch(kernel, args)

So the launches are those of a real call, with its shapes and arguments, whether somebody counts them or runs them. What
was written by hand is launched as it is (written.py).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from tests.gpu_offline.written import WrittenKernel, launches_go_to

if TYPE_CHECKING:
    from fsdp_hooks.kernels.compiled import Kernel

# Nothing may come from a cache: what stands there was made by other code, or for a GPU that is there.
SETTINGS = {
    torch._inductor.config: {
        "fx_graph_cache": False,
        "fx_graph_remote_cache": False,
        "compile_threads": 1,
        "joint_graph_constant_folding": False,  # it would compute constants on the GPU; no kernel has any to fold
    },
    torch._functorch.config: {"enable_autograd_cache": False},
    torch._dynamo.config: {"automatic_dynamic_local_pgo": False, "automatic_dynamic_remote_pgo": False},
}
_fake = FakeTensorMode()
_compile = torch.compile


class _Compiled(Exception):
    """What was asked for is there, and nothing can run."""


def code_of(module: torch.nn.Module, *inputs: Tensor) -> list[str]:
    """What inductor writes for forward and backward of a module of tensors without values, called in a fake mode."""
    written: list[str] = []

    def backend(graph: Any, given: Any) -> Callable[..., Any]:
        compile_fx(graph, given)
        raise _Compiled

    with (
        _as_if_there_was_a_gpu(),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        mock.patch.object(GraphLowering, "save_output_code", staticmethod(written.append)),
        contextlib.suppress(_Compiled, BackendCompilerFailed),
    ):
        torch._dynamo.reset()
        _compile(module, backend=backend, fullgraph=True)(*inputs)
    torch._dynamo.reset()
    return written


class TritonKernel:
    """One kernel as inductor writes it: the text of a module, with the settings that it would run under."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source

    @functools.cached_property
    def tuner(self) -> Any:
        """inductor's object around the Triton function: the function itself, its arguments' types, its configs."""
        return getattr(_module(self.source), self.name)

    @property
    def short(self) -> str:
        """`red_0` instead of a name that lists all operations."""
        found = re.fullmatch(r"triton_([a-z]+)_fused.*_(\d+)", self.name)
        return "_".join(found.groups()) if found else self.name

    def run(self, *args: Any, stream: int) -> None:
        """Called by inductor's code."""
        assert Launching.current is not None
        Launching.current.launch(self, args)


@functools.cache
def _module(source: str) -> Any:
    # Triton reads the text of a function from its file.
    folder = Path(tempfile.mkdtemp(prefix="emitted-"))
    file = folder / f"emitted_{abs(hash(source)):x}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    with mock.patch.object(triton_helpers, "set_driver_to_gpu"):
        spec.loader.exec_module(module)
    return module


class Launching:
    """Calls kernels as they are compiled for a GPU; `launch(kernel, args)` is called for each launch.

    `by_hand` says whether kernels are taken that were written by hand, where there are such.
    """

    current: Launching | None = None
    compilations = 0

    def __init__(self, launch: Callable[[TritonKernel | WrittenKernel, tuple[Any, ...]], None]) -> None:
        self.launch = launch
        self.by_hand = True
        self.real: dict[int, Tensor] = {}  # by id of the tensor that says to be on the GPU

    def __call__(self, kernel: Kernel, *args: Any, out: Any = None) -> Any:
        """What `kernel` returns on a GPU, for arguments in the CPU's memory."""
        if self.takes_by_hand(kernel):
            assert kernel.by_hand is not None
            with launches_go_to(self.launch):
                return kernel.by_hand(*args, **({} if out is None else {"out": out}))
        self.real = {}
        said = tuple(self._said_to_be_on_gpu(arg) if isinstance(arg, Tensor) else arg for arg in args)
        inductors = mock.patch.object(kernel, "by_hand", None)
        with _as_if_there_was_a_gpu(), mock.patch.object(Launching, "current", self), inductors, _fake:
            return kernel.compiled_for(said)(*said)

    def takes_by_hand(self, kernel: Kernel) -> bool:
        """Whether a call runs what was written by hand."""
        return self.by_hand and kernel.by_hand is not None

    def _said_to_be_on_gpu(self, real: Tensor) -> Tensor:
        with _fake:
            said = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cuda")
        self.real[id(said)] = real
        return said


def _backend(graph: Any, inputs: Any) -> Callable[..., Any]:
    Launching.compilations += 1
    compiled = compile_fx(graph, inputs)

    def call(*args: Any) -> Any:
        assert Launching.current is not None
        with _disable_current_modes(), torch.no_grad():
            return compiled(*(Launching.current.real.get(id(arg), arg) for arg in args))

    return call


@contextlib.contextmanager
def _as_if_there_was_a_gpu() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # torch's compiler warns of itself
        for module, settings in SETTINGS.items():
            stack.enter_context(module.patch(settings))
        # Patterns for attention and matmuls: to register them, tensors are made on the GPU.
        stack.enter_context(mock.patch.object(joint_graph, "lazy_init"))
        stack.enter_context(mock.patch.object(torch, "compile", functools.partial(_compile, backend=_backend)))
        stack.enter_context(mock.patch.object(AsyncCompile, "triton", _made))
        stack.enter_context(mock.patch.object(torch._C._dynamo.guards, "_empty_strided_cuda", _in_memory))
        stack.enter_context(mock.patch.object(torch.cuda, "_DeviceGuard", contextlib.nullcontext))
        yield


def _made(self: AsyncCompile, kernel_name: str, source_code: str, device_str: str = "cuda") -> TritonKernel:
    return TritonKernel(kernel_name, source_code)


def _in_memory(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
