"""Launches without Triton's binder are those that Triton would make, and what calls take of the host has budgets."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import qtensor as qt
from fsdp_hooks.kernels.compiled import VARIABLE, use_kernels
from qtensor.numerics import kernels
from tests.gpu_offline import host_time

REPO = Path(__file__).resolve().parent.parent.parent
# Calls of Python's and C's functions for a weight, at most; beyond those of torch's own on a bf16 weight.
BUDGETS = {
    "quantize": 180,  # of tensor-wide scales, two launches; 135 for the others
    "decode": 84,
    "linear": 190,
    "pre_all_gather": 46,
    "post_all_gather": 8,
    "post_all_gather, one rank": 30,
    "FSDP2": 445,  # it compares the sizes of shards before each of two gathers
    "step of 28": 195,
    "step of 256": 170,
}


@pytest.mark.budget
def test_calls_take_no_more_of_the_host_than_they_may(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu_offline.host_time", str(tmp_path / "out")]
    subprocess.run(command, check=True, cwd=REPO, env={**os.environ, "PYTHONPATH": str(REPO), VARIABLE: "auto"})
    found = json.loads((tmp_path / "out").read_text())
    of_torch = found.pop("torch")
    del found["hooks"]  # FSDP2's own
    over = {
        f"{program} of {name}": beyond
        for name, of in found.items()
        for program, figures in of.items()
        if (beyond := figures["calls"] - of_torch.get(program, {"calls": 0})["calls"]) > BUDGETS[program]
    }
    assert over == {}
    assert {name: of["decode"]["launches"] for name, of in found.items()} == dict.fromkeys(host_time.FORMATS, 1)
    assert {name: of["linear"]["launches"] for name, of in found.items()} == dict.fromkeys(host_time.FORMATS, 2)


# -- what tells launches apart -----------------------------------------------------------------------------------------


def test_arguments_that_triton_tells_apart_are_told_apart() -> None:
    from qtensor.numerics.triton_kernels import mxfp8
    from qtensor.numerics.triton_kernels.launching import specialized

    room = torch.zeros(64, dtype=torch.uint8)
    pieces = [room[first : first + 16] for first in (0, 4, 8, 16)]
    tensors = [piece.view(dtype) for piece in pieces for dtype in (torch.uint8, torch.float32)]
    edges = [2**power + step for power in (4, 31, 32, 63) for step in (-1, 0, 1)]
    numbers = [number for number in (0, 1, 2, 15, 17, 48, *edges) if number < 2**64]
    numbers += [-number for number in numbers if 0 < number < 2**63]
    _, _, _, _, binder = mxfp8._decode.device_caches[0]

    def of_triton(first: Any, last: Any) -> str:
        constants = {"ELEMENT": None, "E4M3": True, "TILE": 1}
        _, found, _ = binder(first, room, room, 3, last, **constants, num_warps=4)
        return str(found)

    cases = [(tensor, 3) for tensor in tensors] + [(room, number) for number in numbers]
    for one, other in itertools.combinations(cases, 2):
        if of_triton(*one) != of_triton(*other):
            assert specialized(one) != specialized(other), (one, other)
    assert len({str(specialized(case)) for case in cases}) < len(cases)  # and others are alike


# -- on a GPU that does nothing ----------------------------------------------------------------------------------------

Launched = tuple[str, tuple[int, ...], tuple[Any, ...]]  # of a launch: its code, its grid, its arguments


@pytest.fixture(scope="module")
def idle() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process that has such a GPU."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_begin) as process:
        yield lambda function, *args: process.submit(function, *args).result()


def _begin() -> None:
    from tests.gpu_offline.idle import idle_gpu

    idle_gpu()
    use_kernels("auto")  # tests run eagerly otherwise


class Log:
    """What is launched: addresses as which tensor of the call, in the order of their first use."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []

    def __call__(self, launcher: Any, *given: Any) -> None:
        grid, args = given[:3], given[9:]
        names: dict[int, str] = {}
        seen = [
            (names.setdefault(arg.data_ptr(), f"tensor {len(names)}"), arg.data_ptr() % 16, arg.nbytes)
            if isinstance(arg, Tensor)
            else str(arg)
            for arg in args
        ]
        self.launched.append((launcher.code, grid, tuple(seen)))


def launches_of(call: Callable[[], object]) -> list[Launched]:
    from tests.gpu_offline.idle import Launcher

    log = Log()

    def launched(launcher: Any, *given: Any) -> None:
        log(launcher, *given)

    with mock.patch.object(Launcher, "__call__", launched):
        call()
    return log.launched


def forget() -> None:
    """As if nothing had been launched yet."""
    from qtensor.numerics.triton_kernels import launching

    launching._loaded.clear()
    for made in (kernels._encode_kernel, kernels._decode_kernel):
        made.cache_clear()


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls whose tensors lie differently: other shapes, one row, other dtypes and addresses."""
    for name, recipe in host_time.FORMATS.items():
        for rows, columns in ((64, 512), (1, 512), (48, 544)):
            for skipped in (0, 4):  # addresses are multiples of 16, or of 8 alone
                room = torch.empty(rows * columns + skipped, dtype=torch.bfloat16, device="cuda")
                x = room[skipped:].view(rows, columns)
                what = f"{name} {rows} x {columns} {skipped}"
                yield f"quantize {what}", lambda x=x, recipe=recipe: qt.quantize(x, recipe)  # type: ignore[misc]
                q = qt.quantize(x, recipe)
                yield f"decode {what}", q.dequantize
                yield f"decode {what} to fp32", lambda q=q: q.dequantize(torch.float32)  # type: ignore[misc]


def types_of(args: tuple[Any, ...]) -> list[type]:
    """Stands for what forgets to tell launches apart."""
    return [type(arg) for arg in args]


def differing(told: bool) -> tuple[int, list[str]]:
    """How many calls there were, and those that launch something else once others have been launched."""
    from fsdp_hooks.kernels import replays
    from qtensor.numerics.triton_kernels import launching

    found = []
    with use_kernels("compiled"):
        made = list(cases())
        alone = {}
        for name, call in made:
            forget()
            alone[name] = launches_of(call)
        forget()
        with contextlib.ExitStack() as untold:
            if not told:
                untold.enter_context(mock.patch.object(launching, "specialized", types_of))
                untold.enter_context(mock.patch.object(replays, "MOST", 0))
            for _ in range(3):
                found += [name for name, call in made if launches_of(call) != alone[name]]
    return len(made), found


def test_a_launch_does_not_depend_on_those_before(idle: Callable[..., Any]) -> None:
    calls, found = idle(differing, True)
    assert (calls, found) == (72, [])


def test_launches_that_are_not_told_apart_are_found(idle: Callable[..., Any]) -> None:
    assert idle(differing, False)[1]


def launches_under(what: str) -> list[int]:
    """Launches of a quantize and of a decode."""
    recipe = host_time.FORMATS["mxfp8"]
    x = torch.empty(1024, 1024, dtype=torch.bfloat16, device="cuda")
    q = qt.quantize(x, recipe)
    q.dequantize()
    under = {
        "nothing": lambda: use_kernels("auto"),
        "eager": lambda: use_kernels("eager"),
        "flops": lambda: FlopCounterMode(display=False),
    }[what]
    counts = []
    for call in (lambda: qt.quantize(x, recipe), q.dequantize):
        counts.append(0)
        with under():
            try:
                counts[-1] = len(launches_of(call))
            except NotImplementedError:  # the definition takes operations that this GPU has none of
                pass
    return counts


@pytest.mark.parametrize(("what", "launches"), [("nothing", [1, 1]), ("eager", [0, 0]), ("flops", [0, 0])])
def test_what_is_known_is_launched_where_code_by_hand_may_run(
    idle: Callable[..., Any], what: str, launches: list[int]
) -> None:
    assert idle(launches_under, what) == launches
