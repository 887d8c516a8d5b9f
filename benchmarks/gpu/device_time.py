"""Two times of a call on a GPU: what the device works, and what the host needs until the call returns.

    device    between two events around the call, behind a queue that keeps the host ahead: the GPU begins when all is
              in its queue, so that no gap is counted in which it waits for Python
    host      of a call that nobody waits for, on an empty queue
    busy      what the kernels of a call take together, by torch's profiler: for calls that wait for the GPU themselves

The queue is made of writes to a buffer that is larger than the L2 cache, so values come from memory. Whether the host
was ahead is seen, not assumed: the first event must not be reached when the call has returned. Else the queue is made
twice as long, and the call is timed again.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import torch
from torch.autograd import DeviceType

FLUSHED = 2**28  # bytes; several times the L2 cache
MOST_FILLS = 2**15
HOST_ROUNDS = 7

Call = Callable[[], object]


class Mark(Protocol):
    """A place in the queue of a device."""

    def reached(self) -> bool:
        """Whether the device has come to it."""

    def seconds_to(self, later: Any) -> float:
        """What the device took from here to there; both are reached."""


class Device(Protocol):
    """What works in a queue of its own."""

    def fill(self) -> None:
        """Queue some work that takes longer than to queue it, and that leaves nothing useful in a cache."""

    def mark(self) -> Mark:
        """Mark the end of the queue as it is."""

    def wait(self) -> None:
        """Until the queue is empty."""

    def clock(self) -> float:
        """The host's time, in seconds."""


@dataclass(frozen=True)
class Times:
    """Seconds of each call, round by round."""

    device: list[float]
    host: list[float]


class Gpu:
    """The current GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")

    def fill(self) -> None:
        """Write a buffer that no cache holds."""
        self._buffer.zero_()

    def mark(self) -> Mark:
        """An event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return _Event(event)

    def wait(self) -> None:
        """For the GPU."""
        torch.cuda.synchronize()

    def clock(self) -> float:
        """Python's."""
        return time.perf_counter()


@dataclass(frozen=True)
class _Event:
    event: Any

    def reached(self) -> bool:
        return bool(self.event.query())

    def seconds_to(self, later: Any) -> float:
        return float(self.event.elapsed_time(later.event)) / 1e3


class WaitsItselfError(RuntimeError):
    """However long the queue was, it was empty when the call returned."""


def timed(contenders: dict[str, Call], device: Device, rounds: int) -> dict[str, Times]:
    """Both times of each contender in each round; contenders take turns, every round in another order.

    Raises:
        WaitsItselfError: one of them waits for the device, so that nothing can keep the host ahead; take `busy`.
    """
    found = {name: Times([], []) for name in contenders}
    for call in contenders.values():
        call()  # warms up: kernels are compiled and chosen
    host = {name: statistics.median(hosts_of(call, device)) for name, call in contenders.items()}
    filled = _seconds_of_a_fill(device)
    fills = {name: 2 + int(2 * taken / filled) for name, taken in host.items()}
    order, shuffle = list(contenders), Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            seconds, fills[name] = _behind_a_queue(name, contenders[name], device, fills[name])
            found[name].device.append(seconds)
            found[name].host.append(hosts_of(contenders[name], device, 1)[0])
    return found


def hosts_of(call: Call, device: Device, rounds: int = HOST_ROUNDS) -> list[float]:
    """Seconds until each call returns, on an empty queue."""
    found = []
    for _ in range(rounds):
        device.wait()
        began = device.clock()
        call()
        found.append(device.clock() - began)
    device.wait()
    return found


def _seconds_of_a_fill(device: Device) -> float:
    device.wait()
    begin = device.mark()
    for _ in range(8):
        device.fill()
    end = device.mark()
    device.wait()
    return max(begin.seconds_to(end) / 8, 1e-6)


def _behind_a_queue(name: str, call: Call, device: Device, fills: int) -> tuple[float, int]:
    """What the device takes for a call, and how many fills kept the host ahead."""
    while fills <= MOST_FILLS:
        device.wait()
        for _ in range(fills):
            device.fill()
        begin = device.mark()
        call()
        end = device.mark()
        ahead = not begin.reached()
        device.wait()
        if ahead:
            return begin.seconds_to(end), fills
        fills *= 2
    raise WaitsItselfError(f"{name}: the queue was empty when the call returned, so it waits for the device itself")


def busy(contenders: dict[str, Call], rounds: int) -> dict[str, Times]:
    """What the kernels of each contender take together on the current GPU, and its host time; they take turns."""
    gpu, found = Gpu(), {name: Times([], []) for name in contenders}
    for call in contenders.values():
        call()
    for _ in range(rounds):
        for name, call in contenders.items():
            found[name].host.append(hosts_of(call, gpu, 1)[0])
            found[name].device.append(launches_of(call, "cuda").seconds)
    return found


@dataclass(frozen=True)
class Launches:
    """What a call puts into the queue of the device: kernels, copies and fills."""

    number: int
    seconds: float  # of all of them together


def launches_of(call: Call, device: str) -> Launches:
    """By torch's profiler, which slows the host and not the device; none on a CPU."""
    if device == "cpu":
        call()
        return Launches(0, 0.0)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    # An operation on the CPU may be told the time of the kernels that it launched, too.
    events = [event for event in profile.key_averages() if event.device_type == DeviceType.CUDA]
    events = [event for event in events if event.self_device_time_total > 0]
    return Launches(sum(event.count for event in events), sum(event.self_device_time_total for event in events) / 1e6)


def on_the_host(contenders: dict[str, Call], rounds: int) -> dict[str, Times]:
    """For a CPU, which has no queue: both times are that of the call."""
    found = {name: Times([], []) for name in contenders}
    for number in range(-1, rounds):
        for name, call in contenders.items():
            began = time.perf_counter()
            call()
            took = time.perf_counter() - began
            if number >= 0:
                found[name].device.append(took)
                found[name].host.append(took)
    return found


def times_on(device: str, contenders: dict[str, Call], rounds: int) -> dict[str, Times]:
    """Both times of contenders on a device; where one waits for the GPU itself, what all kernels of a call take."""
    if device == "cpu":
        return on_the_host(contenders, rounds)
    try:
        return timed(contenders, Gpu(), rounds)
    except WaitsItselfError as error:
        print(f"{error}; told is what its kernels take together", flush=True)
        return busy(contenders, max(rounds // 3, 1))
