"""Streams and events that only write a log, and a mode that adds what operations read and write on them.

    with FakeTensorMode(), recorded() as log:      # tensors without values on a GPU that is not there
        ...                                        # a program that asks torch.cuda for streams
    faults_of(log), waits_of_host(log)             # ordering.py

Tensors have storages without memory, so identity and lifetime of every storage are those of a real run; what is left
out is the work itself. Views are no accesses. A collective runs on the stream that is current, as NCCL's own stream
waits for that one and is waited for by it. Reads of values are answered, so that the program goes on: see `Answers`.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qtensor import QuantizedTensor
from qtensor.scales.high_precision import HighPrecisionWeight
from tests.gpu_offline.ordering import HOST, Allocated, Entry, Freed, HostWaited, Lent, Ran, Recorded, Waited

PACKAGES = ("fsdp_hooks", "qtensor", "dcp_adapters", "layerwise", "torch/distributed/fsdp", "tests")
READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default}
Answers = Callable[[str, torch.dtype], Any]  # where a value is read, its dtype -> the value


class Recorder:
    """The log, and what is needed to number things in it."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.numbers = itertools.count(1)
        self.live: dict[int, tuple[int, StorageWeakRef]] = {}  # address -> number, and whether it lives
        self.pinned: set[int] = set()  # memory of the CPU that streams copy from by themselves
        self.streams: list[Stream] = []
        self.default = Stream(recorder=self)
        self.current = [self.default]

    def add(self, entry: Entry) -> None:
        """An entry, behind the deaths that came before it."""
        for address, (number, storage) in list(self.live.items()):
            if storage.expired():
                del self.live[address]
                self.entries.append(Freed(number))
        self.entries.append(entry)

    def wait_of_host(self, what: str, **of: int) -> None:
        self.add(HostWaited(what, **of))

    def number_of(self, tensor: Tensor, what: str) -> int:
        """The number of a tensor's storage, which begins here if it is new."""
        storage = tensor.untyped_storage()
        known = self.live.get(storage._cdata)
        if known is not None and not known[1].expired():
            return known[0]
        number = next(self.numbers)
        stream = self.current[-1].number if tensor.device.type == "cuda" else HOST
        text = f"{str(tensor.dtype)[6:]} {list(tensor.shape)} of {what}"
        self.add(Allocated(number, stream, text))
        self.live[storage._cdata] = number, StorageWeakRef(storage)
        return number

    def emptied(self, storage: torch.UntypedStorage) -> None:
        """A storage gives its memory back and lives on; when it is filled again it counts as a new one."""
        known = self.live.pop(storage._cdata, None)
        if known is not None:
            self.add(Freed(known[0]))


class Stream:
    """torch.cuda.Stream, as far as programs use it."""

    recorder: Recorder

    def __init__(self, device: Any = None, priority: int = 0, *, recorder: Recorder | None = None) -> None:
        if recorder is not None:
            self.recorder = recorder
        self.number = len(self.recorder.streams)
        self.recorder.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        if event.number is not None:
            self.recorder.add(Waited(self.number, event.number))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(recorder=self.recorder)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.recorder.wait_of_host(f"Stream.synchronize in {_where()}", stream=self.number)

    def is_capturing(self) -> bool:
        return False


class Event:
    """torch.cuda.Event, likewise."""

    recorder: Recorder

    def __init__(self, *args: Any, recorder: Recorder | None = None, **options: Any) -> None:
        if recorder is not None:
            self.recorder = recorder
        self.number: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.recorder.current[-1]
        self.number = next(self.recorder.numbers)
        self.recorder.add(Recorded(self.number, stream.number))

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.recorder.current[-1]).wait_event(self)

    def synchronize(self) -> None:
        if self.number is not None:
            self.recorder.wait_of_host(f"Event.synchronize in {_where()}", event=self.number)

    def query(self) -> bool:
        return False


class _Accesses(TorchDispatchMode):
    """What each operation reads and writes, on which stream."""

    def __init__(self, recorder: Recorder, answers: Answers) -> None:
        super().__init__()
        self.recorder, self.answers = recorder, answers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        with self:  # below autograd, composite operations arrive whole, and could be taken for views
            if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                return result
        made_of_parts = [type(each) for each in given if isinstance(each, QuantizedTensor | HighPrecisionWeight)]
        if made_of_parts and not any(isinstance(each, DTensor) for each in given):
            with self:  # after NotImplemented no mode would see what is done to the parts
                return made_of_parts[0].__torch_dispatch__(func, types, args, kwargs)
        if any(type(each) not in (Tensor, FakeTensor, torch.nn.Parameter) for each in given):
            return NotImplemented
        where = _where()
        if func in READS and all(isinstance(each, FakeTensor) for each in given):
            self._read(f"{func} in {where}", given)
            return self.answers(where, given[0].dtype)
        result = func(*args, **kwargs)
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if kwargs.get("pin_memory"):
            self.recorder.pinned.update(self.recorder.number_of(each, f"{func} in {where}") for each in made)
        written = _written(func, args, kwargs)
        if written or not any(one.alias_info is not None for one in func._schema.returns):
            self._note(f"{func} in {where}", given, [*written, *made], _waits(func, args, kwargs))
        return result

    def _read(self, what: str, given: list[Tensor]) -> None:
        """The CPU reads values: on a GPU it waits for them."""
        numbers = frozenset(self.recorder.number_of(each, what) for each in given)
        before, last = self.recorder.entries[-2:] if len(self.recorder.entries) > 1 else (None, None)
        again = isinstance(last, HostWaited) and last.what == what and "_local_scalar_dense" in what
        if again and isinstance(before, Ran) and before.reads == numbers:
            return  # the next value of a list, of one memory; all of them come with the first
        stream = self.recorder.current[-1].number
        if any(each.device.type == "cuda" for each in given):
            self.recorder.add(Ran(stream, what, numbers, frozenset()))
            self.recorder.wait_of_host(what, stream=stream)
        else:
            self.recorder.add(Ran(HOST, what, numbers, frozenset()))

    def _note(self, what: str, given: list[Tensor], written: list[Tensor], waits: bool) -> None:
        recorder, stream = self.recorder, self.recorder.current[-1].number
        used = [each for each in [*given, *written] if each.numel()]
        devices = {each.device.type for each in used}
        if "meta" in devices or not devices:
            return
        writes = frozenset(recorder.number_of(each, what) for each in written if each.numel())
        on_cpu = frozenset(recorder.number_of(each, what) for each in used if each.device.type == "cpu")
        reads = frozenset(recorder.number_of(each, what) for each in given if each.numel()) - writes
        if "cuda" not in devices:
            recorder.add(Ran(HOST, what, reads, writes))
            return
        pageable = (reads & on_cpu) - recorder.pinned
        if pageable:  # CUDA has copied all of a pageable memory that it copies from when the call returns
            recorder.add(Ran(HOST, what, pageable, frozenset()))
        recorder.add(Ran(stream, what, reads - pageable, writes))
        # a number on the CPU may be an operand
        if waits and (writes & on_cpu or any(each.ndim and each.device.type == "cpu" for each in given)):
            recorder.wait_of_host(what, stream=stream)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes; the schemas of collectives do not say it."""
    schema = func._schema
    of_collective = func.namespace == "c10d"
    found = []
    for place, argument in enumerate(schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if marked or (of_collective and argument.name.startswith(("output", "tensors"))):
            found += [each for each in tree_leaves(value) if isinstance(each, Tensor)]
    return found


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a copy between devices would be waited for."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "non_blocking":
            return not (args[place] if place < len(args) else kwargs.get("non_blocking", False))
    return True


def _where() -> str:
    """The innermost frame of the packages, or of FSDP2: `qtensor/optim/master_step.py step`."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.endswith(("recording.py", "ordering.py")):
            for package in PACKAGES:
                if f"/{package}/" in name and ("site-packages" not in name or package.startswith("torch/")):
                    return f"{Path(name).parent.name}/{Path(name).name} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment] # the last frame has none
    return "?"


@contextlib.contextmanager
def recorded(answers: Answers = lambda where, dtype: True) -> Iterator[list[Entry]]:
    """The log of what runs inside; use it inside FakeTensorMode.

    Args:
        answers: what is read where a program reads a value; every value is true, or 1, by default.
    """
    recorder = Recorder()
    stream_class = type("Stream", (Stream,), {"recorder": recorder})
    event_class = type("Event", (Event,), {"recorder": recorder})

    @contextlib.contextmanager
    def on(stream: Stream | None) -> Iterator[None]:
        recorder.current.append(stream or recorder.current[-1])
        try:
            yield
        finally:
            recorder.current.pop()

    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.nbytes() and not size:
            recorder.emptied(storage)
        return resize(storage, size)

    def lent(tensor: Tensor, stream: Stream) -> None:
        recorder.add(Lent(recorder.number_of(tensor, f"record_stream in {_where()}"), stream.number))

    current = {"current_stream": lambda device=None: recorder.current[-1]}
    cuda = {"Stream": stream_class, "Event": event_class, "stream": on, **current}
    cuda["default_stream"] = lambda device=None: recorder.default
    with (
        patch.multiple(torch.cuda, **cuda),
        patch.multiple(torch.accelerator, **current),
        patch.object(torch.UntypedStorage, "resize_", resized),
        patch.object(Tensor, "record_stream", lent),
        _Accesses(recorder, answers),
    ):
        yield recorder.entries
