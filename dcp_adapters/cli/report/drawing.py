"""Small pictures in SVG: a heat map of errors, a histogram of scales, the profile of channels. Colours are classes.

One unit is a CSS pixel where a picture is as wide as it was drawn. Strength of colour is opacity of one hue, so that it
reads on light and dark pages and by eyes that do not tell red from green.
"""

import math
from collections.abc import Mapping, Sequence

from dcp_adapters.cli.report.channels import FACTOR
from dcp_adapters.cli.report.layers import Cell, Grid, badness, labels
from dcp_adapters.cli.report.markup import Markup, joined, short, tag
from dcp_adapters.cli.report.records import Profile, TensorReport

WIDTH = 1080
LABEL = 10.0  # pixels between two labels of an axis
LEAST_RANGE = 2.0  # dB: smaller differences are not blown up to the whole scale
_SUPERSCRIPTS = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")


def heat_map(grid: Grid) -> Markup:
    """The lowest SNR of each kind in each layer; the stronger, the lower."""
    low, high = snr_range([cell.worst for cell in grid.cells.values()])
    names = labels(grid.kinds)
    left, row = 190, 26
    cell = min((WIDTH - left) / max(grid.columns, 1), 60.0)
    bottom = len(grid.kinds) * row
    drawn = [
        _at(left - 10, y * row + 17, short(names[kind], 30), class_="label", anchor="end")
        for y, kind in enumerate(grid.kinds)
    ]
    for (kind, column), one in grid.cells.items():
        wide = cell if column is not None else min(max(cell, 60.0), WIDTH - left)
        box = (left + cell * (column or 0), grid.kinds.index(kind) * row, wide, row)
        drawn.append(_heat_cell(one, box, (low, high)))
    step = _step(grid.columns, WIDTH - left, cell)
    shown = {column: found for (_, column), found in grid.cells.items() if column is not None}
    drawn += [
        _at(left + cell * (column + 0.5), bottom + 18, str(shown[column].first), class_="tick", anchor="middle")
        for column in range(0, grid.columns, step)
        if column in shown
    ]
    if grid.columns:
        drawn.append(_at(left - 10, bottom + 18, "layer", class_="tick", anchor="end"))
    drawn.append(_legend(left, bottom + 36, low, high))
    return _picture(WIDTH, bottom + 66, "Signal-to-noise ratio of every kind of tensor in every layer", drawn)


def histogram(
    counts: Mapping[int, int], span: tuple[int, int] | None = None, width: int = 520, height: int = 180
) -> Markup:
    """Shares of scales in each power of two; `span`: the first and the last that there can be."""
    total, low, high = sum(counts.values()), min(counts), max(counts)
    if span is not None:
        low, high = min(low, span[0]), max(high, span[1])
    elif high - low < 8:
        low, high = low - (8 - high + low) // 2, high + (9 - high + low) // 2
    top = max(counts.values()) / total
    left, base, above = 44, height - 34, 24
    slot = (width - left - 6) / (high - low + 1)
    drawn = []
    for share in (0.0, _round_share(top) / 2, _round_share(top)):
        y = base - (base - above) * share / _round_share(top)
        drawn += [tag("line", x1=left, x2=width, y1=_n(y), y2=_n(y), class_="grid")]
        drawn += [_at(left - 6, y + 4, f"{100 * share:.3g}%", class_="tick", anchor="end")]
    for exponent, count in sorted(counts.items()):
        tall = max((base - above) * count / total / _round_share(top), 1.0)  # rare is not never
        words = f"{power_of_two(exponent)} to {power_of_two(exponent + 1)}: {count:,} ({100 * count / total:.3g}%)"
        box = (left + slot * (exponent - low) + slot * 0.08, base - tall, slot * 0.84, tall)
        drawn.append(_box(box, tag("title", words), class_="bar", rx=2))
        drawn.append(_at(box[0] + box[2] / 2, base - tall - 4, _percent(count / total), class_="tick", anchor="middle"))
    step = max(1, math.ceil(34 / slot))
    drawn += [
        _at(left + slot * (e - low + 0.5), base + 16, power_of_two(e), class_="tick", anchor="middle")
        for e in range(low, high + 1, step)
    ]
    drawn.append(_at(width, height - 3, "each bar one power of two; above it, percent", class_="axis", anchor="end"))
    return _picture(width, height, "Share of scales in each power of two", drawn)


def profile(found: Profile, width: int = 340, height: int = 120) -> Markup:
    """Amaxes of channels over their median, on a logarithmic axis, outliers in another colour."""
    top = math.log2(max(*found.bins, 2 * FACTOR))
    floor = -1.0  # half the median
    left, base, above = 34, height - 20, 8

    def y(factor: float) -> float:
        return base - (base - above) * (max(math.log2(factor), floor) - floor) / (top - floor) if factor else base

    drawn = []
    powers = int(top / 4)
    lines = (FACTOR, 1.0, *(16.0**power for power in range(1, powers + 1, max(1, math.ceil(powers / 4)))))
    labelled: list[float] = []
    for factor in lines:
        kind = "limit" if factor == FACTOR else "grid"
        drawn += [tag("line", x1=left, x2=width, y1=_n(y(factor)), y2=_n(y(factor)), class_=kind)]
        if all(abs(y(factor) - other) >= LABEL for other in labelled):
            labelled.append(y(factor))
            words = f"{factor:g}" if factor < 1000 else power_of_two(int(math.log2(factor)))
            drawn += [_at(left - 5, y(factor) + 4, f"{words}\u00d7", class_="tick", anchor="end")]
    slot = (width - left) / len(found.bins)
    for index, factor in enumerate(found.bins):
        box = (left + slot * index, y(factor), max(slot * 0.8, 0.8), base - y(factor))
        drawn.append(_box(box, class_="hot" if factor > FACTOR else "bar"))
    drawn.append(_at(left, height - 5, f"{found.axis} 0", class_="tick"))
    drawn.append(_at(width, height - 5, f"{found.channels - 1:,}", class_="tick", anchor="end"))
    return _picture(width, height, f"Largest magnitude of each {found.axis} over the median", drawn)


def snr_range(tensors: Sequence[TensorReport]) -> tuple[float, float]:
    """The ends of the scale of colours, in dB."""
    known = [tensor.snr_db for tensor in tensors if tensor.snr_db is not None]
    low, high = (min(known), max(known)) if known else (0.0, LEAST_RANGE)
    return min(low, high - LEAST_RANGE), high


def power_of_two(exponent: int) -> str:
    """Like 2^-9, with a raised exponent."""
    return f"2{str(exponent).translate(_SUPERSCRIPTS)}"


def _heat_cell(cell: Cell, box: tuple[float, float, float, float], limits: tuple[float, float]) -> Markup:
    low, high = limits
    worst = badness(cell.worst)
    strength = min(max((high - worst) / (high - low), 0.0), 1.0)
    x, y, wide, tall = box
    several = f"; the lowest of {cell.tensors} tensors" if cell.tensors > 1 else ""
    written = "equal" if math.isinf(worst) and worst > 0 else "-" if math.isinf(worst) else f"{worst:.1f}"
    words = f"{written}{'' if math.isinf(worst) else ' dB'}{several}: {short(cell.worst.name, 100)}"
    number = _at(x + wide / 2, y + 17, written, class_="on" if strength > 0.55 else "off", anchor="middle")
    opacity = 0.0 if worst == math.inf else 0.06 + 0.94 * strength
    shape = _box((x + 0.5, y + 0.5, wide - 1, tall - 1), class_="cell", fill_opacity=_n(opacity), rx=2)
    return tag("g", tag("title", words), shape, number if wide >= 26 or (wide >= 24 and worst < 10) else "")


def _legend(x: float, y: float, low: float, high: float) -> Markup:
    steps, wide = 24, 8
    boxes = [
        _box((x + wide * i, y, wide, 12), class_="cell", fill_opacity=_n(0.06 + 0.94 * (1 - i / (steps - 1))))
        for i in range(steps)
    ]
    end = x + steps * wide
    return joined(
        *boxes,
        _at(x, y + 26, f"{low:.1f} dB", class_="tick"),
        _at(end, y + 26, f"{high:.1f} dB", class_="tick", anchor="end"),
        _at(end + 14, y + 10, "SNR: higher is better, 6 dB more is half the error", class_="tick"),
    )


def _percent(part: float) -> str:
    """At most two digits, so that it fits over a bar."""
    percent = 100 * part
    return f"{percent:.0f}" if percent >= 9.5 else f"{percent:.1g}" if percent >= 0.095 else "<.1"


def _step(columns: int, width: float, cell: float) -> int:
    """Every how many columns there is room for a number."""
    return next((step for step in (1, 2, 5, 10, 20, 50) if step * cell >= 26), max(columns, 1)) if width else 1


def _round_share(share: float) -> float:
    """The least of some round numbers that is not less."""
    return next(top for top in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0) if top >= share - 1e-12)


def _picture(width: float, height: float, title: str, drawn: Sequence[Markup]) -> Markup:
    return tag("svg", tag("title", title), *drawn, viewBox=f"0 0 {_n(width)} {_n(height)}", role="img")


def _box(box: tuple[float, float, float, float], *inside: Markup, **attributes: object) -> Markup:
    x, y, wide, tall = map(_n, box)
    return tag("rect", *inside, x=x, y=y, width=wide, height=tall, **attributes)


def _at(x: float, y: float, words: str, *, class_: str, anchor: str | None = None) -> Markup:
    return tag("text", words, x=_n(x), y=_n(y), class_=class_, text_anchor=anchor)


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
