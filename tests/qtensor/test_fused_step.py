"""The fused step of MasterWeightOptimizer: where it is not taken, and, on a GPU, the bytes of the general way."""

import copy
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, QuantizedTensor, quantize, use_kernels
from qtensor.optim import fused
from qtensor.optim.fused.counts import advance_counts, read_counts
from qtensor.optim.fused.decision import PLAIN
from qtensor.optim.fused.step import FusedStep
from tests.gpu_offline.recipes import RECIPES

RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "sgd, no momentum": (torch.optim.SGD, {"lr": 0.1}),
}
SHAPES = (512, 1024), (48, 4096), (128, 128)


def parameters(recipe: Any, device: str) -> list[nn.Parameter]:
    torch.manual_seed(0)
    weights = [nn.Parameter(quantize(torch.randn(shape, device=device).bfloat16(), recipe)) for shape in SHAPES]
    dense = [nn.Parameter(torch.randn(shape, device=device).bfloat16()) for shape in ((33,), (64, 64))]
    return [*weights, *dense, nn.Parameter(torch.randn(64, device=device))]


def lend(params: list[nn.Parameter], step: int) -> None:
    torch.manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, device=param.device).to(param.dtype)


def held(params: list[nn.Parameter], optimizer: MasterWeightOptimizer) -> list[Tensor]:
    found = []
    for param in params:
        found += param.parts().values() if isinstance(param, QuantizedTensor) else [param.detach()]
        found += [value for value in optimizer.state[param].values() if isinstance(value, Tensor)]
    return [value.detach().reshape(-1).contiguous().view(torch.uint8).cpu() for value in found]


def test_nothing_of_it_is_imported_on_a_cpu() -> None:
    code = (
        "import sys, torch; from torch import nn; import qtensor as qt\n"
        "p = nn.Parameter(qt.quantize(torch.randn(4, 32), qt.MXFP8BlockScaling()))\n"
        "o = qt.MasterWeightOptimizer(torch.optim.AdamW, [p]); p.grad = torch.ones(4, 32); o.step(); o.step()\n"
        "print([name for name in sys.modules if 'optim.fused.' in name or 'triton_kernels.' in name])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_a_step_that_must_be_fused_says_why_it_cannot() -> None:
    params = parameters(MXFP8BlockScaling(), "cpu")
    optimizer = MasterWeightOptimizer(torch.optim.Adagrad, params, fused_step=True)
    lend(params, 0)
    with use_kernels("auto"), pytest.raises(RuntimeError, match=r"^MasterWeightOptimizer\(fused_step=True\): a para"):
        optimizer.step()
    for each in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        lend(each.param_groups[0]["params"], 0)
        with use_kernels("auto"), pytest.raises(RuntimeError, match=r"Adagrad is none of torch's AdamW, Adam and SGD"):
            each.step()


def test_counts_are_read_each_time() -> None:
    steps = [torch.tensor(3.0), torch.tensor(8.0)]
    assert read_counts(steps) == [3.0, 8.0]
    advance_counts(steps)
    steps[0].data.fill_(20.0)  # no version counter tells
    assert read_counts(steps) == [20.0, 9.0]


@contextmanager
def cpu_for_a_gpu() -> Iterator[None]:
    """Inside, the fused step is for weights of the CPU; none can be launched."""
    with (
        mock.patch.object(fused, "FUSED_ON", {"cpu"}),
        mock.patch("qtensor.optim.fused.shards.FUSED_ON", {"cpu"}),
        mock.patch("qtensor.optim.master_weights.available", return_value=True),
        use_kernels("auto"),
    ):
        yield


def test_an_optimizer_that_is_not_covered_steps_with_all_of_its_parameters() -> None:
    """Also in a step without gradients: it may count its steps, and deal its parameters out to ranks."""
    seen: list[int] = []

    class Whole(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(sum(len(group["params"]) for group in self.param_groups))
            return super().step(closure)

    params = parameters(MXFP8BlockScaling(), "cpu")
    optimizer = MasterWeightOptimizer(Whole, params, lr=0.1)
    with cpu_for_a_gpu():
        lend(params[:1], 0)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
    assert seen == [len(params)] * 2


def test_groups_that_are_covered_ask_torch_for_its_foreach_step() -> None:
    """A first step, and one behind a load, take the general way: it must not be torch's own fused kernel."""
    seen: list[tuple[Any, Any]] = []
    params = parameters(MXFP8BlockScaling(), "cpu")
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, params, fused=True)
    inner = optimizer._inner
    assert inner is not None
    step = type(inner).step

    def noting(self: Any, closure: Any = None) -> Any:
        seen.extend((group["foreach"], group["fused"]) for group in self.param_groups)
        return step(self, closure)

    with cpu_for_a_gpu(), mock.patch.object(torch.optim.AdamW, "step", noting):
        lend(params, 0)
        optimizer.step()
    assert set(seen) == {(True, None)}
    assert [(group["foreach"], group["fused"]) for group in optimizer.param_groups] == [(None, True)]


def test_what_a_weight_stores_is_asked_again_where_its_data_was_exchanged() -> None:
    """`module.half()` puts other data into the same parameter."""
    param = torch.nn.Parameter(torch.ones(4, 32, dtype=torch.bfloat16))
    master = param.detach().float()
    step = FusedStep(required=False)
    with cpu_for_a_gpu(), mock.patch.object(FusedStep, "_compiled", return_value=""):
        found = []
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            param.data = param.data.to(dtype)
            param.grad = torch.ones_like(param)
            found.append(step._look((param, master), {}, PLAIN, 0))
    assert [found[0].kind.output.element, found[1].kind.output.element] == [torch.bfloat16, torch.float16]
    assert found[2] == "it is a Parameter of torch.float32"


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", RECIPES)
def test_the_fused_step_writes_the_bytes_of_the_general_way(name: str, rule: str) -> None:
    """Those of foreach=True; the ways change in the middle of training, too."""
    kind, options = RULES[rule]
    ran = []
    for ways in ([True] * 5, [False] * 5, [True, True, False, True, True]):  # True: or an error
        params = parameters(RECIPES[name], "cuda")
        optimizer = MasterWeightOptimizer(kind, params, **options)
        for step, way in enumerate(ways):
            optimizer._fused_step = way
            lend(params, step)
            with use_kernels("auto"):
                optimizer.step()
        ran.append(held(params, optimizer))
    first, *others = ran
    for other in others:
        assert [torch.equal(a, b) for a, b in zip(first, other, strict=True)] == [True] * len(first)


@pytest.mark.gpu
def test_with_fused_of_torch_all_steps_are_those_of_foreach() -> None:
    """Through a load, too; and counts that torch left on the GPU are read in each step."""
    ran = []
    for options in ({"fused": True}, {"foreach": True}):
        params = parameters(MXFP8BlockScaling(), "cuda")
        optimizer = MasterWeightOptimizer(torch.optim.AdamW, params, fused_step=True, lr=1e-2, **options)
        for step in range(5):
            lend(params, step)
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if step == 3:
                for state in optimizer._inner.state.values():
                    state["step"] = state["step"].to("cuda")
            with use_kernels("auto"):
                optimizer.step()
        ran.append(held(params, optimizer))
    first, second = ran
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True] * len(first)


@pytest.mark.gpu
def test_every_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    params = parameters(MXFP8BlockScaling(), "cuda")
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, params, amsgrad=True)
    with caplog.at_level(logging.DEBUG, "qtensor.optim.fused.step"), use_kernels("auto"):
        for step in range(3):
            lend(params, step)
            optimizer.step()
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["amsgrad=True"] * len(params)
