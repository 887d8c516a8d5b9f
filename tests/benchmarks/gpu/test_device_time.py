"""Device and host are two times, whichever of them a call is bound by: on a GPU that is simulated, with its queue."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks.gpu import device_time
from benchmarks.gpu.device_time import (
    MOST_FILLS,
    Launches,
    WaitsItselfError,
    hosts_of,
    launches_of,
    on_the_host,
    timed,
    times_on,
)

LAUNCH = 5e-6  # seconds of the host to put anything into the queue
FILL = 60e-6


@dataclass
class Mark:
    gpu: Simulated
    at: float

    def reached(self) -> bool:
        return self.gpu.now >= self.at

    def seconds_to(self, later: Mark) -> float:
        return later.at - self.at


class Simulated:
    """A clock of the host, and when a queue that is worked off in order will be empty."""

    def __init__(self) -> None:
        self.now = self.empty = 0.0

    def launch(self, seconds: float) -> None:
        self.now += LAUNCH
        self.empty = max(self.empty, self.now) + seconds

    def fill(self) -> None:
        self.launch(FILL)

    def mark(self) -> Mark:
        return Mark(self, max(self.empty, self.now))

    def wait(self) -> None:
        self.now = max(self.empty, self.now)

    def clock(self) -> float:
        return self.now

    def call(self, host: float, device: float, *, waits: bool = False) -> Callable[[], None]:
        """A call of two kernels, with Python before each of them."""

        def run() -> None:
            for _ in range(2):
                self.now += host / 2 - LAUNCH
                self.launch(device / 2)
                if waits:
                    self.wait()

        return run


@pytest.mark.parametrize(("host", "device"), [(300e-6, 53e-6), (50e-3, 8e-3), (20e-6, 5e-3)])
def test_both_times_are_told_apart(host: float, device: float) -> None:
    gpu = Simulated()
    times = timed({"one": gpu.call(host, device), "other": gpu.call(20e-6, 100e-6)}, gpu, rounds=3)
    assert times["one"].device == pytest.approx([device] * 3)
    assert times["one"].host == pytest.approx([host] * 3)
    assert times["other"].device == pytest.approx([100e-6] * 3)


def test_a_call_that_is_waited_for_would_have_told_the_host_s_time() -> None:
    """What the difference is about: the device works 53 us of these 326."""
    gpu = Simulated()
    call = gpu.call(300e-6, 53e-6)
    began = gpu.clock()
    call()
    gpu.wait()
    assert gpu.clock() - began == pytest.approx(326.5e-6)
    assert timed({"": call}, gpu, rounds=1)[""].device == pytest.approx([53e-6])


def test_a_host_that_falls_behind_gets_a_longer_queue() -> None:
    """It was quick when it was looked at, and is slow from then on."""
    gpu = Simulated()
    quick, slow, calls = gpu.call(20e-6, 1e-3), gpu.call(4e-3, 1e-3), [0]

    def run() -> None:
        calls[0] += 1
        (quick if calls[0] <= 8 else slow)()

    assert timed({"": run}, gpu, rounds=2)[""].device == pytest.approx([1e-3] * 2)
    assert calls[0] > 8 + 2 * 2  # some were timed again


def test_a_call_that_waits_for_the_device_itself_is_refused() -> None:
    gpu = Simulated()
    with pytest.raises(WaitsItselfError, match=r"^step: the queue was empty when the call returned"):
        timed({"step": gpu.call(1e-3, 1e-3, waits=True)}, gpu, rounds=1)
    assert MOST_FILLS * FILL > 1  # seconds: longer than any call here


def test_of_a_call_that_waits_its_kernels_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = Simulated()
    monkeypatch.setattr(device_time, "Gpu", lambda: gpu)
    monkeypatch.setattr(device_time, "busy", dict.fromkeys)
    assert times_on("cuda", {"step": gpu.call(1e-3, 1e-3, waits=True)}, 6) == {"step": 2}
    assert "step: the queue was empty when the call returned" in capsys.readouterr().out


def test_launches_are_what_runs_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the operation that launches them, which may be told the time of its kernels."""

    def event(kind: DeviceType, count: int, microseconds: float) -> SimpleNamespace:
        return SimpleNamespace(device_type=kind, count=count, self_device_time_total=microseconds)

    events = [event(DeviceType.CPU, 1, 7.0), event(DeviceType.CUDA, 2, 5.0), event(DeviceType.CUDA, 1, 3.0)]
    events.append(event(DeviceType.CUDA, 4, 0.0))  # of the profiler itself
    profile = SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: contextlib.nullcontext(profile))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert launches_of(lambda: None, "cuda") == Launches(3, pytest.approx(8e-6))


def test_the_queue_is_empty_before_the_host_is_timed() -> None:
    gpu = Simulated()
    gpu.fill()
    assert hosts_of(gpu.call(40e-6, 1.0), gpu, 2) == pytest.approx([40e-6] * 2)


def test_a_cpu_has_one_time() -> None:
    calls = [0]

    def call() -> None:
        calls[0] += 1

    times = times_on("cpu", {"call": call}, 3)
    assert times["call"].device == times["call"].host
    assert (len(times["call"].device), calls[0]) == (3, 4)
    assert on_the_host({}, 3) == {}
