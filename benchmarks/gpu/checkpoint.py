"""What do save, load, stream and digest of weights on a GPU cost, beside bf16 through stock DCP?

The weights of some layers of Llama-3-8B, in the directory for temporary files; the disk's own speed is in the figures
of saves. "GB/s" is by the bytes of what is saved, sent or summed up.
"""

import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from benchmarks.gpu.question import Aim, Figures, Row, Scale, tried
from benchmarks.gpu.staging import parts_of
from dcp_adapters import (
    AtomicFileSystemWriter,
    QuantizedLoadPlanner,
    QuantizedSavePlanner,
    SafeFileSystemReader,
    WeightStream,
    digest,
)
from qtensor import MXFP8BlockScaling, NVFP4BlockScaling, quantize
from qtensor.spec.recipes import Recipe

SECONDS = 45
RECIPES: dict[str, Recipe] = {"mxfp8 row": MXFP8BlockScaling(), "nvfp4 row": NVFP4BlockScaling()}
ROUNDS = 3
TOOK = "ms"
AIMS = (
    *(Aim(row=f"save {name}", figure=TOOK, most=0.8, over="save bf16") for name in RECIPES),
    *(Aim(row=f"load {name}", figure=TOOK, most=0.8, over="load bf16") for name in RECIPES),
)
NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
NAMES += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def rows(scale: Scale) -> Iterator[Row]:
    """Each recipe behind bf16."""
    dense = {
        f"model.layers.{layer}.{name}.weight": torch.randn(shape, dtype=torch.bfloat16, device=scale.device)
        for layer in range(scale.layers)
        for name, shape in zip(NAMES, scale.shapes, strict=True)
    }
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")  # a single process is intended
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        for name, recipe in {"bf16": None, **RECIPES}.items():
            state: dict[str, Tensor] = (
                dense if recipe is None else {fqn: quantize(w, recipe) for fqn, w in dense.items()}
            )
            paths = (Path(folder) / f"{name} {number}" for number in count())
            for what, call in _calls(state, paths, quantized=recipe is not None).items():
                yield tried(f"{what} {name}", partial(_measured, scale, state, call))


def _quantized(dense: dict[str, Tensor], recipe: Recipe) -> dict[str, Tensor]:
    return {name: quantize(weight, recipe) for name, weight in dense.items()}


def _calls(state: dict[str, Tensor], paths: Iterator[Path], *, quantized: bool) -> dict[str, Callable[[], object]]:
    """Save first: what is loaded is what was saved last."""
    saved: list[Path] = []

    def save() -> None:
        if saved:  # its time is in the figure: room on a disk that may be small is worth more
            shutil.rmtree(saved[-1])
        saved.append(next(paths))
        kind = AtomicFileSystemWriter if quantized else FileSystemWriter
        planner = QuantizedSavePlanner() if quantized else None
        dcp.save({"model": state}, storage_writer=kind(saved[-1], thread_count=2), planner=planner)

    def load() -> None:
        reader = (SafeFileSystemReader if quantized else FileSystemReader)(saved[-1])
        dcp.load({"model": state}, storage_reader=reader, planner=QuantizedLoadPlanner() if quantized else None)

    calls: dict[str, Callable[[], object]] = {"save": save, "load": load}
    if quantized:
        calls["stream"] = lambda: _through(state)
        calls["digest"] = lambda: digest(state, no_dist=True)
    return calls


def _through(state: dict[str, Tensor]) -> None:
    """Take each bucket of a new stream and drop it; what engines run as one gets one scale."""
    for _ in WeightStream(state, config={"model_type": "llama"}, fused_scales="requantize", no_dist=True):
        pass


def _measured(scale: Scale, state: dict[str, Tensor], call: Callable[[], object]) -> Figures:
    seconds = []
    call()  # imports, and fills caches
    for _ in range(min(ROUNDS, scale.rounds)):
        scale.wait()
        began = time.perf_counter()
        call()
        scale.wait()
        seconds.append(time.perf_counter() - began)
    size = sum(part.nbytes for part in parts_of(state))
    took = statistics.median(seconds)
    return {TOOK: took * 1e3, "GB": size / 1e9, "GB/s": size / took / 1e9}
