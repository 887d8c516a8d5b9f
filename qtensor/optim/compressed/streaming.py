"""Chunks of host memory through a device: one is computed on while the next one's copies arrive.

    side stream       in 0 | in 1         | out 0, in 2   | out 1, in 3   | ..
    compute stream         | compute on 0 | compute on 1  | compute on 2  | ..

`schedule` says what happens in which order, as records; `stream` does it. One side stream is enough, because there is
memory for two chunks: the next one's copies in cannot begin before the last one's copies out have ended. All buffers
are allocated and freed on the side stream, which has waited for the compute stream by then, so their memory is never
given away while it is in use.

The CPU waits in one place, `Lanes.settle`: nobody may read host memory that copies are still written to.
"""

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

Chunk = TypeVar("Chunk")


class Act(enum.Enum):
    """What is done with a chunk, in this order."""

    BRING = "side stream: allocate buffers, copy into them"
    AWAIT_COPIES = "compute stream: wait for these copies"
    COMPUTE = "compute stream: what the caller asks for"
    AWAIT_COMPUTE = "side stream: wait for all of this"
    RETURN = "side stream: copy back what was to be written, free the buffers"


class Action(NamedTuple):
    """One action on the chunk of this number."""

    act: Act
    chunk: int


def schedule(chunks: int) -> list[Action]:
    """Return what is done with so many chunks."""
    actions = [Action(Act.BRING, 0)] if chunks else []
    for chunk in range(chunks):
        if chunk + 1 < chunks:
            actions.append(Action(Act.BRING, chunk + 1))
        actions += [Action(act, chunk) for act in (Act.AWAIT_COPIES, Act.COMPUTE, Act.AWAIT_COMPUTE, Act.RETURN)]
    return actions


class Visit(Protocol):
    """One chunk's way to the devices and back; called in this order, `abandon` in the place of `give_back`."""

    devices: Sequence[torch.device]

    def bring(self) -> None:
        """Make copies on the devices."""

    def arrive(self) -> None:
        """Put them in the place of what is in host memory, for those who compute."""

    def give_back(self) -> None:
        """Put host memory back in its place and copy into it what is to be written; let go of the copies."""

    def abandon(self) -> None:
        """Put host memory back as it was, and let go of the copies."""


class Lanes:
    """The side stream of each device. Tensors of the CPU need none: their copies are made on the spot."""

    def __init__(self) -> None:
        self._sides: dict[torch.device, Any] = {}
        self._out: dict[torch.device, Any] = {}  # events behind copies out that nobody has waited for

    def __getstate__(self) -> dict[str, object]:
        return {"_sides": {}, "_out": {}}  # streams are the process's

    def aside(self, device: torch.device) -> AbstractContextManager[Any]:
        """Inside, what is asked of a device goes to its side stream."""
        if device.type == "cpu":
            return nullcontext()
        context: AbstractContextManager[Any] = torch.get_device_module(device).stream(self._side(device))
        return context

    def lend(self, tensor: Tensor, device: torch.device) -> None:
        """Tell the allocator that the side stream uses a tensor of the compute stream's."""
        if device.type != "cpu":
            tensor.record_stream(self._side(device))

    def mark(self, devices: Iterable[torch.device]) -> dict[torch.device, Any]:
        """Return an event for all that each side stream has been asked for."""
        return {device: self._side(device).record_event() for device in devices if device.type != "cpu"}

    def await_copies(self, marks: dict[torch.device, Any]) -> None:
        """Have the compute streams wait for these events."""
        for device, event in marks.items():
            torch.get_device_module(device).current_stream(device).wait_event(event)

    def await_compute(self, devices: Iterable[torch.device]) -> None:
        """Have the side streams wait for all that the compute streams have been asked for."""
        for device in devices:
            if device.type != "cpu":
                self._side(device).wait_event(torch.get_device_module(device).current_stream(device).record_event())

    def sent(self, devices: Iterable[torch.device]) -> None:
        """Remember that copies into host memory are on their way."""
        self._out |= self.mark(devices)

    def settle(self) -> None:
        """Wait until all copies into host memory have ended: the one wait of the CPU."""
        for event in self._out.values():
            event.synchronize()
        self._out.clear()

    def _side(self, device: torch.device) -> Any:
        if device not in self._sides:
            self._sides[device] = torch.get_device_module(device).Stream(device)
        return self._sides[device]


def stream(chunks: Sequence[Chunk], visit: Callable[[Chunk], Visit], lanes: Lanes) -> Iterator[Chunk]:
    """Yield each chunk while it is on its devices.

    Close the iterator (`contextlib.closing`): after an error the chunk that was computed on is abandoned.
    """
    visits: dict[int, Visit] = {}
    marks: dict[int, dict[torch.device, Any]] = {}
    try:
        for act, number in schedule(len(chunks)):
            if act is Act.BRING:
                visits[number] = visit(chunks[number])
                visits[number].bring()
                marks[number] = lanes.mark(visits[number].devices)
            elif act is Act.AWAIT_COPIES:
                lanes.await_copies(marks.pop(number))
            elif act is Act.COMPUTE:
                visits[number].arrive()
                yield chunks[number]
            elif act is Act.AWAIT_COMPUTE:
                lanes.await_compute(visits[number].devices)
            else:
                visits[number].give_back()
                lanes.sent(visits.pop(number).devices)
    finally:
        for left in visits.values():
            lanes.await_compute(left.devices)
            left.abandon()
