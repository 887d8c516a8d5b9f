"""`python -m tests.torch_versions.write`: the checkpoints that the installed torch writes, as one archive.

    stock       a dense state dict, by torch.distributed.checkpoint alone
    sync        a state dict with a weight of every recipe, sharded over two ranks
    async       the same by async_save and QuantizedStager
    hsdp        the same on a mesh of two replicas by two shards
    converted   the same as `sync`, converted to NVFP4 by `python -m dcp_adapters convert`
    window      a calibration that stopped behind its first window

`make test TORCH=<version>` makes an environment with another torch; its Python writes the archive of that version.
"""

from __future__ import annotations

import os

os.environ.setdefault("QTENSOR_KERNELS", "eager")

import subprocess
import sys
import tarfile
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp_adapters import QuantizedSavePlanner, QuantizedStager
from tests import ranks
from tests.layerwise.small_runs import Case, model_of, stopped
from tests.torch_versions.states import Place, dense, state

HERE = Path(__file__).resolve().parent
CASE = Case(stop=("checkpoint", 0))


def fill(model: nn.Module) -> None:
    """Weights that every version makes alike: random bf16 numbers differ between them."""
    for at, param in enumerate(model.parameters()):
        numbers = (torch.arange(param.numel(), dtype=torch.int64, device="cpu") * 7919 + at) % 509 - 254
        param.copy_((numbers / 512).to(param.dtype).view_as(param))


def model() -> nn.Module:
    """What is calibrated."""
    return model_of(CASE, shard=False, prepare=fill)


def on(mesh: DeviceMesh, *placements: Any) -> Place:
    """Puts a tensor on a mesh."""
    return lambda tensor: distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def write_on_two(base: Path) -> None:
    """What two ranks write."""
    place = on(init_device_mesh("cpu", (2,)), Shard(0))
    dcp.save(state(place=place), checkpoint_id=base / "sync", planner=QuantizedSavePlanner())
    upload = dist.new_group(backend="gloo")
    dcp.async_save(
        state(place=place),
        checkpoint_id=base / "async",
        planner=QuantizedSavePlanner(),
        async_stager=QuantizedStager(),
        process_group=upload,
    ).result()
    dcp.save(dense(1), checkpoint_id=base / "stock")


def write_on_four(base: Path) -> None:
    """What two replicas of two shards write."""
    place = on(init_device_mesh("cpu", (2, 2)), Replicate(), Shard(0))
    dcp.save(state(place=place), checkpoint_id=base / "hsdp", planner=QuantizedSavePlanner())


def write(base: Path) -> None:
    """All of them."""
    ranks.run_ranks(2, write_on_two, base)
    ranks.run_ranks(4, write_on_four, base)
    convert = [sys.executable, "-m", "dcp_adapters", "convert", str(base / "sync"), str(base / "converted")]
    subprocess.run([*convert, "--to", "nvfp4"], check=True, stdout=subprocess.DEVNULL)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        stopped(model(), CASE, base / "window")


def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """An entry that tells neither who wrote it nor when."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def main() -> None:
    """Write the archive beside this file."""
    version = torch.__version__.partition("+")[0]
    try:
        with tempfile.TemporaryDirectory() as scratch:
            write(Path(scratch))
            with tarfile.open(HERE / f"{version}.tar.xz", "w:xz") as archive:
                archive.add(scratch, version, filter=anonymous)
    finally:
        ranks.close()


if __name__ == "__main__":
    main()
