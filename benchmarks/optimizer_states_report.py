"""Tables and a picture of what optimizer_states.py found.

Differences are taken seed by seed, from the contender with the same weights and masters and moments in fp32. With
d_1 .. d_n those of n seeds,   mean = sum d / n,   standard error = sqrt(sum (d - mean)^2 / (n - 1) / n).
"""

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.optimizer_contenders import table

BEST = "1"  # times the best rate
Runs = dict[str, dict[str, dict[str, Any]]]  # contender -> multiple of the rate -> seed -> run


def markdown(results: Mapping[str, Any]) -> str:
    """Everything that has been asked so far."""
    lines = ["# Optimizer states: quality against fp32", ""]
    for part in (_rates, _scratch, _small_rate, _finetune, _not_run):
        lines += part(results)
    return "\n".join(lines) + "\n"


def _rates(results: Mapping[str, Any]) -> list[str]:
    found = results.get("rates", {})
    if not found:
        return []
    lines = [
        "## Which rate",
        "",
        "fp32 weights with fp32 states, each seed.",
        "",
        "| rate | mean | seeds |",
        "|---:|---:|---|",
    ]
    for rate, by_seed in found.items():
        last = [run["last"] for run in by_seed.values()]
        mean = _loss(None if None in last else statistics.fmean(last))
        lines.append(f"| {rate} | {mean} | {', '.join(map(_loss, last))} |")
    return [*lines, ""]


def _scratch(results: Mapping[str, Any]) -> list[str]:
    runs: Runs = results.get("scratch", {})
    if not runs:
        return []
    multiples = sorted({multiple for by_rate in runs.values() for multiple in by_rate}, key=float)
    columns = ("spread", "minus fp32 states", "mean ± standard error")
    heads = [head for multiple in multiples for head in (f"loss, {multiple}x", *columns)]
    steps = results["settings"]["steps"]
    said = f"Nats a byte after {steps} steps; the spread is the largest less the smallest over seeds."
    lines = ["## From scratch", "", said, ""]
    lines += [f"| weights | states | bytes a weight | {' | '.join(heads)} |", f"|---|---|---:|{'---:|' * len(heads)}"]
    for name, row in table().items():
        if name in runs:
            cells = [cell for multiple in multiples for cell in _cells(runs, name, row.baseline, multiple)]
            lines.append(f"| {row.weights} | {row.states} | {row.bytes_per_weight:.3g} | {' | '.join(cells)} |")
    return [*lines, "", *_all_pairs(runs)]


def _all_pairs(runs: Runs) -> list[str]:
    """Of each kind of states, the differences of all weights, rates and seeds together."""
    gaps: dict[str, list[float]] = {}
    for name, row in table().items():
        for multiple in runs.get(name, {}):
            found = _gaps(runs, name, row.baseline, multiple)
            if found:
                gaps.setdefault(row.states, []).extend(found)
    if not gaps:
        return []
    lines = ["All weights, rates and seeds together, minus fp32 states:", ""]
    lines += ["| states | pairs of runs | above fp32 | mean ± standard error |", "|---|---:|---:|---:|"]
    lines += [
        f"| {states} | {len(each)} | {sum(gap > 0 for gap in each)} | {_mean_and_error(each)} |"
        for states, each in gaps.items()
    ]
    return [*lines, ""]


def _gaps(runs: Runs, name: str, baseline: str, multiple: str) -> list[float]:
    """Loss minus the baseline's, of each seed that both have ended."""
    if name == baseline:
        return []
    mine, theirs = runs[name][multiple], runs.get(baseline, {}).get(multiple, {})
    pairs = [(mine[seed]["last"], theirs[seed]["last"]) for seed in sorted(mine) if seed in theirs]
    return [own - other for own, other in pairs if own is not None and other is not None]


def _mean_and_error(gaps: list[float]) -> str:
    """One difference has no error, and is shown beside."""
    if len(gaps) < 2:
        return ""
    return f"{statistics.fmean(gaps):+.4f} ± {_error(gaps):.4f}"


def _error(values: list[float]) -> float:
    """The standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _cells(runs: Runs, name: str, baseline: str, multiple: str) -> list[str]:
    """Mean loss, its spread over seeds, the distance from the baseline of each seed, and its mean."""
    found = runs[name].get(multiple, {})
    last = [run["last"] for run in found.values()]
    if not last:
        return ["", "", "", ""]
    ended = [loss for loss in last if loss is not None]
    if len(ended) < len(last):
        return [f"{len(last) - len(ended)} of {len(last)} diverged", "", "", ""]
    gaps = _gaps(runs, name, baseline, multiple)
    spread = f"{max(ended) - min(ended):.4f}" if len(ended) > 1 else ""
    shown = ", ".join(f"{gap:+.4f}" for gap in gaps)
    return [f"{statistics.fmean(ended):.4f} ({len(ended)})", spread, shown, _mean_and_error(gaps)]


def _loss(loss: float | None) -> str:
    return "diverged" if loss is None else f"{loss:.4f}"


def _small_rate(results: Mapping[str, Any]) -> list[str]:
    found = results.get("small-rate", {})
    if not found:
        return []
    settings = results["settings"]
    lines = [f"## {settings['small_steps']} steps with a rate of {settings['small_rate']:g}", ""]
    lines += ["| weights | states | cosine | projection | codes that differ | codes that moved |"]
    lines += ["|---|---|---:|---:|---:|---:|"]
    for name, row in table().items():
        if name in found:
            own = found[name]
            shares = f"{own['codes_differ']:.3%} | {own['codes_moved']:.3%}"
            lines.append(f"| {row.weights} | {row.states} | {own['cosine']:.4f} | {own['projection']:.4f} | {shares} |")
    return [*lines, ""]


def _finetune(results: Mapping[str, Any]) -> list[str]:
    found = {row: results["finetune"][name] for name, row in table().items() if name in results.get("finetune", {})}
    if not found:
        return []
    lines = ["## SmolLM2-135M", "", "| weights | states | steps | seconds a step | the first |"]
    lines += ["|---|---|---:|---:|---:|"]
    for row, own in found.items():
        times = f"{own['step_seconds']:.2f} | {own['first_step_seconds']:.2f}"
        lines.append(f"| {row.weights} | {row.states} | {own['steps']} | {times} |")
    curves = {row: own["held_out"] for row, own in found.items() if own.get("held_out")}
    if not curves:
        return [*lines, ""]
    # a loss falls with the steps: curves are compared where each of them was looked at
    common = sorted(set.intersection(*(set(curve) for curve in curves.values())), key=int)
    lines += ["", "Held-out loss, nats a token:", ""]
    lines += [f"| weights | states | {' | '.join(f'step {step}' for step in common)} |"]
    lines += [f"|---|---|{'---:|' * len(common)}"]
    for row, curve in curves.items():
        lines.append(f"| {row.weights} | {row.states} | {' | '.join(_loss(curve[step]) for step in common)} |")
    return [*lines, ""]


def _not_run(results: Mapping[str, Any]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, reason in results.get("not_run", {}).items():
        reasons.setdefault(reason, []).append(name)
    return [f"Not run, since {reason}: {'; '.join(names)}." for reason, names in reasons.items()]


def draw(results: Mapping[str, Any], path: Path) -> None:
    """For each kind of weights, held-out loss less the baseline's against the step, at the best rate; means of seeds.

    Bars: a standard error to each side. Grey: how far single seeds of the baseline are from their mean.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    runs: Runs = {name: by[BEST] for name, by in results.get("scratch", {}).items() if BEST in by}
    rows = {name: row for name, row in table().items() if name in runs and row.baseline in runs}
    kinds = list(dict.fromkeys(row.weights for row in rows.values() if row.weights != "fp32"))
    if not kinds:
        return
    figure, axes = plt.subplots(2, len(kinds), figsize=(4.6 * len(kinds), 7.2), layout="constrained", squeeze=False)
    states = list(dict.fromkeys(row.states for row in rows.values() if row.weights != "fp32"))
    colours = {each: f"C{number % 10}" for number, each in enumerate(states)}
    for column, kind in enumerate(kinds):
        above, below = axes[0][column], axes[1][column]
        for name, row in rows.items():
            if row.weights != kind:
                continue
            style = {"color": "black" if name == row.baseline else colours[row.states], "label": row.states}
            above.plot(*_mean_curve(runs[name]), **style)
            if name == row.baseline:
                steps, around = _around_mean(runs[name])
                below.fill_between(steps, [-each for each in around], around, color="lightgrey")
            else:
                steps, means, errors = _mean_gap(runs[name], runs[row.baseline])
                below.errorbar(steps, means, errors, elinewidth=0.7, capsize=1.5, **style)
        above.set(title=f"{kind} weights, held-out loss", xlabel="step", ylabel="nats a byte")
        below.set(title="minus fp32 states, seed by seed", xlabel="step", ylabel="nats a byte")
        below.axhline(0, color="black", linewidth=1)
        for each in (above, below):
            each.grid(alpha=0.3)
    handles = {label: handle for row in axes[0] for handle, label in zip(*row.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize="small", frameon=False
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _curves(by_seed: Mapping[str, Any]) -> list[dict[str, float]]:
    return [
        {step: math.nan if loss is None else loss for step, loss in run["held_out"].items()} for run in by_seed.values()
    ]


def _mean_curve(by_seed: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    curves = _curves(by_seed)
    steps = [step for step in curves[0] if all(step in curve for curve in curves)]
    return [int(step) for step in steps], [statistics.fmean(curve[step] for curve in curves) for step in steps]


def _around_mean(by_seed: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """The largest distance of a seed's curve from the mean of them."""
    curves = _curves(by_seed)
    steps, means = _mean_curve(by_seed)
    far = [max(abs(curve[str(step)] - mean) for curve in curves) for step, mean in zip(steps, means, strict=True)]
    return steps, far


def _mean_gap(mine: Mapping[str, Any], baseline: Mapping[str, Any]) -> tuple[list[int], list[float], list[float]]:
    """Steps, and the mean over seeds that both have and its standard error."""
    pairs = list(
        zip(*(_curves({seed: by[seed] for seed in mine if seed in baseline}) for by in (mine, baseline)), strict=True)
    )
    if not pairs:
        return [], [], []
    steps = [step for step in pairs[0][0] if all(step in curve for pair in pairs for curve in pair)]
    gaps = [[own[step] - other[step] for own, other in pairs] for step in steps]
    return [int(step) for step in steps], [statistics.fmean(each) for each in gaps], [_error(each) for each in gaps]
