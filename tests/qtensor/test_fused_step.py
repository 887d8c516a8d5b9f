"""The fused step of MasterWeightOptimizer: where it is not taken, and, on a GPU, the bytes of the general way."""

import copy
import gc
import logging
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from qtensor import (
    Float8CurrentScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
    use_kernels,
)
from qtensor.optim import fused
from qtensor.optim.fused.counts import advance_counts, read_counts
from qtensor.optim.fused.decision import PLAIN
from qtensor.optim.fused.facts import FactsReader
from qtensor.optim.fused.step import CAPTURED, FusedStep
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.tensor.contents import preserve
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


def lend(params: Sequence[Tensor], step: int) -> None:
    torch.manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, device=param.device).to(param.dtype)


def held(params: list[nn.Parameter], optimizer: MasterWeightOptimizer) -> list[Tensor]:
    """All bytes of the weights and of what is kept of them."""
    found: list[Tensor] = []
    for param in params:
        for value in (param.detach(), *optimizer.state[param].values()):
            own = value.parts().values() if isinstance(value, QuantizedTensor) else [value]
            found += [each for each in own if isinstance(each, Tensor)]
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
        mock.patch("qtensor.optim.fused.tasks.FUSED_ON", {"cpu"}),
        mock.patch("qtensor.optim.master_step.available", return_value=True),
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
    found: list[Any] = []
    with cpu_for_a_gpu(), mock.patch.object(FusedStep, "_compiled", return_value=""):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            param.data = param.data.to(dtype)
            param.grad = torch.ones_like(param)
            found.append(step._look((param, master), {}, PLAIN, FactsReader())[0])
    assert [found[0].kind.output.element, found[1].kind.output.element] == [torch.bfloat16, torch.float16]
    assert found[2] == "it is a Parameter of torch.float32"


# -- what is kept from step to step ------------------------------------------------------------------------------------


def stepped_once() -> MasterWeightOptimizer:
    """An optimizer whose weights have all been written and have gradients; two groups."""
    recipes = (MXFP8BlockScaling(), NVFP4BlockScaling(), Float8CurrentScaling())
    weights = [nn.Parameter(quantize(torch.randn(32, 32).bfloat16(), recipe)) for recipe in recipes]
    dense = nn.Parameter(HighPrecisionWeight(torch.randn(32, 32).bfloat16(), MXFP8BlockScaling()))
    plain = [nn.Parameter(torch.randn(32, 32).bfloat16()), nn.Parameter(torch.randn(32, 32))]
    groups = [{"params": [*weights, dense]}, {"params": plain, "lr": 0.1}]
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, groups, lr=1e-2)
    lend([*weights, dense, *plain], 0)
    optimizer.step()
    optimizer._fresh.clear()
    return optimizer


def taken_by(optimizer: MasterWeightOptimizer) -> list[Any]:
    """All that a step would take the fused way, in words that can be compared."""
    inner = optimizer._inner
    assert inner is not None
    stepped = [param for param in optimizer._masters if param.grad is not None and param.requires_grad]
    taken = optimizer._take_fused(inner, stepped)
    assert taken is not None
    turns = [
        (id(turn.task.param), replace(turn.task, param=None), turn.grad, id(turn.taken), id(turn.options))  # type: ignore[arg-type]
        for turn in taken._turns
    ]
    return [*turns, *taken._plans]


def shift(grad: Tensor) -> Tensor:
    """The same numbers, which begin elsewhere."""
    room = torch.zeros(grad.numel() + 1, dtype=grad.dtype)
    return room[1:].view(grad.shape).copy_(grad)


def anew(weight: Tensor) -> QuantizedTensor:
    assert isinstance(weight, QuantizedTensor)
    return quantize(torch.randn(weight.shape).to(weight.dtype), weight.recipe)


def set_data(tensor: Any, value: Tensor) -> None:
    tensor.data = value


def keep_value(weight: Any) -> None:
    preserve(weight, torch.zeros(weight.shape))


def forget_state(optimizer: Any, master: Tensor) -> None:
    optimizer._inner.state[master] = {}


def load(optimizer: MasterWeightOptimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer._fresh.clear()


def add_group(optimizer: MasterWeightOptimizer) -> None:
    param = nn.Parameter(quantize(torch.randn(32, 32).bfloat16(), MXFP8BlockScaling()))
    optimizer.add_param_group({"params": [param]})
    lend([param], 1)
    assert optimizer._inner is not None
    master = optimizer._masters[param]
    moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
    optimizer._inner.state[master] = {"step": torch.ones(()), **moments}
    optimizer._fresh.clear()


def set_option(optimizer: Any, number: int, **options: Any) -> None:
    optimizer._inner.param_groups[number].update(options)


# (optimizer, one of its parameters, its master, the master's state); which of the parameters each is about: below
CHANGES: dict[str, tuple[int, Callable[[Any, Any, Tensor, Any], object]]] = {
    "data of a quantized weight": (0, lambda o, p, m, s: set_data(p, anew(p))),
    "a part": (0, lambda o, p, m, s: setattr(p, "scale", p.scale.clone())),
    "data of a part": (1, lambda o, p, m, s: set_data(p.payload, p.payload.clone())),
    "a part that covers all values": (1, lambda o, p, m, s: setattr(p, "global_scale", p.global_scale.clone())),
    "data of a plain weight": (4, lambda o, p, m, s: set_data(p, p.data.clone())),
    "another dtype of a plain weight": (4, lambda o, p, m, s: set_data(p, p.data.half())),
    "data of a weight in fp32": (5, lambda o, p, m, s: set_data(p, p.data.clone())),
    "what stays dense": (3, lambda o, p, m, s: setattr(p, "dense", p.dense.clone())),
    "a preserved value": (0, lambda o, p, m, s: keep_value(p)),
    "a master": (0, lambda o, p, m, s: o._masters.update({p: m.clone()})),
    "data of a master": (0, lambda o, p, m, s: set_data(m, m.clone())),
    "strides of a master": (0, lambda o, p, m, s: m.t_()),
    "shape of a moment": (0, lambda o, p, m, s: s["exp_avg"].resize_(16, 64)),
    "data of a moment": (0, lambda o, p, m, s: set_data(s["exp_avg"], s["exp_avg"].clone())),
    "a moment by hand": (0, lambda o, p, m, s: s.update(exp_avg_sq=s["exp_avg_sq"].clone())),
    "dtype of a moment": (0, lambda o, p, m, s: s.update(exp_avg=s["exp_avg"].double())),
    "dtype of a moment, at its place": (0, lambda o, p, m, s: set_data(s["exp_avg"], s["exp_avg"].view(torch.int32))),
    "strides of a moment": (0, lambda o, p, m, s: s["exp_avg"].t_()),
    "moments that change places": (0, lambda o, p, m, s: s.update(exp_avg=s["exp_avg_sq"], exp_avg_sq=s["exp_avg"])),
    "no moment": (0, lambda o, p, m, s: s.pop("exp_avg")),
    "one moment more": (0, lambda o, p, m, s: s.update(max_exp_avg_sq=m.clone())),
    "a count by hand": (0, lambda o, p, m, s: s.update(step=torch.tensor(7.0))),
    "dtype of a count": (0, lambda o, p, m, s: s.update(step=torch.tensor(7))),
    "class of a count": (0, lambda o, p, m, s: s.update(step=nn.Parameter(torch.tensor(7.0)))),
    "no state": (0, lambda o, p, m, s: forget_state(o, m)),
    "another gradient": (0, lambda o, p, m, s: setattr(p, "grad", p.grad.clone())),
    "dtype of a gradient": (0, lambda o, p, m, s: set_data(p.grad, p.grad.float())),
    "strides of a gradient": (0, lambda o, p, m, s: p.grad.t_()),
    "where a gradient begins": (0, lambda o, p, m, s: set_data(p.grad, shift(p.grad))),
    "a negative gradient": (0, lambda o, p, m, s: set_data(p.grad, torch._neg_view(p.grad))),
    "a gradient without memory": (
        0,
        lambda o, p, m, s: set_data(p.grad, torch._efficientzerotensor(p.shape, dtype=p.dtype)),
    ),
    "a sparse gradient": (5, lambda o, p, m, s: setattr(p, "grad", p.grad.to_sparse())),
    "zero_grad": (0, lambda o, p, m, s: o.zero_grad()),
    "no gradient": (2, lambda o, p, m, s: setattr(p, "grad", None)),
    "a weight that is frozen": (1, lambda o, p, m, s: p.requires_grad_(False)),
    "a weight that others wrote": (0, lambda o, p, m, s: o._fresh.add(p)),
    "the rule of a group": (0, lambda o, p, m, s: set_option(o, 0, amsgrad=True)),
    "a loaded state": (0, lambda o, p, m, s: load(o)),
    "one group more": (0, lambda o, p, m, s: add_group(o)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_kept_is_what_is_found_anew(change: str) -> None:
    """Whatever changes between two steps: no step goes by what was true before."""
    number, change_it = CHANGES[change]
    optimizer = stepped_once()
    param = list(optimizer._masters)[number]
    master = optimizer._masters[param]
    assert optimizer._inner is not None
    with cpu_for_a_gpu(), mock.patch.object(FusedStep, "_compiled", return_value=""), torch.no_grad():
        before = taken_by(optimizer)
        kept = optimizer._fused_way
        assert taken_by(optimizer) == before
        change_it(optimizer, param, master, optimizer._inner.state[master])
        found = taken_by(optimizer)
        optimizer._fused_way = None
        assert found == taken_by(optimizer)
        assert found != before
        # and back again, where there is a way back
        optimizer._fused_way = kept
        assert taken_by(optimizer) == found


def test_a_step_like_the_last_one_decides_nothing() -> None:
    optimizer = stepped_once()
    with cpu_for_a_gpu(), mock.patch.object(FusedStep, "_compiled", return_value="") as compiled, torch.no_grad():
        before = taken_by(optimizer)
        assert len({entry[0] for entry in before if isinstance(entry, tuple)}) == 6
        asked = compiled.call_count
        lend(list(optimizer._masters), 1)
        with mock.patch("qtensor.optim.fused.step.output_of"), mock.patch("qtensor.optim.fused.step.task_of"):
            again = taken_by(optimizer)
        assert compiled.call_count == asked
    assert [entry[1] for entry in again[:6]] == [entry[1] for entry in before[:6]]
    assert again[6] is before[6]  # the very plan


def test_a_capture_is_no_reason_that_is_kept() -> None:
    """A kernel that was not tried before is not tried while a graph is captured; afterwards it is."""
    optimizer = stepped_once()
    with (
        cpu_for_a_gpu(),
        mock.patch("qtensor.optim.fused.trials.can_try", return_value=False) as can_try,
        mock.patch("qtensor.optim.fused.step.run") as run,
        mock.patch("qtensor.optim.fused.step.prove") as prove,
        torch.no_grad(),
    ):
        assert taken_by(optimizer) == []
        assert optimizer._fused_way is not None
        assert set(optimizer._fused_way._reasons.told.values()) == {CAPTURED}
        assert not run.called
        assert not prove.called
        can_try.return_value = True
        assert len([entry for entry in taken_by(optimizer) if isinstance(entry, tuple)]) == len(optimizer._masters)
        assert run.called
        assert prove.called
        # and in the next capture, what is known holds
        can_try.return_value = False
        assert len([entry for entry in taken_by(optimizer) if isinstance(entry, tuple)]) == len(optimizer._masters)


def test_a_step_that_must_be_fused_is_not_captured_untried() -> None:
    optimizer = stepped_once()
    optimizer._wants_fused = True
    with (
        cpu_for_a_gpu(),
        mock.patch("qtensor.optim.fused.trials.can_try", return_value=False),
        torch.no_grad(),
        pytest.raises(RuntimeError, match="step once before that"),
    ):
        taken_by(optimizer)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_general_way_beside_it_steps_its_own_alone(*, frozen: bool) -> None:
    """Parameters in fp32 have gradients that the inner optimizer would find: what was taken, and what is frozen."""
    optimizer = stepped_once()
    first, *_, last = optimizer._masters
    last.requires_grad_(not frozen)
    forget_state(optimizer, optimizer._masters[first])
    before, grad = last.detach().clone(), last.grad
    with (
        cpu_for_a_gpu(),
        mock.patch.object(FusedStep, "_compiled", return_value=""),
        mock.patch("qtensor.optim.fused.step.run"),  # so nothing moves what takes the fused way
    ):
        optimizer.step()
    assert optimizer._inner is not None
    steps = [float(optimizer._inner.state[optimizer._masters[param]]["step"]) for param in (first, last)]
    assert steps == [1.0, 1.0 if frozen else 2.0]
    assert torch.equal(last, before)
    assert last.grad is grad


def test_copies_of_an_optimizer_keep_nothing_of_it() -> None:
    optimizer = stepped_once()
    with cpu_for_a_gpu(), mock.patch.object(FusedStep, "_compiled", return_value=""), torch.no_grad():
        taken_by(optimizer)
        for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert other._fused_way is None
            lend(list(other._masters), 0)
            places = {entry[1].addresses.master for entry in taken_by(other)[:6]}
            assert places == {master.data_ptr() for master in other._masters.values()}


@pytest.mark.parametrize("way", [None, False, True])
def test_a_pickle_with_the_older_name_of_the_option_loads(*, way: bool | None) -> None:
    params = parameters(MXFP8BlockScaling(), "cpu")
    written = pickle.dumps(MasterWeightOptimizer(torch.optim.AdamW, params, fused_step=way), protocol=2)
    new, old = (b"X" + len(name).to_bytes(4, "little") + name for name in (b"_wants_fused", b"_fused_step"))
    assert written.count(new) == 1
    loaded = pickle.loads(written.replace(new, old))
    assert loaded._wants_fused is way
    assert "_fused_step" not in vars(loaded)


def test_what_is_kept_keeps_no_memory() -> None:
    """A state that is loaded takes the place of the old one, which is let go of before a step."""
    optimizer = stepped_once()
    assert optimizer._inner is not None
    with cpu_for_a_gpu(), mock.patch.object(FusedStep, "_compiled", return_value=""), torch.no_grad():
        taken_by(optimizer)
        state = optimizer._inner.state[next(iter(optimizer._masters.values()))]
        held = [weakref.ref(value) for value in state.values()]
        state.clear()
        optimizer.state.clear()
        gc.collect()
        assert [one() for one in held] == [None] * 3


# -- on a GPU ----------------------------------------------------------------------------------------------------------


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
            optimizer._wants_fused = way
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
                inner = optimizer._inner
                assert inner is not None
                for state in inner.state.values():
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
