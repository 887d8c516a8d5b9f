"""A whole training application in one checkpoint, as torchtitan lays it out: one Stateful for each of its pieces.

    {"model": .., "optimizer": .., "lr_scheduler": .., "dataloader": .., "train_state": .., "random": ..}

Optimizer states are flattened to one entry a parameter and state, so that pipeline stages can share a checkpoint. The
batches of the training here come from the generators that the checkpoint restores, so forgetting one of them shows.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from dcp_adapters import QuantizedSavePlanner
from qtensor import MasterWeightOptimizer, quantized_model_init
from tests.dcp_adapters.cases import RECIPES, load, save
from tests.dcp_adapters.test_async import whole
from tests.ranks import run_ranks

NAMES = ("nvfp4", "mxfp8")
FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)


class ModelState:
    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.net)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.net, state_dict)


class OptimizerState:
    def __init__(self, net: nn.Module, optimizer: Any) -> None:
        self.net, self.optimizer = net, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.net, self.optimizer, options=FLATTENED)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.net, self.optimizer, state_dict, options=FLATTENED)


class Loader:
    """Batches in an order that is shuffled with Python's generator at the start of each epoch."""

    def __init__(self) -> None:
        self.epoch, self.position, self.order = 0, 0, []

    def batch(self) -> Tensor:
        if self.position == len(self.order):
            self.epoch, self.position, self.order = self.epoch + 1, 0, random.sample(range(3), 3)
        self.position += 1
        return torch.randn(4, 64) * (1 + self.order[self.position - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "order": tuple(self.order)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.position = state_dict["epoch"], state_dict["position"]
        self.order = list(state_dict["order"])


class TrainState:
    def __init__(self) -> None:
        self.step, self.losses = 0, []

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": torch.tensor(self.step),
            "losses": tuple(self.losses),
            "by_phase": OrderedDict(warmup=self.step),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.losses = int(state_dict["step"]), list(state_dict["losses"])
        assert state_dict["by_phase"] == {"warmup": self.step}


class Generators:
    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "python": random.getstate()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch.set_rng_state(state_dict["torch"])
        random.setstate(state_dict["python"])


class Application:
    def __init__(self, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        with quantized_model_init(RECIPES[name]):
            self.net: Any = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 48)).to(torch.bfloat16)
        for layer in self.net:
            fully_shard(layer)
        fully_shard(self.net)
        self.optimizer = MasterWeightOptimizer(torch.optim.AdamW, self.net.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.loader, self.progress = Loader(), TrainState()

    def pieces(self) -> dict[str, Any]:
        return {
            "model": ModelState(self.net),
            "optimizer": OptimizerState(self.net, self.optimizer),
            "lr_scheduler": self.schedule,
            "dataloader": self.loader,
            "train_state": self.progress,
            "random": Generators(),
        }

    def train(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.net(self.loader.batch().to(torch.bfloat16)).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.progress.step += 1
            self.progress.losses.append(self.progress.step * 0.5)

    def everything(self) -> dict[str, Any]:
        return whole({name: piece.state_dict() for name, piece in self.pieces().items()})


def trained_and_saved(base: Path) -> dict[str, Any]:
    saved = {}
    upload = dist.new_group(backend="gloo")
    for name in NAMES:
        straight = Application(name, 0)
        straight.train(2)  # in the middle of an epoch, just behind a change of the learning rate
        saved[name] = straight.everything()
        save(straight.pieces(), base / name)
        future = dcp.async_save(
            straight.pieces(),
            checkpoint_id=base / f"{name}-async",
            planner=QuantizedSavePlanner(),
            process_group=upload,
        )
        straight.train(3)
        future.result()

        resumed = Application(name, 1)
        load(resumed.pieces(), base / name)
        assert resumed.everything() == saved[name]
        resumed.train(3)
        assert resumed.everything() == straight.everything()
        assert resumed.everything() != saved[name]
    return saved


def resumed_elsewhere(base: Path, saved: dict[str, Any]) -> None:
    for name, expected in saved.items():
        for way in (name, f"{name}-async"):
            resumed = Application(name, 1)
            load(resumed.pieces(), base / way)
            assert resumed.everything() == expected, way
        resumed.train(1)


def test_an_application_of_stateful_pieces_resumes_bit_for_bit(shared_tmp_path: Path) -> None:
    saved = run_ranks(2, trained_and_saved, shared_tmp_path)
    assert saved[0] == saved[1]
    for world in (1, 3):
        run_ranks(world, resumed_elsewhere, shared_tmp_path, saved[0])
    entries = dcp.FileSystemReader(shared_tmp_path / NAMES[0]).read_metadata().state_dict_metadata
    assert isinstance(entries["random.python"], BytesStorageMetadata)
    assert {"optimizer.state.0.weight.exp_avg", "optimizer.state.0.weight.master_weight"} <= entries.keys()
    assert "optimizer.param_groups.0.weight.lr" in entries
