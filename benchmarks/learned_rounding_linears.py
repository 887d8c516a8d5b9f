"""Learned rounding of linears one by one, beside GPTQ: a part of benchmarks/learned_rounding.py, which tells of both.

What is made small is tr(E^T H E), E = Q - W, with the Hessian H of 4,096 tokens, damped as GPTQ does it. Scales are
those of LocalHessian. Judged is the SNR of the output with the Hessian of 4,096 held-out tokens.
"""

import math
import time
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.calibration_sides import first_layers
from layerwise import GPTQ, LocalHessian
from layerwise.algorithms.algorithm import Group, Inputs, Linear
from layerwise.algorithms.solvers.columns import ColumnRounding, columns_of, rounding_of
from layerwise.algorithms.solvers.descent import descend
from qtensor import NVFP4BlockScaling
from qtensor.spec.registry import shared_amax

RECIPE = NVFP4BlockScaling()
GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
ALONE = 1  # their layer
ROWS, BATCH = 16, 2  # of 256 tokens: of each of the two texts, and of a forward
DESCENTS = (0, 1, 2, 4)
RATE, WEIGHT = 0.05, 30.0  # of Adam, of the penalty
GRID = torch.tensor([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32, device="cpu")


class Learned:
    """The v of some elements."""

    def __init__(self, begin: Tensor, steps: int) -> None:
        self.v, self.steps, self.step = torch.logit((begin + 0.1) / 1.2), steps, 0
        self.first, self.second = torch.zeros_like(begin), torch.zeros_like(begin)

    def h(self) -> Tensor:
        return (1.2 * torch.sigmoid(self.v) - 0.1).clamp_(0, 1)

    def take(self, slope: Tensor, h: Tensor) -> None:
        """One step of Adam, down the slope of the error by `h` and that of the penalty."""
        self.step += 1
        done, off, soft = self.step / self.steps, 2 * h - 1, torch.sigmoid(self.v)
        if done > 0.2:
            beta = 2 + 18 * (1 - (done - 0.2) / 0.8)
            slope = slope - WEIGHT * 2 * beta * off.sign() * off.abs() ** (beta - 1)
        slope = slope * 1.2 * soft * (1 - soft)
        self.first.lerp_(slope, 0.1)
        self.second.lerp_(slope.square(), 0.01)
        size = (self.second / (1 - 0.99**self.step)).sqrt_().add_(1e-8)
        self.v -= RATE * self.first / (1 - 0.9**self.step) / size


def decibels(signal: float, noise: float) -> float:
    return 10 * math.log10(signal / noise)


def error(off: Tensor, hessian: Tensor) -> float:
    """tr(off^T H off) of [K, rows]."""
    return float((off.double() * (hessian.double() @ off.double())).sum())


def rounded(columns: Tensor, rounding: ColumnRounding) -> Tensor:
    """To nearest."""
    return torch.stack([rounding(column, index) for index, column in enumerate(columns)])


def learned_linear(aims: Tensor, hessian: Tensor, rounding: ColumnRounding, start: Tensor, steps: int) -> Tensor:
    """Values [K, rows] under the scales of `rounding`, each one of the two neighbours of what `start` has there."""
    scaled = (start * rounding.enc.repeat_interleave(rounding.span, 0)).clamp(-6, 6)
    place = (torch.searchsorted(GRID, scaled, right=True) - 1).clamp(0, len(GRID) - 2)
    dec = rounding.dec.repeat_interleave(rounding.span, 0)
    low, high = GRID[place] * dec, GRID[place + 1] * dec
    step = (GRID[place + 1] - GRID[place]) * dec
    learned = Learned(((scaled - GRID[place]) / (GRID[place + 1] - GRID[place])).clamp(0.02, 0.98), steps)
    unit = 2 * aims.numel() / error(rounded(aims, rounding) - aims, hessian)
    for _ in range(steps):
        h = learned.h()
        learned.take((hessian @ (low + h * step - aims)).mul_(step).mul_(unit), h)
    return torch.where(learned.h() > 0.5, high, low)


@torch.no_grad()
def hessians(dense: Any, rows: Tensor) -> list[Tensor]:
    """2 X^T X / tokens of the input of each group in the layer `ALONE`."""
    found: list[Any] = [0.0] * len(GROUPS)

    def add(index: int, x: Tensor) -> None:
        found[index] = found[index] + 2 * (x.T @ x) / rows.numel()

    with first_layers(dense, ALONE + 1):
        hooks = [
            dense.model.layers[ALONE]
            .get_submodule(names[0])
            .register_forward_pre_hook(lambda _, args, index=index: add(index, args[0].flatten(0, -2)))
            for index, names in enumerate(GROUPS)
        ]
        for ids in rows.split(BATCH):
            dense.model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def of_linears(
    dense: Any, train: Tensor, held_out: Tensor, steps: int, done: Container[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each group that is not done, and way -> SNR on held-out tokens, the error that is minimised, CPU seconds."""
    for names, hessian, other in zip(GROUPS, hessians(dense, train), hessians(dense, held_out), strict=True):
        group = ", ".join(name.rpartition(".")[2] for name in names)
        if group in done:
            continue
        weights = [dense.model.layers[ALONE].get_submodule(name).weight.detach() for name in names]
        linears = [Linear(*pair, shared_amax(pair[1], RECIPE)) for pair in zip(names, weights, strict=True)]
        inputs = Inputs(train.numel(), torch.ones((), dtype=torch.float32, device="cpu"), hessian=hessian)
        found = of_group(Group(tuple(linears), inputs), hessian, other, steps)
        print(group, {way: (round(one["db"], 3), one["cpu_seconds"]) for way, one in found.items()}, flush=True)
        yield group, found


def of_group(group: Group, hessian: Tensor, other: Tensor, steps: int) -> dict[str, Any]:
    """Way -> figures; `other` is the Hessian of held-out tokens."""
    aims, damped, ways = columns_of(group), hessian.clone(), {}
    damped.diagonal().add_(max(0.01, len(aims) / (2 * ROWS * 256)) * damped.diagonal().mean())  # as GPTQ does

    def note(way: str, values: Tensor, began: float) -> None:
        seconds, noise = time.process_time() - began, error(values - aims, other)
        ways[way] = {"db": decibels(error(aims, other), noise), "error": error(values - aims, damped)}
        ways[way]["cpu_seconds"] = round(seconds, 2)

    start = aims
    for descent in DESCENTS:
        began = time.process_time()
        decisions = GPTQ(scales=LocalHessian(), descent=descent).decide(group, RECIPE)
        values = torch.cat([one.weight for one in decisions if one.weight is not None]).t().contiguous()
        rounding = rounding_of(group, RECIPE, [one.quantizer for one in decisions])
        start = start if descent else values  # columns as GPTQ had them just before it rounded them
        note(f"GPTQ, descent {descent}", rounded(values, rounding), began)
    began = time.process_time()
    values = learned_linear(aims, damped, rounding, start, steps)
    note("learned", values, began)
    note("learned, descent 4", descend(aims, values, damped, rounding, 4), began)
    return ways
