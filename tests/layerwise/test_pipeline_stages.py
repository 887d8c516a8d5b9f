"""A model cut into pipeline stages: each rank calibrates its own layers on what the stage before hands on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerwise import GPTQ, Max, SmoothQuant
from tests.layerwise.models import DIM, RECIPES, Toy, batches, fingerprints, run, toy
from tests.ranks import run_ranks

LAYERS, CUT = 4, 2
METHODS: dict[str, Any] = {"GPTQ": GPTQ(), "SmoothQuant": SmoothQuant(), "Max": Max()}


class First(nn.Module):
    """The embedding and the first layers."""

    def __init__(self, model: Toy) -> None:
        super().__init__()
        self.embed, self.layers = model.embed, nn.ModuleList(list(model.layers)[:CUT])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Last(nn.Module):
    """The other layers, the norm and the head."""

    def __init__(self, model: Toy) -> None:
        super().__init__()
        self.layers = nn.ModuleList(list(model.layers)[CUT:])
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _options(algorithm: Any) -> dict[str, Any]:
    return {"inputs": "static"} if isinstance(algorithm, Max) else {}


@torch.no_grad()
def _calibrated_stage(name: str) -> dict[str, str]:
    """What a rank comes to for its stage, under the names of the whole model."""
    algorithm, rank, recipe = METHODS[name], dist.get_rank(), RECIPES["nvfp4"]
    own = [dist.new_group([one]) for one in range(2)][rank]  # made by all ranks alike
    options = {"process_group": own, **_options(algorithm)}
    if rank == 0:
        stage: nn.Module = First(toy(layers=LAYERS))
        hidden = [stage(ids) for ids in batches()]
        result = run(stage, batches(), recipe, algorithm, **options)
        if algorithm.layer_inputs == "quantized":
            hidden = [stage(ids) for ids in batches()]
        for x in hidden:
            dist.send(x, 1)
        return fingerprints(result.state_dict())
    hidden = [torch.empty(*ids.shape, DIM, dtype=torch.float32, device="cpu") for ids in batches()]
    for x in hidden:
        dist.recv(x, 0)
    found = fingerprints(run(Last(toy(layers=LAYERS)), hidden, recipe, algorithm, **options).state_dict())
    return {_of_whole(part): value for part, value in found.items()}


def _of_whole(name: str) -> str:
    first, _, rest = name.partition(".")
    number, _, rest = rest.partition(".")
    return f"layers.{int(number) + CUT}.{rest}" if first == "layers" else name


def test_stages_come_to_the_bytes_of_the_whole_model() -> None:
    for name, algorithm in METHODS.items():
        whole = run(toy(layers=LAYERS), batches(), RECIPES["nvfp4"], algorithm, **_options(algorithm))
        first, last = run_ranks(2, _calibrated_stage, name)
        assert first
        assert last
        assert first.keys().isdisjoint(last)
        assert first | last == fingerprints(whole.state_dict()), name
