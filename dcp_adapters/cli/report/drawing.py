"""Small pictures as coordinates: a heat map of errors, a histogram of scales, the profile of channels.

One unit is a CSS pixel where a picture is as wide as it was drawn. Looks are classes of the style sheet. Stronger
colour is more opacity of one hue, which is readable on light and dark pages and for eyes that do not tell red from
green.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dcp_adapters.cli.report.channels import FACTOR
from dcp_adapters.cli.report.layers import Cell, Grid, badness, labels, middle_left_out
from dcp_adapters.cli.report.records import Profile, TensorReport

WIDTH = 1080
LABEL = 10.0  # pixels between two labels of an axis
LEAST_RANGE = 2.0  # dB: smaller differences are not blown up to the whole scale
_SUPERSCRIPTS = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")


class Text(NamedTuple):
    """Words at a point."""

    x: float
    y: float
    words: str
    look: str = "tick"
    anchor: str = "start"


class Box(NamedTuple):
    """A rectangle, perhaps with words that are shown where the mouse rests, and with a text that belongs to it."""

    x: float
    y: float
    wide: float
    tall: float
    look: str
    opacity: float = 1.0
    title: str = ""
    text: Text | None = None


class Picture(NamedTuple):
    """What is drawn: lines (x, y, look) from a point to the right edge, boxes over them, texts over both."""

    title: str
    width: float
    height: float
    lines: Sequence[tuple[float, float, str]]
    boxes: Sequence[Box]
    texts: Sequence[Text]


def heat_map(grid: Grid) -> Picture:
    """Draw the lowest SNR of each kind in each layer; the lower it is, the stronger the colour."""
    low, high = snr_range([cell.worst for cell in grid.cells.values()])
    names = labels(grid.kinds)
    left, row = 190, 26
    cell = min((WIDTH - left) / max(len(grid.layers), 1), 60.0)
    bottom = len(grid.kinds) * row
    texts = [
        Text(left - 10, y * row + 17, middle_left_out(names[kind], 30), "label", "end")
        for y, kind in enumerate(grid.kinds)
    ]
    boxes = []
    for (kind, column), one in grid.cells.items():
        wide = cell if column is not None else min(max(cell, 60.0), WIDTH - left)
        strength = min(max((high - badness(one.worst)) / (high - low), 0.0), 1.0)
        boxes.append(_draw_cell(one, left + cell * (column or 0), grid.kinds.index(kind) * row, wide, strength))
    step = next(step for step in (1, 2, 5) if step * cell >= 26)  # room for a number; there are at most 100 columns
    texts += [
        Text(left + cell * (column + 0.5), bottom + 18, str(grid.layers[column]), anchor="middle")
        for column in range(0, len(grid.layers), step)
    ]
    if grid.layers:
        texts.append(Text(left - 10, bottom + 18, "layer", anchor="end"))
    steps, y = 24, bottom + 36  # the legend
    boxes += [Box(left + 8 * i, y, 8, 12, "cell", _opacity(1 - i / (steps - 1))) for i in range(steps)]
    end = left + 8 * steps
    texts += [
        Text(left, y + 26, f"{low:.1f} dB"),
        Text(end, y + 26, f"{high:.1f} dB", anchor="end"),
        Text(end + 14, y + 10, "SNR: higher is better, 6 dB more is half the error"),
    ]
    title = "Signal-to-noise ratio of every kind of tensor in every layer"
    return Picture(title, WIDTH, bottom + 66, (), boxes, texts)


def histogram(counts: Mapping[int, int], span: tuple[int, int] | None = None) -> Picture:
    """Draw shares of scales in each power of two; `span`: the first and the last that there can be."""
    total, low, high = sum(counts.values()), min(counts), max(counts)
    if span is not None:
        low, high = min(low, span[0]), max(high, span[1])
    elif high - low < 8:
        low, high = low - (8 - high + low) // 2, high + (9 - high + low) // 2
    most = max(counts.values()) / total
    most = next(top for top in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0) if top >= most - 1e-12)
    width, height, left, base, above = 520, 180, 44, 146, 24
    slot = (width - left - 6) / (high - low + 1)
    lines, boxes, texts = [], [], []
    for share in (0.0, most / 2, most):
        y = base - (base - above) * share / most
        lines.append((left, y, "grid"))
        texts.append(Text(left - 6, y + 4, f"{100 * share:.3g}%", anchor="end"))
    for exponent, count in sorted(counts.items()):
        # a rare power must not look like one that never occurs
        tall = max((base - above) * count / total / most, 1.0)
        x, percent = left + slot * (exponent - low), 100 * count / total
        title = f"{_power_of_two(exponent)} to {_power_of_two(exponent + 1)}: {count:,} ({percent:.3g}%)"
        # at most two digits, so that they fit over the bar
        words = f"{percent:.0f}" if percent >= 9.5 else f"{percent:.1g}" if percent >= 0.095 else "<.1"
        text = Text(x + slot / 2, base - tall - 4, words, anchor="middle")
        boxes.append(Box(x + slot * 0.08, base - tall, slot * 0.84, tall, "bar", title=title, text=text))
    texts += [
        Text(left + slot * (exponent - low + 0.5), base + 16, _power_of_two(exponent), anchor="middle")
        for exponent in range(low, high + 1, max(1, math.ceil(34 / slot)))
    ]
    texts.append(Text(width, height - 3, "each bar one power of two; above it, percent", "axis", "end"))
    return Picture("Share of scales in each power of two", width, height, lines, boxes, texts)


def profile(found: Profile) -> Picture:
    """Draw amaxes of channels over their median, on a logarithmic axis, outliers in another colour."""
    top, floor = math.log2(max(*found.bins, 2 * FACTOR)), -1.0  # half the median
    width, height, left, base, above = 340, 120, 34, 100, 8

    def y(factor: float) -> float:
        return base - (base - above) * (max(math.log2(factor), floor) - floor) / (top - floor) if factor else base

    powers = int(top / 4)
    factors = (FACTOR, 1.0, *(16.0**power for power in range(1, powers + 1, max(1, math.ceil(powers / 4)))))
    texts: list[Text] = []
    for factor in factors:
        if all(abs(y(factor) + 4 - other.y) >= LABEL for other in texts):
            words = f"{factor:g}" if factor < 1000 else _power_of_two(int(math.log2(factor)))
            texts.append(Text(left - 5, y(factor) + 4, f"{words}\u00d7", anchor="end"))
    texts.append(Text(left, height - 5, f"{found.axis} 0"))
    texts.append(Text(width, height - 5, f"{found.channels - 1:,}", anchor="end"))
    slot = (width - left) / len(found.bins)
    return Picture(
        f"Largest magnitude of each {found.axis} over the median",
        width,
        height,
        [(left, y(factor), "limit" if factor == FACTOR else "grid") for factor in factors],
        [
            Box(left + slot * i, y(one), max(slot * 0.8, 0.8), base - y(one), "hot" if one > FACTOR else "bar")
            for i, one in enumerate(found.bins)
        ],
        texts,
    )


def snr_range(tensors: Sequence[TensorReport]) -> tuple[float, float]:
    """Return the ends of the scale of colours, in dB."""
    known = [tensor.snr_db for tensor in tensors if tensor.snr_db is not None]
    low, high = (min(known), max(known)) if known else (0.0, LEAST_RANGE)
    return min(low, high - LEAST_RANGE), high


def _power_of_two(exponent: int) -> str:
    """Write a power of two with a raised exponent."""
    return f"2{str(exponent).translate(_SUPERSCRIPTS)}"


def _draw_cell(cell: Cell, x: float, y: float, wide: float, strength: float) -> Box:
    worst = badness(cell.worst)
    words = f"{worst:.1f}" if math.isfinite(worst) else "equal" if worst > 0 else "-"
    unit = " dB" if math.isfinite(worst) else ""
    several = f"; the lowest of {cell.tensors} tensors" if cell.tensors > 1 else ""
    title = f"{words}{unit}{several}: {middle_left_out(cell.worst.name, 100)}"
    fits = wide >= 26 or (wide >= 24 and worst < 10)
    text = Text(x + wide / 2, y + 17, words, "on" if strength > 0.55 else "off", "middle") if fits else None
    opacity = 0.0 if worst == math.inf else _opacity(strength)
    return Box(x + 0.5, y + 0.5, wide - 1, 25, "cell", opacity, title, text)


def _opacity(strength: float) -> float:
    return 0.06 + 0.94 * strength
