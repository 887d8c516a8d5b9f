"""How many bytes are alive, and the most that were at one moment: three meters with one face, and a count of storages.

    with OfAllocator() as meter:
        model, optimizer = build()
        meter.mark("built")
        optimizer.step()
        meter.mark("step")
    meter.alive["built"]   bytes alive at the mark, less those that were alive when the block began
    meter.peak["step"]     the most of them at one moment since the mark before

    OfAllocator   torch's CPU allocator tells its profiler of each piece that it hands out and gets back: every tensor,
                  also one that lives inside of an operation (foreach) or of a compiled kernel. It does not know what
                  is taken beside it: scratch of oneDNN and of C++ code, Python's objects, compiled code, what malloc
                  keeps.
                  Nor does it hear of a piece that was made before the block and is freed inside: make all in the block.
    OfCuda        the same from torch's allocator for CUDA, without a profiler.
    OfProcess     the pages that the process has in memory, as the kernel counts them: all of the above, rounded up. It
                  means something where freed memory is given back at once (RETURNED in the environment of a process),
                  and pages count from the first write on.

None of them reads a clock, so none minds who else works on the machine.
"""

import contextlib
import ctypes
import gc
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}  # of glibc
MARK = "allocations.mark "
STATUS = Path("/proc/self/status")
PEAK_AGAIN = "5"  # what /proc/self/clear_refs takes for: the peak begins anew


class Meter:
    """What all meters have; see the module's docstring."""

    def __init__(self) -> None:
        self.alive: dict[str, int] = {}
        self.peak: dict[str, int] = {}

    def __enter__(self) -> "Meter":
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is to be ended."""

    def mark(self, name: str) -> None:
        """End a stretch, which has this name."""
        raise NotImplementedError


class OfAllocator(Meter):
    """Figures are there once the block has ended."""

    def __enter__(self) -> "OfAllocator":
        self._inside = contextlib.ExitStack()
        self._inside.enter_context(_silent())
        # one cycle only; without acc_events torch 2.11 warns that others would be lost
        watching = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._profile = self._inside.enter_context(watching)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside.close()
        if error is None:
            self._read(_events(self._profile))

    def mark(self, name: str) -> None:
        """End a stretch."""
        with record_function(MARK + name):
            pass

    def _read(self, events: Iterable[dict[str, Any]]) -> None:
        alive = peak = 0
        for event in sorted(events, key=lambda event: event["ts"]):  # stable: as they came, where the clock stood
            if event["name"] == "[memory]":
                alive += event["args"]["Bytes"]
                peak = max(peak, alive)
            else:
                name = event["name"].removeprefix(MARK)
                self.alive[name], self.peak[name] = alive, peak
                peak = alive


def _events(trace: profile) -> Iterator[dict[str, Any]]:
    """What the allocator told, and marks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    for event in events:
        name = event.get("name", "")
        if name == "[memory]" or (name.startswith(MARK) and event["ph"] == "X"):
            yield event


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Nothing goes to stderr, where the profiler announces itself without using Python's stream."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class OfCuda(Meter):
    """The current device's."""

    def __enter__(self) -> "OfCuda":
        gc.collect()
        self._before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return self

    def mark(self, name: str) -> None:
        """End a stretch."""
        self.alive[name] = torch.cuda.memory_allocated() - self._before
        self.peak[name] = torch.cuda.max_memory_allocated() - self._before
        torch.cuda.reset_peak_memory_stats()


class OfProcess(Meter):
    """Linux with glibc; `can` tells."""

    def __enter__(self) -> "OfProcess":
        gc.collect()
        _trim()  # what a compiler gave back
        self._before = _resident("VmRSS")
        self._again()
        return self

    def mark(self, name: str) -> None:
        """End a stretch."""
        self.peak[name] = _resident("VmHWM") - self._before
        _trim()  # what it keeps of small pieces is no tensor's
        self.alive[name] = _resident("VmRSS") - self._before
        self._again()

    @staticmethod
    def _again() -> None:
        Path("/proc/self/clear_refs").write_text(PEAK_AGAIN)

    @staticmethod
    def can() -> bool:
        """Whether this machine has what it takes."""
        try:
            OfProcess._again()
        except OSError:
            return False
        return STATUS.exists() and hasattr(ctypes.CDLL(None), "malloc_trim")


def _trim() -> None:
    ctypes.CDLL(None).malloc_trim(0)


def _resident(which: str) -> int:
    """Bytes: VmRSS now, VmHWM at most."""
    found = re.search(rf"^{which}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{STATUS} has no line {which}; OfProcess needs Linux's")
    return int(found[1]) * 1024


def meter_for(device: str) -> Meter:
    """The allocator's of that device."""
    return OfCuda() if device == "cuda" else OfAllocator()


def held(tensors: Iterable[Any], seen: set[int] | None = None) -> int:
    """Bytes of the storages of these tensors, each once; storages in `seen` do not count, and new ones are added.

    Tensors made of others (quantized ones, DTensors, states of 8-bit optimizers) have the storages of those.
    """
    seen = set() if seen is None else seen
    total = 0
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            total += held((getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]), seen)
        elif isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:  # noqa: SLF001 - the address of the storage itself: empty ones have no data
                seen.add(storage._cdata)  # noqa: SLF001 - likewise
                total += storage.nbytes()
    return total
