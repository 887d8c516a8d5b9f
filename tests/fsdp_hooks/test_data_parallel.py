"""DistributedDataParallel around quantized weights: rank 0's bytes on all ranks, and the gradients of dense weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from qtensor import (
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    QuantizedTensor,
    quantize,
    quantized_model_init,
)
from qtensor.tensor.contents import initial_value
from tests.fsdp_hooks.cases import RECIPES, assert_same_bytes, assert_same_snapshot, exchanged, pack, snapshot, unpack
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each
from tests.recipes import WITH_HISTORY

ALL = RECIPES | WITH_HISTORY


class Adapted(nn.Module):
    """A linear, and a dense adapter of rank 4 beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 96, dtype=torch.bfloat16)
        self.down = nn.Linear(64, 4, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(4, 96, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(recipe: Any, seed: int, **init: Any) -> Adapted:
    torch.manual_seed(seed)
    net = Adapted()
    if recipe is not None:
        with quantized_model_init(recipe, **init):
            net.base = nn.Linear(64, 96, dtype=torch.bfloat16)
    return net


def dense_twin(net: Adapted) -> Adapted:
    """The same values in dense weights."""
    twin = Adapted()
    state = {
        name: value.dequantize() if isinstance(value, QuantizedTensor) else value
        for name, value in net.state_dict().items()
    }
    twin.load_state_dict(state)
    for own, its in zip(twin.parameters(), net.parameters(), strict=True):
        own.requires_grad_(its.requires_grad)
    return twin


def batch(step: int, rank: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(5, 64, generator=generator).to(torch.bfloat16)


def assert_as_on_rank_0(net: nn.Module, what: str) -> None:
    first = unpack(exchanged(pack(snapshot(net)))[0])
    assert_same_snapshot(snapshot(net), first, what)


def trains_like_dense_weights(name: str, train_base: bool) -> None:
    net = adapted(ALL[name], seed=dist.get_rank())  # other weights on each rank, until DDP sends those of rank 0
    net.base.requires_grad_(train_base)
    source = unpack(exchanged(pack(snapshot(net)))[0])
    model = DistributedDataParallel(net)
    assert_same_snapshot(snapshot(net), source, "sent by rank 0")
    dense = DistributedDataParallel(dense_twin(net))
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, [p for p in net.parameters() if p.requires_grad], lr=0.01)
    for one in (model, dense):
        out = one(batch(0))
        out.float().square().mean().backward()
    for (fqn, own), its in zip(net.named_parameters(), dense.module.parameters(), strict=True):
        assert (own.grad is None) == (its.grad is None) == (not own.requires_grad), fqn
        if own.grad is not None:
            assert type(own.grad) is Tensor
            assert_same_bytes(own.grad, its.grad, f"gradient of {fqn}")
    for step in range(2):
        optimizer.step()
        optimizer.zero_grad()
        model(batch(step + 1)).float().square().mean().backward()
        assert_as_on_rank_0(net, f"after step {step}")
    changed = not torch.equal(snapshot(net)["base.weight.payload"].view(torch.uint8), payload_of(source))
    assert changed == train_base


def payload_of(parts: dict[str, Tensor]) -> Tensor:
    return parts["base.weight.payload"].view(torch.uint8)


@pytest.mark.parametrize("train_base", [False, True], ids=["adapters on a frozen base", "everything"])
def test_quantized_weights_train_like_dense_ones(train_base: bool) -> None:
    run_ranks_each(2, ALL, trains_like_dense_weights, train_base)


def is_sent(kind: str) -> None:
    """A module whose one weight fills a message, stacked weights, preserved values, and dense shards."""
    rank, recipe = dist.get_rank(), RECIPES["nvfp4"]
    torch.manual_seed(rank)
    if kind == "alone":
        with quantized_model_init(recipe):
            net: nn.Module = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    elif kind == "stacked":
        net = nn.Linear(64, 8, dtype=torch.bfloat16)
        net.experts = nn.Parameter(quantize(torch.randn(3, 16, 64).to(torch.bfloat16), recipe))
    else:
        options: dict[str, Any] = {"storage": "high_precision"} if kind == "dense" else {}
        if kind == "preserved":
            options["preserve_high_precision_init_val"] = True
        net = adapted(recipe, rank, **options)
    DistributedDataParallel(net)
    if kind == "dense":
        first = exchanged([param.detach().float() for param in net.parameters()])[0]
        for param, value in zip(net.parameters(), first, strict=True):
            assert torch.equal(param.detach().float(), value)
        return
    assert_as_on_rank_0(net, kind)
    if kind == "preserved":
        kept = exchanged(initial_value(net.base.weight).float())
        assert torch.equal(kept[0], kept[rank])


def test_whatever_is_sent_arrives_bit_for_bit() -> None:
    run_ranks_each(2, ("alone", "stacked", "preserved", "dense"), is_sent)


def differs_between_ranks() -> None:
    net = adapted(MXFP8BlockScaling(element="e4m3" if dist.get_rank() else "e5m2"), 0)
    DistributedDataParallel(net)


def test_weights_of_other_formats_are_refused_on_all_ranks() -> None:
    for rank, error in enumerate(run_ranks_catching(2, differs_between_ranks)):
        assert error.startswith("RuntimeError: broadcasting the weights of a module: ranks hold them in different form")
        assert "quantize them by the same recipes everywhere. Nothing has been sent. This rank has" in error
        assert f"element='{'e4m3' if rank else 'e5m2'}'" in error


def joins() -> None:
    flat = [quantize(torch.ones(2, 32), MXFP8BlockScaling()).view(-1), torch.ones(3)]
    joined = torch.cat(flat)
    assert joined.shape == (67,)
    assert torch.equal(joined[64:67], torch.ones(3))
    for use in (lambda: joined + 1, lambda: joined[1:3], joined.clone, lambda: torch.cat([joined, joined])):
        with pytest.raises(NotImplementedError, match="DistributedDataParallel broadcasts them, and nothing else is"):
            use()


def test_joined_weights_serve_for_nothing_else() -> None:
    run_ranks(1, joins)
