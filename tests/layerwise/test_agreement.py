"""Ranks that are about to do different things, or the same in another order, are told so before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerwise import GPTQ, Max, calibrate
from layerwise.resume.weight_sums import weights_digest
from qtensor import MXFP8BlockScaling
from tests.layerwise.families import assert_same
from tests.ranks import run_ranks

DIM = 32


class Block(nn.Module):
    """Two linears, which some rank registers the other way round."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        for name in ("second", "first") if turned else ("first", "second"):
            torch.manual_seed(len(name))
            self.register_module(name, nn.Linear(DIM, DIM, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def model(*, turned: bool = False) -> nn.Module:
    return nn.Sequential(*(Block(turned=turned) for _ in range(3)))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(4, DIM, generator=generator)]


FIRST: dict[str, Callable[[], Any]] = {
    "modules": model,
    "layers": lambda: {"layers": ["0", "1", "2"]},
    "exclude": lambda: {"exclude": ["0.first"]},
    "algorithm": lambda: {"algorithm": GPTQ()},
    "save_every": lambda: {"save_every": 1},
}
OTHERS: dict[str, Callable[[], Any]] = {
    "modules": lambda: model(turned=True),
    "layers": lambda: {"layers": ["0", "2", "1"]},
    "exclude": lambda: {"exclude": ["0.second"]},
    "algorithm": lambda: {"algorithm": GPTQ(act_order=False)},
    "save_every": lambda: {"save_every": 2},
}
WORDS = {
    "modules": "the ranks disagree on the weights to quantize and their order: rank 1 has 0.second.weight in the "
    "place of 0.first.weight of rank 0; call it alike on all ranks, with models that were built in the same order",
    "layers": "the ranks disagree on the layers and their order: rank 1 has 2 in the place of 1 of rank 0",
    "exclude": "on the weights to quantize and their order: rank 1 has 0.first.weight in the place of 0.second.weight",
    "algorithm": "the ranks disagree on the options: rank 1 has algorithm=",
    "save_every": "the ranks disagree on the options: rank 1 has save_every=2 in the place of save_every=1 of rank 0",
}


def _disagreeing() -> dict[str, str]:
    found = {}
    for case in FIRST:
        made = (OTHERS if dist.get_rank() else FIRST)[case]()
        options = {"algorithm": Max(), **(made if isinstance(made, dict) else {})}
        net = made if isinstance(made, nn.Module) else model()
        before = {name: value.clone() for name, value in net.state_dict().items()}
        with pytest.raises(ValueError, match="calibrate: the ranks disagree on") as caught:
            calibrate(net, batches(), recipe=MXFP8BlockScaling(), progress=False, **options)
        found[case] = str(caught.value)
        assert_same(net.state_dict(), before, "nothing was changed")
    return found


def _in_other_words() -> tuple[dict[str, Any], dict[str, int]]:
    """What may be said in another order, since it decides none."""
    include = ["*.first", "1.*", "2.second"]
    result = calibrate(
        model(),
        batches(),
        recipe=MXFP8BlockScaling(),
        algorithm=GPTQ(),
        include=include[::-1] if dist.get_rank() else include,
        inputs_on=("device", "cpu")[dist.get_rank()],
        progress=False,
    )
    named = dict(model(turned=dist.get_rank() == 1).named_parameters())
    return {name: q.dequantize() for name, q in result.state_dict().items()}, weights_digest(named)


def test_ranks_that_disagree_are_all_refused_alike() -> None:
    first, second = run_ranks(2, _disagreeing)
    assert first == second
    for case, words in WORDS.items():
        assert words in first[case]


def test_patterns_and_names_in_another_order_are_the_same() -> None:
    (one, digests), (other, others) = run_ranks(2, _in_other_words)
    assert_same(one, other, "every rank has the same result")
    assert len(one) == 5
    assert digests == others == weights_digest(dict(model().named_parameters()))
