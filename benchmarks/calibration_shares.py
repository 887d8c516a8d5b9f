"""What ranks save by sharing the decisions of GPTQ, measured on 2 ranks and simulated on up to 8.

    python -m benchmarks.calibration_shares [OUT.json [LAYERS [ROUNDS]]]

    measured    layers of SmolLM2-135M in NVFP4 on 1 and on 2 ranks of one thread each, in turn: the CPU seconds inside
                `GPTQ.decide`, and CPU and wall seconds from the event "calibrate" to the event "write" (reducing,
                deciding, rounding, exchanging), of the slower rank; one layer before, which loads kernels, is left out
    simulated   every group of a layer is decided about in this process, on one thread; on so many ranks each round then
                takes as long as the slowest of them, without what is sent. Where LAYERS says that groups are too large
                to be run here, `Algorithm.cost` takes the place of seconds

With torchrun it is one of the ranks: `-m benchmarks.calibration_shares rank OUT LAYERS`.
"""

import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from benchmarks.calibration_sides import ROOT, Job, batches, first_layers, pretrained
from benchmarks.calibration_worker import QUIET
from benchmarks.machine import machine_and_versions
from layerwise import GPTQ, Event, calibrate
from layerwise.algorithms.algorithm import Group, Inputs, Linear
from layerwise.stages.sharing import rounds_of
from layerwise.stages.stage import Method
from qtensor import NVFP4BlockScaling
from qtensor.spec.registry import shared_amax

RECIPE = NVFP4BlockScaling()
BATCHES = 8
RANKS = (1, 2, 4, 8)
TARGET = 0.6  # of the decide seconds of one rank, on two

Shape = tuple[int, int]
# Of each group of a layer: the rows of its weights together, and K.
LAYERS: dict[str, Sequence[Shape]] = {
    "SmolLM2-135M": [(960, 576), (576, 576), (3072, 576), (576, 1536)],
    "128 experts of 1024 x 384": [(2560, 1024), (1024, 1024), *[(768, 1024), (1024, 384)] * 128],
    "Llama 70B": [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)],
}
TOO_LARGE = 2**24  # elements of a weight
TOKENS = 1  # a group has some; how many does not count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed(GPTQ):
    """GPTQ that adds up the CPU seconds that this process spends in it."""

    spent: list[float] = dataclasses.field(default_factory=lambda: [0.0], compare=False)

    def decide(self, group: Any, recipe: Any) -> Any:
        before = time.process_time()
        try:
            return super().decide(group, recipe)
        finally:
            self.spent[0] += time.process_time() - before

    def to_json(self) -> dict[str, Any]:
        """As ranks compare it: without the seconds."""
        return GPTQ().to_json()


# -- measured ----------------------------------------------------------------------------------------------------------


def rank(out: str, layers: int) -> None:
    """One rank of a measurement; rank 0 writes what all have spent."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model: Any = pretrained()
    job = Job(task="fp8_gptq", side="layerwise", layers=1 + layers, batches=BATCHES)
    algorithm, clocks = Timed(), (time.process_time, time.perf_counter)
    at, stage = [0.0, 0.0], [0.0, 0.0]

    def note(event: Event) -> None:
        if event.index == 0:
            algorithm.spent[0] = 0.0
            return
        for index, clock in enumerate(clocks):
            if event.kind == "calibrate":
                at[index] = clock()
            elif event.kind == "write":
                stage[index] += clock() - at[index]

    with first_layers(model, 1 + layers):
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        data = batches(job)[dist.get_rank() :: dist.get_world_size()]
        calibrate(model, data, recipe=RECIPE, algorithm=algorithm, exclude=("lm_head",), on_event=note, progress=False)
    own = {"decide, CPU": algorithm.spent[0], "stage, CPU": stage[0], "stage, wall": stage[1]}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(everyone))
    dist.destroy_process_group()


def measured(ranks: int, layers: int, out: Path) -> dict[str, float]:
    """The seconds of the slower rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "benchmarks.calibration_shares", "rank", str(out), str(layers)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **QUIET, "OMP_NUM_THREADS": "1"})
    found = json.loads(out.read_text())
    return {what: max(one[what] for one in found) for what in found[0]}


def on_two(layers: int, repeats: int) -> dict[str, Any]:
    """Medians of seconds on 1 and 2 ranks, and of their ratios with the least and the largest."""
    rounds: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(repeats):
            for ranks in (1, 2) if number % 2 == 0 else (2, 1):
                rounds[ranks].append(measured(ranks, layers, Path(directory) / "out.json"))
    figures = {}
    for what in rounds[1][0]:
        alone, shared = ([one[what] for one in rounds[ranks]] for ranks in (1, 2))
        ratios = sorted(two / one for one, two in zip(alone, shared, strict=True))
        figures[what] = {
            "one rank, s": round(statistics.median(alone), 3),
            "slower of two, s": round(statistics.median(shared), 3),
            "ratio": round(statistics.median(ratios), 3),
            "from": round(ratios[0], 3),
            "to": round(ratios[-1], 3),
        }
    return figures


# -- simulated ---------------------------------------------------------------------------------------------------------


class Ranks:
    """As much of a process group as sharing asks for."""

    def __init__(self, count: int) -> None:
        self.size, self.rank = lambda: count, lambda: 0


@functools.cache
def decided(shape: Shape) -> float:
    """CPU seconds of one decision about a random weight, the least of three."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator).mul_(columns**-0.5)
    x = torch.randn(2 * columns, columns, generator=generator)
    inputs = Inputs(len(x), x.abs().amax(), hessian=x.t() @ x * (2 / len(x)))
    group = Group((Linear("weight", weight, shared_amax(weight, RECIPE)),), inputs)
    seconds = []
    for _ in range(3):
        before = time.process_time()
        GPTQ().decide(group, RECIPE)
        seconds.append(time.process_time() - before)
    return min(seconds)


def cost(shape: Shape) -> float:
    """What ranks take a group for."""
    return GPTQ().cost(*shape, TOKENS)


def simulated(groups: Sequence[Shape], ranks: int, takes: Callable[[Shape], float]) -> float:
    """The time of a layer's decisions on some ranks, as a fraction of that on one."""
    linears = [(TOKENS, [Linear("", torch.empty(shape, dtype=torch.float32, device="meta"))]) for shape in groups]
    group: Any = Ranks(ranks)
    rounds = rounds_of(Method(GPTQ(), RECIPE, quantized_onward=True, group=group), linears)
    longest = [max(sum(takes(groups[index]) for index in indices) for indices in turn) for turn in rounds]
    return sum(longest) / sum(map(takes, groups))


def growth() -> dict[str, Any]:
    """For each kind of layer, the fraction on each number of ranks, and the least that any division could have."""
    figures = {}
    for name, groups in LAYERS.items():
        runs = all(rows * columns <= TOO_LARGE for rows, columns in groups)
        takes = decided if runs else cost
        least = max(map(takes, groups)) / sum(map(takes, groups))  # groups are not divided
        figures[name] = {
            "in": "CPU seconds" if runs else "Algorithm.cost",
            **{str(ranks): round(simulated(groups, ranks, takes), 3) for ranks in RANKS},
            "least": {str(ranks): round(max(least, 1 / ranks), 3) for ranks in RANKS},
        }
        told = ", ".join(f"{ranks}: {figures[name][str(ranks)]:.3f}" for ranks in RANKS)
        print(f"{name}, simulated in {figures[name]['in']}, on ranks {told}", flush=True)
    return figures


def main(out: str = "", layers: str = "3", repeats: str = "5") -> None:
    """Print all figures, and write them."""
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"simulated": growth(), "measured": on_two(int(layers), int(repeats))}
    for what, found in figures["measured"].items():
        print(
            f"{what}: {found['one rank, s']:.2f} s on one rank, {found['slower of two, s']:.2f} s on the slower of "
            f"two: {found['ratio']:.2f} ({found['from']:.2f} - {found['to']:.2f})"
        )
    ratio = figures["measured"]["decide, CPU"]["ratio"]
    print(f"aimed at {TARGET} of one rank's decide seconds on two: {'met' if ratio <= TARGET else 'not met'}")
    if out:
        Path(out).write_text(json.dumps({**machine_and_versions(), **figures}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2], int(sys.argv[3]))
    else:
        main(*sys.argv[1:])
