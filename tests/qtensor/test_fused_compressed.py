"""The fused step on compressed states: what takes it, and, on a GPU, the bytes of the general way."""

import struct
import subprocess
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, NVFP4BlockScaling, quantize, use_kernels
from qtensor.optim import fused
from qtensor.optim.fused.compressed.decision import EMPTY, Form, cut_of, form_of, packed, refuse_rule, weight_form
from qtensor.optim.fused.compressed.step import PASSING, BothWays, FusedCompressedStep
from qtensor.optim.fused.compressed.table import NUMBERS, Cut
from qtensor.optim.fused.decision import ADAM, MOMENTUM
from qtensor.spec.registry import format_of
from tests.qtensor.test_fused_step import held

STATES: dict[str, Any] = {"masters": "remainder", "moments": "float8"}


def parameters(device: str) -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = (512, 1024), (48, 4096), (7, 96)
    weights: list[Tensor] = [quantize(torch.randn(shape).bfloat16(), MXFP8BlockScaling()) for shape in shapes]
    weights += torch.randn(300, 256).bfloat16(), torch.randn(33).bfloat16(), torch.randn(64)
    return [nn.Parameter(weight.to(device)) for weight in weights]


def lend(params: list[nn.Parameter], step: int) -> None:
    torch.manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape).to(param.device, param.dtype) * 1e-2


def test_nothing_of_it_is_imported_on_a_cpu() -> None:
    code = (
        "import sys, torch; from torch import nn; import qtensor as qt\n"
        "p = nn.Parameter(qt.quantize(torch.randn(4, 32), qt.MXFP8BlockScaling()))\n"
        "o = qt.MasterWeightOptimizer(torch.optim.AdamW, [p], masters='remainder', moments='float8')\n"
        "p.grad = torch.ones(4, 32); o.step(); o.step()\n"
        "print([name for name in sys.modules if 'optim.fused.' in name or 'triton_kernels.' in name])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_a_step_that_must_be_fused_says_why_it_cannot() -> None:
    params = parameters("cpu")
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, params, fused_step=True, **STATES)
    with use_kernels("auto"):
        lend(params, 0)
        optimizer.step()  # the first one takes the general way
        with pytest.raises(RuntimeError, match=r"fused_step=True\): a para.* cannot take the fused step: it is on cpu"):
            optimizer.step()


def taken(optimizer: MasterWeightOptimizer) -> BothWays:
    inner, states = optimizer._inner, optimizer._states
    assert inner is not None
    assert states is not None
    stepped = [param for param in optimizer._masters if param.grad is not None]
    with (
        mock.patch.object(fused, "FUSED_ON", {"cpu"}),
        mock.patch("qtensor.optim.fused.compressed.tasks.FUSED_ON", {"cpu"}),
        mock.patch("qtensor.optim.master_step.available", return_value=True),
        mock.patch.object(FusedCompressedStep, "_compiled", return_value=""),
        use_kernels("auto"),
        torch.no_grad(),
    ):
        found = optimizer._take_compressed(states, inner, stepped, None)
    assert isinstance(found, BothWays)
    return found


def test_all_parameters_of_a_model_take_it_from_the_second_step_on() -> None:
    params = parameters("cpu")
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, params, **STATES)
    lend(params, 0)
    assert taken(optimizer)._turns == []
    optimizer.step()
    optimizer._fresh.clear()
    step = taken(optimizer)
    assert {id(task.param) for task, _, _ in step._turns} == {id(param) for param in params}
    assert step.params == set(params)
    assert step._general.params == set()


def changed(change: str) -> tuple[MasterWeightOptimizer, nn.Parameter]:
    params = parameters("cpu")
    kind = torch.optim.SGD if change == "another optimizer" else torch.optim.AdamW
    options: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = MasterWeightOptimizer(kind, params, lr=0.01, **options, **STATES)
    lend(params, 0)
    optimizer.step()
    optimizer._fresh.clear()
    param, states, inner = params[0], optimizer._states, optimizer._inner
    assert states is not None
    assert inner is not None
    if change == "a write of others":
        optimizer._fresh.add(param)
    elif change == "a master in fp32":
        states.loaded[param] = torch.zeros(param.shape)
    elif change == "no state":
        inner.state[optimizer._masters[param]] = {}
    elif change == "one state more":
        inner.state[optimizer._masters[param]]["more"] = torch.zeros(())
    elif change == "a root in fp32":
        inner.state[optimizer._masters[param]]["exp_avg_sq_root"] = torch.zeros(param.shape)
    elif change == "a gradient that is transposed":
        assert param.grad is not None
        param.grad.data = param.grad.data.t().contiguous().t()
    return optimizer, param


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("a write of others", "no step has written it"),
        ("a master in fp32", "its master was loaded in fp32"),
        ("no state", "its first step makes"),
        ("one state more", "its state is step, exp_avg, exp_avg_sq_root, more"),
        ("a root in fp32", "its moments are kept in another form"),
        ("a gradient that is transposed", "its gradient is laid out otherwise"),
        ("another optimizer", "only steps of Adam and AdamW are fused"),
    ],
)
def test_what_cannot_take_it_takes_the_general_way_for_a_reason(change: str, why: str) -> None:
    optimizer, param = changed(change)
    step = taken(optimizer)
    assert param in step._general.params
    assert param not in {task.param for task, _, _ in step._turns}
    assert optimizer._fused_compressed is not None
    assert why in optimizer._fused_compressed._reasons.told[param]


def test_the_count_of_draws_is_that_of_the_step() -> None:
    """Keys of both ways are those of the step that is being taken, and of the weight's name."""
    params = parameters("cpu")
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, params, **STATES)
    lend(params, 0)
    optimizer.step()
    optimizer._fresh.clear()
    first = [keys for _, _, keys in taken(optimizer)._turns]
    assert len(set(first)) == len(params)
    optimizer.param_groups[0]["states_seed"] = optimizer._inner.param_groups[0]["states_seed"] = 1  # type: ignore[union-attr]
    assert set(first).isdisjoint(keys for _, _, keys in taken(optimizer)._turns)


def test_shards_are_cut_as_rows() -> None:
    assert cut_of((8, 64), [(2, 3), (32, 32)]) == Cut(3, 32, 2, 32)
    assert cut_of((4, 8, 64), [(1, 2), (0, 8), (0, 64)]) == Cut(16, 64, 8, 0)
    assert cut_of((4, 8, 64), [(0, 4), (2, 3), (0, 64)]) == "its rows do not follow each other in the whole weight"
    assert cut_of((40,), [(8, 16)]) == Cut(1, 16, 0, 8)
    assert cut_of((), []) == Cut(1, 1, 0, 0)
    assert cut_of((4, 64), [(4, 0), (0, 64)]) == "it has no elements"
    assert "more rows or columns" in cut_of((2**31, 64), [(0, 2**31), (0, 64)])  # type: ignore[operator]


def test_tiles_are_as_wide_as_leaves_least_of_them_empty() -> None:
    widths = {
        columns: form_of("mxfp8", "float8", Cut(64, columns, 0, 0), drawn=True).width for columns in (32, 96, 4096)
    }
    assert widths == {32: 1, 96: 1, 4096: 16}
    assert form_of("dense", "fp32", Cut(1, 4096, 0, 0), drawn=True).width == 16
    form = Form("mxfp8", "float8", drawn=True, multiple=32, width=16)
    assert form.programs(17, 4096) == 3 * 8
    assert replace(form, width=2).programs(65, 96) == 2 * 2


def test_numbers_that_are_not_usual_are_told() -> None:
    numbers = [1.0, 0.0, 0.99, 0.1, 0.9, 0.999, 0.001, 0.5, 1e-8, -1e-3]

    def told(place: int, value: float) -> list[float]:
        raw = packed([*numbers[:place], value, *numbers[place + 1 :]], (3, -4))
        assert len(raw) == 4 * NUMBERS
        return list(struct.unpack_from("13f2i", raw))

    high, low, usual, *keys = told(0, 1.0)[10:]
    assert (high, low, usual, keys) == (-2.0, 0.0, 1.0, [3, -4])
    # the reciprocal has nearly twice fp32's bits
    high, low = told(7, 0.3)[10:12]
    root = told(7, 0.3)[7]
    assert abs((high + low) * root + 1) < 2.0**-47
    for place, value in ((3, 0.6), (7, 0.0), (7, 1e-4), (8, -1.0), (8, float("nan")), (8, float("inf"))):
        assert told(place, value)[12] == 0.0


def test_every_reason_has_a_name() -> None:
    assert refuse_rule(ADAM) == ""
    assert "Adam and AdamW" in refuse_rule(MOMENTUM)
    assert refuse_rule("amsgrad=True") == "amsgrad=True"
    for recipe, why in (
        (MXFP8BlockScaling(), ""),
        (MXFP8BlockScaling(blocks="square"), "square blocks"),
        (MXFP8BlockScaling(element="e5m2"), "other elements than E4M3"),
        (MXFP8BlockScaling(scale_rounding="floor"), "rounded down"),
        (NVFP4BlockScaling(), "its format's remainders"),
    ):
        found = weight_form(format_of(recipe).by_hand(recipe))
        assert (found == "") == (why == "")
        assert why in found


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("moments", ["float8", "fp32"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_the_fused_step_writes_the_bytes_of_the_general_way(
    kind: type[torch.optim.Optimizer], moments: str, rounding: str
) -> None:
    """Those of foreach=True; the ways change in the middle of training, too."""
    ran = []
    for ways in ([True] * 5, [False] * 5, [True, True, False, True, True]):  # True: or an error
        params = parameters("cuda")
        states = {**STATES, "moments": moments, "rounding": rounding}
        optimizer = MasterWeightOptimizer(kind, params, lr=1e-2, **states)
        for step, way in enumerate(ways):
            optimizer._wants_fused, optimizer._fused_compressed = way, None
            lend(params, step)
            with use_kernels("auto"):
                optimizer.step()
        ran.append(held(params, optimizer))
    first, *others = ran
    for other in others:
        assert [torch.equal(a, b) for a, b in zip(first, other, strict=True)] == [True] * len(first)


def test_a_shard_without_elements_passes_where_the_fused_step_is_required() -> None:
    """A bias of 4 on 8 ranks has four of them."""
    assert cut_of((4,), [(4, 0)]) == EMPTY
    assert EMPTY in PASSING
