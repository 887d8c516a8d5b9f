"""The fused step of MasterWeightOptimizer: where it is not taken, and, on a GPU, the bytes of the general way."""

import copy
import logging
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, QuantizedTensor, quantize, use_kernels
from qtensor.optim.fused.counts import Counts
from tests.devices import told_of_waits
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
        "print([name for name in sys.modules if 'optim.fused.' in name or name == 'triton'])\n"
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


def test_counts_on_the_cpu_are_read_each_time() -> None:
    counts, steps = Counts(), [torch.tensor(3.0), torch.tensor(8.0)]
    assert counts.read(steps) == [3.0, 8.0]
    counts.advance(steps)
    steps[0].data.fill_(20.0)
    assert counts.read(steps) == [20.0, 9.0]


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
def test_steps_after_fused_ones_of_torch_go_on_and_wait_for_nothing_but_digests() -> None:
    """torch keeps the counts on the GPU then: they are read once, and in place writes into them are seen."""
    params = parameters(MXFP8BlockScaling(), "cuda")
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, params, fused_step=True, fused=True, lr=1e-2)
    for step in range(4):
        lend(params, step)
        if step == 3:
            optimizer.state[params[0]]["step"].fill_(10.0)
        with use_kernels("auto"):
            optimizer.step()
        for param in params[: len(SHAPES)]:
            again = quantize(optimizer.state[param]["master_weight"], MXFP8BlockScaling())
            assert torch.equal(param.payload.view(torch.uint8), again.payload.view(torch.uint8))
            assert torch.equal(param.scale.view(torch.uint8), again.scale.view(torch.uint8))
    counts = [optimizer.state[param]["step"] for param in params]
    assert {count.device.type for count in counts} == {"cuda"}
    assert [count.item() for count in counts] == [11.0] + [4.0] * (len(params) - 1)
    known = Counts()
    known.read(counts)
    with told_of_waits("error"):
        known.advance(counts)
        assert known.read(counts) == [12.0] + [5.0] * (len(params) - 1)


@pytest.mark.gpu
def test_every_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    params = parameters(MXFP8BlockScaling(), "cuda")
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, params, amsgrad=True)
    with caplog.at_level(logging.DEBUG, "qtensor.optim.fused.step"), use_kernels("auto"):
        for step in range(3):
            lend(params, step)
            optimizer.step()
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["amsgrad=True"] * len(params)
