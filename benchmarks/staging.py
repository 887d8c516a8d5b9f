"""How long does an asynchronous save block training? Stagers against a plain copy of the same parts.

Each figure is the time of `stage()` over that of `for buffer, part in ...: buffer.copy_(part)` with buffers that exist
and have been touched; `us_per_part` is what is left of it after the copy loop, for each part. "second" is every save
but the first ones, which touch their memory for the first time ("first").
"""

import gc
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

from benchmarks.timing import medians
from dcp_adapters import QuantizedStager, expand
from fsdp_hooks.scale_sync import local_of
from qtensor import MXFP8BlockScaling, quantize

BIG = (8, 8192, 16384)  # weights, rows, columns: 1.1 GB of payload and scales
LAYERS, HIDDEN, INNER, HEADS_OUT = 30, 576, 1536, 192  # 135M parameters: 7 weights and 2 norms a layer


def run() -> dict[str, dict[str, float]]:
    """Both state dicts; see the module's docstring for the figures."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder) / "store"), 1), rank=0, world_size=1)
        try:
            return {"few_big": _measured(_few_big(), repeats=7), "model_135m_dtensors": _measured(_model(), repeats=15)}
        finally:
            dist.destroy_process_group()


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


def _measured(state: dict[str, Any], repeats: int) -> dict[str, float]:
    parts = [local_of(part) for part in expand(state).values()]
    buffers = [torch.zeros_like(part) for part in parts]

    def copy_loop() -> None:
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part)

    ours, stock = QuantizedStager(max_snapshots=1), _default_stager()
    seconds = medians(
        {
            "copy loop": copy_loop,
            "quantized_stager_second": lambda: ours.stage(state),
            "default_stager_second": lambda: stock.stage(state),
        },
        repeats,
    )
    ours.close()
    stock.close()
    seconds |= {
        "quantized_stager_first": _first(QuantizedStager, state),
        "default_stager_first": _first(_default_stager, state),
    }
    loop = seconds.pop("copy loop")
    figures: dict[str, float] = {"parts": len(parts), "gb": round(sum(part.nbytes for part in parts) / 1e9, 3)}
    for name, value in seconds.items():
        figures[name] = round(value / loop, 2)
        figures[f"{name}_us_per_part"] = round((value - loop) / len(parts) * 1e6, 1)
    return figures


def _default_stager() -> DefaultStager:
    return DefaultStager(StagingOptions(False, False, False, False))


def _first(make: Callable[[], Any], state: dict[str, Any]) -> float:
    """Median seconds of the first save of a new stager."""
    times = []
    for _ in range(3):
        stager = make()
        began = time.perf_counter()
        staged = stager.stage(state)
        times.append(time.perf_counter() - began)
        del staged
        stager.close()
        gc.collect()
    return sorted(times)[1]
