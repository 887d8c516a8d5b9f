"""Hooks on layers are part of what layers compute: calibrated as if they were written into the model's forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from layerwise import GPTQ
from qtensor import MXFP8BlockScaling
from tests.layerwise.families import assert_same
from tests.layerwise.small_runs import Case, model_of, run
from tests.ranks import run_ranks_each

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

CASE = Case(algorithm=GPTQ(), recipe=MXFP8BlockScaling(), dtype=torch.float32)
ORDER: list[str] = []


def hooked(model: Any) -> list[RemovableHandle]:
    """Hooks of all kinds on the first layer; all they change doubles what the second one gets."""
    layer = model.layers[0]

    def see(module: nn.Module, *_: Any) -> None:
        assert module is layer
        ORDER.append("seen")

    return [
        layer.register_forward_pre_hook(see),
        layer.register_forward_pre_hook(lambda _, args: args[0] * 4),
        layer.register_forward_pre_hook(lambda _, args, kwargs: ((args[0] / 4,), kwargs), with_kwargs=True),
        layer.register_forward_hook(see, with_kwargs=True),
        layer.register_forward_hook(lambda _, args, output: output * 2),
    ]


def amaxes(model: nn.Module) -> dict[str, float | None]:
    return {record.name: record.input_amax for record in run(model, CASE).report.records}


class Twice(nn.Module):
    """What hooks do to a layer, as a module."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layer(hidden) * 2


def test_hooks_of_layers_run() -> None:
    model, written = model_of(CASE), model_of(CASE)
    hooked(model)
    written.layers[0] = Twice(written.layers[0])
    ORDER.clear()
    found, expected = run(model, CASE), run(written, CASE)
    assert ORDER == ["seen", "seen"] * (len(ORDER) // 2) != []
    named = {name.replace("layers.0.", "layers.0.layer."): value for name, value in found.state_dict().items()}
    assert_same(named, expected.state_dict())


def _sharded(grouping: str) -> dict[str, float | None]:
    model = model_of(CASE, shard=False)
    hooked(model)
    if grouping == "one group":
        fully_shard([*model.layers])
    else:
        for layer in model.layers:
            fully_shard(layer)
    fully_shard(model)
    assert isinstance(model.layers[0], FSDPModule)
    return amaxes(model)


def test_hooks_of_layers_run_beside_those_of_fsdp() -> None:
    model = model_of(CASE)
    hooked(model)
    expected = amaxes(model)
    assert run_ranks_each(2, ["each layer", "one group"], _sharded) == [[expected] * 2] * 2
    assert expected != amaxes(model_of(CASE))
