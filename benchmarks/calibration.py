"""What does calibrating layer by layer cost, against the whole model at once and against nvidia-modelopt?

    python -m benchmarks calibration [--full]

    time      wall and CPU seconds of one process with two threads, contenders in turn, medians of rounds
    memory    the most bytes of tensors alive beside the model itself, counted, in a run of its own
    result    held-out perplexity with the quantized weights, and how many of them equal ModelOpt's
    ranks     a sharded model on 2 ranks: gathers of each layer, and the peak against what cannot be avoided

The targets are about CPU seconds, which neighbours on the machine disturb less than the clock. ModelOpt's GPTQ takes
some ten seconds a layer on a CPU, so that task runs on the first three layers, and without --full all is smaller still;
`benchmarks/calibration_sides.py` says what each side does and leaves behind. ModelOpt comes with the extra "bench".
"""

import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import calibration_figures
from benchmarks.calibration_sides import ROOT, Job
from benchmarks.calibration_worker import QUIET, Worker

THREADS = 2
SIDES = ("layerwise", "at once", "modelopt")


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
    """A job on so many (layers, batches)."""
    return Job(task=task, side=side, layers=sizes[0], batches=sizes[1], **options)


def results(workers: dict[str, Worker], task: str, effort: Effort, directory: Path) -> dict[str, Any]:
    """Held-out perplexity of each side, and the share of weights that are ModelOpt's but for the last bits.

    In NVFP4 k_proj, v_proj and up_proj differ: ours share the scale of the tensor with those that take the same input,
    as inference engines want it; ModelOpt makes them share it when it exports.
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
                **calibration_figures.of_answers(answers),
                "peak_bytes": peaks,
                **results(workers, task, effort, directory),
                "ranks": on_ranks(task, sizes, directory),
            }
    out["targets"] = calibration_figures.targets(out)
    return out
