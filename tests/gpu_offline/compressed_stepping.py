"""Steps on compressed states with the fused step, interpreted; runs in the process of an `Interpreter`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from qtensor import MasterWeightOptimizer, QuantizedTensor, use_kernels
from qtensor.optim import fused
from qtensor.states.kinds import REMAINDER
from tests.gpu_offline.foreach_on_cuda import foreach_on_cuda
from tests.gpu_offline.stepping import Weight, stored, values
from tests.gpu_offline.written import WrittenKernel, launches_go_to


@dataclass(frozen=True)
class Run:
    """What is trained, and how."""

    weights: Sequence[Weight]
    kind: str = "AdamW"
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 4
    fused_steps: Sequence[bool | None] = ()  # of each step, what is asked for; none: the fused way where it is
    grads: torch.dtype | None = None  # else the weight's
    factors: Sequence[float] = (0.1,)  # of the gradients, in turns
    seed: int = 0


@dataclass
class Seen:
    """What was launched by steps, and, of `careful` tiles and of those with `low` elements, how many there were."""

    launched: list[str] = field(default_factory=list)
    careful: int = 0
    low: int = 0


@contextmanager
def on_gpu(seen: Seen) -> Iterator[None]:
    """The fused step runs on tensors of the CPU; no kernel proves itself (see `tried`)."""

    def launch(kernel: WrittenKernel, args: tuple[Any, ...]) -> None:
        if kernel.programs:
            constants = dict(kernel.constants)
            seen.launched.append(f"{kernel.name} {constants['WEIGHT']} {constants.get('MOMENTS', 'float8')}")
            kernel.run()

    with (
        foreach_on_cuda(),
        use_kernels("auto"),
        mock.patch.object(fused, "FUSED_ON", {"cpu"}),
        mock.patch("qtensor.optim.fused.compressed.tasks.FUSED_ON", {"cpu"}),
        mock.patch("qtensor.optim.fused.compressed.step.prove"),
        counted(seen),
        launches_go_to(launch),
    ):
        yield


@contextmanager
def counted(seen: Seen) -> Iterator[None]:
    """Inside, `seen` counts tiles."""
    from qtensor.optim.fused.compressed import kernel, usual

    careful, below = kernel.careful, usual.lattice.below

    def carefully(*args: Any) -> Any:
        seen.careful += 1
        return careful(*args)

    def counting(*args: Any) -> Any:
        seen.low += 1
        return below(*args)

    with mock.patch.object(kernel, "careful", carefully), mock.patch.object(usual.lattice, "below", counting):
        yield


def trained(run: Run) -> dict[str, Any]:
    """Train; returns the bytes of all that a step writes, after each step, and what was launched by steps."""
    params = []
    for number, weight in enumerate(run.weights):
        x = values(weight, run.seed + number).to(weight.dtype)
        params.append(nn.Parameter(stored(x, weight)))
        params[-1].grad_dtype = run.grads or weight.dtype
    after: list[dict[str, Tensor]] = []
    seen = Seen()
    with on_gpu(seen):
        options = {"foreach": True, "masters": "remainder", "moments": "float8", **run.options}
        optimizer = MasterWeightOptimizer(getattr(torch.optim, run.kind), params, **options)
        for step in range(run.steps):
            if run.fused_steps:
                optimizer._wants_fused = run.fused_steps[step]
            for number, (param, weight) in enumerate(zip(params, run.weights, strict=True)):
                factor = run.factors[step % len(run.factors)]
                grad = values(weight, 100 * step + number + run.seed, factor).to(run.grads or weight.dtype)
                if weight.spoiled and step:
                    flat = grad.view(-1)
                    flat[3], flat[37], flat[70] = float("nan"), float("inf"), -float("inf")
                param.grad = None if step in weight.skips else grad
            optimizer.step()
            after.append(bytes_of(params, optimizer))
    return {"after": after, **vars(seen)}


def bytes_of(params: Sequence[nn.Parameter], optimizer: MasterWeightOptimizer) -> dict[str, Tensor]:
    """Copies of all that a step writes; NaN of fp32 states is made one."""
    found = {}
    for number, param in enumerate(params):
        held: dict[str, Any] = {"weight": getattr(param, "dense", param.detach()), **optimizer.state.get(param, {})}
        for name, value in held.items():
            if isinstance(value, QuantizedTensor):
                found |= {f"{number}.{name}.{part}": each for part, each in value.parts().items()}
            elif isinstance(value, Tensor):
                plain = value.view(torch.int16) if name == REMAINDER else value
                plain = torch.where(plain.isnan(), torch.nan, plain) if plain.is_floating_point() else plain
                found[f"{number}.{name}"] = plain
    return {name: value.detach().clone().reshape(-1).view(torch.uint8) for name, value in found.items()}


def tried(form: Any, grads: torch.dtype = torch.bfloat16, *, aligned: bool = True) -> str:
    """Have the kernel of a form prove itself, interpreted; returns why it is refused, "" if it is not."""
    from qtensor.optim.fused.compressed import probe
    from qtensor.optim.fused.compressed.step import run
    from qtensor.optim.fused.compressed.tasks import Kind

    probe._proven.clear()
    with (
        foreach_on_cuda(),
        use_kernels("auto"),
        launches_go_to(lambda kernel, args: kernel.run() if kernel.programs else None),
    ):
        try:
            probe.prove(Kind(torch.device("cpu"), form, grads, aligned), run)
        except probe.OtherBytesError as error:
            return str(error)
    return ""


def tried_broken(form: Any, module: str, name: str, value: Any) -> str:
    """The same with another constant in a module of the kernel."""
    import triton.language as tl

    with mock.patch(f"qtensor.optim.fused.compressed.{module}.{name}", tl.constexpr(value)):
        return tried(form)
