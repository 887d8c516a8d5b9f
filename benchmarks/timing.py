"""Interleaved repeats: the machines are noisy, so contenders take turns and only ratios of medians are reported."""

import contextlib
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterator

import torch

THREADS = 2  # of what a user's process would do with all cores of a small machine


@contextlib.contextmanager
def two_threads() -> Iterator[None]:
    """THREADS threads inside an operation of torch, whatever the environment says; then as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def medians(contenders: dict[str, Callable[[], object]], repeats: int = 15) -> dict[str, float]:
    """Median seconds of each contender, called in turn `repeats` times after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        call()
    for _ in range(repeats):
        for name, call in contenders.items():
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def nothing() -> None:
    """Do nothing before or after a contender's call."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """A call that is timed, and what has to happen around it that is not."""

    call: Callable[[], object]
    before: Callable[[], object] = nothing
    after: Callable[[], object] = nothing


def interleaved(contenders: dict[str, Contender], repeats: int, *, warm_up: bool) -> dict[str, list[float]]:
    """Seconds of each call in each of `repeats` rounds, every round in another order (the same in every run)."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    order, shuffle = list(contenders), random.Random(0).shuffle
    for number in range(-1 if warm_up else 0, repeats):
        shuffle(order)  # else each contender would always inherit caches and pages from the same one
        for name in order:
            one = contenders[name]
            one.before()
            began = time.perf_counter()
            one.call()
            took = time.perf_counter() - began
            one.after()
            if number >= 0:
                seconds[name].append(took)
    return seconds


def ratio(mine: list[float], others: list[float]) -> dict[str, float]:
    """The ratio of the medians, and the least and the greatest ratio within one round."""
    within = [a / b for a, b in zip(mine, others, strict=True)]
    median = statistics.median(mine) / statistics.median(others)
    return {"ratio": round(median, 3), "min": round(min(within), 3), "max": round(max(within), 3)}
