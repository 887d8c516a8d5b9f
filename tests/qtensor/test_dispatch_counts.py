"""How often a training step goes through the op table: a number per layer, the same for shallow and deep models."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from qtensor import (
    MasterWeightOptimizer,
    quantize,
    quantized_model_init,
)
from qtensor.tensor.quantized_tensor import OPS
from tests.ranks import run_ranks
from tests.recipes import ROW

pytestmark = pytest.mark.budget
# calls a layer: at most, since fewer are welcome. Adam's own step multiplies (weight decay) and adds.
LIMITS = {"forward and backward": 0, "MasterWeightOptimizer": 0, "AdamW": 2}


class Counting:
    """While entered, the op table counts its calls by op."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> Counter[str]:
        self.before = dict(OPS)
        OPS.update({op: self._counting(op, handler) for op, handler in self.before.items()})
        return self.calls

    def __exit__(self, *exception: object) -> None:
        OPS.update(self.before)

    def _counting(self, op: Any, handler: Any) -> Any:
        def counting(*args: Any) -> Any:
            self.calls[str(op)] += 1
            return handler(*args)

        return counting


def counts(recipe: Any, optimizer: str, layers: int, *, sharded: bool) -> dict[str, Counter[str]]:
    """Calls of the second step, in which nothing is set up any more."""
    torch.manual_seed(0)
    with quantized_model_init(recipe):
        net = nn.Sequential(*[nn.Linear(32, 32, dtype=torch.bfloat16) for _ in range(layers)])
    if sharded:
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    params = net.parameters()
    made = (
        MasterWeightOptimizer(torch.optim.AdamW, params)
        if optimizer == "MasterWeightOptimizer"
        else torch.optim.AdamW(params, foreach=False)
    )
    for _ in range(2):
        with Counting() as products:
            net(torch.ones(4, 32, dtype=torch.bfloat16)).sum().backward()
        with Counting() as update:
            made.step()
        made.zero_grad()
    return {"forward and backward": products, optimizer: update}


def check(recipe: Any, optimizer: str, *, sharded: bool) -> None:
    shallow, deep = (counts(recipe, optimizer, layers, sharded=sharded) for layers in (2, 8))
    for phase, calls in shallow.items():
        assert {op: number * 4 for op, number in calls.items()} == dict(deep[phase]), phase
        assert calls.total() / 2 <= LIMITS[phase], (phase, calls)


@pytest.mark.parametrize("optimizer", ["MasterWeightOptimizer", "AdamW"])
@pytest.mark.parametrize("recipe", ROW.values(), ids=ROW.keys())
def test_op_table_calls_of_a_step_per_layer(recipe: Any, optimizer: str) -> None:
    check(recipe, optimizer, sharded=False)


def sharded_cases() -> None:
    check(ROW["float8_tensor"], "MasterWeightOptimizer", sharded=True)
    check(ROW["nvfp4"], "MasterWeightOptimizer", sharded=True)
    check(ROW["mxfp8"], "AdamW", sharded=True)


def test_op_table_calls_of_a_sharded_step_per_layer() -> None:
    run_ranks(1, sharded_cases)


def test_the_count_sees_what_goes_through_the_table() -> None:
    weight = quantize(torch.ones(32, 32), ROW["mxfp8"])
    with Counting() as calls:
        torch.zeros(2).detach()
        weight.detach()[:16].add_(1.0)
    weight.detach()
    assert calls == {"aten.detach.default": 1, "aten.slice.Tensor": 1, "aten.add_.Tensor": 1}
