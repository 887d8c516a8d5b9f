"""Exponents: how steep cost over size is on logarithmic axes.

A cost is a + b * size ** p, and a constant part a only lowers the slope, most where sizes are small. So the slope
between the two largest sizes, "top", is what says whether growth is super-linear; "fit" is that of least squares over
all sizes. Of both, the figure is that of the least costs of all rounds, since whatever else runs on the machine only
adds to a cost; min and max are those of single rounds.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Series = Mapping[str, Sequence[float]]  # size -> one cost a round


def summary(series: Series) -> dict[str, Any]:
    """Least and median cost of every size, and the exponents."""
    return {
        "least": {size: min(costs) for size, costs in series.items()},
        "median": {size: statistics.median(costs) for size, costs in series.items()},
        "exponents": exponents(series),
    }


def exponents(series: Series) -> dict[str, dict[str, float]] | None:
    """See the module's docstring; None where the cost is nothing at some size."""
    sizes = sorted(map(int, series))
    rounds = [list(costs) for costs in zip(*(series[str(size)] for size in sizes), strict=True)]
    least = [min(series[str(size)]) for size in sizes]
    if min(least) <= 0:
        return None
    out = {}
    for name, first in (("fit", 0), ("top", -2)):
        single = [_slope(sizes[first:], costs[first:]) for costs in rounds]
        slope = _slope(sizes[first:], least[first:])
        out[name] = {"exponent": round(slope, 3), "min": round(min(single), 3), "max": round(max(single), 3)}
    return out


def _slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    x, y = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    return statistics.linear_regression(x, y).slope


def within(mine: Any, peer: Any, most: float, margin: float) -> dict[str, Any]:
    """Whether the top exponent is at most `most`, or not above the peer's by more than the margin."""
    value = mine["top"]["exponent"]
    limit = max(most, (peer["top"]["exponent"] if peer else 0.0) + margin)
    why = f"{value} against {limit:.2f}; single rounds {mine['top']['min']} - {mine['top']['max']}"
    return {"value": value, "target": round(limit, 3), "met": value <= limit, "why": "" if value <= limit else why}
