"""What does a step of MasterWeightOptimizer(AdamW) cost beside torch's AdamW on fp32 weights of the same shapes?

    few large     the linears of 4 layers of Llama-3-8B, gradients in bf16 (torch's own: fp32, as its weights)
    many small    256 weights of 256 x 256
    fused         one pass over masters in fp32 and parts
    compressed    one pass over remainders, moments in 8 bits and parts
    foreach       the general way, which every other optimizer takes

Wall is from an empty queue to an empty queue; the host's part is what the call takes until it returns, the device's
what its kernels take together.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.device_time import launches_of
from benchmarks.gpu.question import Aim, Figures, Row, Scale, tried
from qtensor import Float8CurrentScaling, MasterWeightOptimizer, MXFP8BlockScaling, NVFP4BlockScaling, quantize
from qtensor.spec.recipes import Recipe

SECONDS = 60
RECIPES: dict[str, Recipe] = {
    "mxfp8 row": MXFP8BlockScaling(),
    "nvfp4 row": NVFP4BlockScaling(),
    "float8 row": Float8CurrentScaling(),
    "float8 tensor": Float8CurrentScaling(granularity="tensor"),
}
DENSE = "bf16"  # weights without a recipe
WAYS = {"fused": tuple(RECIPES), "compressed": ("mxfp8 row", DENSE), "foreach": ("mxfp8 row", "nvfp4 row")}
OPTIONS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "compressed": {"masters": "remainder", "moments": "float8"},
    "foreach": {"foreach": True, "fused_step": False},
}
WALL, HOST, DEVICE, LAUNCHES = "wall ms", "host ms", "device ms", "launches"
MOST = {"few large": 1.0, "many small": 1.5}
AIMS = (
    *(
        Aim(row=f"{name}, {size}, fused", figure=WALL, most=most, over=f"torch AdamW, {size}, fused")
        for size, most in MOST.items()
        for name in RECIPES
    ),
    *(Aim(row=f"{name}, {size}, fused", figure=LAUNCHES, most=40) for size in MOST for name in RECIPES),
    *(Aim(row=f"{name}, few large, fused", figure=HOST, most=3) for name in RECIPES),
    *(
        Aim(row=f"{name}, few large, compressed", figure=WALL, most=0.6, over="torch AdamW, few large, fused")
        for name in WAYS["compressed"]
    ),
)


def rows(scale: Scale) -> Iterator[Row]:
    """Fused first; foreach, which nothing is aimed at for, last."""
    count, side = scale.many
    sizes = {"few large": scale.shapes * scale.layers, "many small": [(side, side)] * count}
    for way, recipes in WAYS.items():
        for size, shapes in sizes.items():
            if way in ("fused", "foreach"):  # of torch's own
                yield tried(f"torch AdamW, {size}, {way}", partial(_torchs, scale, shapes, way))
            for name in recipes:
                yield tried(f"{name}, {size}, {way}", partial(_ours, scale, shapes, way, RECIPES.get(name)))


def _torchs(scale: Scale, shapes: list[tuple[int, int]], way: str) -> Figures:
    params = [nn.Parameter(torch.randn(shape, device=scale.device)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return _measured(scale, torch.optim.AdamW(params, lr=1e-3, **{way: True}).step)


def _ours(scale: Scale, shapes: list[tuple[int, int]], way: str, recipe: Recipe | None) -> Figures:
    params = []
    for shape in shapes:
        value = torch.randn(shape, dtype=torch.bfloat16, device=scale.device)
        params.append(nn.Parameter(value.clone() if recipe is None else quantize(value, recipe)))
        params[-1].grad = value * 0.1
    return _measured(scale, MasterWeightOptimizer(torch.optim.AdamW, params, lr=1e-3, **OPTIONS[way]).step)


def _measured(scale: Scale, step: Callable[[], object]) -> Figures:
    for _ in range(3):
        step()  # makes moments, compiles, and is no longer the first
    host, wall = [], []
    for _ in range(scale.rounds):
        scale.wait()
        began = time.perf_counter()
        step()
        host.append(time.perf_counter() - began)
        scale.wait()
        wall.append(time.perf_counter() - began)
    launches = launches_of(step, scale.device)
    return {
        WALL: statistics.median(wall) * 1e3,
        HOST: statistics.median(host) * 1e3,
        DEVICE: launches.seconds * 1e3,
        LAUNCHES: launches.number,
    }
