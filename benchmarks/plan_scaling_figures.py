"""The figures of benchmarks/plan_scaling.py: targets, a table and a picture."""

from pathlib import Path
from typing import Any

from benchmarks.model_shapes import MODELS
from benchmarks.report import at_most

TARGETS = {
    "local": ("one rank's plan: CPU seconds / stock's for bf16, worst", 1.5),
    "coordinator": ("the coordinator's plan: CPU seconds / stock's for bf16, worst", 2.0),
}


def _models(results: dict[str, Any]) -> dict[str, Any]:
    """Those that were measured."""
    return {model: results[model] for model in MODELS if model in results}


def targets(results: dict[str, Any]) -> dict[str, Any]:
    """The worst ratio of each kind, and whether it is within the target."""
    found = {
        "local": [
            (value, f"{name} {model}")
            for model, figures in _models(results).items()
            for name, value in figures["local"]["ratio"].items()
        ],
        "coordinator": [
            (row["ratio"], f"{name} {model} on {world} ranks")
            for model, figures in _models(results).items()
            for world, rows in figures["coordinator"].items()
            if world != "fitted"
            for name, row in rows.items()
        ],
    }
    return {name: at_most(max(found[kind])[0], most, max(found[kind])[1]) for kind, (name, most) in TARGETS.items()}


def markdown(results: dict[str, Any]) -> str:
    """One row for each model, world and format."""
    lines = [
        "Planning a save of a quantized model: CPU seconds (gather: bytes) over those of the same model in bf16.",
        "",
        "| model | ranks | format | local plan | gather | coordinator, gc off | without validation | gc on / off |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, figures in _models(results).items():
        for world, rows in figures["coordinator"].items():
            if world == "fitted":
                continue
            dense = rows["dense"]
            for name, row in rows.items():
                local = figures["local"]["ratio"][name]
                bare = (row["gc_off_s"] - row["validate_s"]) / (dense["gc_off_s"] - dense["validate_s"])
                collector = f"{row['gc_on_s'] / row['gc_off_s']:.1f}" if "gc_on_s" in row else "-"
                lines.append(
                    f"| {model} | {world} | {name} | {local} | {row['gather_ratio']} | {row['ratio']} | {bare:.2f} | "
                    f"{collector} |"
                )
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """A panel a model: the coordinator's seconds over ranks."""
    from matplotlib.figure import Figure

    models = _models(results)
    figure = Figure(figsize=(5 * len(models), 4), layout="constrained")
    grid = figure.subplots(1, len(models), squeeze=False)
    for axes, (model, figures) in zip(grid[0], models.items(), strict=True):
        worlds = sorted(int(world) for world in figures["coordinator"] if world != "fitted")
        for name in figures["coordinator"][str(worlds[0])]:
            seconds = [figures["coordinator"][str(world)][name]["gc_off_s"] for world in worlds]
            axes.plot(worlds, seconds, marker="o", label="bf16, stock" if name == "dense" else name)
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="CPU seconds of the coordinator")
        axes.set_title(f"{model}: {figures['entries']} entries")
        axes.minorticks_off()
        axes.set_xticks(worlds, list(map(str, worlds)))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle("Planning a save, quantized and in bf16")
    figure.savefig(path, dpi=110)
