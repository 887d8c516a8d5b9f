"""How long do exports to and imports from Hugging Face directories take, compared with plain files of the same bytes?

Written: the bytes of all payloads and scales into one file and to the disk (fsync), by plain writes, by safetensors'
save_file, by `export_hf` of a state dict, and of a checkpoint, which is read and compared with its checksums first.
Read, from the page cache into new memory: by plain reads, and by `import_hf` without a model.
"""

import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.report import at_most, with_spread
from benchmarks.timing import Contender, interleaved, ratio
from dcp_adapters import QuantizedSavePlanner, expand, export_hf, import_hf
from qtensor import MXFP8BlockScaling, quantize

WEIGHTS, ROWS, COLUMNS = 12, 4096, 4096
REPEATS = 5
WRITING, READING = "plain write", "plain read"
# One copy of what is gathered, a check for NaN, a sync; a checkpoint is read and digested in addition.
MOST = {"export_hf, state dict": 1.5, "export_hf, checkpoint": 3.0, "import_hf": 2.0}


def run() -> dict[str, Any]:
    """All contenders in one run, in turns."""
    q = quantize(torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16(), MXFP8BlockScaling())
    state = {f"layers.{number}.weight": q.clone() for number in range(WEIGHTS)}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        home = Path(folder)
        dcp.save(state, checkpoint_id=home / "checkpoint", planner=QuantizedSavePlanner())
        export_hf(state, home / "exported", config={"model_type": "none"}, progress=False)
        seconds = interleaved(_contenders(state, home), REPEATS, warm_up=True)
    ratios = {name: ratio(seconds[name], seconds[_limit(name)]) for name in seconds if name != _limit(name)}
    nbytes = sum(part.nbytes for part in expand(state).values())
    targets = {
        f"{name} / {_limit(name)}": at_most(
            ratios[name]["ratio"], most, f"rounds from {ratios[name]['min']} to {ratios[name]['max']}"
        )
        for name, most in MOST.items()
    }
    return {"mb": round(nbytes / 1e6), "weights": WEIGHTS, "ratios": ratios, "targets": targets}


def _limit(name: str) -> str:
    return READING if name in (READING, "import_hf") else WRITING


def _contenders(state: dict[str, Any], home: Path) -> dict[str, Contender]:
    parts = {name: part.contiguous() for name, part in expand(state).items()}
    target, file = home / "target", home / "file"
    blocks = [_bytes(part) for part in parts.values()]

    def write() -> None:
        with file.open("wb", buffering=0) as stream:
            for block in blocks:
                stream.write(block)
            os.fsync(stream.fileno())

    def save() -> None:
        save_file(parts, file)
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def read() -> None:
        (home / "exported" / "model.safetensors").read_bytes()

    def clear() -> None:
        shutil.rmtree(target, ignore_errors=True)
        file.unlink(missing_ok=True)

    return {
        WRITING: Contender(call=write, after=clear),
        "safetensors' save_file": Contender(call=save, after=clear),
        "export_hf, state dict": Contender(call=lambda: export_hf(state, target, progress=False), after=clear),
        "export_hf, checkpoint": Contender(
            call=lambda: export_hf(home / "checkpoint", target, progress=False), after=clear
        ),
        READING: Contender(call=read),
        "import_hf": Contender(call=lambda: import_hf(home / "exported", progress=False)),
    }


def _bytes(part: Tensor) -> memoryview:
    return memoryview(part.reshape(-1).view(torch.uint8).numpy())


def markdown(results: dict[str, Any]) -> str:
    """A row a contender."""
    lines = [
        f"{results['weights']} MXFP8 weights, {results['mb']} MB, one process: times of plain files, and spread.",
        "",
        "| | over | times |",
        "|---|---|---:|",
    ]
    lines += [f"| {name} | {_limit(name)} | {with_spread(cell)} |" for name, cell in results["ratios"].items()]
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """A bar a contender."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.8), layout="constrained")
    axes = figure.subplots()
    for at, (name, cell) in enumerate(results["ratios"].items()):
        spread = [[max(cell["ratio"] - cell["min"], 0)], [max(cell["max"] - cell["ratio"], 0)]]
        axes.barh(
            at, cell["ratio"], 0.7, xerr=spread, color="C0" if "_hf" in name else "C1", error_kw={"elinewidth": 0.8}
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(results["ratios"])), list(results["ratios"]))
    axes.invert_yaxis()
    axes.set(xlabel="times of plain files", title=f"Exports and imports of {results['mb']} MB")
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=110)
