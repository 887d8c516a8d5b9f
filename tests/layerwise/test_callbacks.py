"""Weights that a callback or an algorithm of one's own changes: part of the result, or refused by name; never lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerwise import GPTQ, Algorithm, Event, Max
from qtensor import Float8CurrentScaling, MXFP8BlockScaling
from tests.layerwise.small_runs import Case, Found, assert_usable, batches, found, model_of, own, run, state_of, stopped
from tests.ranks import run_ranks, run_ranks_each
from tests.sampling import halves, sampled

LAYER = "layers.1."
LINEAR, NORM = f"{LAYER}q_proj.weight", f"{LAYER}norm1.weight"
EARLY, LATE = ("layer_start", "capture", "calibrate"), ("write", "metrics")
DATA = batches(2)
WRITES = Case(algorithm=GPTQ(), recipe=Float8CurrentScaling())
WRITES_NONE = Case(recipe=Float8CurrentScaling())
STORED = Case(algorithm=GPTQ(), recipe=MXFP8BlockScaling(), stored=MXFP8BlockScaling())


def other(param: Tensor) -> Tensor:
    """New values, exact in every dtype."""
    return param.detach() * 2 + 1


def assign(owner: nn.Module, name: str) -> None:
    param = owner.get_parameter(name)
    param.data = other(param)


def write(owner: nn.Module, name: str) -> None:
    param = owner.get_parameter(name)
    param.copy_(other(param))


def write_data(owner: nn.Module, name: str) -> None:
    param = owner.get_parameter(name)
    param.data.mul_(2).add_(1)


def replace(owner: nn.Module, name: str) -> None:
    param = owner.get_parameter(name)
    setattr(owner, name, nn.Parameter(other(param), requires_grad=param.requires_grad))


WAYS: dict[str, Callable[[nn.Module, str], None]] = {
    "assigns data": assign,
    "writes in place": write,
    "writes into data": write_data,
    "replaces": replace,
}


def changing(model: nn.Module, kind: str, name: str, way: str) -> Callable[[Event], None]:
    """A callback that changes a parameter of the second layer at one event."""
    path, _, attribute = name.rpartition(".")

    def on_event(event: Event) -> None:
        if (event.kind, event.layer) == (kind, LAYER[:-1]):
            WAYS[way](model.get_submodule(path), attribute)

    return on_event


@dataclass(frozen=True)
class Change:
    """One case: the event, the parameter, the way."""

    kind: str
    name: str
    way: str

    def __str__(self) -> str:
        return f"{self.way} {self.name} at {self.kind}"


ALL = [Change(kind, name, way) for kind in (*EARLY, *LATE) for name in (LINEAR, NORM) for way in WAYS]
# Each with every event and every way. In `make test` FIRST, and of FEW one that is kept and one that is refused.
FIRST, SOME, FEW = ALL[::7], [*dict.fromkeys((*ALL[::7], *ALL[::3]))], ALL[4::7]


def refused(change: Change, case: Case) -> None:
    """The change is refused by name, and the layer holds what it held."""
    model = model_of(case)
    before = state_of(model)
    with pytest.raises(RuntimeError, match=f"calibrate: {change.name} .*change weights before the (calibration|event)"):
        run(model, case, data=own(DATA), on_event=changing(model, change.kind, change.name, change.way))
    after = state_of(model)
    for name in before:
        if name.startswith((LAYER, "layers.2.", "lm_head.")):
            assert after[name] == before[name], name
    assert_usable(model)


@cache
def changed_before(case: Case, name: str) -> Found:
    """What the model comes to that had the change when the calibration began."""
    with torch.no_grad():
        model = model_of(case, prepare=lambda dense: write(dense, name))
    return found(run(model, case, data=own(DATA)), model)


def kept(change: Change, case: Case) -> None:
    """The change is in the result and in the model, with the bytes as if it had been there from the beginning."""
    model = model_of(case)
    objects = [*model.parameters()]
    result = run(model, case, data=own(DATA), on_event=changing(model, change.kind, change.name, change.way))
    assert all(now is then for now, then in zip(model.parameters(), objects, strict=True))
    here, expected = found(result, model), changed_before(case, change.name)
    assert_usable(model)
    assert here.model[change.name] == expected.model[change.name]
    if change.name == NORM:
        assert here.result.pop(NORM) == expected.model[NORM]
    else:
        assert here.result[LINEAR] == expected.result[LINEAR]
    if change.kind != "calibrate":  # by then statistics had been taken
        assert here.same() == expected.same()


def takes_part_or_is_refused(change: Change) -> None:
    if change.kind in EARLY:
        kept(change, WRITES)
    else:
        refused(change, WRITES)
    refused(change, WRITES_NONE)


@sampled("change", SOME, FIRST, ids=map(str, SOME))
def test_a_change_takes_part_or_is_refused(change: Change) -> None:
    takes_part_or_is_refused(change)


@halves("changes", FEW, FEW[::3])
def test_a_change_takes_part_or_is_refused_on_shards(changes: tuple[Change, ...]) -> None:
    run_ranks_each(2, changes, takes_part_or_is_refused)


def test_a_norm_beside_quantized_storage_is_kept_too() -> None:
    kept(Change("capture", NORM, "writes in place"), STORED)
    run_ranks_each(2, [Change("capture", NORM, way) for way in ("assigns data", "replaces")], kept, STORED)


def written_when_finished(way: str, path: Path) -> None:
    """At "checkpoint" and at "resumed" the layer is sharded; a change of it is refused by name all the same."""
    for number, (name, kind) in enumerate(((LINEAR, "checkpoint"), (NORM, "checkpoint"), (NORM, "resumed"))):
        own_path = path / f"{way} {number}"
        if kind == "resumed":
            run(model_of(WRITES), WRITES, data=own(DATA), checkpoint_dir=own_path)
        model = model_of(WRITES)
        with pytest.raises(RuntimeError, match=f'calibrate: {name} changed in the event "{kind}", when layers.1 was '):
            run(model, WRITES, data=own(DATA), checkpoint_dir=own_path, on_event=changing(model, kind, name, way))


@sampled("way", WAYS, ["writes in place", "replaces"])
def test_a_change_of_a_finished_layer_is_refused(tmp_path: Path, way: str) -> None:
    written_when_finished(way, tmp_path)


@sampled("way", ["writes in place", "replaces"], ["writes in place"])
def test_a_change_of_a_finished_layer_is_refused_on_shards(way: str, shared_tmp_path: Path) -> None:
    run_ranks(2, written_when_finished, way, shared_tmp_path)


def on_one_rank_only() -> str:
    """Where only the first rank writes, all of them are told."""
    model = model_of(WRITES_NONE)
    change = changing(model, "capture", LINEAR, "writes in place")
    with pytest.raises(RuntimeError) as caught:
        run(model, WRITES_NONE, data=own(DATA), on_event=change if dist.get_rank() == 0 else None)
    assert_usable(model)
    return str(caught.value)


def test_a_change_on_one_rank_is_refused_on_all() -> None:
    first, second = run_ranks(2, on_one_rank_only)
    assert first.startswith(f"calibrate: {LINEAR} changed while Max calibrated layers.1")
    assert second == f"rank 0: RuntimeError: {first}"


# -- an algorithm of one's own -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Doubles(Algorithm):
    """Writes into the weights it is given, and says so or not."""

    writes_weights: ClassVar[bool] = True

    def decide(self, group: Any, recipe: Any) -> Sequence[Any]:
        if group.linears[0].name == LINEAR:
            write_into(group.linears[0].weight)
        return Max().decide(group, recipe)


@dataclass(frozen=True, kw_only=True)
class SaysItDoesNot(Doubles):
    """As above."""

    writes_weights: ClassVar[bool] = False


def write_into(weight: Tensor) -> None:
    weight.copy_(other(weight))


def of_ones_own() -> None:
    case = Case(algorithm=Doubles(), recipe=MXFP8BlockScaling())
    model = model_of(case)
    here = found(run(model, case, data=own(DATA)), model)
    assert_usable(model)
    plain = Case(recipe=case.recipe)
    assert here.result[LINEAR] == changed_before(plain, LINEAR).result[LINEAR]
    model = model_of(plain)
    before = state_of(model)
    told = (
        rf"calibrate: {LINEAR} changed while SaysItDoesNot calibrated layers\.1, and it is an algorithm that writes no "
        r"weights: .*Nothing of this layer was stored; set writes_weights = True"
    )
    with pytest.raises(RuntimeError, match=told):
        run(model, Case(algorithm=SaysItDoesNot(), recipe=plain.recipe), data=own(DATA))
    assert state_of(model)[LINEAR] == before[LINEAR]
    assert_usable(model)


model_with_norm: Any = None


@dataclass(frozen=True, kw_only=True)
class WritesANorm(Algorithm):
    """Scales of Max; and something that it was not given is changed on the way."""

    writes_weights: ClassVar[bool] = False

    def decide(self, group: Any, recipe: Any) -> Sequence[Any]:
        if group.linears[0].name == LINEAR:
            write_into(model_with_norm.get_parameter(NORM).data)
        return Max().decide(group, recipe)


def test_what_an_algorithm_inside_another_wrote_is_part_of_the_result() -> None:
    global model_with_norm
    case = Case(algorithm=GPTQ(scales=WritesANorm()), recipe=MXFP8BlockScaling())
    model = model_with_norm = model_of(case)
    before = model.get_parameter(NORM).detach().clone()
    result = run(model, case, data=DATA)
    model_with_norm = None
    assert torch.equal(result.state_dict()[NORM], other(before))


def test_an_algorithm_that_writes_says_so_or_is_refused() -> None:
    of_ones_own()
    run_ranks(2, of_ones_own)


def test_what_a_writing_algorithm_wrote_survives_a_resume(tmp_path: Path) -> None:
    case = Case(algorithm=Doubles(), recipe=Float8CurrentScaling(), stop=("checkpoint", 1))
    stopped(model_of(case), case, tmp_path, data=DATA)
    model = model_of(case)
    here = found(run(model, case, data=DATA, checkpoint_dir=tmp_path), model)
    whole = found(run(model := model_of(case), case, data=DATA), model)
    assert here.same() == whole.same()
