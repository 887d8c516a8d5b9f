"""The figures of benchmarks/gather.py: predicted bytes and times, the bandwidth at which two curves meet, a picture."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gather_link import WIRE

BF16 = 2.0
STORAGES = ("quantized", "high_precision")
TITLES = {
    "quantized": 'storage="quantized", fp32 masters\n(bf16 with the same MasterWeightOptimizer = 1)',
    "high_precision": 'storage="high_precision", torch\'s AdamW\n(bf16 with the same AdamW = 1)',
}
COLOURS = {"float8-row": "C0", "mxfp8": "C1", "nvfp4": "C2"}


def gathered_per_weight(recipe: str, width: int) -> float:
    """Bytes an element that an all-gather sends: payload and scales, by the definition of the format.

    The tensor-wide scale of NVFP4, 4 bytes a shard, is left to `predicted_bytes`.
    """
    return {"bf16": BF16, "float8-row": 1 + 4 / width, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}[recipe]


def predicted_bytes(recipe: str, width: int, layers: int) -> dict[str, float]:
    """What a rank of two receives in one step: half of every weight, for the forward and again for the backward.

    A reduce-scatter needs half of every bf16 gradient, too. gloo makes an all-reduce of it, which takes twice that.
    """
    half = layers * width * width / 2
    wide = 4 * layers if recipe == "nvfp4" else 0
    gather = 2 * (half * gathered_per_weight(recipe, width) + wide)
    return {"gather": gather, "reduce": 2 * half * BF16, "needed": gather + half * BF16}


def seconds_at(row: dict[str, float], gather_s: float, reduce_s: float | None = None) -> float:
    """A step of `row` where all-gathers and gradients come with so many bytes a second: nothing overlaps on gloo."""
    return row["own_seconds"] + WIRE * (row["gather"] / gather_s + row["reduce"] / (reduce_s or gather_s))


def meets(mine: dict[str, float], peer: dict[str, float]) -> float | None:
    """Bytes a second below which the first of two is the faster one; None: at any bandwidth."""
    saved = peer["gather"] + peer["reduce"] - mine["gather"] - mine["reduce"]
    more = mine["own_seconds"] - peer["own_seconds"]
    return None if more <= 0 else WIRE * saved / more


def crossing(bandwidths: Sequence[float], ratios: Sequence[float]) -> tuple[float | None, str]:
    """The bandwidth below which all ratios are under 1, by interpolation in its logarithm, and that in words."""
    points = sorted(zip(bandwidths, ratios, strict=True))
    slower = next((number for number, (_, value) in enumerate(points) if value >= 1), None)
    if slower is None:
        return None, "faster at every bandwidth measured"
    if slower == 0:
        return None, "not faster at any bandwidth measured"
    (low, below), (high, above) = points[slower - 1], points[slower]
    share = (1 - below) / (above - below)
    found = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return round(found), f"faster below {found:.0f} Mbit/s"


def targets(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Copies a side; the bytes are held against the formats."""
    rows = [figures for gathers in results["copies"].values() for figures in gathers.values()]
    found = {
        "copies of a payload byte before the collective": max(row["copy_in"] + row["hooks"] for row in rows),
        "copies of a payload byte after the collective": max(row["copy_out"] for row in rows),
    }
    out: dict[str, dict[str, Any]] = {
        name: {"value": value, "target": 1.0, "met": value <= 1.0, "why": "" if value <= 1.0 else "the hooks copy, too"}
        for name, value in found.items()
    }
    off = max(abs(row["given_over_predicted"] - 1) for row in results["bytes"].values())
    name = "bytes given to collectives, distance from the formats'"
    out[name] = {"value": off, "target": 0.0, "met": off == 0, "why": "" if off == 0 else "see the table of bytes"}
    return out


def markdown(results: dict[str, Any]) -> str:
    """Tables of bytes, copies and, where there was a slow link, of ratios over bandwidth."""
    model = results["model"]
    title = (
        f"One FSDP2 step of {model['layers']} Linear layers {model['width']} x {model['width']}, {model['tokens']} "
        "tokens, 2 ranks on gloo, one thread each. Times are ratios to bf16 FSDP2 with the same optimizer, median "
        "(least - greatest) of rounds in which all contenders take turns."
    )
    lines = [
        title,
        "",
        *_table_of_bytes(results["bytes"]),
        "",
        *_table_of_copies(results["copies"]),
        "",
    ]
    if "skipped" in results["link"]:
        lines += [f"No slow link: {results['link']['skipped']}.", ""]
    return "\n".join([*lines, *_table_of_ratios(results)])


def _table_of_bytes(figures: dict[str, Any]) -> list[str]:
    heads = (
        "a rank of two, in a step",
        "gathered, bytes a weight",
        "of bf16's",
        "given to collectives / by format",
        "TCP payload / by format",
        "gathers and gradients, of bf16's",
        "with a true reduce-scatter",
    )
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for name, row in figures.items():
        wire = row["received_over_predicted"]
        cells = (
            name,
            f"{row['gather_per_weight']:.3f}",
            f"{row['gather_over_bf16']:.3f}",
            f"{row['given_over_predicted']:.4f}",
            "-" if wire is None else f"{wire:.4f}",
            f"{row['all_over_bf16']:.3f}",
            f"{row['needed_over_bf16']:.3f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _table_of_copies(figures: dict[str, Any]) -> list[str]:
    lines = ["| writes of each payload byte | FSDP2's copy-in | FSDP2's copy-out | ours |", "|---|---:|---:|---:|"]
    for name, gathers in figures.items():
        same = gathers["first"] == gathers["later"]
        rows = {"every gather": gathers["first"]} if same else gathers
        for when, row in rows.items():
            lines.append(f"| {name}, {when} | {row['copy_in']:g} | {row['copy_out']:g} | {row['hooks']:g} |")
    return lines


def _table_of_ratios(results: dict[str, Any]) -> list[str]:
    curve = results["curve"]
    names = list(curve[0]["ratios"])
    heads = [f"{point['mbit_s']:g} Mbit/s" if point["mbit_s"] else "no limit" for point in curve]
    reached = [f"{(row := point['reached_mbit_s'])['gather']:.0f} / {row['reduce']:.0f}" for point in curve]
    lines = [
        f"| time of a step / bf16's | {' | '.join(heads)} | pays below, Mbit/s | predicted |",
        f"|---|{'---:|' * (len(heads) + 2)}",
        f"| a bare all-gather / reduce-scatter reaches | {' | '.join(reached)} | | |",
    ]
    for name in names:
        cells = [
            f"{(row := point['ratios'][name])['ratio']:.2f} ({row['min']:.2f} - {row['max']:.2f})" for point in curve
        ]
        pays = results["pays_below"].get(name, {"measured": "-", "predicted": "-"})
        pays = {key: "any" if value is None and key == "predicted" else value for key, value in pays.items()}
        if pays["measured"] is None:
            pays["measured"] = pays["words"]
        lines.append(f"| {name} | {' | '.join(cells)} | {pays['measured']} | {pays['predicted']} |")
        if len(curve) > 1:
            cells = [f"{point['predicted'][name]:.2f}" for point in curve[1:]]
            lines.append(f"| predicted from the limit | | {' | '.join(cells)} | | |")
    return lines


def draw(results: dict[str, Any], path: Path) -> None:
    """A panel a storage: the ratio of step times over bandwidth, a line a recipe; the prediction is dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    curve = results["curve"]
    at = positions(curve)
    for axes, storage in zip(panels, STORAGES, strict=True):
        for recipe, colour in COLOURS.items():
            name = f"{recipe}/{storage}"
            rows = [point["ratios"][name] for point in curve]
            middle = [row["ratio"] for row in rows]
            spread = [
                [max(0.0, row["ratio"] - row["min"]) for row in rows],
                [max(0.0, row["max"] - row["ratio"]) for row in rows],
            ]
            label = recipe if len(curve) == 1 else f"{recipe}: {results['pays_below'][name]['words']}"
            axes.errorbar(at, middle, spread, color=colour, marker="o", capsize=3, elinewidth=0.8, label=label)
            if results["model_of_time"]:
                dense = [at_ * 1.0 for at_ in _between(min(at), max(at))]
                axes.plot(dense, [_predicted(results, name, mbit_s) for mbit_s in dense], "--", color=colour, alpha=0.7)
        axes.axhline(1, color="black", linewidth=1)
        axes.set(xscale="log", title=TITLES[storage], xlabel="limit of the cable between the ranks, Mbit/s each way")
        ticks = [round(value) for value in at]
        axes.set_xticks(ticks, [f"{tick}\nno limit" if tick == ticks[0] else str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(
            loc="upper left" if len(curve) > 1 else "upper right",
            title="bars: least and greatest round; dashed: predicted",
        )
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].set_ylabel("time of a step / bf16's   (below 1: faster than bf16)")
    figure.suptitle(
        "Below which bandwidth does a compressed all-gather make an FSDP2 step faster? (gloo, 2 ranks, CPU)"
    )
    figure.savefig(path, dpi=120)


def _between(low: float, high: float, count: int = 60) -> list[float]:
    return [low * (high / low) ** (step / (count - 1)) for step in range(count)]


def positions(curve: Sequence[dict[str, Any]]) -> list[float]:
    """Mbit/s of each point: the limit, or what a bare all-gather reaches without one."""
    return [point["mbit_s"] or point["reached_mbit_s"]["gather"] for point in curve]


def _predicted(results: dict[str, Any], name: str, mbit_s: float) -> float:
    mine, its = (results["model_of_time"][one] for one in (name, results["peers"][name]))
    return seconds_at(mine, mbit_s * 1e6 / 8) / seconds_at(its, mbit_s * 1e6 / 8)


def prediction_errors(curve: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Measured over predicted ratios, less 1, at each limit: the median, and the worst and whose it is.

    Of the prediction from the limit alone, and of that from what bare collectives reached under it.
    """
    out: dict[str, Any] = {}
    for point in curve:
        for kind in ("predicted", "explained") if point["mbit_s"] else ():
            errors = {name: row["ratio"] / point[kind][name] - 1 for name, row in point["ratios"].items()}
            worst = max(errors, key=lambda name: abs(errors[name]))
            row = {
                "median": round(statistics.median(errors.values()), 3),
                "worst": round(errors[worst], 3),
                "of": worst,
            }
            out.setdefault(kind, {})[f"{point['mbit_s']:g}"] = row
    return out
