"""Layers called on recorded inputs give, bit for bit, what they give inside the model, whatever the parent does."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerwise.inputs.layers import find_layers
from layerwise.inputs.replay import Recorder
from layerwise.inputs.stores import INPUTS_ON, Kept
from tests.layerwise.inputs.parents import (
    DIM,
    PARENTS,
    Adds,
    Calls,
    Carries,
    Layer,
    Looks,
    Parent,
    Returns,
    Scribbles,
    assert_same,
    id_batches,
    plain,
    replay,
)

# For which layers the parent ran: the first, then up to where it does more than pass on what layers return.
PREPARED = {
    "two classes": [0, 1, 2],  # what the second class returns shows when one ran
    "adds": [0, 1, 2, 3],
    "deepstack": [0, 1, 2],
    "counts": [0, 1, 2, 3],
    "shares and adds": [0, 1, 2],
}


def _recorder(model: nn.Module, data: Any, inputs_on: str = "device") -> Recorder:
    return Recorder(model, find_layers(model), data, inputs_on=inputs_on)


@pytest.mark.parametrize("inputs_on", INPUTS_ON)
@pytest.mark.parametrize("name", PARENTS)
def test_replayed_layers_give_what_they_give_inside_the_model(name: str, inputs_on: str) -> None:
    model, batches = PARENTS[name]().eval(), id_batches()
    results, outs = plain(model, batches)
    modules, runs = dict(model.named_modules()), model.runs
    with _recorder(model, batches, inputs_on) as recorder:
        again, layer_outs, prepared = replay(recorder)
    assert_same(layer_outs, outs, "outputs of layers")
    assert_same(again, results, "outputs of the model")
    assert prepared == PREPARED.get(name, [0, 1])
    assert dict(model.named_modules()) == modules
    assert "forward" not in vars(model)
    if name == "plain":
        assert model.runs - runs == 3 * len(batches), "stopped at the first, recorded all, ran the tail"
    assert_same(plain(model, batches)[0], results, "the model afterwards")


ONCE = "; layers must be called once each, in the order of layers="
KEPT = (
    ", which is not kept: between layers a model may change only the output of the layer just before. Give such "
    "layers as one module of layers=, or leave them out"
)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Looks(),
            "what the model computes before it calls layer layers.2 is computed from the output of layers.0" + KEPT,
        ),
        (Scribbles(), "before it calls layer layers.2 is computed from the output of layers.0" + KEPT),
        (
            Looks([Layer(), Layer()]),
            "the model takes the output of layers.0, which is not kept: after the layers a model may use only",
        ),
        (
            Carries(looks=True),
            "before it calls layer layers.2 is computed from the output of layers.0" + KEPT,
        ),
        (Returns(2), "args[0] of layer layers.3 is computed from the output of layers.0" + KEPT),
        (
            Returns(3),
            "module norm takes the output of layers.0, which is not kept: after the layers a model may use only that",
        ),
        (
            Returns(3),
            "only that of the last one, layers.3. Give these layers as one module of layers=, or leave them out",
        ),
        (Calls((0, 1, 1, 2)), "layer layers.1 is called again in one forward of the model (batch 0)" + ONCE),
        (Calls((0, 2, 1, 3)), "layer layers.2 is called before layers.1 in one forward of the model (batch 0)" + ONCE),
        (Calls((0, 1, 2)), "layer layers.3 was not called in the model's forward of batch 0" + ONCE),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(model: Parent, message: str) -> None:
    modules = dict(model.named_modules())
    with pytest.raises(NotImplementedError, match=re.escape(message)), _recorder(model, id_batches()) as recorder:
        replay(recorder)
    assert dict(model.named_modules()) == modules
    assert "forward" not in vars(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


# -- batches ---------------------------------------------------------------------------------------------------


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
    with _recorder(model, data, inputs_on) as recorder:
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
        _recorder(Parent(), data)


def test_a_loop_that_uses_what_the_model_returns_is_told_that_it_returns_nothing() -> None:
    model = Parent()
    with pytest.raises(AttributeError) as caught:
        _recorder(model, lambda model: model(id_batches()[0]).sum())
    assert caught.value.__notes__ == [
        "inside forward_loop the model only records what it is called with, and returns None"
    ]
    assert "forward" not in vars(model)


def test_an_unknown_place_for_inputs_is_named() -> None:
    with pytest.raises(ValueError, match="inputs_on must be one of 'device', 'cpu', 'disk', got 'gpu'"):
        _recorder(Parent(), [], "gpu")


def test_a_rank_without_batches_does_nothing() -> None:
    model = Parent()
    with _recorder(model, []) as recorder:
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
    hashes = [_recorder(Parent(), data).batch_hashes()[0] for data in same]
    assert set(hashes) == {4889499598802646498}, "stable over processes and versions"
    others = _recorder(Parent(), other).batch_hashes()
    assert len({*hashes, *others}) == 1 + len(other)


# -- what is kept ----------------------------------------------------------------------------------------------


class Masked(Parent):
    """All layers get one mask, which the model owns; and a view of a parameter."""

    class Biased(Layer):
        def forward(self, hidden: Tensor, *, mask: Tensor, bias: Tensor) -> Tensor:
            return super().forward(hidden, mask=mask) + bias

    def __init__(self) -> None:
        super().__init__([self.Biased() for _ in range(3)])
        self.mask = torch.full((1, 1, DIM), 0.5)

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, mask=self.mask, bias=self.embed.weight[3:4])
        return hidden


@pytest.mark.parametrize("inputs_on", INPUTS_ON)
def test_what_calls_share_is_kept_once(inputs_on: str) -> None:
    model = Masked()
    with _recorder(model, id_batches(), inputs_on) as recorder:
        kept = _kept(recorder, "mask")
        assert len(kept) == 9
        assert len(set(map(id, kept))) == 1


@torch.no_grad()
def _kept(recorder: Recorder, name: str) -> list[Kept]:
    """What is kept of an argument of all layers, for all batches."""
    recorder.prepare(0)
    for batch in range(len(recorder)):
        args, kwargs = recorder.inputs(0, batch)
        recorder.put(0, batch, recorder.layers[0][1](*args, **kwargs))
    recorder.prepare(1)
    calls = [call for progress in recorder._progress for call in progress.calls]
    return [call.sources[list(call.structure.children[1].items).index(name) + 1] for call in calls]


@torch.no_grad()
def test_what_lies_in_parameters_outlives_their_sharding() -> None:
    model, batches = Masked(), id_batches()
    results, _ = plain(model, batches)
    storage = model.embed.weight.untyped_storage()
    with _recorder(model, batches) as recorder:
        for index, (_, layer) in enumerate(recorder.layers):
            recorder.prepare(index)
            weight, size = model.embed.weight.clone(), storage.nbytes()
            storage.resize_(0)  # what FSDP does to gathered weights
            for batch in range(len(recorder)):
                args, kwargs = recorder.inputs(index, batch)
                recorder.put(index, batch, layer(*args, **kwargs))
            storage.resize_(size)
            model.embed.weight.copy_(weight)
        assert_same([recorder.run_tail(batch) for batch in range(3)], results, "the model")


@torch.no_grad()
def test_outputs_go_when_their_last_layer_is_done() -> None:
    model = PARENTS["skips"]()
    with _recorder(model, id_batches()) as recorder:
        alive: list[weakref.ref[Kept]] = []
        left = []
        for index, (_, layer) in enumerate(recorder.layers):
            recorder.prepare(index)
            args, kwargs = recorder.inputs(index, 0)
            out = layer(*args, **kwargs)
            for batch in range(3):
                recorder.put(index, batch, out)
            alive.append(weakref.ref(recorder._progress[0].outputs[index].leaves[0]))
            del out, args, kwargs
            recorder.done(index)
            gc.collect()
            left.append([ref() is not None for ref in alive])
    assert left == [[True], [True, True], [True, True, True], [False, False, False, True]]


def test_files_go_with_their_last_use_and_with_the_recorder() -> None:
    model = Parent()
    with _recorder(model, id_batches(), "disk") as recorder:
        replay(recorder)
        directory = recorder._store.directory
        assert directory is not None
        assert len(list(directory.iterdir())) == 6, "3 batches, 3 outputs of the last layer"
    assert not directory.exists()
    recorder.close()


class Reuses(Parent):
    """Writes its mask, in place, in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.zeros(1)

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        self.mask.fill_(float(ids.sum()))
        for layer in self.layers:
            hidden = layer(hidden, mask=self.mask)
        return hidden


def test_memory_that_the_model_writes_again_is_noticed_or_copied() -> None:
    model = Reuses()
    message = (
        "a tensor of shape [1] was written in place after it was recorded; the model reuses its memory, keep recorded"
    )
    with _recorder(model, id_batches()) as recorder, pytest.raises(RuntimeError, match=re.escape(message)):
        replay(recorder)
    with _recorder(model, id_batches(), "cpu") as recorder:
        assert_same(replay(recorder)[0], plain(model, id_batches())[0], "the model")


@pytest.mark.parametrize("inputs_on", INPUTS_ON)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.int64, torch.complex64])
def test_kept_tensors_come_back_with_their_bits_and_strides(dtype: torch.dtype, inputs_on: str) -> None:
    from layerwise.inputs.stores import Store

    store = Store(inputs_on)
    raw = torch.arange(24).remainder(2).to(dtype).reshape(2, 3, 4)
    shapes = [
        raw,
        raw.permute(2, 0, 1),
        raw[:1].expand(2, 3, 4),
        raw[0, 0, 0],
        raw[:0],
        raw[None].expand(3, 2, 3, 4),
    ]
    for tensor in shapes:
        again = store.keep(tensor).tensor(fresh=True)
        assert again.dtype is dtype
        assert again.stride() == tensor.stride() or not tensor.numel()
        as_bytes = [one.contiguous().view(-1).view(torch.uint8) for one in (again, tensor)]
        assert torch.equal(*as_bytes)
        assert again.shape == tensor.shape
    gap = raw[:, 1]
    assert torch.equal(store.keep(gap).tensor(fresh=True).view(torch.uint8), gap.contiguous().view(torch.uint8))
    store.close()


def test_inputs_can_be_cast() -> None:
    model = PARENTS["pairs"]()
    with _recorder(model, id_batches()) as recorder:
        recorder.prepare(0)
        (pair,), kwargs = recorder.inputs(0, 0, cast=torch.bfloat16)
        assert pair[0].dtype is torch.bfloat16
        assert pair[1].dtype is torch.int64
        assert kwargs == {}


# -- order and restoring ---------------------------------------------------------------------------------------


def test_what_is_asked_for_too_early_or_too_late_is_named() -> None:
    with _recorder(Parent(), id_batches()) as recorder:
        with pytest.raises(
            RuntimeError, match=re.escape("inputs of layer layers.0 are not there: not prepared yet, or done")
        ):
            recorder.inputs(0, 0)
        with pytest.raises(
            RuntimeError, match=re.escape("the output of layer layers.3 for batch 1 was not put, or is freed")
        ):
            recorder.run_tail(1)
        recorder.prepare(0)
        with pytest.raises(RuntimeError, match=re.escape("the output of layer layers.0 for batch 0 was not put")):
            recorder.prepare(1)
        recorder.done(0)
        with pytest.raises(RuntimeError, match=re.escape("inputs of layer layers.0 are not there")):
            recorder.inputs(0, 0)


class Fails(Parent):
    fails = False

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.fails and index == 2:
                raise KeyError("in the parent")
            hidden = layer(hidden)
        return hidden


def test_after_an_exception_the_model_is_as_it_was() -> None:
    model, batches = Fails(), id_batches()
    results, _ = plain(model, batches)
    modules = dict(model.named_modules())
    directories: list[Path | None] = []

    def failing_layer() -> None:
        with _recorder(model, batches, "disk") as recorder:
            recorder.prepare(0)
            directories.append(recorder._store.directory)
            raise ZeroDivisionError("in a layer")

    def failing_parent() -> None:
        model.fails = True
        with _recorder(model, batches, "disk") as recorder:
            directories.append(recorder._store.directory)
            replay(recorder)

    with pytest.raises(ZeroDivisionError):
        failing_layer()
    with pytest.raises(KeyError, match="in the parent"):
        failing_parent()
    model.fails = False
    assert dict(model.named_modules()) == modules
    assert "forward" not in vars(model)
    assert not any(directory.exists() for directory in directories if directory is not None)
    assert None not in directories
    assert_same(plain(model, batches)[0], results, "the model afterwards")


class Peeks(Parent):
    """Catches exceptions, asks its layers for attributes, and knows each by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.last = self.layers[3]
        self.seen: list[tuple[int, int]] = []

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        try:
            for layer in self.layers[:3]:
                hidden = layer(hidden) if layer.linear.in_features == DIM else hidden
            hidden = self.last(hidden)
        except Exception:
            return ids
        finally:
            stand_ins = sum(1 for _ in self.layers.parameters()), self.last.calls
            self.seen.append(stand_ins)
        return hidden


def test_the_parent_runs_without_its_layers_and_inside_its_hooks() -> None:
    model, batches = Peeks(), id_batches()[:1]
    mine = model.forward
    model.forward = mine  # patched by the user already
    results, _ = plain(model, batches)
    model.seen.clear()
    ran: list[Any] = []
    handle = model.register_forward_hook(lambda *_: ran.append(1))
    with _recorder(model, batches) as recorder:
        assert_same(replay(recorder, times=1)[0], results, "the model")
    handle.remove()
    assert [count for count, _ in model.seen] == [0, 0, 0], "a stand-in has parameters"
    assert len(ran) == 3, "an early stop left the model's hooks out"
    assert vars(model)["forward"] is mine
    assert model.last is model.layers[3]


def test_adding_nothing_is_passing_on() -> None:
    class Same(Adds):
        def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
            for layer in self.layers:
                hidden = layer(hidden).contiguous().to(torch.float32)
            return hidden

    model = Same()
    with _recorder(model, id_batches()) as recorder:
        results, _, prepared = replay(recorder)
    assert_same(results, plain(model, id_batches())[0], "the model")
    assert prepared == [0, 1]
