"""Training under FSDP2 on a GPU that is not there: what it asks of streams and memory, phase by phase."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import qtensor as qt
from dcp_adapters.save.staging.stager import QuantizedStager, Survey
from fsdp_hooks import sync_scales
from fsdp_hooks.torch_private import local_of
from qtensor.scales.high_precision import HighPrecisionWeight
from tests.gpu_offline.ordering import Entry
from tests.gpu_offline.recording import recorded

LAYERS, WIDTH, TOKENS, STEPS = 2, 256, 8, 2
RANKS = 2


@dataclass
class Run:
    """The log of a run, where each phase of it lies in the log, and what was left of it."""

    log: list[Entry]
    phases: dict[str, slice] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = len(self.log)
        yield
        self.phases[name] = slice(begin, len(self.log))

    def of(self, name: str) -> list[Entry]:
        return self.log[self.phases[name]]


@contextlib.contextmanager
def mesh_without_peers() -> Iterator[DeviceMesh]:
    """A mesh of RANKS GPUs, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield init_device_mesh("cuda", (RANKS,))
    finally:
        dist.destroy_process_group()


def answers(where: str, dtype: torch.dtype) -> float | bool:
    """Of ranks that agree: none failed, and a digest is its own negative; digests are the same, masters moved."""
    if "exchange.py" in where:
        return 0.0
    return True if dtype == torch.bool else 1.0


def block() -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    return nn.Sequential(nn.LayerNorm(WIDTH, dtype=torch.bfloat16), linear)


def sharded(mesh: DeviceMesh, recipe: Any, storage: Any, *, reshard: bool) -> nn.Module:
    """A model that was built on the meta device and allocated on the GPU."""
    with torch.device("meta"), qt.quantized_model_init(recipe, storage=storage):
        model = nn.Sequential(*[block() for _ in range(LAYERS)])
    for each in model:
        fully_shard(each, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model.to_empty(device="cuda")


def optimizer_of(model: nn.Module, storage: str) -> torch.optim.Optimizer:
    if storage == "quantized":
        return qt.MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(mesh: DeviceMesh, recipe: Any, storage: str, *, reshard: bool) -> Run:
    """Build, train for STEPS steps, agree on scales, stage a checkpoint and train on."""
    with FakeTensorMode(), recorded(answers) as log:
        run = Run(log)
        with run.phase("build"):
            model = sharded(mesh, recipe, storage, reshard=reshard)
            optimizer = optimizer_of(model, storage)
        for number in range(STEPS):
            take_step(run, number, model, optimizer)
        with run.phase("staging"):
            run.weights = stage(model.state_dict())
        with run.phase("upload"):
            for copied in run.weights.values():
                copied.sum()  # a read by the CPU
        take_step(run, STEPS, model, optimizer)
    return run


def take_step(run: Run, number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.empty(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    with run.phase(f"forward {number}"):
        loss = model(tokens).float().square().mean()
    with run.phase(f"backward {number}"):
        loss.backward()
    with run.phase(f"step {number}"):
        optimizer.step()
    with run.phase(f"sync_scales {number}"):
        sync_scales(model)
    optimizer.zero_grad()


def stage(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What QuantizedStager copies, behind its survey, which refuses tensors without values."""
    parts = {f"{name}.{part}": tensor for name, value in state.items() for part, tensor in parts_of(value).items()}
    *offsets, nbytes = itertools.accumulate((part.nbytes for part in parts.values()), initial=0)
    stager = QuantizedStager(pin_memory=False)
    with patch.object(torch, "frombuffer", without_values):
        copies = stager._copied(Survey(list(parts.values()), offsets, nbytes))
    stager.close()
    return dict(zip(parts, copies, strict=True))


def without_values(lease: memoryview, *, dtype: torch.dtype, count: int, offset: int) -> Tensor:
    """Memory of the host, of which a tensor without values can be made."""
    return torch.empty(count, dtype=dtype, device="cpu")


def parts_of(value: Tensor) -> dict[str, Tensor]:
    held = local_of(value).detach()
    if isinstance(held, qt.QuantizedTensor):
        return held.parts()
    return {"": held.dense if isinstance(held, HighPrecisionWeight) else held}
