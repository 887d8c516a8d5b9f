"""One rank's part of benchmarks/growth.py: models of many sizes go through their lives, phase by phase.

    torchrun --nproc-per-node N -m benchmarks.growth_rank ORDER OUT     # both JSON; rank 0 writes figures of all ranks

A life: build on the meta device, fully_shard each layer, fill the shards, first step (builds the optimizer and its
state), step, save, load. A side is a recipe by its name, or bf16, which is stock FSDP2, AdamW and DCP. All jobs take
turns, in a new order each round, after a warm-up, which also compiles kernels.

Time is the CPU time of the process (which other processes disturb little) and wall time. The garbage collector is off
within a phase: it could walk all objects at any time, whoever made them. Memory is counted in separate lives, since
counting takes time: tensors by LiveStorages, Python objects by tracemalloc.
"""

import dataclasses
import gc
import json
import random
import shutil
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from benchmarks.live_storages import LiveStorages
from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from fsdp_hooks import sync_scales
from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, NVFP4BlockScaling, quantized_model_init

RECIPES = {"nvfp4": NVFP4BlockScaling(), "mxfp8": MXFP8BlockScaling()}
PHASES = ("build", "shard", "fill", "first_step", "step", "save", "load")
ROWS = 4  # of the batch: few, so that weights and not activations are what grows


@dataclasses.dataclass(frozen=True)
class Job:
    """A model of `layers` weights of [width, width], and the side that handles it."""

    side: str
    layers: int
    width: int

    @property
    def name(self) -> str:
        """A key of results."""
        return f"{self.side} {self.layers}x{self.width}"


class Layer(nn.Module):
    """One weight; the identity beside it keeps values finite in any number of layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[ROWS, width] -> [ROWS, width]."""
        return torch.add(x, self.linear(x), alpha=0.1)


class Life:
    """A model from its first phase to its last; each phase is a method."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.recipe, self.folder = job, RECIPES.get(job.side), folder

    def build(self) -> None:
        """Make the parameters, without bytes."""
        with torch.device("meta"), quantized_model_init(self.recipe or NVFP4BlockScaling(), enabled=bool(self.recipe)):
            layers = [Layer(self.job.width) for _ in range(self.job.layers)]
            self.model: Any = nn.Sequential(*layers).to(torch.bfloat16)

    def shard(self) -> None:
        """One FSDP group for each layer, and a root."""
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)

    def fill(self) -> None:
        """Allocate the shards, and fill them with values."""
        self.model.to_empty(device="cpu")
        for layer in self.model:
            layer.linear.reset_parameters()
        if self.recipe:
            sync_scales(self.model)

    def first_step(self) -> None:
        """The optimizer, and the state that it makes when it steps."""
        parameters = self.model.parameters()
        if self.recipe:
            self.optimizer: torch.optim.Optimizer = MasterWeightOptimizer(torch.optim.AdamW, parameters, lr=1e-4)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-4)
        self.step()

    def step(self) -> None:
        """Forward, backward, optimizer."""
        batch = torch.ones(ROWS, self.job.width, dtype=torch.bfloat16)
        self.model(batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> None:
        """The model's weights into a directory."""
        planner = QuantizedSavePlanner() if self.recipe else None
        dcp.save({"model": self.model.state_dict()}, checkpoint_id=self.folder, planner=planner)

    def load(self) -> None:
        """The same weights from there."""
        planner = QuantizedLoadPlanner() if self.recipe else None
        dcp.load({"model": self.model.state_dict()}, checkpoint_id=self.folder, planner=planner)

    def live(self, phase: Callable[[str, Callable[[], None]], None]) -> None:
        """All phases."""
        self.folder.mkdir(exist_ok=True)
        for name in PHASES:
            phase(name, getattr(self, name))
        if dist.get_world_size() > 1:
            dist.barrier()  # others may still read
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder)


def timed(job: Job, folder: Path) -> dict[str, Any]:
    """CPU and wall seconds of every phase."""
    cpu, wall = {}, {}

    def phase(name: str, call: Callable[[], None]) -> None:
        gc.collect()
        gc.disable()
        if dist.get_world_size() > 1:
            dist.barrier()
        began, began_cpu = time.perf_counter(), time.process_time()
        call()
        cpu[name], wall[name] = time.process_time() - began_cpu, time.perf_counter() - began
        gc.enable()

    Life(job, folder).live(phase)
    return {"cpu": cpu, "wall": wall}


def tensors(job: Job, folder: Path) -> dict[str, int]:
    """The most bytes of its own tensors that each phase holds at once."""
    # The first time, DTensor works out with fake tensors how an operation shards; no other mode may watch these.
    Life(dataclasses.replace(job, layers=2), folder).live(lambda _, call: call())
    peaks = {}

    def phase(name: str, call: Callable[[], None]) -> None:
        with LiveStorages(resized=True) as storages:
            call()
        peaks[name] = storages.peak

    Life(job, folder).live(phase)
    return peaks


def objects(job: Job, folder: Path) -> dict[str, int]:
    """The most bytes of its own Python objects that each phase holds at once."""
    peaks = {}

    def phase(name: str, call: Callable[[], None]) -> None:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        peaks[name] = tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    try:
        Life(job, folder).live(phase)
    finally:
        tracemalloc.stop()
    return peaks


def rounds(jobs: list[Job], count: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The times of each job in each round."""
    times: dict[str, list[dict[str, Any]]] = {job.name: [] for job in jobs}
    order, shuffle = list(jobs), random.Random(0).shuffle
    for job in {(job.side, job.layers): dataclasses.replace(job, layers=2) for job in jobs[::-1]}.values():
        timed(job, folder)
    for _ in range(count):
        shuffle(order)
        for job in order:
            times[job.name].append(timed(job, folder))
    return times


def main(order: Path, out: Path) -> None:
    """The times and counts of all ranks."""
    warnings.filterwarnings("ignore")
    wanted = json.loads(order.read_text())
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = out.with_name("checkpoint")
    times, *counts = ([Job(*job) for job in wanted.get(key, ())] for key in ("times", "tensors", "objects"))
    mine = {
        "times": rounds(times, wanted["rounds"], folder),
        "tensors": {job.name: tensors(job, folder) for job in counts[0]},
        "objects": {job.name: objects(job, folder) for job in counts[1]},
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(ranks))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
