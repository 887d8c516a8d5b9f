"""A model run plainly, and by a recorder: both give what every layer returned, to be compared bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from layerwise.inputs.recording.recorder import Recorder
from layerwise.inputs.values.structure import flatten
from layerwise.stages.layers import find_layers


def record(model: nn.Module, data: Any, inputs_on: str = "device") -> Recorder:
    return Recorder(model, find_layers(model), data, inputs_on=inputs_on)


def id_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 16, (2, 5 + extra), generator=generator) for extra in (0, 2, 0)]


@torch.no_grad()
def plain(model: nn.Module, batches: list[Any]) -> tuple[list[Any], list[list[Any]]]:
    """What the model returns, and what each layer returned, for each batch."""
    outs: list[list[Any]] = []
    handles = [
        layer.register_forward_hook(lambda _, __, out: outs[-1].append(_copied(out))) for _, layer in find_layers(model)
    ]
    results = []
    for batch in batches:
        outs.append([])
        results.append(call(model, batch))
    for handle in handles:
        handle.remove()
    return results, outs


def call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return model(batch)
    return model(*batch) if isinstance(batch, tuple) else model(**batch)


def _copied(out: Any) -> list[Any]:
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in flatten(out)[0]]


@torch.no_grad()
def replay(recorder: Recorder, times: int = 2) -> tuple[list[Any], list[list[Any]], list[int]]:
    """As `plain`, by a recorder that runs each layer several times; and for which layers the parent ran."""
    outs: list[list[Any]] = [[] for _ in range(len(recorder))]
    prepared = []
    for index, (_, layer) in enumerate(recorder.layers):
        if recorder.needs_parent(index):
            prepared.append(index)
            recorder.prepare(index)
        for batch in range(len(recorder)):
            for _ in range(times):
                out, written = recorder.run(index, batch, layer)
                recorder.put(index, batch, out, written)
            outs[batch].append(_copied(out))
        recorder.free(index)
    return [recorder.run_tail(batch) for batch in range(len(recorder))], outs, prepared


def assert_same(one: Any, other: Any, what: str) -> None:
    """Bit for bit, everything that is in two values."""
    ones, others = flatten(one)[0], flatten(other)[0]
    assert len(ones) == len(others), what
    for a, b in zip(ones, others, strict=True):
        if isinstance(a, Tensor):
            assert a.dtype == b.dtype, what
            assert torch.equal(a, b), f"{what}: differs by {(a.float() - b.float()).abs().max()}"
        elif isinstance(a, bool | int | str | None):
            assert a == b, what
