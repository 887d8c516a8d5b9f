"""The figures of benchmarks/checkpoints.py: ratios of what was timed, targets, tables and a picture."""

import statistics
from pathlib import Path
from typing import Any

from benchmarks.report import at_most, with_spread
from benchmarks.timing import ratio

QUANTIZED = ("mxfp8", "nvfp4")
FORMATS = ("bf16", *QUANTIZED)
# (name of the ratio, what is divided, by what, for which formats); {} stands for the format
RATIOS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("save {} / raw write", "save {}", "raw write {}", FORMATS),
    ("atomic save {} / raw write", "atomic save {}", "raw write {}", FORMATS),
    ("default save {} / raw write", "default save {}", "raw write {}", FORMATS),
    ("save {} / with one thread", "save {}", "one thread save {}", ("mxfp8",)),
    ("save {} / save bf16", "save {}", "save bf16", QUANTIZED),
    ("default save {} / default save bf16", "default save {}", "default save bf16", QUANTIZED),
    ("save {} / dequantize, save", "save layers {}", "dequantize, save layers {}", QUANTIZED),
    ("save {} / without checksums", "save {}", "unchecked save {}", QUANTIZED),
    ("planning / save {}", "plan save {}", "save {}", FORMATS),
    ("async block {} / copy loop", "async {}", "copy loop {}", FORMATS),
    ("async block {} / bf16", "async {}", "async bf16", QUANTIZED),
    ("cold load {} / cold raw read", "cold load {}", "cold raw read {}", FORMATS),
    ("cold safe load {} / cold raw read", "cold safe load {}", "cold raw read {}", QUANTIZED),
    ("cold verified safe load {} / cold raw read", "cold verified safe load {}", "cold raw read {}", QUANTIZED),
    ("cold load {} / cold load bf16", "cold load {}", "cold load bf16", QUANTIZED),
    ("warm load {} / warm raw read", "warm load {}", "warm raw read {}", FORMATS),
    ("warm safe load {} / warm raw read", "warm safe load {}", "warm raw read {}", QUANTIZED),
    ("warm verified safe load {} / warm safe load", "warm verified safe load {}", "warm safe load {}", QUANTIZED),
    ("warm load {} / warm load bf16", "warm load {}", "warm load bf16", QUANTIZED),
    ("planning / warm load {}", "plan load {}", "warm load {}", FORMATS),
    ("convert to {} / load, quantize", "convert to {}", "load and quantize {}", QUANTIZED),
)
# what an entry costs in the first, beyond the second
BEYOND = (
    ("save", "raw write"),
    ("atomic save", "raw write"),
    ("cold load", "cold raw read"),
    ("cold safe load", "cold raw read"),
    ("warm load", "warm raw read"),
    ("warm safe load", "warm raw read"),
)
MODELS = ("smollm2_135m", "synthetic")
BYTES = {"mxfp8": 0.53, "nvfp4": 0.30}  # of bf16, at most
WHY_BYTES = "what stays bf16 (an embedding, norms) counts in a directory, too"
# models, ratio, its greatest value. Stock's writer runs torch.save for each entry, and does not get near its limit with
# small tensors: AtomicFileSystemWriter has one that they can be held to. Loads of many small tensors have a wider one.
RATIO_TARGETS: tuple[tuple[tuple[str, ...], str, float], ...] = (
    *((MODELS, f"save {form} / raw write", 1.2) for form in QUANTIZED),
    *((MODELS, f"atomic save {form} / raw write", 1.5) for form in QUANTIZED),
    *((MODELS, f"cold load {form} / cold raw read", 1.3) for form in QUANTIZED),
    *((MODELS[:1], f"cold safe load {form} / cold raw read", 1.8) for form in QUANTIZED),
    *((MODELS[1:], f"cold safe load {form} / cold raw read", 1.3) for form in QUANTIZED),
    (("synthetic",), "save mxfp8 / save bf16", 0.65),
    (("synthetic",), "save nvfp4 / save bf16", 0.45),
)


def of_seconds(seconds: dict[str, list[float]], entries: dict[str, int]) -> dict[str, Any]:
    """Median, least and greatest seconds of each contender, all ratios between them, and what an entry costs."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "entries": entries,
        "ms_per_entry_beyond_raw": {
            f"{mine} {form}": round((medians[f"{mine} {form}"] - medians[f"{raw} {form}"]) / count * 1e3, 3)
            for mine, raw in BEYOND
            for form, count in entries.items()
            if f"{mine} {form}" in medians
        },
        "seconds": {
            name: {"median": round(medians[name], 4), "min": round(min(values), 4), "max": round(max(values), 4)}
            for name, values in seconds.items()
        },
        "ratios": {
            name.format(form): ratio(seconds[mine.format(form)], seconds[other.format(form)])
            for name, mine, other, forms in RATIOS
            for form in forms
            if mine.format(form) in seconds
        },
    }


def targets(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each target, its value, and whether it is met."""
    rows: list[tuple[str, float, float, str]] = [
        (f"{model}: bytes of {form}, {what.replace('_', ' ')} / bf16", value, BYTES[form], WHY_BYTES)
        for model in MODELS
        for form in QUANTIZED
        for what, value in results[model]["bytes_over_bf16"][form].items()
    ]
    rows += [
        (f"{model}: {key}", results[model]["ratios"][key]["ratio"], limit, _why(key, model, results[model]))
        for models, key, limit in RATIO_TARGETS
        for model in models
    ]
    return {name: at_most(value, limit, why) for name, value, limit, why in rows}


def _why(key: str, model: str, figures: dict[str, Any]) -> str:
    """The spread and, where tensors are small, what an entry costs."""
    cell = figures["ratios"][key]
    small = figures["ms_per_entry_beyond_raw"] if model == MODELS[0] else {}
    entries = "".join(
        f"; {value:.2f} ms an entry beyond raw" for name, value in small.items() if key.startswith(f"{name} /")
    )
    return f"rounds from {cell['min']:.2f} to {cell['max']:.2f}{entries}"


def markdown(results: dict[str, Any]) -> str:
    """Sizes, and every ratio of both models with its spread."""
    lines = ["Ratios of medians (least - greatest within one round), and what an entry costs beyond raw bytes.", ""]
    for model in MODELS:
        sizes = ", ".join(f"{form} {size} GB" for form, size in results[model]["gb"].items())
        lines += [f"{model}: {results[model]['weights']} quantized weights; {sizes}.", ""]
    lines += [f"| | {' | '.join(MODELS)} |", "|---|---:|---:|"]
    for name in results[MODELS[0]]["ratios"]:
        cells = [results[model]["ratios"].get(name) for model in MODELS]
        lines.append(f"| {name} | {' | '.join(map(with_spread, cells))} |")
    for name in results[MODELS[0]]["ms_per_entry_beyond_raw"]:
        cost = results[MODELS[0]]["ms_per_entry_beyond_raw"][name]  # for large tensors, bytes take the time
        lines.append(f"| {name}: ms an entry beyond raw | {cost:.2f} | - |")
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """A bar a ratio and model, on a logarithmic axis, with its spread; ticks where a target lies."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in results[MODELS[0]]["ratios"] if not name.startswith("planning")]
    figure, axes = plt.subplots(figsize=(10, 0.34 * len(names) + 1.2), layout="constrained")
    limits = {(model, key): limit for models, key, limit in RATIO_TARGETS for model in models}
    for number, model in enumerate(MODELS):
        ratios = results[model]["ratios"]
        shown = [(row, name) for row, name in enumerate(names) if name in ratios]
        at = [row + (number - 0.5) * 0.38 for row, _ in shown]
        values = [ratios[name]["ratio"] for _, name in shown]
        # the ratio of medians may lie outside the range of the ratios within rounds
        below = [max(value - ratios[name]["min"], 0) for value, (_, name) in zip(values, shown, strict=True)]
        above = [max(ratios[name]["max"] - value, 0) for value, (_, name) in zip(values, shown, strict=True)]
        axes.barh(at, values, 0.36, xerr=(below, above), label=model, color=f"C{number}", error_kw={"elinewidth": 0.8})
        for y, (_, name) in zip(at, shown, strict=True):
            if (model, name) in limits:
                axes.plot([limits[model, name]] * 2, [y - 0.18, y + 0.18], color="black", linewidth=2)
    axes.set(yticks=range(len(names)), yticklabels=names, xscale="log", title="Checkpoints: ratios of medians")
    axes.set_xlabel("ratio, with its spread within rounds; black ticks: targets")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
