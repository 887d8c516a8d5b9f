"""A torch built for CPUs that believes in one NVIDIA GPU, far enough to trace and compile for it; nothing can run."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

CAPABILITY = (9, 0)
# Numbers of an H100, as the runtime reports them.
PROPERTIES = SimpleNamespace(
    name="a GPU that is not there",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    total_memory=80 << 30,
    L2_cache_size=50 << 20,
    clock_rate=1980000,
    memory_bus_width=5120,
    memory_clock_rate=2619000,
    gcnArchName="",
    uuid="0",
)
# What torch.cuda answers.
ANSWERS: dict[str, Any] = {
    "is_available": True,
    "is_initialized": True,
    "_is_compiled": True,
    "_is_in_bad_fork": False,
    "_lazy_init": None,
    "device_count": 1,
    "current_device": 0,
    "set_device": None,
    "synchronize": None,
    "_exchange_device": 0,
    "_maybe_exchange_device": 0,
    "get_device_capability": CAPABILITY,
    "get_device_properties": PROPERTIES,
    "get_device_name": PROPERTIES.name,
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": None,
}
INTERFACE = ("current_device", "set_device", "synchronize", "device_count", "is_bf16_supported")
GUARD = Path(__file__).with_name("guard.cpp")


def pretend_gpu() -> None:
    """For good: a process that believes in a GPU is of no use for anything else."""
    ctypes.CDLL(str(built(GUARD)))
    for name, answer in ANSWERS.items():
        setattr(torch.cuda, name, _answering(answer))
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice", "_cuda_setDevice"):
        if not hasattr(torch._C, name):
            setattr(torch._C, name, _answering(0))
    for name in ("_cuda_exchangeDevice", "_cuda_maybeExchangeDevice"):
        if not hasattr(torch._C, name):
            setattr(torch._C, name, _answering(0))
    torch.version.cuda = "13.0"
    _tell_dynamo()
    _tell_triton()


def _answering(answer: Any) -> Any:
    return lambda *args, **options: answer


def built(source: Path) -> Path:
    """C++ code as a library, built once for each torch and each text of it."""
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(sys.prefix) / f"{source.stem}-{key}.so"
    if not library.exists():
        home = Path(torch.__file__).parent
        libraries = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home / 'lib'}"]
        headers = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
        with tempfile.TemporaryDirectory(dir=sys.prefix) as directory:
            made = Path(directory) / library.name
            options = ["-shared", "-fPIC", "-std=c++20", *headers]
            subprocess.run(["g++", *options, source, "-o", made, *libraries], check=True)
            made.replace(library)
    return library


def _tell_dynamo() -> None:
    from torch._dynamo import device_interface

    cuda = device_interface.CudaInterface
    for name in INTERFACE:
        setattr(cuda, name, staticmethod(getattr(torch.cuda, name)))
    for name in ("exchange_device", "maybe_exchange_device", "get_raw_stream"):
        setattr(cuda, name, staticmethod(_answering(0)))
    cuda.get_device_properties = staticmethod(_answering(PROPERTIES))
    device_interface.caching_worker_device_properties.clear()


def _tell_triton() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    target = GPUTarget("cuda", CAPABILITY[0] * 10 + CAPABILITY[1], 32)
    answers = {
        "get_current_target": target,
        "get_current_device": 0,
        "get_current_stream": 0,
        "get_active_torch_device": torch.device("cuda", 0),
        "get_device_interface": torch.cuda,
        "get_device_capability": CAPABILITY,
        "is_active": True,
    }
    driver.set_active(SimpleNamespace(**{name: _answering(answer) for name, answer in answers.items()}))
