"""What does calibrating layer by layer cost, against the whole model at once and against nvidia-modelopt?

    python -m benchmarks calibration [--full]

    time      wall and CPU seconds of one process with two threads, contenders in turn, medians of rounds
    memory    the peak of bytes of live tensors besides the model itself, counted, in a run of its own
    result    held-out perplexity with the quantized weights, and how many of them equal ModelOpt's
    ranks     a sharded model on 2 ranks: gathers of each layer, and peak memory against what cannot be avoided

The targets are in CPU seconds, which other processes disturb less than wall time. ModelOpt's GPTQ takes some ten
seconds a layer on a CPU, so that task runs on the first three layers at most; without --full all sizes are smaller.
`benchmarks/calibration_sides.py` says what each side does and leaves behind. ModelOpt comes with the extra "bench".
"""

import contextlib
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.calibration_sides import ROOT, Job
from benchmarks.calibration_worker import QUIET, Worker
from benchmarks.report import at_most, with_spread
from benchmarks.timing import ratio

THREADS = 2
SIDES = ("layerwise", "at once", "modelopt")
CPU_TARGETS = {"nvfp4_max": 0.7, "fp8_gptq": 0.5}  # of ModelOpt's CPU seconds, at most
PEER = "modelopt"
STORED = "modelopt, stored"  # ModelOpt with the rounded values in the weights, where our side always puts them
TITLES = {"nvfp4_max": "NVFP4, Max", "fp8_gptq": "FP8, GPTQ"}
MIB = 1 << 20
STATISTICS = {"median": statistics.median, "min": min, "max": max}


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        repeats: rounds.
        sizes: task -> (decoder layers, batches of 256 tokens).
        eval_blocks: rows of 256 tokens for the held-out perplexity.
    """

    repeats: int
    sizes: dict[str, tuple[int, int]]
    eval_blocks: int


QUICK = Effort(3, {"nvfp4_max": (5, 8), "fp8_gptq": (1, 8)}, 6)  # four minutes
FULL = Effort(5, {"nvfp4_max": (30, 8), "fp8_gptq": (3, 8)}, 24)  # 9 to 16


def rounds(workers: dict[str, Worker], task: str, effort: Effort) -> dict[str, list[dict[str, Any]]]:
    """The answers of each side in each round, every round in another order, after a warm-up on one layer and batch."""
    answers: dict[str, list[dict[str, Any]]] = {side: [] for side in workers}
    for side, worker in workers.items():
        worker(job(task, side, (1, 1)))
    order, shuffle = list(workers), random.Random(0).shuffle
    for _ in range(effort.repeats):
        shuffle(order)
        for side in order:
            answers[side].append(workers[side](job(task, side, effort.sizes[task])))
    return answers


def job(task: Any, side: Any, sizes: tuple[int, int], **options: Any) -> Job:
    """A job on `sizes`, (layers, batches)."""
    return Job(task=task, side=side, layers=sizes[0], batches=sizes[1], **options)


def results(workers: dict[str, Worker], task: str, effort: Effort, directory: Path) -> dict[str, Any]:
    """Held-out perplexity of each side, and the share of weights that equal ModelOpt's except for the last bits.

    In NVFP4 k_proj, v_proj and up_proj differ: ours share a tensor-wide scale with the linears that take the same
    input, as inference engines want it; ModelOpt makes them share it only when it exports.
    """
    out: dict[str, Any] = {"perplexity": {}, "weights_equal_to_modelopt": {}}
    weights, sizes = {}, effort.sizes[task]
    for side, worker in workers.items():
        path = directory / f"{task} {side}.pt"
        options = {"measure": "result", "out": str(path), "eval_blocks": effort.eval_blocks}
        answer = worker(job(task, side, sizes, **options))
        out["perplexity"][side] = round(answer["perplexity"], 3)
        weights[side] = torch.load(path, mmap=True)
    quantized = [name for name in weights["modelopt"] if int(name.split(".")[2]) < sizes[0]]
    for side in ("layerwise", "at once"):
        equal = sum(
            weights[side][name].isclose(weights["modelopt"][name], rtol=1e-5, atol=0).sum().item() for name in quantized
        )
        total = sum(weights["modelopt"][name].numel() for name in quantized)
        out["weights_equal_to_modelopt"][side] = round(equal / total, 6)
    return out


def on_ranks(task: str, sizes: tuple[int, int], directory: Path) -> list[dict[str, Any]]:
    """The figures of both ranks."""
    out = directory / f"{task} ranks.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "benchmarks.calibration_ranks", str(out), task, *map(str, sizes)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **QUIET, "OMP_NUM_THREADS": "1"})
    figures: list[dict[str, Any]] = json.loads(out.read_text())
    return figures


def run(*, full: bool = False) -> dict[str, Any]:
    """All figures of both tasks."""
    effort = FULL if full else QUICK
    out: dict[str, Any] = {
        "threads": THREADS,
        "repeats": effort.repeats,
        "eval_blocks": effort.eval_blocks,
        "versions": {name: metadata.version(name) for name in ("nvidia-modelopt", "transformers")},
    }
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = {
            side: stack.enter_context(Worker(directory / f"{number}.log", threads=THREADS))
            for number, side in enumerate(SIDES)
        }
        for task, sizes in effort.sizes.items():
            print(f"  {task}: time ...", flush=True)
            answers = rounds(workers, task, effort)
            print(f"  {task}: memory, result, ranks ...", flush=True)
            peaks = {
                side: worker(job(task, side, sizes, measure="memory"))["peak_bytes"] for side, worker in workers.items()
            }
            out[task] = {
                "layers": sizes[0],
                "batches": sizes[1],
                "tokens": sizes[1] * Job.seq_len,
                **of_answers(answers),
                "peak_bytes": peaks,
                **results(workers, task, effort, directory),
                "ranks": on_ranks(task, sizes, directory),
            }
    out["targets"] = targets(out)
    return out


# -- figures ----------------------------------------------------------------------------------------------------------


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
    """Each target, its value, and whether it is met."""
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
