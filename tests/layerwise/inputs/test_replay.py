"""Layers called on recorded inputs give, bit for bit, what they give inside the model, whatever the parent does."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from layerwise.inputs.values.stores import INPUTS_ON
from tests.layerwise.inputs.parents import (
    DIM,
    PARENTS,
    Adds,
    Calls,
    Carries,
    Hides,
    Layer,
    Looks,
    Parent,
    Returns,
    Scribbles,
)
from tests.layerwise.inputs.replaying import assert_same, id_batches, plain, record, replay

if TYPE_CHECKING:
    from pathlib import Path

# For which layers the parent ran: the first, then up to where it does more than pass on what layers return.
PREPARED = {
    "two classes": [0, 1, 2],  # what the second class returns shows when one ran
    "adds": [0, 1, 2, 3],
    "deepstack": [0, 1, 2],
    "counts": [0, 1, 2, 3],
    "hands over one object": [0, 1, 2, 3],
    "hands over objects": [0, 1, 2, 3],
    "shares and adds": [0, 1, 2],
}


@pytest.mark.parametrize("inputs_on", INPUTS_ON)
@pytest.mark.parametrize("name", PARENTS)
def test_replayed_layers_give_what_they_give_inside_the_model(name: str, inputs_on: str) -> None:
    model, batches = PARENTS[name]().eval(), id_batches()
    results, outs = plain(model, batches)
    modules, runs = dict(model.named_modules()), model.runs
    with record(model, batches, inputs_on) as recorder:
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
            Hides(),
            "layer layers.2 takes hidden states out of an object inside of an argument, where they cannot be replaced",
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
        (Calls((0, 1, 2, 3, 0, 1, 2, 3)), "layer layers.0 is called again in one forward of the model (batch 0)"),
        (Calls((0, 2, 1, 3)), "layer layers.2 is called before layers.1 in one forward of the model (batch 0)" + ONCE),
        (Calls((0, 1, 2)), "layer layers.3 was not called in the model's forward of batch 0" + ONCE),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(model: Parent, message: str) -> None:
    modules = dict(model.named_modules())
    with pytest.raises(NotImplementedError, match=re.escape(message)), record(model, id_batches()) as recorder:
        replay(recorder)
    assert dict(model.named_modules()) == modules
    assert "forward" not in vars(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


class Talks(Parent):
    """Its layers talk through a dict: a new one for each forward, or one that the model keeps; with a mask in it."""

    class Adds(Layer):
        def forward(self, hidden: Tensor, *, state: dict[str, Tensor]) -> Tensor:
            out = super().forward(hidden, mask=state["mask"]) + state.get("sum", 0)
            state["sum"] = out.mean()
            return out

    def __init__(self, *, keeps_dict: bool = False, keeps_mask: bool = False) -> None:
        super().__init__([self.Adds() for _ in range(3)])
        self.state: dict[str, Tensor] | None = {} if keeps_dict else None
        self.mask = torch.ones(1) if keeps_mask else None

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        state = {} if self.state is None else self.state
        state.clear()
        state["mask"] = torch.ones(1) if self.mask is None else self.mask
        if self.mask is not None:
            self.mask.data.fill_(float(ids.sum()))
        for layer in self.layers:
            hidden = layer(hidden, state=state)
        return hidden


class Rewrites(Parent):
    """Changes hidden states where torch counts no writes."""

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
            hidden.data[:, 0].mul_(2)
        return hidden


def test_a_dict_of_each_forward_is_its_own_batchs() -> None:
    results, outs = plain(Talks(), id_batches())
    with record(Talks(), id_batches()) as recorder:
        again, layer_outs, _ = replay(recorder)
    assert_same(layer_outs, outs, "outputs of layers")
    assert_same(again, results, "the model")


FILLED = (
    "; a layer is run on one batch after the other, so each forward of the model has to make its own, with tensors of "
    "its own, or pass these as arguments"
)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Talks(keeps_mask=True),
            "kwargs['state'] of layer layers.0 is a dict that the model fills again for a later batch" + FILLED,
        ),
        (
            Talks(keeps_dict=True),
            "kwargs['state'] of layer layers.0 is a dict that is the same for several batches, and layers change it"
            + FILLED,
        ),
        (Rewrites(), "what the model computes before it calls layer layers.2 is computed from the output of layers.0"),
    ],
)
def test_what_the_last_batch_would_be_seen_in_is_refused(model: Parent, message: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(message)), record(model, id_batches()) as recorder:
        replay(recorder)


# -- order and restoring ---------------------------------------------------------------------------------------


def test_what_is_asked_for_too_early_or_too_late_is_named() -> None:
    with record(Parent(), id_batches()) as recorder:
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
        recorder.free(0)
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
        with record(model, batches, "disk") as recorder:
            recorder.prepare(0)
            directories.append(recorder._store.directory)
            raise ZeroDivisionError("in a layer")

    def failing_parent() -> None:
        model.fails = True
        with record(model, batches, "disk") as recorder:
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
    with record(model, batches) as recorder:
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
    with record(model, id_batches()) as recorder:
        results, _, prepared = replay(recorder)
    assert_same(results, plain(model, id_batches())[0], "the model")
    assert prepared == [0, 1]
