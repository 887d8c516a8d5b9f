"""Steps of a MasterWeightOptimizer with the fused step, interpreted; runs in the process of an `Interpreter`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from qtensor import MasterWeightOptimizer, QuantizedTensor, quantize, share_scales, use_kernels
from qtensor.optim import fused
from qtensor.scales.high_precision import HighPrecisionWeight
from tests.gpu_offline.foreach_on_cuda import foreach_on_cuda
from tests.gpu_offline.written import WrittenKernel, launches_go_to


@dataclass(frozen=True)
class Weight:
    """A parameter: recipe None: dense, of a dtype."""

    shape: tuple[int, ...]
    recipe: Any = None
    dtype: torch.dtype = torch.bfloat16
    group: int = 0
    skips: tuple[int, ...] = ()  # steps in which it has no gradient
    dense: bool = False  # storage="high_precision"
    spoiled: bool = False  # from the second step on, some gradients are not finite


@dataclass(frozen=True)
class Run:
    """What is trained, and how."""

    kind: str
    weights: Sequence[Weight]
    options: Sequence[Mapping[str, Any]] = ({},)  # of each group
    steps: int = 4
    fused_steps: Sequence[bool] = ()  # of each step, whether it takes the fused way; none: all do
    seed: int = 0
    shares: bool = False  # the first two weights share a scale
    optimizer: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def on_gpu(seen: list[str], tried: list[str] | None = None) -> Iterator[None]:
    """The fused step runs on tensors of the CPU; each launch adds the name of what it runs, to `tried` if it proves it.

    Which launches prove a kernel, depends on what the process has run before.
    """
    from qtensor.optim.fused.probe import prove

    def prove_apart(*given: Any) -> None:
        steps = len(seen)
        try:
            prove(*given)
        finally:
            if tried is not None:
                tried.extend(seen[steps:])
            del seen[steps:]

    def launch(kernel: WrittenKernel, args: tuple[Any, ...]) -> None:
        if kernel.programs:
            constants = dict(kernel.constants)
            seen.append(f"{kernel.name} {constants.get('RULE', '')} {constants.get('FORMAT', 'float8')}")
            kernel.run()

    with (
        foreach_on_cuda(),
        use_kernels("auto"),
        mock.patch.object(fused, "FUSED_ON", {"cpu"}),
        mock.patch("qtensor.optim.fused.tasks.FUSED_ON", {"cpu"}),
        mock.patch("qtensor.optim.fused.step.prove", prove_apart),
        launches_go_to(launch),
    ):
        yield


def stored(x: Tensor, weight: Weight) -> Tensor:
    """What holds x."""
    if weight.recipe is None:
        return x
    return HighPrecisionWeight(x, weight.recipe) if weight.dense else quantize(x, weight.recipe)


def values(weight: Weight, seed: int, factor: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(weight.shape, generator=generator)
    return x * torch.exp2(torch.randint(-6, 3, x.shape, generator=generator).float()) * factor


def trained(run: Run) -> dict[str, Any]:
    """Train; returns the bytes of all that a step writes, after each step, and what was launched by steps and tried."""
    params = []
    for number, weight in enumerate(run.weights):
        x = values(weight, run.seed + number).to(weight.dtype)
        params.append(nn.Parameter(stored(x, weight)))
    if run.shares:
        model = nn.ModuleDict({str(number): nn.Linear(1, 1, bias=False) for number in range(len(params))})
        for linear, param in zip(model.values(), params, strict=True):
            linear.weight = param
        share_scales(model, [("0", "1")])
    groups = [
        {**options, "params": [p for p, weight in zip(params, run.weights, strict=True) if weight.group == number]}
        for number, options in enumerate(run.options)
    ]
    after: list[dict[str, Tensor]] = []
    launched: list[str] = []
    tried: list[str] = []
    with on_gpu(launched, tried):
        options = {"foreach": True, **run.optimizer}
        optimizer = MasterWeightOptimizer(getattr(torch.optim, run.kind), groups, **options)
        for step in range(run.steps):
            if run.fused_steps:
                optimizer._wants_fused = None if run.fused_steps[step] else False
            for number, (param, weight) in enumerate(zip(params, run.weights, strict=True)):
                grad = values(weight, 100 * step + number + run.seed, 0.1).to(weight.dtype)
                if weight.spoiled and step:
                    grad[1, 3], grad[2, 5], grad[2, 40] = float("nan"), float("inf"), -float("inf")
                param.grad = None if step in weight.skips else grad
            optimizer.step()
            after.append(bytes_of(params, optimizer))
    return {"after": after, "launched": launched, "tried": tried}


def bytes_of(params: Sequence[nn.Parameter], optimizer: MasterWeightOptimizer) -> dict[str, Tensor]:
    """Copies of all that a step writes.

    A state's NaNs are made one: which of two NaNs a sum returns is left to the order in which a CPU's code has them,
    and a GPU knows a single one.
    """
    found = {}
    for number, param in enumerate(params):
        parts = param.parts() if isinstance(param, QuantizedTensor) else {"dense": getattr(param, "dense", param)}
        state = {name: value for name, value in optimizer.state.get(param, {}).items() if isinstance(value, Tensor)}
        state = {name: torch.where(value.isnan(), torch.nan, value.detach()) for name, value in state.items()}
        for name, value in {**parts, **state}.items():
            flat = value.detach().clone().reshape(-1)
            found[f"{number}.{name}"] = flat.view(torch.uint8) if flat.numel() else flat
    return found
