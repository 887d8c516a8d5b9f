"""What a model is calibrated on: batches of all kinds, consumed once, known by their content."""

from __future__ import annotations

import copy
import re
from collections import UserDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from layerwise.inputs.recording.recorder import Recorder
from tests.layerwise.inputs.parents import (
    Parent,
)
from tests.layerwise.inputs.replaying import assert_same, call, id_batches, plain, record, replay


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


def _copied(to: Tensor, values: Tensor) -> None:
    to.copy_(values)


def _through_numpy(to: Tensor, values: Tensor) -> None:
    np.copyto(to.numpy(), values.numpy())


def _through_data(to: Tensor, values: Tensor) -> None:
    to.data.copy_(values)


def _refilled(fill: Callable[[Tensor, Tensor], object]) -> Iterator[Tensor]:
    """One tensor that every batch is written into; and that is overwritten after the last."""
    buffer = torch.empty(2, 5, dtype=torch.int64)
    for number in range(3):
        fill(buffer, torch.full((2, 5), 3 * number + 1))
        yield buffer
    fill(buffer, torch.zeros(2, 5, dtype=torch.int64))


def _refilled_mapping(fill: Callable[[Tensor, Tensor], object]) -> Iterator[dict[str, Any]]:
    """One dict, of which a batch is a tensor in a list."""
    batch: dict[str, Any] = {}
    for ids in _refilled(fill):
        batch.update(ids=ids, scale=float(ids[0, 0]))
        yield batch
    batch.clear()


def _refilled_in_inference_mode(_: object) -> Iterator[Tensor]:
    """A tensor whose writes torch does not count."""
    with torch.inference_mode():
        buffer = torch.empty(2, 5, dtype=torch.int64)
    for number in range(3):
        with torch.inference_mode():
            buffer.fill_(3 * number + 1)
        yield buffer


@pytest.mark.parametrize("fill", [_copied, _through_numpy, _through_data])
@pytest.mark.parametrize("inputs_on", ["device", "cpu", "disk"])
@pytest.mark.parametrize("batches", [_refilled, _refilled_mapping, _refilled_in_inference_mode])
@pytest.mark.parametrize("loop", [False, True])
def test_a_buffer_that_every_batch_is_written_into_gives_every_batch_its_values(
    batches: Any, fill: Any, inputs_on: str, loop: bool
) -> None:
    model = Parent()
    apart = [copy.deepcopy(batch) for batch in batches(fill)]
    results, outs = plain(model, apart)

    def forward_loop(model: nn.Module) -> None:
        for batch in batches(fill):
            call(model, batch)

    with record(model, apart) as recorder:
        hashes = recorder.batch_hashes()
    with record(model, forward_loop if loop else batches(fill), inputs_on) as recorder:
        assert recorder.batch_hashes() == hashes
        again, layer_outs, _ = replay(recorder)
    assert len(set(hashes)) == 3
    assert_same(layer_outs, outs, "outputs of layers")
    assert_same(again, results, "the model")


def test_a_model_that_writes_into_its_arguments_gets_the_same_ones_every_time() -> None:
    class Overwrites(Parent):
        def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
            out = super().forward(ids, scale)
            ids.data.zero_()
            return out

        def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
            ids.data.add_(1)
            return super().body(hidden, ids)

    model, batches = Overwrites(), id_batches()
    results, outs = plain(model, id_batches())
    with record(model, batches) as recorder:
        again, layer_outs, _ = replay(recorder)
    assert_same(layer_outs, outs, "outputs of layers")
    assert_same(again, results, "the model")
    assert_same(batches, id_batches(), "whoever gave the batches has them as they were")


@pytest.mark.parametrize(
    "make",
    [
        lambda values: SimpleNamespace(inner={"ids": values}),
        lambda values: UserDict(ids=values),
        lambda values: SimpleNamespace(array=values.numpy()),
        lambda values: SimpleNamespace(number=0),
    ],
    ids=["a tensor deep inside", "a mapping", "an array", "a number"],
)
@pytest.mark.parametrize("loop", [False, True])
def test_an_object_that_is_filled_again_is_refused(make: Any, loop: bool) -> None:
    buffer = torch.zeros(3)
    context = make(buffer)

    def batches() -> Iterator[tuple[Tensor, Any]]:
        for number in range(2):
            buffer.data.fill_(number)
            if hasattr(context, "number"):
                context.number = number
            yield torch.ones(1), context

    def forward_loop(model: nn.Module) -> None:
        for batch in batches():
            model(*batch)

    message = (
        f"[0][1] of batch 0 is a {type(context).__name__} that holds other values now than when its batch was taken "
        "from data: it was filled again for a later batch, and only tensors are copied; make a new one for each batch"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        record(Parent(), forward_loop if loop else batches())
    again = [(torch.ones(1), make(torch.zeros(3))) for _ in range(2)] + [(torch.ones(1), context)] * 2
    with record(Parent(), again) as recorder:
        assert len(recorder) == 4, "the same object again, as it was, and others that are equal"


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
