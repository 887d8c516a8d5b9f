"""GPTAQ and Qronos in runs: two models in step, whose difference it makes up for, whatever layers hand on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise import GPTAQ, GPTQ, Qronos, SmoothQuant
from layerwise.algorithms.algorithm import CROSS
from tests.layerwise.models import RECIPES, assert_same, batches, outcome, run, shard, toy
from tests.layerwise.small_runs import Stop, stopping
from tests.ranks import run_ranks

NVFP4, MXFP8 = RECIPES["nvfp4"], RECIPES["mxfp8"]
DIM = 32
Kind = type[GPTAQ] | type[Qronos]
both = pytest.mark.parametrize("kind", [GPTAQ, Qronos])


class _Block(nn.Module):
    """A layer without anything that hides errors of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class _Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], count: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: Tensor, notes: dict[str, Tensor] | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x) if notes is None else layer(x, notes)
        return x


def _model(block: Callable[[], nn.Module], count: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return _Stack(block, count).eval()


def _data(count: int = 4, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 25, DIM, generator=generator) for _ in range(count)]


@torch.no_grad()
def _error(model: nn.Module, dense: nn.Module, data: list[Tensor]) -> float:
    return sum(float((model(x) - dense(x)).square().sum()) for x in data)


@both
@pytest.mark.parametrize("act_order", [False, True])
def test_two_layers_come_nearer_to_the_unquantized_ones_than_by_gptq(kind: Kind, act_order: bool) -> None:
    """On the data that they are calibrated on, and on others."""
    dense = _model(_Block)
    found = {}
    for algorithm in (GPTQ(act_order=act_order), kind(act_order=act_order, alpha=1.0)):
        model = _model(_Block)
        run(model, _data(), NVFP4, algorithm, layers="layers")
        found[type(algorithm)] = _error(model, dense, _data()), _error(model, dense, _data(seed=1))
    assert found[kind][0] < 0.95 * found[GPTQ][0], found
    assert found[kind][1] < found[GPTQ][1], found


@both
def test_the_first_layer_is_that_of_gptq_byte_for_byte_and_the_second_is_not(kind: Kind) -> None:
    found = {}
    for algorithm in (GPTQ(), kind()):
        model = toy(layers=2)
        found[type(algorithm)] = outcome(model, run(model, batches(), MXFP8, algorithm))["result"]
    first = {name: value for name, value in found[GPTQ].items() if name.startswith("layers.0.")}
    assert first
    assert first == {name: found[kind][name] for name in first}
    second = {name: value for name, value in found[GPTQ].items() if name.startswith("layers.1.") and "payload" in name}
    assert second
    assert all(found[kind][name] != value for name, value in second.items())


@both
def test_a_model_of_one_stage_is_that_of_gptq(kind: Kind) -> None:
    found = []
    for algorithm in (GPTQ(), kind()):
        model = toy(layers=2)
        found.append(outcome(model, run(model, batches(), MXFP8, algorithm, layers=())))
    assert_same(found[1], found[0], "no layers")


@pytest.mark.parametrize("inputs_on", ["cpu", "disk"])
def test_wherever_inputs_wait(inputs_on: str) -> None:
    found = []
    for place in ("device", inputs_on):
        model = toy(layers=2)
        found.append(outcome(model, run(model, batches(), NVFP4, GPTAQ(), inputs_on=place)))
    assert_same(found[1], found[0], inputs_on)


# -- experts -----------------------------------------------------------------------------------------------------------


class _Routed(nn.Module):
    """Each token goes to the expert that the router says; rounding of earlier layers sends some elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, DIM, bias=False)
        self.router = nn.Linear(DIM, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x + self.mix(x), (DIM,))
        rows, out = x.flatten(0, -2), torch.zeros_like(x).flatten(0, -2)
        chosen = self.router(rows).argmax(dim=-1)
        for number, expert in enumerate(self.experts):
            (tokens,) = torch.where(chosen == number)
            out.index_add_(0, tokens, expert(rows[tokens]))
        return out.view_as(x) + x


ROUTED: dict[str, Any] = {"layers": "layers", "exclude": ["*.router"]}


@both
def test_experts_that_get_other_tokens_are_told_of_in_the_report(kind: Kind) -> None:
    result = run(_model(_Routed), _data(), NVFP4, kind(), **ROUTED)
    warnings = {record.name: record.warning for record in result.report.records}
    assert all(not warnings[f"layers.0.{name}.weight"] for name in ("mix", "experts.0", "experts.1"))
    assert not warnings["layers.1.mix.weight"], "what all tokens go to has pairs"
    for number in (0, 1):
        told = warnings[f"layers.1.experts.{number}.weight"]
        assert told is not None
        assert told.endswith("that bring it others in the unquantized model; for those it is GPTQ")


@pytest.mark.full
@both
@pytest.mark.parametrize("hessians", ["shared", "one_at_a_time"])
def test_routed_experts_and_resuming(kind: Kind, hessians: str, tmp_path: Path) -> None:
    """Any order of batches, one matrix at a time, and a run that goes on after the first layer."""
    whole, algorithm = _model(_Routed, 3), kind(hessians=hessians)
    expected = outcome(whole, run(whole, _data(), NVFP4, kind(), **ROUTED))
    model = _model(_Routed, 3)
    assert_same(outcome(model, run(model, _data()[::-1], NVFP4, algorithm, **ROUTED)), expected, "in another order")
    with pytest.raises(Stop):
        run(
            _model(_Routed, 3),
            _data(),
            NVFP4,
            algorithm,
            checkpoint_dir=tmp_path,
            on_event=stopping("checkpoint", 1),
            **ROUTED,
        )
    model = _model(_Routed, 3)
    result = run(model, _data(), NVFP4, algorithm, checkpoint_dir=tmp_path, **ROUTED)
    assert result.report.resumed == (0, 1)
    assert_same(outcome(model, result), expected, "resumed")


@pytest.mark.full
@both
def test_a_smoothed_run_goes_on_to_the_same_bytes(kind: Kind, tmp_path: Path) -> None:
    """The unquantized model's outputs are those from before factors were folded, however often its layers run."""
    algorithm = kind(smoothing=SmoothQuant(), hessians="one_at_a_time")

    def made() -> nn.Module:
        return toy(layers=3, dtype=torch.bfloat16)

    whole = made()
    expected = outcome(whole, run(whole, batches(), NVFP4, algorithm))
    with pytest.raises(Stop):
        run(made(), batches(), NVFP4, algorithm, checkpoint_dir=tmp_path, on_event=stopping("checkpoint", 1))
    model = made()
    assert_same(outcome(model, run(model, batches(), NVFP4, algorithm, checkpoint_dir=tmp_path)), expected, "resumed")


def _resumed_where_one_rank_has_no_batch(path: Path) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Without the head a layer is the last stage, and what is outside of layers is gathered to record them only."""
    mine, options = batches() if dist.get_rank() == 0 else [], {"exclude": ["head"], "checkpoint_dir": path}
    with pytest.raises((Stop, RuntimeError)):
        run(shard(toy(layers=3)), mine, NVFP4, GPTAQ(), on_event=stopping("checkpoint", 1), **options)
    model = shard(toy(layers=3))
    result = run(model, mine, NVFP4, GPTAQ(), **options)
    return result.report.resumed, outcome(model, result)


def test_a_run_goes_on_where_a_rank_has_no_batch(shared_tmp_path: Path) -> None:
    model = toy(layers=3)
    expected = outcome(model, run(model, batches(), NVFP4, GPTAQ(), exclude=["head"]))
    for finished, found in run_ranks(2, _resumed_where_one_rank_has_no_batch, shared_tmp_path):
        assert finished == (0, 1)
        assert_same(found, expected, "resumed")


@dataclass(frozen=True, kw_only=True)
class _OnlyCross(GPTQ):
    @property
    def needs(self) -> frozenset[str]:
        return frozenset({CROSS})


def test_the_products_of_differences_are_wanted_beside_a_hessian() -> None:
    with pytest.raises(ValueError, match=r"_OnlyCross\.needs has CROSS without HESSIAN, .* name both"):
        run(_model(_Block), _data(), NVFP4, _OnlyCross())


# -- what layers share -------------------------------------------------------------------------------------------------


class _Noting(_Block):
    """The first layer leaves something for the others in an object that all of them get."""

    def forward(self, x: Tensor, notes: dict[str, Tensor]) -> Tensor:
        return super().forward(x) + notes.setdefault("first", torch.tanh(x))


class _Keeping(_Stack):
    """Makes that object itself, in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, {})


def test_each_stream_has_what_layers_share_to_itself() -> None:
    """By the definition: the pairs of the last layer are those of two models that run by themselves."""
    torch.manual_seed(0)
    model = _Keeping(_Noting, 3).eval()
    torch.manual_seed(0)
    dense = _Keeping(_Noting, 3).eval()
    seen: list[Any] = []

    class Sees(GPTAQ):
        def decide(self, group: Any, recipe: Any) -> Any:
            seen.append((group.linears[0].name, group.inputs))
            return super().decide(group, recipe)

    run(model, _data(), MXFP8, Sees(), layers="layers")
    ins: dict[int, list[Tensor]] = {id(one): [] for one in (model, dense)}
    for one in (model, dense):
        # of both, the last layer's weights as they are before their turn
        one.layers[2].register_forward_pre_hook(lambda _, args, one=one: ins[id(one)].append(args[0].flatten(0, -2)))
        with torch.no_grad():
            for x in _data():
                one(x)
    expected = sum(2 / 400 * (y - x).double().T @ x.double() for x, y in zip(*ins.values(), strict=True))
    (found,) = (inputs for name, inputs in seen if name == "layers.2.up.weight")
    assert found.unpaired == 0
    torch.testing.assert_close(found.cross.double(), expected, rtol=0, atol=float(expected.abs().max()) * 2**-18)


class _Notes:
    """Not a dict: an object, which is passed on as it is."""

    def setdefault(self, key: str, value: Tensor) -> Tensor:
        return vars(self).setdefault(key, value)


def test_an_object_of_the_caller_that_layers_fill_is_refused() -> None:
    """Both streams would fill it."""
    torch.manual_seed(0)
    model = _Stack(_Noting, 3).eval()
    data = [{"x": x, "notes": _Notes()} for x in _data(1)]
    with pytest.raises(
        NotImplementedError, match="is a _Notes that is the same for several batches, and layers change"
    ):
        run(model, data, MXFP8, GPTAQ(), layers="layers")
