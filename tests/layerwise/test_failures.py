"""An exception anywhere in a run: every rank raises, the model is whole and sharded, and the run can be continued."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerwise import GPTQ, Algorithm, Max
from tests.layerwise.small_runs import (
    Case,
    Found,
    Layer,
    Stop,
    assert_usable,
    batches,
    found,
    model_of,
    own,
    run,
    state_of,
    stopping,
)
from tests.ranks import run_ranks_each
from tests.sampling import halves

BROKEN = 1  # the layer in which everything breaks


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@dataclass(frozen=True, kw_only=True)
class Breaks(Algorithm):
    """Max, until a group of the second layer comes, on some rank."""

    writes_weights: ClassVar[bool] = False

    def decide(self, group: Any, recipe: Any) -> Sequence[Any]:
        if breaking is not None and group.linears[0].name.startswith(f"layers.{BROKEN}."):
            breaking()
        return Max().decide(group, recipe)


breaking: Callable[[], None] | None = (
    None  # what it does there; no option of the algorithm, which a checkpoint compares
)


@dataclass(frozen=True)
class Failure:
    """Where a run fails, on which rank (None: all), with what."""

    where: str
    on: int | None
    kind: type[BaseException] = Stop

    def here(self) -> None:
        if self.on is None or self.on == rank():
            raise self.kind(f"in {self.where}")

    @property
    def finished(self) -> int:
        """How many layers are calibrated before."""
        return 0 if self.where.startswith("data") else BROKEN

    def __repr__(self) -> str:
        return f"{self.kind.__name__} in {self.where} on {'all ranks' if self.on is None else f'rank {self.on}'}"


FAILURES = [
    Failure("decide", None),
    Failure("decide", 1),
    Failure("decide", 0, KeyboardInterrupt),
    *(Failure(f"on_event {kind}", 1) for kind in ("layer_start", "calibrate", "write", "metrics")),
    Failure("on_event calibrate", 1, KeyboardInterrupt),
    Failure("forward", None),
    Failure("forward", 0),
    Failure("forward", 1, KeyboardInterrupt),
    Failure("forward, later", 1),
    Failure("data", 1),
    Failure("data", None, KeyboardInterrupt),
    Failure("data loop", 0),
]


# On ranks without those whose place, kind of error and rank others of the list have, too.
ON_RANKS = [one for number, one in enumerate(FAILURES) if number not in (0, 7, 9)]
RESUMED = (FAILURES[1], FAILURES[5], FAILURES[-1])
# Every place once, of events the one before and the one behind the results of a layer; on either rank or on both, with
# either kind of error. Runs that are resumed are among them.
FIRST_ON_RANKS = [FAILURES[number] for number in (1, 5, 6, 10, 13, 14)]


@cache
def whole_of(case: Case) -> Found:
    """What an uninterrupted run comes to; one for all that a call tries."""
    model = model_of(case)
    return found(run(model, case), model)


def broken(failure: Failure, model: Any) -> tuple[dict[str, Any], Any]:
    """Options and data of a run that fails."""
    global breaking
    options: dict[str, Any] = {}
    data: Any = own()
    if failure.where == "decide":
        breaking = failure.here
    elif failure.where.startswith("on_event"):
        options["on_event"] = stopping(failure.where.split()[1], BROKEN, failure.kind, failure.on)
    elif failure.where.startswith("forward"):
        left = [3 if failure.where.endswith("later") else 1]

        def fails() -> None:
            left[0] -= 1
            if left[0] == 0:
                failure.here()

        model.layers[BROKEN].fails = fails
    elif failure.where == "data":

        def some() -> Iterator[Tensor]:
            yield batches()[0]
            failure.here()
            yield batches()[1]

        data = some()
    else:

        def loop(called: nn.Module) -> None:
            called(batches()[0])
            failure.here()

        data = loop
    return options, data


def fails(failure: Failure, case: Case, path: Path | None = None) -> str:
    """What a failing run says here, after a look at what it leaves and what it comes to when it is continued."""
    global breaking
    model = model_of(case)
    model.train()
    model.layers[2].eval()
    objects, training = [*model.modules()], [module.training for module in model.modules()]
    requires = {name: param.requires_grad for name, param in model.named_parameters()}
    before, given = state_of(model), {} if path is None else {"checkpoint_dir": path / repr(failure)}
    options, data = broken(failure, model)
    try:
        run(model, case, data=data, **options, **given)
    except BaseException as error:
        told = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError(f"no {failure}")
    finally:
        breaking = None
    model.layers[BROKEN].fails = None
    assert [*model.modules()] == objects
    assert [module.training for module in model.modules()] == training
    assert {name: param.requires_grad for name, param in model.named_parameters()} == requires
    assert torch.is_grad_enabled()
    assert_usable(model)
    after = state_of(model)
    whole = whole_of(case)
    for name, value in after.items():
        done = any(name.startswith(f"layers.{index}.") for index in range(failure.finished))
        assert value == (whole.model if done else before)[name], name
    if path is None or failure not in RESUMED:
        return told
    fresh = model_of(case)
    again = found(run(fresh, case, **given), fresh)
    assert again.same() == whole.same()
    assert again.resumed == (*range(failure.finished),)
    return told


def text(failure: Failure) -> str:
    words = f"in {failure.where}"
    if failure.where.startswith("on_event"):
        words = f"stopped at {failure.where.split()[1]} of {BROKEN}"
    return f"{failure.kind.__name__}: {words}"


LINEAR = rf"layers\.{BROKEN}\.\w+\.weight"
NOTES = {  # what other ranks are told beside the error
    "decide": rf" \(while calibrating {LINEAR}(, {LINEAR})*\)",
    "data loop": r" \(inside forward_loop the model only records what it is called with, and returns None\)",
}


@halves("failures", ON_RANKS, FIRST_ON_RANKS)
def test_every_rank_raises_and_the_model_stays_sharded(failures: tuple[Failure, ...], shared_tmp_path: Path) -> None:
    told = run_ranks_each(2, failures, fails, Case(algorithm=Breaks()), shared_tmp_path, timeout=120)
    for number, own_told in enumerate(told):
        for failure, words in zip(failures, own_told, strict=True):
            if failure.on in (None, number):
                assert words == text(failure)
            else:
                told_of_it = re.escape(f"RuntimeError: rank {failure.on}: {text(failure)}")
                assert re.fullmatch(told_of_it + NOTES.get(failure.where, ""), words)


@pytest.mark.parametrize("failure", [one for one in FAILURES if one.on in (None, 0)], ids=repr)
def test_a_plain_model_stays_whole(tmp_path: Path, failure: Failure) -> None:
    told = fails(failure, Case(algorithm=Breaks()), tmp_path)
    assert told == text(failure)


def test_an_algorithm_inside_another_fails_as_one_by_itself(tmp_path: Path) -> None:
    told = fails(FAILURES[0], Case(algorithm=GPTQ(scales=Breaks())), tmp_path)
    assert told == text(FAILURES[0])


STORED = [
    Failure("forward, later", 0),
    Failure("on_event metrics", None),
]


def test_layers_after_the_failed_one_are_what_they_were_in_every_storage() -> None:
    """With weights written and the quantized outputs passed on, and the bytes themselves in the model."""
    case = Case(algorithm=GPTQ(), stored=Case().recipe)
    for own_told in run_ranks_each(2, STORED, fails, case, timeout=120):
        for failure, words in zip(STORED, own_told, strict=True):
            assert words.endswith(text(failure))


def test_layers_hold_no_reference_to_a_failed_run() -> None:
    model = model_of()
    options, data = broken(Failure("forward", None), model)
    with pytest.raises(Stop):
        run(model, data=data, **options)
    model.layers[BROKEN].fails = None
    Layer.calls = 0
    model(batches()[0])
    assert Layer.calls == len(model.layers)
