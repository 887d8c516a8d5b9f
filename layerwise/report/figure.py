"""The picture of a report: the error of every layer, one line for each kind of linear.

If a layer has several linears of a kind, such as experts, the line is their mean, and a band reaches from the worst to
the best. A ring marks a linear with a warning.
"""

import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerwise.report.report import Report

# kind -> layer -> SNR of each of its linears
Series = dict[str, dict[int, list[float]]]


def draw(report: "Report", path: Path) -> Path:
    """Write the picture in the format that the path's suffix names."""
    series = _collect_series(report)
    if not series:
        raise ValueError(f"{path}: nothing to draw, no linear of a layer has an SNR")
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError(
            f"{path}: drawing needs matplotlib, which is not installed: pip install 'qtensor-fsdp[calibration]'"
        ) from error
    # Not through pyplot, which keeps figures and a backend in globals of the user's process.
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.add_subplot()
    # The legend reads from top to bottom as the lines do at the right end.
    kinds = sorted(series, key=lambda kind: -statistics.fmean(series[kind][max(series[kind])]))
    # By the order of the report, so that kinds have the same colours in the pictures of two runs.
    colours = {kind: f"C{number % 10}" for number, kind in enumerate(series)}
    for kind in kinds:
        layers = sorted(series[kind])
        values = [series[kind][layer] for layer in layers]
        axes.plot(layers, [statistics.fmean(v) for v in values], ".-", color=colours[kind], label=kind, linewidth=1.3)
        if any(len(v) > 1 for v in values):
            low, high = [min(v) for v in values], [max(v) for v in values]
            axes.fill_between(layers, low, high, color=colours[kind], alpha=0.15, linewidth=0)
    if errors := {layer: value for layer, value in report.layer_errors.items() if math.isfinite(value)}:
        whole = sorted(errors)
        axes.plot(whole, [errors[layer] for layer in whole], color="black", linewidth=2.2, label="whole layer")
    _mark_warnings(report, axes)
    axes.set(xlabel="layer", ylabel="output SNR in dB (higher is better)", title=report.title or "Error of each layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(path, dpi=130)
    return path


def _collect_series(report: "Report") -> Series:
    series: Series = {}
    for record in report.records:
        if record.layer is not None and record.snr_db is not None and math.isfinite(record.snr_db):
            series.setdefault(record.kind, {}).setdefault(record.layer, []).append(record.snr_db)
    return series


def _mark_warnings(report: "Report", axes: Any) -> None:
    warned = [
        (record.layer, record.snr_db)
        for record in report.records
        if record.warning and record.layer is not None and record.snr_db is not None and math.isfinite(record.snr_db)
    ]
    if warned:
        ring = {"s": 90, "facecolors": "none", "edgecolors": "red", "linewidths": 1.4, "label": "with a warning"}
        axes.scatter([layer for layer, _ in warned], [value for _, value in warned], **ring)
