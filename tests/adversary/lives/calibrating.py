"""A step beside the life: a model of its own is calibrated, and goes on as the checkpoint of what came out."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from layerwise import Max, calibrate
from qtensor import Float8DelayedScaling, quantize
from tests.adversary.attack import Found
from tests.adversary.lives import models, numerics
from tests.adversary.lives.life import different, stored
from tests.adversary.lives.models import FACTS
from tests.adversary.lives.twin import as_array, raw

if TYPE_CHECKING:
    from tests.adversary.lives.life import Life

WIDTH = 128  # every recipe's blocks fit
CALIBRATED = [facts for facts in FACTS.values() if not isinstance(facts.recipe, Float8DelayedScaling)]


class Rung(nn.Module):
    """x + linear(x)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Ladder(nn.Module):
    """Some of them."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Rung(dtype) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def calibrated(life: Life, random: Random) -> None:
    """`Max` gives the bytes of quantizing, a checkpoint keeps them, and the model holds their values."""
    facts, dtype = random.choice(CALIBRATED), random.choice(models.DTYPES)
    net, weights = Ladder(random.randint(1, 3), dtype), {}
    for name, param in net.named_parameters():
        kind = random.choice(("normal", "rows", "sparse", "powers"))
        weights[name] = models.weights(tuple(param.shape), random.getrandbits(40), dtype, kind)
        with torch.no_grad():
            param.copy_(weights[name])
    data = [models.small((3, WIDTH), random.getrandbits(40), dtype) for _ in range(2)]
    with torch.no_grad():
        if not all(bool(net(x).isfinite().all()) for x in data):  # fp16, refused by name
            return
    life.saves += 1
    path = life.path / f"calibrated-{life.saves}"
    with life.under():
        result = calibrate(net, data, recipe=facts.recipe, algorithm=Max(), progress=False)
        state = result.state_dict()
        dcp.save(state, checkpoint_id=path, planner=QuantizedSavePlanner())
        target: dict[str, Any] = {
            name: quantize(torch.zeros_like(value), facts.recipe) for name, value in weights.items()
        }
        dcp.load(target, checkpoint_id=path, planner=QuantizedLoadPlanner())
    for name, value in weights.items():
        parts = numerics.encode(as_array(value), facts)
        wanted = {part: array.tobytes() for part, array in parts.items()}
        for where, found in (("calibrate", stored(state[name])), ("its checkpoint", stored(target[name]))):
            if found != wanted:
                raise Found(f"{name} of {where} as {facts.name}: {different(found, wanted)}")
        values = torch.from_numpy(numerics.decode(parts, facts)).to(dtype)
        if raw(dict(net.named_parameters())[name]) != raw(values):
            raise Found(f"{name}: the model does not hold the values of {facts.name}")


STEPS = {"calibrated": calibrated}
