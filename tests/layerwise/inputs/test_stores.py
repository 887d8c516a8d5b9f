"""What waits for its use: kept once, freed after its last use, in the same bits, safe from who owns the memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layerwise.inputs.values.stores import INPUTS_ON, StoredTensor
from tests.layerwise.inputs.parents import (
    DIM,
    PARENTS,
    Layer,
    Parent,
)
from tests.layerwise.inputs.replaying import assert_same, id_batches, plain, record, replay

if TYPE_CHECKING:
    from layerwise.inputs.recording.recorder import Recorder


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
    with record(model, id_batches(), inputs_on) as recorder:
        kept = _kept(recorder, "mask")
        assert len(kept) == 9
        assert len(set(map(id, kept))) == 1


class Signed(Masked):
    """All layers get a mask, and its negative in the same memory."""

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, mask=self.mask, bias=torch._neg_view(self.mask))
        return hidden


@pytest.mark.parametrize("inputs_on", INPUTS_ON)
def test_a_lazy_negative_is_not_what_lies_in_its_memory(inputs_on: str) -> None:
    model, batches = Signed(), id_batches()
    results, outs = plain(model, batches)
    with record(model, batches, inputs_on) as recorder:
        found, layers, _ = replay(recorder)
    assert_same(found, results, "results")
    assert_same(layers, outs, "layers")


@torch.no_grad()
def _kept(recorder: Recorder, name: str) -> list[StoredTensor]:
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
    with record(model, batches) as recorder:
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
    with record(model, id_batches()) as recorder:
        alive: list[weakref.ref[StoredTensor]] = []
        left = []
        for index, (_, layer) in enumerate(recorder.layers):
            recorder.prepare(index)
            args, kwargs = recorder.inputs(index, 0)
            out = layer(*args, **kwargs)
            for batch in range(3):
                recorder.put(index, batch, out)
            alive.append(weakref.ref(recorder._progress[0].outputs[index].leaves[0]))
            del out, args, kwargs
            recorder.free(index)
            gc.collect()
            left.append([ref() is not None for ref in alive])
    assert left == [[True], [True, True], [True, True, True], [False, False, False, True]]


def test_files_go_with_their_last_use_and_with_therecord() -> None:
    model = Parent()
    with record(model, id_batches(), "disk") as recorder:
        replay(recorder)
        directory = recorder._store.directory
        assert directory is not None
        assert len(list(directory.iterdir())) == 6, "3 batches, 3 outputs of the last layer"
    assert not directory.exists()
    recorder.close()


FILLS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "copy_": lambda to, values: to.copy_(values),
    "numpy": lambda to, values: np.copyto(to.numpy(), values.numpy()),
    "data": lambda to, values: to.data.copy_(values),
}


class Reuses(Parent):
    """Has memory of its own for what it passes to its layers, and for what these return; writes it in every forward."""

    class Fills(Layer):
        def __init__(self, fill: Callable[[Tensor, Tensor], object]) -> None:
            super().__init__()
            self.fill, self.out = fill, torch.zeros(2, 5, DIM)

        def forward(self, hidden: Tensor, *, mask: Tensor) -> Tensor:
            self.fill(self.out, super().forward(hidden, mask=mask))
            return self.out

    def __init__(self, fill: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__([self.Fills(fill) for _ in range(3)])
        self.fill, self.mask, self.hidden = fill, torch.zeros(1), torch.zeros(2, 5, DIM)

    def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
        self.fill(self.mask, ids.sum().float()[None] / 64)
        self.fill(self.hidden, hidden)
        hidden = self.hidden
        for number, layer in enumerate(self.layers):
            self.fill(self.mask, self.mask + number)  # each layer has another mask
            hidden = layer(hidden, mask=self.mask)
        return hidden


class Infers(Reuses):
    """In whose forward torch counts no writes."""

    @torch.inference_mode()
    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        mask = torch.ones(1)
        hidden = self.embed(ids)
        for number, layer in enumerate(self.layers):
            hidden.mul_(1.5)
            mask.add_(number)
            hidden = layer(hidden, mask=mask)
        return self.head(self.norm(hidden))


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@pytest.mark.parametrize("kind", [Reuses, Infers])
@pytest.mark.parametrize("inputs_on", INPUTS_ON)
def test_memory_that_the_model_writes_again_is_copied(kind: type[Reuses], fill: Any, inputs_on: str) -> None:
    model, batches = kind(fill), [batch for batch in id_batches() if batch.shape[1] == 5]
    results, outs = plain(model, batches)
    with record(model, batches, inputs_on) as recorder:
        again, layer_outs, _ = replay(recorder)
    assert_same(layer_outs, outs, "outputs of layers")
    assert_same(again, results, "the model")


@pytest.mark.parametrize("inputs_on", INPUTS_ON)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.int64, torch.complex64])
def test_kept_tensors_come_back_with_their_bits_and_strides(dtype: torch.dtype, inputs_on: str) -> None:
    from layerwise.inputs.values.stores import Store

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
        again = store.keep(tensor).tensor()
        assert again.dtype is dtype
        assert again.stride() == tensor.stride() or not tensor.numel()
        as_bytes = [one.contiguous().view(-1).view(torch.uint8) for one in (again, tensor)]
        assert torch.equal(*as_bytes)
        assert again.shape == tensor.shape
    gap = raw[:, 1]
    assert torch.equal(store.keep(gap).tensor().view(torch.uint8), gap.contiguous().view(torch.uint8))
    store.close()


def test_one_tensor_that_is_passed_twice_stays_one() -> None:
    class Twice(Parent):
        def body(self, hidden: Tensor, ids: Tensor) -> Tensor:
            for layer in self.layers:
                hidden = layer(hidden, again=[hidden], ids=ids, too=(ids,))
            return hidden

    model = Twice()
    with record(model, id_batches()) as recorder:
        replay(recorder)
    with record(model, id_batches()) as recorder:
        _kept(recorder, "ids")
        args, kwargs = recorder.inputs(1, 0)
        assert kwargs["again"][0] is args[0]
        assert kwargs["too"][0] is kwargs["ids"]
