"""How far a reader travels: files that the main jobs enter, and calls that lead from one of them into another.

    python -m tests.hops

A small model of one recipe in one process, everything done once before it is counted. A hop is a call of a function of
ours whose nearest caller of ours stands in another file; what torch calls back counts as called by who called torch.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, NVFP4BlockScaling, quantize_

REPO = Path(__file__).resolve().parent.parent
PACKAGES = tuple(f"{REPO / name}/" for name in ("fsdp_hooks", "qtensor", "dcp_adapters", "layerwise"))


def traced(job: Callable[[], Any]) -> tuple[int, int]:
    """(files, hops) of a job."""
    files: set[str] = set()
    hops = 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal hops
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGES):
            return
        files.add(file)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGES):
            caller = caller.f_back
        hops += caller is not None and caller.f_code.co_filename != file

    sys.setprofile(profile)
    try:
        job()
    finally:
        sys.setprofile(None)
    return len(files), hops


def built(recipe: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16), nn.Linear(64, 64, dtype=torch.bfloat16))
    quantize_(model, recipe)
    return model


def jobs(folder: Path) -> dict[str, Callable[[], Any]]:
    """The jobs by name; a load comes after the save."""
    model, other = built(MXFP8BlockScaling()), built(NVFP4BlockScaling())
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
    model(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()

    def load(into: nn.Module, how: str) -> None:
        planner = QuantizedLoadPlanner(on_mismatch=how)
        dcp.load({"model": into.state_dict()}, checkpoint_id=folder, planner=planner, no_dist=True)

    def save() -> None:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder, planner=QuantizedSavePlanner(), no_dist=True)

    return {
        "an optimizer step": optimizer.step,
        "a save": save,
        "a load": lambda: load(model, "raise"),
        "a converting load": lambda: load(other, "convert"),
    }


def table() -> str:
    """What `python -m tests.hops` prints."""
    with tempfile.TemporaryDirectory() as folder:
        lines = ["job                    files   hops"]
        for name, job in jobs(Path(folder)).items():
            job()
            files, hops = traced(job)
            lines.append(f"{name:22} {files:5} {hops:6}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
