"""A GPU that does nothing, and whose tensors have no memory: a program on it takes what it takes of the host.

Tensors of `pretended.py` exist within FakeTensorMode alone, which takes longer than all that it looks at. Those made
here are torch's own: they have a device, sizes and addresses, and go through dispatcher, autograd and FSDP2 as on a
machine with a GPU (idle.cpp). Triton compiles and looks up kernels as it does there; what stands for its launcher,
which is C code, returns at once. So do streams and events.

What is not there: the time of CUDA's own calls (an allocation, a launch), and more operations than the programs of
host.py need. For good: a process with such a GPU is of no use for anything else.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Hashable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fsdp_hooks.kernels import digest
from fsdp_hooks.kernels.compiled import Kernel
from qtensor.optim.fused import step
from tests.gpu_offline.pretended import built, pretend_gpu

SOURCE = Path(__file__).with_name("idle.cpp")


class Launcher:
    """Stands for what Triton makes for a compiled kernel: launches are counted."""

    launches: ClassVar[int] = 0

    def __init__(self, source: Any, metadata: Any) -> None:
        self.code = metadata.hash

    def __call__(self, *given: Any) -> None:
        Launcher.launches += 1


class Stream:
    """Stands for torch.cuda.Stream."""

    cuda_stream = 0

    def __init__(self, *options: Any, **others: Any) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass

    wait_event = wait_stream

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        pass


class Event:
    """Stands for torch.cuda.Event."""

    def __init__(self, *options: Any, **others: Any) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        pass

    wait = record

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def idle_gpu() -> None:
    """Make this process believe in such a GPU."""
    from triton.runtime.driver import driver

    pretend_gpu()
    ctypes.CDLL(str(built(SOURCE)))
    driver.active.launcher_cls = Launcher
    driver.active.utils = SimpleNamespace(
        load_binary=lambda name, kernel, shared, device: (1, 1, 32, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )
    default = Stream()
    torch.cuda.Stream, torch.cuda.Event = Stream, Event  # type: ignore[assignment, misc]
    torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment]
    for where, names in ((torch.cuda, ("current_stream", "default_stream")), (torch.accelerator, ("current_stream",))):
        for name in names:
            setattr(where, name, lambda device=None: default)
    # no memory of the host is pinned: a copy takes what it takes
    Tensor.pin_memory = lambda self, device=None: self  # type: ignore[assignment, method-assign, return-value]
    Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment, method-assign]
    torch.UntypedStorage.resize_ = lambda self, size: None  # type: ignore[assignment, method-assign]
    # gradients are computed by the thread that asks for them, so that one counter sees all
    torch.autograd.set_multithreading_enabled(False)
    # nothing is computed, so nothing could be proven
    Kernel._prove = _believe  # type: ignore[method-assign]
    step.prove = lambda *given: None  # type: ignore[assignment]
    digest._proven.add(torch.device("cuda", torch.cuda.current_device()))


def _believe(kernel: Kernel, device: torch.device, kind: Hashable) -> None:
    """Stands for the proof of a kernel."""
    kernel._proven.add((device, kind))
