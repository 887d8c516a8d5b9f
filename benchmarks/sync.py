"""What does it take to bring the weights of two FSDP2 ranks into an engine: streams, files, one parameter at a time?

    python -m benchmarks sync            # a model of 0.1 GB in bf16
    python -m benchmarks sync --full     # and one of 2 GB

Two ranks, gloo, one thread each; the engine takes bytes at once, or as a link of 1 Gbit/s would (sync_rank.py). The
peer is what stacks do: `full_tensor()` of one parameter after the other, in bf16. All ways take turns in the same
processes. Counted besides: bytes for the engine, gathers, and the most bytes alive on the sending rank beyond the
shards.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from torch import multiprocessing

from benchmarks.report import at_most, with_spread
from benchmarks.sync_rank import BASE, measure
from benchmarks.timing import ratio

MBIT_S = 1000.0
SMALL = {"width": 1024, "layers": 6, "rounds": 5, "bucket_bytes": 4 * 2**20}
LARGE = {"width": 4096, "layers": 8, "rounds": 3, "bucket_bytes": 64 * 2**20}
MOST = {"mxfp8": 0.6, "nvfp4": 0.35}  # of bf16's bytes, and of its time on the link


def run(*, full: bool = False) -> dict[str, Any]:
    """Figures of each model, and targets."""
    sizes = {"small": SMALL, **({"large": LARGE} if full else {})}
    models = {name: _measured(options) for name, options in sizes.items()}
    targets: dict[str, Any] = {}
    for name, found in models.items():
        for recipe, most in MOST.items():
            way = f"stream, {recipe}"
            figures = found["figures"][way]
            told = found["ratios"]["link"][way]
            targets |= {
                f"{name}, {recipe}: bytes of bf16's": at_most(round(figures["of_bf16"], 4), most),
                f"{name}, {recipe}: time of bf16's on the link": at_most(
                    told["ratio"], most, f"rounds from {told['min']} to {told['max']}"
                ),
                f"{name}, {recipe}: gathers": at_most(figures["gathers"], found["groups"]),
            }
    return {"models": models, "mbit_s": MBIT_S, "targets": targets}


def _measured(options: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        arguments = (f"{folder}/store", str(out), {**options, "mbit_s": MBIT_S})
        multiprocessing.start_processes(measure, arguments, nprocs=2, start_method="spawn")
        found: dict[str, Any] = json.loads(out.read_text())
    bf16 = found["figures"][BASE]["sent"]
    for figures in found["figures"].values():
        figures["of_bf16"] = figures["sent"] / bf16
    seconds = found.pop("seconds")
    found["ratios"] = {
        label: {name: ratio(values, rounds[BASE]) for name, values in rounds.items()}
        for label, rounds in seconds.items()
    }
    found["groups"] = options["layers"]  # the root has no parameters of its own
    found["bf16_mb"] = round(bf16 / 1e6)
    print(f"  {found['bf16_mb']} MB: {found['ratios']['link']}", flush=True)
    return found


def markdown(results: dict[str, Any]) -> str:
    """A table for each model."""
    lines = []
    for found in results["models"].values():
        title = (
            f"A model of {found['bf16_mb']} MB in bf16 and {found['groups']} FSDP modules, 2 ranks on gloo, one thread "
            f"each. Times are ratios to {BASE}, median (least - greatest) of rounds in which all take turns; the link "
            f"has {results['mbit_s']:g} Mbit/s."
        )
        lines += [
            title,
            "",
            "| way | bytes of bf16's | gathers | peak MB | time, no limit | time, on the link |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for name, figures in found["figures"].items():
            times = (with_spread(found["ratios"][label][name]) for label in ("no limit", "link"))
            row = (name, f"{figures['of_bf16']:.3f}", str(figures["gathers"]), f"{figures['peak'] / 1e6:.1f}", *times)
            lines.append(f"| {' | '.join(row)} |")
        lines.append("")
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Bytes and times of all ways beside bf16's."""
    from matplotlib.figure import Figure

    found = results["models"]["small"]
    names = [name for name in found["figures"] if name != BASE]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    kinds = {
        "bytes": [found["figures"][name]["of_bf16"] for name in names],
        "time, no limit": [found["ratios"]["no limit"][name]["ratio"] for name in names],
        f"time, {results['mbit_s']:g} Mbit/s": [found["ratios"]["link"][name]["ratio"] for name in names],
    }
    for number, (kind, values) in enumerate(kinds.items()):
        axes.bar([place + number * 0.27 for place in range(len(names))], values, 0.25, label=kind)
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set_xticks([place + 0.27 for place in range(len(names))], names)
    axes.set_ylabel(f"{BASE} = 1")
    axes.legend()
    figure.savefig(path, dpi=150)
