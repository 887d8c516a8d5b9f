"""What calls take of the host on a GPU: function calls, launches, CPU time and, under callgrind, instructions.

    python -m tests.gpu_offline.host_time OUT         in .venv-gpu-offline; OUT receives JSON, by format and program:
                                                      {"calls": .., "launches": .., "microseconds": ..}
    valgrind --tool=callgrind --instr-atstart=no --collect-atstart=no python -m tests.gpu_offline.host_time OUT --count
                                                      OUT receives the names of callgrind's dumps, in their order

The GPU is one that does nothing (idle.py). Programs are those of a training step, for one weight:

    decode, quantize    of [1024, 1024]
    linear              forward and backward, with the gradients of the input and of the weight
    pre_all_gather      FSDP2's hook in front of a gather, and the question for its signature
    post_all_gather     FSDP2's hook behind a gather that fills a weight again, for two ranks and for one
    FSDP2               forward and backward of 28 linears in four groups, for each of them
    step of 28, of 256  MasterWeightOptimizer's, of so many weights that take its fused way, for each of them

`torch` is the format of the same on a bf16 weight. `hooks` is that of a bf16 weight whose hooks around a gather do
nothing: what FSDP2 itself takes for such weights. Calls and instructions are the same in every run: calls have budgets
(test_host_time.py). Time is that of a machine, and of its other load.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

import qtensor as qt
from tests.gpu_offline.idle import Launcher, idle_gpu

SIZE, TOKENS, LAYERS, GROUP = 1024, 64, 28, 7
FORMATS = {
    "float8_row": qt.Float8CurrentScaling(),
    "float8_tensor": qt.Float8CurrentScaling(granularity="tensor"),
    "mxfp8": qt.MXFP8BlockScaling(),
    "nvfp4": qt.NVFP4BlockScaling(),
}
RANKS = 2
STEPPED = (28, 256)  # weights of an optimizer
WARM_UP, ROUNDS, COUNTED = 3, 5, 2
Program = Callable[[], object]


def values(*shape: int, grad: bool = False) -> Tensor:
    """On the GPU, bf16."""
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda", requires_grad=grad)


def linear(weight: Tensor) -> Program:
    """Forward and backward."""
    x, dy = values(TOKENS, SIZE, grad=True), values(TOKENS, SIZE)

    def run() -> None:
        F.linear(x, weight).backward(dy)
        x.grad = weight.grad = None

    return run


TOLD = (None, torch.Size((SIZE, SIZE)), (SIZE, 1), None, None)


def asked(weight: Any) -> object:
    """The hook in front of a gather, as FSDP2 calls it."""
    hook = weight.fsdp_pre_all_gather
    return hook(*TOLD[: len(inspect.signature(hook).parameters)])


def refilled(weight: Any, ranks: int) -> Program:
    """A hook that fills a gathered weight again; one rank gets the payload alone."""
    inputs, rows = weight.fsdp_pre_all_gather(None)
    received = inputs if ranks > 1 else inputs[:1]
    gathered, _ = weight.fsdp_post_all_gather(received, rows, torch.bfloat16)
    return lambda: weight.fsdp_post_all_gather(received, rows, torch.bfloat16, out=gathered)


class Hooked(Tensor):
    """The least wrapper of a plain weight, with FSDP2's hooks."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> Hooked:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map_only(cls, lambda each: each.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*given[0], **given[1]))

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self.inner,), None

    def fsdp_post_all_gather(self, outputs: tuple[Tensor, ...], metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0].view(-1, SIZE), outputs)


def sharded(recipe: Any, *, hooked: bool = False) -> Program:
    """Forward and backward of a model under FSDP2."""
    with torch.device("cuda"), nullcontext() if recipe is None else qt.quantized_model_init(recipe):
        layers = [nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)]
    for layer in layers if hooked else ():
        layer.weight = nn.Parameter(Hooked(layer.weight.detach()))
    net = nn.Sequential(*[nn.Sequential(*layers[first : first + GROUP]) for first in range(0, LAYERS, GROUP)])
    mesh = init_device_mesh("cuda", (RANKS,))
    for each in (*net, net):
        fully_shard(each, mesh=mesh)
    x, dy, params = values(TOKENS, SIZE, grad=True), values(TOKENS, SIZE), list(net.parameters())

    def run() -> None:
        net(x).backward(dy)
        for each in (x, *params):
            each.grad = None

    return run


def stepped(recipe: Any, count: int) -> Program:
    """A step that is not the first one: AdamW's, of weights that a step has written before."""
    params = [nn.Parameter(qt.quantize(values(SIZE, SIZE), recipe)) for _ in range(count)]
    for param in params:
        param.grad = values(SIZE, SIZE)
    optimizer = qt.MasterWeightOptimizer(torch.optim.AdamW, params, foreach=True)
    inner = optimizer._inner
    assert inner is not None
    for master in optimizer._masters.values():
        moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
        inner.state[master] = {"step": torch.ones((), device="cpu"), **moments}
    optimizer._fresh.clear()  # this GPU has none of the operations that a first step takes
    optimizer._wants_fused = True
    return optimizer.step


def programs() -> Iterator[tuple[str, str, Program, int]]:
    """(format, program, what runs it, how many weights it uses)."""
    dense = values(SIZE, SIZE)
    yield "torch", "linear", linear(nn.Parameter(dense)), 1
    for name, recipe in FORMATS.items():
        weight = qt.quantize(dense, recipe)
        yield name, "quantize", lambda recipe=recipe: qt.quantize(dense, recipe), 1  # type: ignore[misc]
        yield name, "decode", weight.dequantize, 1
        yield name, "linear", linear(nn.Parameter(weight)), 1
        yield name, "pre_all_gather", lambda weight=weight: asked(weight), 1  # type: ignore[misc]
        yield name, "post_all_gather", refilled(weight, RANKS), 1
        yield name, "post_all_gather, one rank", refilled(weight, 1), 1
    for name, recipe in {"torch": None, "hooks": None, **FORMATS}.items():
        yield name, "FSDP2", sharded(recipe, hooked=name == "hooks"), LAYERS
    for name, trained in FORMATS.items():
        for count in STEPPED:
            yield name, f"step of {count}", stepped(trained, count), count


def calls_of(program: Program) -> int:
    """Calls of functions, Python's and C's."""
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        program()
    finally:
        sys.setprofile(None)
    return calls - 1  # that of setprofile


def microseconds_of(program: Program, least: float = 0.02) -> float:
    """CPU time of a call, the least of some rounds."""
    best, calls = float("inf"), 1
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(calls):
            program()
        took = time.process_time() - began
        best = min(best, took / calls)
        calls = max(calls, int(least / best))
    return best * 1e6


def measured(program: Program, weights: int) -> dict[str, float]:
    """All figures, for each weight."""
    for _ in range(WARM_UP):
        program()
    before = Launcher.launches
    program()
    launches = Launcher.launches - before
    calls, microseconds = calls_of(program), microseconds_of(program)
    return {
        "calls": round(calls / weights, 1),
        "launches": launches / weights,
        "microseconds": round(microseconds / weights, 1),
    }


def count_instructions(cases: list[tuple[str, str, Program, int]]) -> list[str]:
    """Have callgrind count; a line for each of its dumps: format, program, and calls times weights behind it."""
    # no public name starts and stops callgrind from within
    toggle, toggle_and_dump = torch._C._valgrind_toggle, torch._C._valgrind_toggle_and_dump_stats
    for _, _, program, _ in cases:
        for _ in range(WARM_UP):
            program()
    subprocess.run(["callgrind_control", "-i", "on", str(os.getpid())], check=True, capture_output=True)
    lines = []
    for name, what, program, weights in cases:
        program()
        toggle()
        for _ in range(COUNTED):
            program()
        toggle_and_dump()
        lines.append(f"{name}\t{what}\t{COUNTED * weights}")
    return lines


@contextmanager
def ranks_without_peers() -> Iterator[None]:
    """A process group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Measure, or have it counted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", action="store_true")
    options = parser.parse_args()
    idle_gpu()
    torch.set_num_threads(1)
    with ranks_without_peers():
        if options.count:
            options.out.write_text("\n".join(count_instructions(list(programs()))))
            return
        found: dict[str, dict[str, Any]] = {}
        for name, what, program, weights in programs():
            found.setdefault(name, {})[what] = measured(program, weights)
    options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
