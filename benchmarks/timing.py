"""Interleaved repeats: the machines are noisy, so contenders take turns and only ratios of medians are reported."""

import statistics
import time
from collections.abc import Callable


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
