"""How far a reader travels: files that the main jobs enter, and calls that lead from one of them into another.

    python -m tests.hops
    python -m tests.hops --pairs        also from which file into which, and which functions are entered there

A small model of one recipe in one process, everything done once before it is counted. A hop is a call of a function of
ours whose nearest caller of ours stands in another file; what torch calls back counts as called by who called torch.
"""

import argparse
import sys
import tempfile
from collections import Counter
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


class Trace:
    """The files that a job enters, and its hops: (caller's file, callee's file, callee's function) -> how many."""

    def __init__(self, job: Callable[[], Any]) -> None:
        self.files: set[str] = set()
        self.hops = Counter[tuple[str, str, str]]()
        sys.setprofile(self._profile)
        try:
            job()
        finally:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGES):
            return
        self.files.add(file)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGES):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != file:
            self.hops[caller.f_code.co_filename, file, frame.f_code.co_name] += 1

    def pairs(self) -> list[str]:
        """A line for each pair of files, the most hops first."""
        functions: dict[tuple[str, str], list[str]] = {}
        for (caller, callee, function), count in self.hops.most_common():
            functions.setdefault((caller, callee), []).append(f"{function} {count}" if count > 1 else function)
        counts = Counter[tuple[str, str]]()
        for (caller, callee, _), count in self.hops.items():
            counts[caller, callee] += count
        return [
            f"  {count:5} {Path(caller).relative_to(REPO)} -> {Path(callee).relative_to(REPO)}: "
            + ", ".join(functions[caller, callee])
            for (caller, callee), count in counts.most_common()
        ]


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


def table(*, pairs: bool = False) -> str:
    """What `python -m tests.hops` prints."""
    with tempfile.TemporaryDirectory() as folder:
        lines = ["job                    files   hops"]
        for name, job in jobs(Path(folder)).items():
            job()
            trace = Trace(job)
            lines.append(f"{name:22} {len(trace.files):5} {trace.hops.total():6}")
            lines += trace.pairs() if pairs else []
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.hops", description="How far a reader travels.")
    parser.add_argument("--pairs", action="store_true", help="from which file into which")
    print(table(pairs=parser.parse_args().pairs))
