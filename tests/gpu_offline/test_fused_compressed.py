"""The fused step on compressed states, interpreted: the bytes of the general way; and what its code costs, counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.gpu_offline import model
from tests.gpu_offline.compressed_stepping import Run, trained, tried, tried_broken
from tests.gpu_offline.interpreted import Interpreter
from tests.gpu_offline.recipes import RECIPES
from tests.gpu_offline.stepping import Weight
from tests.gpu_offline.written import launches_go_to

MX = RECIPES["mxfp8_row"]


@pytest.fixture(scope="module")
def interpreter(_gpu_that_is_not_there: None) -> Iterator[Interpreter]:
    process = Interpreter()
    yield process
    process.close()


def stepped(interpreter: Interpreter, run: Run) -> dict[str, Any]:
    """Assert that the fused way and the general one write the same bytes; return what the fused one did."""
    found = interpreter.run(trained, run)
    general = interpreter.run(trained, replace(run, fused_steps=[False] * run.steps))
    assert general["launched"] == []
    for step, (after, wanted) in enumerate(zip(found["after"], general["after"], strict=True)):
        assert after.keys() == wanted.keys()
        different = [name for name, value in wanted.items() if not torch.equal(after[name], value)]
        assert different == [], f"step {step}"
    return found


RUNS = {
    "stochastic": Run([Weight((33, 64), MX), Weight((5, 1024), MX), Weight((7, 96), MX)]),
    "nearest": Run([Weight((33, 64), MX), Weight((4, 96))], options={"rounding": "nearest"}),
    "adam": Run([Weight((20, 64), MX), Weight((20, 64))], "Adam", {"weight_decay": 0.1, "maximize": True, "lr": 0.01}),
    "betas that are not usual": Run([Weight((20, 64), MX)], options={"betas": (0.4, 0.9)}),
    "large steps": Run([Weight((20, 64), MX), Weight((20, 64))], options={"lr": 0.5}, steps=6),
    "gradients in fp32": Run([Weight((20, 64), MX), Weight((4, 64))], grads=torch.float32),
    "no gradient in some steps": Run([Weight((20, 64), MX, skips=(0, 3)), Weight((20, 64), MX)], steps=6),
    "not finite": Run([Weight((33, 64), MX, spoiled=True), Weight((33, 64), spoiled=True)]),
    "gradients of all magnitudes": Run([Weight((20, 64), MX), Weight((20, 64))], factors=(1e20, 1e-30, 0, 1), steps=6),
    "all but weights of two dims in fp32": Run(
        [Weight((13,)), Weight((6, 40)), Weight((64,), dtype=torch.float32), Weight((4, 64), dtype=torch.float32)]
    ),
    "moments in fp32": Run([Weight((20, 64), MX), Weight((4, 64))], options={"moments": "fp32"}),
    "a stack": Run([Weight((3, 8, 64), MX)]),
    "gathered quantized": Run([Weight((16, 64), MX, dense=True)]),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_step_writes_the_bytes_of_the_general_way(interpreter: Interpreter, name: str) -> None:
    assert stepped(interpreter, RUNS[name])["launched"]


def test_nearly_all_of_a_usual_training_goes_the_shorter_way(interpreter: Interpreter) -> None:
    """Else what is counted of it would not be what a step costs; elements below the least normal one are among them."""
    run = Run([Weight((9, 512), MX), Weight((9, 512))], options={"lr": 1e-3}, steps=6)
    found = stepped(interpreter, run)
    tiles = 2 * 9 * 5  # of weights, rows and steps behind the first
    assert found["careful"] <= tiles // 20
    assert found["low"] > 0


def test_ways_may_change_in_the_middle_of_training(interpreter: Interpreter) -> None:
    weights = [Weight((16, 64), MX), Weight((16, 64)), Weight((9,))]
    assert stepped(interpreter, Run(weights, steps=6, fused_steps=[True, True, False, True, False, None]))["launched"]


def test_one_launch_steps_all_weights_of_a_kind(interpreter: Interpreter) -> None:
    found = stepped(interpreter, Run([Weight((16, 64), MX) for _ in range(5)], steps=3))
    names = [each.split()[0] for each in found["launched"]]
    assert names == ["interpreter.step_usual", "interpreter.step_left"] * 2


@pytest.mark.parametrize(
    ("weight", "options"),
    [
        (Weight((32, 64), RECIPES["mxfp8_square"]), {}),
        (Weight((8, 64), RECIPES["nvfp4_row"]), {}),
        (Weight((8, 64), MX), {"masters": "fp32"}),
        (Weight((8, 64), MX), {"moments": "bfloat16"}),
        (Weight((8, 64), MX), {"amsgrad": True}),
    ],
)
def test_what_it_does_not_cover_takes_the_general_way(
    interpreter: Interpreter, weight: Weight, options: dict[str, Any]
) -> None:
    assert stepped(interpreter, Run([weight], options=options, steps=3))["launched"] == []


def forms() -> list[Any]:
    from qtensor.optim.fused.compressed.decision import Form

    return [
        Form("mxfp8", "float8", drawn=True, multiple=32, width=16),
        Form("mxfp8", "float8", drawn=False, multiple=32, width=2),
        Form("mxfp8", "fp32", drawn=True, multiple=32, width=8),
        Form("dense", "float8", drawn=True, multiple=32, width=16),
        Form("dense", "fp32", drawn=True, multiple=1, width=4),
        Form("own", "float8", drawn=True, multiple=32, width=8),
        Form("own", "fp32", drawn=False, multiple=16, width=16),
    ]


@pytest.mark.parametrize("number", range(7))
def test_each_kernel_proves_itself(interpreter: Interpreter, number: int) -> None:
    """On numbers of all magnitudes, of a shard that begins in the middle of its weight."""
    assert interpreter.run(tried, forms()[number]) == ""


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        ("usual", "NOISE", 26),
        ("usual", "MOMENT_LOW", -(2**19)),
        ("usual", "CODE_OF_FLOOR", 132),
        ("usual", "OF_FIRST", 1),
        ("usual", "SMALLEST", 2.0**-7),
        ("usual", "OF_WEIGHT", 7),
        ("careful", "APART", 1),
        ("careful", "MOMENT_BITS", 4),
        ("careful", "OF_SECOND", 1),
        ("draws", "SECOND", 3),
    ],
)
def test_a_kernel_that_is_broken_is_refused(interpreter: Interpreter, module: str, name: str, value: Any) -> None:
    assert "it computes other bytes" in interpreter.run(tried_broken, forms()[0], module, name, value)


# -- what it costs -----------------------------------------------------------------------------------------------------

ADAMW = 28  # bytes an element of torch's AdamW on fp32
MOST = {"mxfp8": (12.25, 102), "dense": (14.15, 92)}  # bytes and instructions of an element


@pytest.mark.parametrize("weight", MOST)
def test_its_code_takes_less_than_six_tenths_of_adamw_on_fp32_by_the_model(weight: str) -> None:
    """On sm_90, all numbers being usual; branches for elements below the least normal one are left out."""
    from qtensor.optim.fused.compressed.decision import TILE, TURNS, Form

    made = code_of(Form(weight, "float8", drawn=True, multiple=32, width=16), low=False)
    moved, most = MOST[weight]
    assert (made.spills, made.divisions, made.fp64) == (0, 0, 0)
    each = TILE  # numbers of a thread, in a turn
    units = made.body + model.Units(*(one // TURNS for one in vars(made.begin).values()))
    assert units.issued / each < most
    elements = 4096 * 4096
    took = model.seconds(int(moved * elements), elements // each, units)
    assert took < 0.6 * model.seconds(ADAMW * elements)


def code_of(form: Any, *, low: bool) -> Any:
    """The program of `step_usual`, with or without the branches for low elements."""
    from contextlib import ExitStack
    from types import SimpleNamespace

    import triton.language as tl

    from qtensor.optim.fused.compressed import kernel, launches, usual
    from qtensor.optim.fused.compressed.table import ROW
    from qtensor.optim.fused.compressed.tasks import Kind
    from tests.gpu_offline.assembled import compiled_by_hand, first_loop, program

    kind = Kind(torch.device("cpu"), form, torch.bfloat16, aligned=True)
    seen: list[Any] = []
    with launches_go_to(lambda *launch: seen.append(launch)):
        launches.step(kind, torch.zeros(1, ROW, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))
    (usual_tiles, args), _ = seen
    functions = kernel.step_usual, usual.usual, usual.rounded, usual.scale_of
    with ExitStack() as stack:
        for name in () if low else ("LOW_WEIGHT", "LOW_FIRST", "LOW_SECOND"):
            stack.enter_context(mock.patch.object(usual, name, tl.constexpr(0)))
        for function in functions:
            function.hash = None  # of its source and what it names
        made = compiled_by_hand(usual_tiles, args, 90)
    for function in functions:
        function.hash = None
    begin, body = first_loop(made.asm["cubin"])
    found = program(made.asm["ptx"], made.asm["cubin"])
    return SimpleNamespace(**vars(found), begin=begin, body=body)
