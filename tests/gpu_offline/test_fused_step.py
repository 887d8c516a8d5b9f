"""The fused step of MasterWeightOptimizer, interpreted: the bytes of the general way, its launches, its code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import qtensor as qt
from qtensor.optim import fused
from qtensor.optim.masters import LastWrites
from tests.gpu_offline.interpreted import Interpreter
from tests.gpu_offline.recipes import RECIPES
from tests.gpu_offline.stepping import Run, Weight, trained
from tests.gpu_offline.written import launches_go_to

MX = RECIPES["mxfp8_row"]


@pytest.fixture(scope="module")
def interpreter(_gpu_that_is_not_there: None) -> Iterator[Interpreter]:
    process = Interpreter()
    yield process
    process.close()


def launched(interpreter: Interpreter, run: Run) -> list[str]:
    """Assert that the fused way and the general one write the same bytes; return what the fused one launched."""
    fused = interpreter.run(trained, run)
    general = interpreter.run(trained, replace(run, fused_steps=[False] * run.steps))
    assert general["launched"] == []
    for step, (found, wanted) in enumerate(zip(fused["after"], general["after"], strict=True)):
        assert found.keys() == wanted.keys()
        different = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
        assert different == [], f"step {step}"
    return fused["launched"]


# the first step makes the state, and the general way writes what it made for the first time
AFTER_THE_FIRST = 3


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_writes_the_bytes_of_the_general_way(interpreter: Interpreter, name: str) -> None:
    """Whole tiles, and blocks that fill none; a recipe takes one launch, or two if its weights wait for an amax."""
    recipe, wide = RECIPES[name], name in ("float8_tensor", "nvfp4_row", "nvfp4_square")
    rows = 16 if name == "nvfp4_square" else 32 if name == "mxfp8_square" else 3
    weights = [Weight((64, 256), recipe), Weight((rows, 256), recipe), Weight((128, 256), recipe)]
    found = launched(interpreter, Run("AdamW", weights))
    assert len(found) == AFTER_THE_FIRST * (2 if wide else 1)


@pytest.mark.parametrize("name", ["float8_row", "float8_block_square"])
def test_long_rows_and_large_squares_have_the_same_bytes(interpreter: Interpreter, name: str) -> None:
    """A program goes through them in pieces; rows and squares end within one."""
    shapes = [(2, 4224), (3, 5000)] if name == "float8_row" else [(128, 256), (300, 128)]
    found = launched(interpreter, Run("AdamW", [Weight(shape, RECIPES[name]) for shape in shapes], steps=3))
    kernels = {each.split()[0].rpartition(".")[2] for each in found}
    assert kernels == {"step_long"}


RULES = {
    "adam": Run("Adam", [], [{"weight_decay": 0.1}]),
    "adam, no decay, maximize": Run("Adam", [], [{"maximize": True}]),
    "adamw, no decay": Run("AdamW", [], [{"weight_decay": 0.0, "eps": 0.0}]),
    "adamw, betas from 0.5 down": Run("AdamW", [], [{"betas": (0.4, 0.0), "lr": 0.1}]),
    "sgd": Run("SGD", [], [{"lr": 0.1, "weight_decay": 0.01}]),
    "sgd, momentum": Run("SGD", [], [{"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}]),
    "sgd, nesterov": Run("SGD", [], [{"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}]),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_rule_has_the_bytes_of_the_general_way(interpreter: Interpreter, rule: str, dtype: torch.dtype) -> None:
    """Beside a quantized weight: masters around dense ones, fp32's own, sizes that fill no word, and nothing at all."""
    weights = [
        Weight((33, 64), MX, dtype=dtype),
        Weight((16, 40), dtype=dtype),
        Weight((7, 5), dtype=dtype),
        Weight((13,), dtype=torch.float32),
        Weight((0, 32), dtype=torch.float32),
    ]
    assert launched(interpreter, replace(RULES[rule], weights=weights))


def test_groups_have_hyperparameters_of_their_own_in_one_launch(interpreter: Interpreter) -> None:
    groups = [{"lr": 1e-3, "weight_decay": 0.1}, {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-3, "maximize": True}]
    weights = [Weight((16, 64), MX, group=number % 2) for number in range(4)]
    assert len(launched(interpreter, Run("AdamW", weights, groups))) == AFTER_THE_FIRST


@pytest.mark.parametrize("name", ["float8_tensor", "nvfp4_row"])
def test_weights_under_one_scale_are_written_under_the_amax_that_is_agreed_on(
    interpreter: Interpreter, name: str
) -> None:
    """And beside them one whose scale is its own."""
    run = Run("AdamW", [Weight((16, 64), RECIPES[name]) for _ in range(3)], shares=True)
    assert len(launched(interpreter, run)) == 2 * AFTER_THE_FIRST


def test_weights_that_are_gathered_quantized_are_stepped(interpreter: Interpreter) -> None:
    found = launched(interpreter, Run("AdamW", [Weight((16, 64), MX, dense=True)]))
    assert [each.split()[-1] for each in found] == ["dense"] * 3


def test_the_ways_may_change_in_the_middle_of_training(interpreter: Interpreter) -> None:
    """Also with counts that differ, since a weight has no gradient in some steps."""
    weights = [Weight((16, 64), MX), Weight((16, 64), MX, skips=(0, 3)), Weight((4, 64), RECIPES["nvfp4_row"])]
    run = Run("AdamW", weights, steps=7, fused_steps=[True, True, False, True, True, False, True])
    assert launched(interpreter, run)


@pytest.mark.parametrize(
    "weight",
    [
        Weight((8, 100), RECIPES["float8_block_row"]),  # a smaller block behind
        Weight((8, 64), qt.Float8DelayedScaling()),
    ],
    ids=["ragged", "history"],
)
def test_what_it_does_not_cover_takes_the_general_way(interpreter: Interpreter, weight: Weight) -> None:
    assert launched(interpreter, Run("AdamW", [weight, Weight((8, 64), MX)], steps=3)) == [STEP] * 2
    assert launched(interpreter, Run("AdamW", [weight], steps=3)) == []


STEP = "interpreter.step adam mxfp8"


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"foreach": False}, {"lr": torch.tensor(0.1)}])
def test_options_that_it_does_not_cover_take_the_general_way(interpreter: Interpreter, options: dict[str, Any]) -> None:
    if "lr" in options:
        options["foreach"] = False
    run = Run("AdamW", [Weight((8, 64), MX)], optimizer=options, steps=2)
    assert interpreter.run(trained, run)["launched"] == []


def test_fused_of_torch_has_the_bytes_of_foreach(interpreter: Interpreter) -> None:
    weights = [Weight((8, 64), MX)]
    found = interpreter.run(trained, Run("AdamW", weights, optimizer={"foreach": None, "fused": True}))
    wanted = interpreter.run(trained, Run("AdamW", weights))
    for after, other in zip(found["after"], wanted["after"], strict=True):
        assert all(torch.equal(after[name], value) for name, value in other.items())


def test_weights_that_are_not_finite_have_the_bytes_of_the_general_way(interpreter: Interpreter) -> None:
    for name, recipe in RECIPES.items():
        rows = 128 if "square" in name else 8
        run = Run("AdamW", [Weight((rows, 256), recipe, spoiled=True)], [{"lr": 0.1}], steps=3)
        assert launched(interpreter, run), name


def test_every_reason_has_a_name() -> None:
    from qtensor.optim.fused.decision import refuse_optimizer, rule_of

    parameter = torch.nn.Parameter(torch.zeros(2))
    inner = torch.optim.Adagrad([parameter])
    assert refuse_optimizer(inner, hooked=False, watched=False) == "Adagrad is none of torch's AdamW, Adam and SGD"
    inner = torch.optim.AdamW([parameter])
    assert refuse_optimizer(inner, hooked=True, watched=False) == "hooks run around the inner optimizer's step"
    inner.grad_scale = torch.ones(())
    assert "grad_scale" in refuse_optimizer(inner, hooked=False, watched=False)
    group = inner.param_groups[0]
    assert rule_of(torch.optim.AdamW, {**group, "capturable": True}) == "capturable=True"
    assert rule_of(torch.optim.AdamW, {**group, "lr": torch.ones(())}) == "lr is no number but a Tensor"
    for options in ({"foreach": False}, {"fused": False}, {"foreach": False, "fused": False}):
        assert "loop over single tensors" in str(rule_of(torch.optim.AdamW, {**group, **options}))
    assert not isinstance(rule_of(torch.optim.AdamW, {**group, "fused": True, "foreach": False}), str)


SHAPES = [(4, 32), (1, 32), (1, 32), (4, 32), (7, 32), (7, 32), (2, 64)] * 4  # 28, of Llama's kinds


@pytest.mark.parametrize(("name", "most"), [("mxfp8_row", 3), ("float8_row", 4), ("nvfp4_row", 4)])
def test_a_step_of_many_weights_is_a_handful_of_launches(name: str, most: int) -> None:
    """All but digests and the table's copy: room for amaxes, flags of who moved, the kernels; for any number."""
    assert {len(launches_of_a_step(RECIPES[name], SHAPES[:count])) for count in (7, 28)} == {most}


def launches_of_a_step(recipe: Any, shapes: list[tuple[int, int]]) -> list[str]:
    """Kernels, and operations of torch that launch one, of a step that is neither the first nor digests anything."""
    seen: list[Any] = []
    with steps_of(recipe, shapes, seen) as optimizer, _Launches(seen):
        optimizer.step()
    return [str(each) for each in seen]


@contextmanager
def steps_of(recipe: Any, shapes: list[tuple[int, int]], seen: list[Any]) -> Iterator[qt.MasterWeightOptimizer]:
    """An optimizer that took its first step, and whose kernels from here on are noted instead of run."""
    params = [torch.nn.Parameter(qt.quantize(torch.randn(shape).bfloat16(), recipe)) for shape in shapes]
    optimizer = qt.MasterWeightOptimizer(torch.optim.AdamW, params, foreach=True)
    for param in params:
        param.grad = torch.randn(param.shape).bfloat16()
    optimizer.step()

    def launch(kernel: Any, args: tuple[Any, ...]) -> None:
        if kernel.programs:
            seen.append(kernel.name)

    with (
        qt.use_kernels("auto"),
        mock.patch.object(fused, "FUSED_ON", {"cpu"}),
        mock.patch("qtensor.optim.fused.tasks.FUSED_ON", {"cpu"}),
        mock.patch("qtensor.optim.fused.step.is_watched", return_value=False),
        mock.patch("qtensor.optim.fused.step.prove"),  # nothing is computed
        mock.patch.multiple(
            LastWrites, look=mock.Mock(return_value=None), changed=mock.Mock(return_value=[]), note=mock.Mock()
        ),
        launches_go_to(launch),
    ):
        optimizer.step()  # compiles
        seen.clear()
        yield optimizer


class _Launches(TorchDispatchMode):
    """Operations of torch that would launch something on a GPU: no views, none on a host's own numbers."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        first = out[0] if isinstance(out, list | tuple) and out else out
        counts = name == "_foreach_add_" or not isinstance(first, torch.Tensor) or (first.ndim == 0)
        if not (func.is_view or counts or name in ("empty", "detach", "_local_scalar_dense")):
            self.seen.append(name)
        return out


@pytest.mark.parametrize("name", RECIPES)
def test_its_code_moves_whole_words_and_spills_nothing(name: str) -> None:
    """On sm_90: by 16 bytes a thread and access; no operation is contracted that the kernel does not name."""
    from qtensor.numerics import kernels
    from qtensor.optim.fused import launches
    from qtensor.optim.fused.decision import ADAM, dense, quantized
    from qtensor.optim.fused.tasks import Kind
    from qtensor.spec.registry import format_of, tensor_wide
    from tests.gpu_offline.assembled import compiled_by_hand, program

    recipe = RECIPES[name]
    wide = tensor_wide(recipe) is not None
    by_row = kernels.shares_amax(recipe) and not wide
    output = quantized(format_of(recipe).by_hand(recipe), (4096, 14336), wide=wide, by_row=by_row)
    assert not isinstance(output, str)
    here = dense(None, 4096).finding_amax() if output.later else output
    kind = Kind(torch.device("cpu"), ADAM, here, torch.bfloat16, aligned=True)
    seen: list[Any] = []
    table, owner = torch.zeros(1, 17, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    with launches_go_to(lambda kernel, args: seen.append((kernel, args))):
        launches.step(kind, table, owner, owner)
        if output.later:
            launches.encode_under(output, table, owner, owner.view(torch.float32))
    for kernel, args in seen:
        made = compiled_by_hand(kernel, args, 90)
        found = program(made.asm["ptx"], made.asm["cubin"])
        assert (found.spills, found.divisions, found.flushes, found.fp64) == (0, 0, 0, 0)
        assert found.registers <= 168  # three programs of 128 threads on a multiprocessor
        accesses = re.findall(r"(ld|st)\.global(\.v4)?(?:\.L1\S*)?\.b32", made.asm["ptx"])
        moved = [sum(kind == access and bool(whole) for access, whole in accesses) for kind in ("ld", "st")]
        if kernel.function.__name__ == "step":
            assert moved[0] >= 14  # 16 numbers of gradient (2), master and moments (4 each)
            assert moved[1] >= 12
            number = (found.straight + found.looped) * kernel.warps * 32 / (output.tile * output.lanes)
            assert output.later or number < 130  # instructions, of 210 in the time that memory takes for 27 bytes
