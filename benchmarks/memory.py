"""How many bytes a parameter does training hold: between steps, with gradients, and at the peak of an optimizer step?

    contenders   memory_contenders.py; each in a process of its own (memory_process.py)
    steps        memory_step.py: a block of Llama's linears, an embedding and norms; the second step, whose state exists
    shares       "linears": embedding and norms are frozen, and not counted; "model": everything is trained
    measured     what torch's CPU allocator hands out (allocations.py), not what formulas say; what is alive at rest is
                 told apart by the storages of weights, masters, moments and gradients. States in host memory are
                 counted apart, so that the other figures are those of the device, which the CPU stands for
    checked      by the pages that the process has in memory at the same moments, with a malloc that gives back at once

The peak is a step's, not that of backward, whose activations depend on the tokens. Temporaries are given in MiB, too:
those of all weights grow with the model, those of one weight or of one chunk do not. At length, a block is as wide as
those of Llama-3.2-1B, and temporaries are also measured with twice the blocks.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.allocations import RETURNED
from benchmarks.memory_contenders import CONTENDERS
from benchmarks.memory_process import FULL, QUICK
from benchmarks.memory_step import PARTS
from benchmarks.report import at_most

ROOT = Path(__file__).resolve().parents[1]
WHEN = ("rest", "with gradients", "peak")  # of a step
LIMIT = 900  # seconds for one contender
OFF = 0.05  # of the peak, between allocator and pages
TWICE = "linears of twice the blocks"
TITLES = {"weights": "weights and scales", "other": "other, at rest", "temporaries": "temporaries of the step"}
COLOURS = {"weights": "C0", "masters": "C1", "moments": "C2", "gradients": "C4", "other": "C7", "temporaries": "C3"}


def run(*, full: bool = False) -> dict[str, Any]:
    """All contenders that can be asked here."""
    found: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for name, contender in CONTENDERS.items():
        if why := contender.missing() or ("asked with --full alone" if contender.at_length and not full else ""):
            skipped[name] = why
            continue
        print(f"  {name} ...", flush=True)
        try:
            found[name] = _asked(name, full=full)
        except RuntimeError as error:
            if not contender.library:  # ours and torch's have to run
                raise
            skipped[name] = str(error)
    size = FULL if full else QUICK
    return {"size": vars(size), "contenders": found, "skipped": skipped, "targets": _targets(found)}


def _asked(name: str, *, full: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.memory_process", name, *(["--full"] if full else [])]
    environment = {**os.environ, **RETURNED}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name} was stopped after {LIMIT} s") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RuntimeError(f"{name} ended with {done.returncode}: {last[0]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def _targets(found: dict[str, Any]) -> dict[str, Any]:
    targets = {}
    for name, of in found.items():
        model = of["model"]
        if "process" in of:
            off = abs(of["process"]["peak"] / model["peak"] - 1)
            told = f"pages: {of['process']['peak']:.2f}, allocator: {model['peak']:.2f} bytes a parameter"
            targets[f"peak by pages, off the allocator's, {name}"] = at_most(round(off, 4), OFF, told)
        unknown = abs(model["at the peak"]["other"])
        targets[f"bytes a parameter that no one owns at rest, {name}"] = at_most(unknown, 0.01, "not told apart")
        targets[f"bytes that a step leaves, {name}"] = at_most(model["grown by a step"], 0, "each step leaves some")
    return targets


def markdown(results: dict[str, Any]) -> str:
    """A table for each share, and who was not asked."""
    size, found = results["size"], results["contenders"]
    lines = [
        f"Bytes a parameter, by torch's CPU allocator, in the second step of {size['layers']} block of hidden",
        f"{size['hidden']} and {size['inner']} with an embedding of {size['vocabulary']} tokens.",
        "",
        *_of_linears(found),
        "",
        "The whole model: embedding and norms are trained, too, and are bf16 (fp32 in the first rows). Pages: the same",
        "peak as the process has it in memory.",
        "",
        "| contender | at rest | with gradients | peak | peak, pages |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, of in found.items():
        pages = f"{of['process']['peak']:.2f}" if "process" in of else "-"
        cells = [*(f"{of['model'][moment]:.2f}" for moment in WHEN), pages]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if results["skipped"]:
        reasons: dict[str, list[str]] = {}
        for name, why in results["skipped"].items():
            reasons.setdefault(why, []).append(name)
        lines += ["", "Not asked:", "", *(f"* {why}: {'; '.join(names)}" for why, names in reasons.items())]
    return "\n".join(lines)


def _of_linears(found: dict[str, Any]) -> list[str]:
    deeper = any(TWICE in of for of in found.values())
    hosted = any(of["linears"].get("host") for of in found.values())
    columns = ["linears alone", "at rest", "with gradients", "peak", *PARTS, "temporaries, MiB"]
    if deeper:
        columns.append("twice the blocks, MiB")
    if hosted:
        columns.append("in host memory")
    lines = [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    for name, of in found.items():
        linears = of["linears"]
        cells = [f"{linears[moment]:.2f}" for moment in WHEN]
        cells += [f"{linears['at the peak'][part]:.2f}" for part in PARTS]
        cells.append(f"{_mib(linears):.0f}")
        if deeper:
            cells.append(f"{_mib(of[TWICE]):.0f}")
        if hosted:
            cells.append(f"{linears.get('host', 0.0):.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _mib(of: dict[str, Any]) -> float:
    """Temporaries of a step."""
    mib: float = of["at the peak"]["temporaries"] * of["parameters"] / 2**20
    return mib


def draw(results: dict[str, Any], path: Path) -> None:
    """What a step's peak is made of, a bar for each contender, once for each share."""
    from matplotlib.figure import Figure

    found = results["contenders"]
    shares = {"linears": "linear weights alone", "model": "whole model"}
    figure = Figure(figsize=(14, 1.4 + 0.33 * len(found)), layout="constrained")
    axes = figure.subplots(1, len(shares), sharey=True)
    for axis, (share, title) in zip(axes, shares.items(), strict=True):
        left = dict.fromkeys(found, 0.0)
        for part in PARTS:
            widths = {name: max(of[share]["at the peak"][part], 0.0) for name, of in found.items()}
            starts, names = [left[name] for name in found], list(found)
            axis.barh(names, list(widths.values()), left=starts, color=COLOURS[part], label=TITLES.get(part, part))
            left = {name: left[name] + widths[name] for name in found}
        for name, of in found.items():
            axis.text(left[name], name, f" {of[share]['rest']:.2f} / {of[share]['peak']:.2f}", va="center", fontsize=8)
        if share == "model":
            pages = {name: of["process"]["peak"] for name, of in found.items() if "process" in of}
            axis.scatter(list(pages.values()), list(pages), color="black", s=12, zorder=3, label="peak by the pages")
        axis.set(title=f"{title} (at rest / peak)", xlabel="bytes a parameter", xlim=(0, max(left.values()) * 1.2))
        axis.grid(alpha=0.3, axis="x")
        axis.set_axisbelow(True)
    axes[0].invert_yaxis()
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize="small")
    figure.suptitle("What an optimizer step holds at its peak")
    figure.savefig(path, dpi=110)
