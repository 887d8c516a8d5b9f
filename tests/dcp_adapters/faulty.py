"""State, faults and checks that the tests of broken saves and loads share."""

from __future__ import annotations

import errno
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from dcp_adapters import QuantizedSavePlanner, read_manifest
from qtensor import quantize
from tests.dcp_adapters.cases import RECIPES, assert_holds, load, placed, values

WORLD = 2
NAMES = ("mxfp8", "nvfp4", "float8_tensor")
UNFINISHED = "no .metadata, so this is no checkpoint or one whose saving never finished"


def full(seed: int) -> dict[str, Any]:
    weights = {name: quantize(values((160, 64), seed + i), RECIPES[name]) for i, name in enumerate(NAMES)}
    return weights | {"exp_avg": values((160, 64), seed, torch.float32), "step": seed}


def state(seed: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: value if name == "step" else placed(value, mesh, Shard(0)) for name, value in full(seed).items()}


def save_state(path: Path, seed: int = 0, **options: Any) -> None:
    overwrite(state(seed), path, **options)


def overwrite(state_dict: dict[str, Any], path: Path, **options: Any) -> None:
    """Save, over whatever is there."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        dcp.save(state_dict, **{"checkpoint_id": path, "planner": QuantizedSavePlanner(), **options})


def assert_loads(path: Path, seed: int) -> None:
    target = state(99)
    load(target, path)
    assert_holds(target, full(seed))


def assert_refused(path: Path) -> None:
    """A directory in which a save never finished says so."""
    # torch 2.11 raises as well, but does not say which file
    with pytest.raises(BaseException, match=rf"No such file or directory: '{path}/\.metadata'|metadata is None"):
        load(state(99), path)
    with pytest.raises(FileNotFoundError, match=UNFINISHED):
        read_manifest(path)


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise OSError(errno.EIO, "the disk is on fire")
