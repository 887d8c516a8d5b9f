"""How long does an asynchronous save block training? Stagers against a plain copy of the same parts.

Each ratio is the time of `stage()` over that of `for buffer, part in ...: buffer.copy_(part)` with buffers that exist
and have been touched; microseconds a part are what `stage()` takes beyond the copy loop. "first" is a save that touches
its memory for the first time, "second" any later one.
"""

import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.report import at_most, with_spread
from benchmarks.timing import Contender, interleaved, ratio
from dcp_adapters import QuantizedStager, expand
from fsdp_hooks.torch_private import local_of
from qtensor import MXFP8BlockScaling, quantize

BIG = (8, 8192, 16384)  # weights, rows, columns: 1.1 GB of payload and scales
STAGERS = ("quantized", "default")
AT_MOST_COPIES = 1.2  # of few large parts; many small ones cost Python
LAYERS, HIDDEN, INNER, HEADS_OUT = 30, 576, 1536, 192  # 135M parameters: 7 weights and 2 norms a layer


def run() -> dict[str, Any]:
    """Both state dicts; see the module's docstring for the figures."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder) / "store"), 1), rank=0, world_size=1)
        try:
            figures = {
                "few_big": _measured(_few_big(), repeats=7),
                "model_135m_dtensors": _measured(_model(), repeats=15),
            }
        finally:
            dist.destroy_process_group()
    return {"states": figures, "targets": _targets(figures)}


def _targets(figures: dict[str, Any]) -> dict[str, Any]:
    targets = {}
    for name, row in figures.items():
        ours = row["ratios"]["quantized second"]
        why = f"rounds from {ours['min']:.2f} to {ours['max']:.2f}; {row['us_per_part']['quantized second']} us a part"
        if name == "few_big":
            targets[f"{name}: blocked / copy loop"] = at_most(ours["ratio"], AT_MOST_COPIES, why)
        over = row["over_default"]
        why = f"rounds from {over['min']:.2f} to {over['max']:.2f}"
        targets[f"{name}: blocked / with torch's DefaultStager"] = at_most(over["ratio"], 1.0, why)
    return targets


def _few_big() -> dict[str, Any]:
    count, rows, columns = BIG
    weight = quantize(torch.zeros(rows, columns, dtype=torch.bfloat16), MXFP8BlockScaling())
    return {f"layers.{i}.weight": weight.clone() for i in range(count)}


def _model() -> dict[str, Any]:
    """DTensors on a mesh of one, as the state dict of a sharded model holds them."""
    mesh, recipe = init_device_mesh("cpu", (1,)), MXFP8BlockScaling()
    shapes = [(HIDDEN, HIDDEN), (HEADS_OUT, HIDDEN), (HEADS_OUT, HIDDEN), (HIDDEN, HIDDEN)]
    shapes += [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]
    state: dict[str, Any] = {}

    def put(name: str, value: Tensor) -> None:
        state[name] = distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)

    put("embedding.weight", torch.zeros(49152, HIDDEN, dtype=torch.bfloat16))
    for layer in range(LAYERS):
        for i, shape in enumerate(shapes):
            put(f"layers.{layer}.{i}.weight", quantize(torch.zeros(shape, dtype=torch.bfloat16), recipe))
        for i in range(2):
            put(f"layers.{layer}.norm{i}.weight", torch.zeros(HIDDEN, dtype=torch.bfloat16))
    return state


def _measured(state: dict[str, Any], repeats: int) -> dict[str, Any]:
    parts = [local_of(part) for part in expand(state).values()]
    buffers = [torch.zeros_like(part) for part in parts]

    def copy_loop() -> None:
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part)

    ours, stock = QuantizedStager(max_snapshots=1), _default_stager()
    seconds = interleaved(
        {
            "copy loop": Contender(call=copy_loop),
            "quantized second": Contender(call=lambda: ours.stage(state)),
            "default second": Contender(call=lambda: stock.stage(state)),
        },
        repeats,
        warm_up=True,
    )
    ours.close()
    stock.close()
    firsts = {"quantized first": _first(QuantizedStager, state), "default first": _first(_default_stager, state)}
    loop = seconds.pop("copy loop")
    ratios = {name: ratio(values, loop) for name, values in seconds.items()}
    unit = statistics.median(loop)  # the first saves are no part of the rounds
    for name, values in firsts.items():
        ratios[name] = {
            key: round(of(values) / unit, 3) for key, of in (("ratio", statistics.median), ("min", min), ("max", max))
        }
    left = {name: statistics.median(values) - unit for name, values in (seconds | firsts).items()}
    return {
        "parts": len(parts),
        "gb": round(sum(part.nbytes for part in parts) / 1e9, 3),
        "ratios": ratios,
        "us_per_part": {name: round(value / len(parts) * 1e6, 1) for name, value in left.items()},
        "over_default": ratio(seconds["quantized second"], seconds["default second"]),
    }


def _default_stager() -> DefaultStager:
    return DefaultStager(StagingOptions(False, False, False, False))


def _first(make: Callable[[], Any], state: dict[str, Any]) -> list[float]:
    """Seconds of the first save of three new stagers."""
    times = []
    for _ in range(3):
        stager = make()
        began = time.perf_counter()
        staged = stager.stage(state)
        times.append(time.perf_counter() - began)
        del staged
        stager.close()
        gc.collect()
    return times


def markdown(results: dict[str, Any]) -> str:
    """A row a state dict, stager and kind of save."""
    lines = [
        "Seconds until `stage()` returns over those of a loop that copies the same parts, median (least - greatest).",
        "",
        "| state dict | parts | GB | stager | first save | later ones | microseconds a part, later |",
        "|---|---:|---:|---|---:|---:|---:|",
    ]
    for name, row in results["states"].items():
        for stager in STAGERS:
            first, second = (with_spread(row["ratios"][f"{stager} {kind}"]) for kind in ("first", "second"))
            left = row["us_per_part"][f"{stager} second"]
            lines.append(f"| {name} | {row['parts']} | {row['gb']} | {stager} | {first} | {second} | {left} |")
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """A panel a state dict: both stagers, first and later saves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    states = results["states"]
    for axes, (name, row) in zip(figure.subplots(1, len(states)), states.items(), strict=True):
        labels = list(row["ratios"])
        for at, label in enumerate(labels):
            cell = row["ratios"][label]
            spread = [[max(cell["ratio"] - cell["min"], 0)], [max(cell["max"] - cell["ratio"], 0)]]
            colour = "C0" if label.startswith("quantized") else "C1"
            axes.barh(at, cell["ratio"], 0.7, xerr=spread, color=colour, error_kw={"elinewidth": 0.8})
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set(title=f"{name}: {row['parts']} parts, {row['gb']} GB", xlabel="times of a loop that copies the parts")
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.grid(alpha=0.3, axis="x")
        axes.set_axisbelow(True)
    figure.suptitle("How long an asynchronous save blocks: our QuantizedStager and torch's DefaultStager")
    figure.savefig(path, dpi=110)
