"""What a model is calibrated on: batches of all kinds, consumed once, known by their content."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from layerwise.inputs.replay import Recorder
from tests.layerwise.inputs.parents import (
    Parent,
)
from tests.layerwise.inputs.replaying import assert_same, id_batches, plain, record, replay


def _generator() -> Iterator[Tensor]:
    yield from id_batches()


def _loop(model: nn.Module) -> None:
    for ids in id_batches():
        assert model(ids) is None


@pytest.mark.parametrize(
    "data",
    [
        _generator(),
        iter([(ids,) for ids in id_batches()]),
        [[ids, 1.0] for ids in id_batches()],
        [{"ids": ids, "scale": 1.0} for ids in id_batches()],
        _loop,
    ],
    ids=["generator", "tuples", "lists", "mappings", "forward_loop"],
)
@pytest.mark.parametrize("inputs_on", ["device", "disk"])
def test_batches_come_in_many_ways(data: Any, inputs_on: str) -> None:
    if isinstance(data, Iterator):
        data = iter([*data] or id_batches())  # pytest uses the same iterator for both places
    model = Parent()
    results, _ = plain(model, id_batches())
    with record(model, data, inputs_on) as recorder:
        assert len(recorder) == 3
        assert_same(replay(recorder)[0], results, "the model")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            torch.zeros(2, 3),
            "data must be an iterable of batches or a callable forward_loop(model), got a Tensor; put one",
        ),
        ({"ids": torch.zeros(1)}, "got a dict; put one batch into a list"),
        (
            [torch.zeros(1), "text"],
            "batch 1 of data is a str; expected a tensor, a tuple or list of positional arguments,",
        ),
        ([{1: 2}], "batch 0 of data is a dict; expected"),
    ],
)
def test_what_is_no_batch_is_named(data: Any, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        record(Parent(), data)


def test_a_loop_that_uses_what_the_model_returns_is_told_that_it_returns_nothing() -> None:
    model = Parent()
    with pytest.raises(AttributeError) as caught:
        record(model, lambda model: model(id_batches()[0]).sum())
    assert caught.value.__notes__ == [
        "inside forward_loop the model only records what it is called with, and returns None"
    ]
    assert "forward" not in vars(model)


def test_an_unknown_place_for_inputs_is_named() -> None:
    with pytest.raises(ValueError, match="inputs_on must be one of 'device', 'cpu', 'disk', got 'gpu'"):
        record(Parent(), [], "gpu")


def test_a_rank_without_batches_does_nothing() -> None:
    model = Parent()
    with record(model, []) as recorder:
        assert recorder.batch_hashes() == []
        assert not any(recorder.needs_parent(index) for index in range(4))
        assert replay(recorder) == ([], [], [])
    assert model.runs == 0


def test_without_layers_the_tail_is_the_model() -> None:
    model = Parent()
    with Recorder(model, [], id_batches()) as recorder:
        assert_same(replay(recorder)[0], plain(model, id_batches())[0], "the model")


def test_batches_are_known_by_their_content() -> None:
    ids = torch.arange(6).reshape(2, 3)
    same = [[ids], [ids.clone()], [(ids,)], [[ids.t().contiguous().t()]]]
    other = [
        ids.t(),
        ids + 1,
        ids.int(),
        ids.reshape(1, 6),
        {"ids": ids},
        (ids, None),
        (ids, 1.0),
        (ids, 1),
        (ids, [ids]),
    ]
    hashes = [record(Parent(), data).batch_hashes()[0] for data in same]
    assert set(hashes) == {4889499598802646498}, "stable over processes and versions"
    others = record(Parent(), other).batch_hashes()
    assert len({*hashes, *others}) == 1 + len(other)


def _refilled(fill: Callable[[Tensor, Tensor], object]) -> Iterator[Tensor]:
    """One tensor that every batch is written into."""
    buffer = torch.empty(2, 5, dtype=torch.int64)
    for number in range(3):
        fill(buffer, torch.full((2, 5), 3 * number + 1))
        yield buffer


FILLS = {
    "copy_": lambda to, values: to.copy_(values),
    "numpy": lambda to, values: np.copyto(to.numpy(), values.numpy()),
}


@pytest.mark.parametrize("fill", FILLS.values(), ids=[*FILLS])
@pytest.mark.parametrize("inputs_on", ["cpu", "disk"])
def test_a_buffer_that_every_batch_is_written_into_gives_every_batch_its_values(fill: Any, inputs_on: str) -> None:
    model = Parent()
    results, _ = plain(model, [batch.clone() for batch in _refilled(fill)])
    with record(model, _refilled(fill), inputs_on) as recorder:
        assert_same(replay(recorder)[0], results, "the model")


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (FILLS["copy_"], "was written in place after it was recorded"),
        (FILLS["numpy"], "a batch holds other values than when it was taken from data"),
    ],
    ids=[*FILLS],
)
def test_a_batch_that_was_overwritten_where_it_is_kept_is_refused(fill: Any, message: str) -> None:
    with record(Parent(), _refilled(fill)) as recorder, pytest.raises(RuntimeError, match=message):
        recorder.prepare(0)


class _More(Tensor):
    """A tensor that may be more than its bytes."""


class _Opaque:
    """A filled cache that shows nothing of what it holds."""

    def get_seq_length(self) -> int:
        return 3

    def update(self) -> None:
        pass


@pytest.mark.parametrize("found", [torch.ones(2, 3).as_subclass(_More), _Opaque(), object()])
def test_what_can_not_be_told_from_other_data_is_named(found: Any) -> None:
    text = f"batch 1 holds [1]['ids'] ({type(found).__name__}): whether another run has the same data can not be told"
    data = [{"ids": torch.ones(1)}, {"ids": found}]
    with record(Parent(), data) as recorder, pytest.raises(TypeError, match=re.escape(text)):
        recorder.batch_hashes()
