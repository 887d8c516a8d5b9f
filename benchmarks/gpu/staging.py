"""How long does an asynchronous save block training: a snapshot beside one copy of its bytes into pinned memory.

The first snapshot locks the pages of its memory, which takes seconds for gigabytes; later ones find them.
"""

import statistics
import time
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.question import Aim, Figures, Row, Scale, tried
from benchmarks.timing import Contender, interleaved, ratio
from dcp_adapters import QuantizedStager
from qtensor import MXFP8BlockScaling, NVFP4BlockScaling, QuantizedTensor, quantize
from qtensor.spec.recipes import Recipe

SECONDS = 30
RECIPES: dict[str, Recipe] = {"mxfp8 row": MXFP8BlockScaling(), "nvfp4 row": NVFP4BlockScaling()}
OVER = "over a copy"
AIMS = tuple(Aim(row=name, figure=OVER, most=1.25) for name in RECIPES)


def rows(scale: Scale) -> Iterator[Row]:
    """The weights of some layers, and fp32 values of half of them as an optimizer has."""
    for name, recipe in RECIPES.items():
        yield tried(name, partial(_measured, scale, recipe))


def _measured(scale: Scale, recipe: Recipe) -> Figures:
    state: dict[str, Tensor] = {}
    for number, shape in enumerate(scale.shapes * scale.layers):
        value = torch.randn(shape, dtype=torch.bfloat16, device=scale.device)
        state[f"{number}.weight"] = quantize(value, recipe)
        if number % 2:
            state[f"{number}.moment"] = value.float()
    pinned = scale.device == "cuda"
    sources = [part.reshape(-1).view(torch.uint8) for part in parts_of(state)]
    targets = [torch.empty(source.shape, dtype=torch.uint8, pin_memory=pinned) for source in sources]
    stager = QuantizedStager(max_snapshots=1)

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        scale.wait()

    def snapshot() -> None:
        stager.stage(state)
        scale.wait()

    scale.wait()
    began = time.perf_counter()
    snapshot()
    first = time.perf_counter() - began
    contenders = {
        "copy": Contender(before=scale.wait, call=copy),
        "snapshot": Contender(before=scale.wait, call=snapshot),
    }
    seconds = interleaved(contenders, max(scale.rounds // 3, 1), warm_up=True)
    stager.close()
    later, size = statistics.median(seconds["snapshot"]), sum(source.nbytes for source in sources)
    over = ratio(seconds["snapshot"], seconds["copy"])["ratio"]
    return {"GB": size / 1e9, "first ms": first * 1e3, "later ms": later * 1e3, "GB/s": size / later / 1e9, OVER: over}


def parts_of(state: Mapping[str, Tensor]) -> list[Tensor]:
    """Of all tensors; a dense one is its own part."""
    parts: list[Tensor] = []
    for value in state.values():
        parts += value.parts().values() if isinstance(value, QuantizedTensor) else [value]
    return parts
