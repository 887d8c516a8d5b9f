"""The figures of benchmarks/calibration.py: medians and ratios of what was timed, targets, tables and a picture."""

import statistics
from pathlib import Path
from typing import Any

from benchmarks.report import at_most, with_spread
from benchmarks.timing import ratio

CPU_TARGETS = {"nvfp4_max": 0.7, "fp8_gptq": 0.5}  # of ModelOpt's CPU seconds, at most
PEER = "modelopt"
STORED = "modelopt, stored"  # with the rounded values in the weights, which ours always has
TITLES = {"nvfp4_max": "NVFP4, Max", "fp8_gptq": "FP8, GPTQ"}
MIB = 1 << 20
STATISTICS = {"median": statistics.median, "min": min, "max": max}


def of_answers(answers: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Median, least and greatest seconds of each side by both clocks, and the ratios of ours to the others."""
    out: dict[str, Any] = {"seconds": {}, "ratios": {}}
    for clock in ("wall", "cpu"):
        seconds = {side: [answer["calibrate"][clock] for answer in rounds] for side, rounds in answers.items()}
        seconds[STORED] = [answer["calibrate"][clock] + answer["store"][clock] for answer in answers[PEER]]
        out["seconds"][clock] = {
            side: {name: round(of(values), 3) for name, of in STATISTICS.items()} for side, values in seconds.items()
        }
        mine = seconds["layerwise"]
        out["ratios"][clock] = {
            f"layerwise / {side}": ratio(mine, values) for side, values in seconds.items() if side != "layerwise"
        }
    return out


def targets(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was aimed at, what came out, and whether that is met."""
    rows: list[tuple[str, float, float, str]] = []
    for task, limit in CPU_TARGETS.items():
        figures = results[task]
        cpu = figures["ratios"]["cpu"][f"layerwise / {PEER}"]
        layers = [calls for rank in figures["ranks"] for name, calls in rank["gathers"].items() if name != "root"]
        rows += [
            (
                f"{TITLES[task]}: CPU seconds / ModelOpt's",
                cpu["ratio"],
                limit,
                f"rounds from {cpu['min']:.2f} to {cpu['max']:.2f}; ModelOpt stores no quantized bytes",
            ),
            (f"{TITLES[task]}: all-gathers of a layer, 2 ranks, most", max(layers), 1, "a layer is gathered again"),
            (
                f"{TITLES[task]}: peak of tensors / what cannot be avoided, 2 ranks",
                max(rank["peak_over_unavoidable"] for rank in figures["ranks"]),
                1.0,
                "the excess is not attributed to any tensor",
            ),
        ]
    return {name: at_most(value, limit, why) for name, value, limit, why in rows}


def markdown(results: dict[str, Any]) -> str:
    """A table a task: seconds, our CPU seconds over theirs, memory, perplexity; a line about ranks."""
    lines = [f"Calibrating SmolLM2-135M, {results['threads']} threads: medians (least - greatest)."]
    for task, title in TITLES.items():
        figures = results[task]
        lines += [
            "",
            f"{title}: {figures['layers']} layers, {figures['tokens']} tokens",
            "",
            "| side | CPU seconds | wall seconds | ours / its CPU seconds | peak MiB beside the model | perplexity |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for side, cpu in figures["seconds"]["cpu"].items():
            wall, peak = figures["seconds"]["wall"][side], figures["peak_bytes"].get(side)
            cells = [f"{clock['median']:.2f} ({clock['min']:.2f} - {clock['max']:.2f})" for clock in (cpu, wall)]
            cells.append(with_spread(figures["ratios"]["cpu"].get(f"layerwise / {side}")))
            cells.append(f"{peak / MIB:.1f}" if peak else "-")
            cells.append(str(figures["perplexity"].get(side, "-")))
            lines.append(f"| {side} | {' | '.join(cells)} |")
        shares = ", ".join(f"{side} {share:.2%}" for side, share in figures["weights_equal_to_modelopt"].items())
        lines += ["", f"Weights equal to ModelOpt's: {shares}."]
        for number, rank in enumerate(figures["ranks"]):
            parts = ", ".join(f"{name} {size / MIB:.1f}" for name, size in rank["bytes"].items())
            gathers = sorted({calls for name, calls in rank["gathers"].items() if name != "root"})
            lines.append(
                f"Rank {number} of 2: {rank['batches']} batches, gathers of a layer {gathers}, of the root "
                f"{rank['gathers']['root']}; peak {rank['peak_bytes'] / MIB:.1f} MiB (in MiB: {parts})."
            )
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """A row a task: CPU seconds with their spread on the left, peak memory on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.2 + 1.9 * len(TITLES)), layout="constrained")
    grid = figure.subplots(len(TITLES), 2, squeeze=False)
    colours = {"layerwise": "C0", "at once": "C9", PEER: "C1", STORED: "C3"}
    for (left, right), task in zip(grid, TITLES, strict=True):
        figures = results[task]
        seconds = figures["seconds"]["cpu"]
        for row, (side, value) in enumerate(seconds.items()):
            spread = [[value["median"] - value["min"]], [value["max"] - value["median"]]]
            left.barh(row, value["median"], 0.7, xerr=spread, color=colours[side], error_kw={"elinewidth": 0.8})
        limit = CPU_TARGETS[task] * seconds[PEER]["median"]
        left.plot([limit, limit], [-0.42, 0.42], color="black", linewidth=2)
        left.set(yticks=range(len(seconds)), yticklabels=list(seconds), xlabel="CPU seconds; black tick: target")
        left.set_title(f"{TITLES[task]}, {figures['layers']} layers, {figures['tokens']} tokens", loc="left")
        for row, side in enumerate(seconds):
            if peak := figures["peak_bytes"].get(side):
                right.barh(row, peak / MIB, 0.7, color=colours[side])
                right.annotate(f" {peak / MIB:.0f}", (peak / MIB, row), va="center")
        right.set(yticks=range(len(seconds)), yticklabels=[], xlabel="peak MiB of tensors beside the model")
        right.margins(x=0.12)
        for axes in (left, right):
            axes.invert_yaxis()
            axes.grid(alpha=0.3, axis="x")
            axes.set_axisbelow(True)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=120)
