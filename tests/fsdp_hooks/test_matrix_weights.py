"""Weights under FSDP that are shared between layers, frozen below adapters, or vectors."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_hooks import sync_scales
from qtensor import MasterWeightOptimizer, QuantizedTensor, quantize, quantize_, quantized_model_init
from tests.fsdp_hooks.cases import (
    RECIPES,
    ROW_RECIPES,
    Collectives,
    K,
    assert_gathers_exactly,
    assert_same_bytes,
    assert_same_snapshot,
    batch,
    held,
    held_since,
    local,
    quantized,
    snapshot,
)
from tests.fsdp_hooks.test_matrix import STORAGES, follow, mean_of_ranks
from tests.fsdp_hooks.test_tensor_parallel import assert_reference_bytes
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each
from tests.sampling import halves, sampled

# -- tied weights ------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(K, K, dtype=torch.bfloat16)
        self.second = nn.Linear(K, K, dtype=torch.bfloat16)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def _shares_one_weight(name: str, storage: str, *, reshard: bool) -> None:
    torch.manual_seed(0)
    with quantized_model_init(RECIPES[name], storage=storage):
        net: Any = nn.Sequential(Twice(), Twice())
    reference = copy.deepcopy(net)
    assert reference[0].first.weight is reference[0].second.weight
    for block in net:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(net, reshard_after_forward=reshard)
    follow(net, reference, own_gradients=True)
    for block in net:
        assert block.first.weight is block.second.weight
    assert len(list(net.parameters())) == 6


@sampled(
    ("reshard", "storage"), itertools.product((True, False), STORAGES), [(True, "quantized"), (False, "high_precision")]
)
def test_layers_that_share_a_quantized_weight_add_their_gradients(reshard: bool, storage: str) -> None:
    run_ranks_each(2, ("float8_tensor", "mxfp8", "nvfp4"), _shares_one_weight, storage, reshard=reshard)


class Language(nn.Module):
    """An embedding whose weight is the head's, around a layer that is quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, K, dtype=torch.bfloat16)
        self.layer = nn.Linear(K, K, dtype=torch.bfloat16)
        self.lm_head = nn.Linear(K, 40, bias=False, dtype=torch.bfloat16)
        self.lm_head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.lm_head(x + torch.tanh(self.layer(x)))


def _keeps_the_tied_head(name: str, storage: str) -> None:
    torch.manual_seed(0)
    with quantized_model_init(RECIPES[name], storage=storage):
        net: Any = Language()
    reference = copy.deepcopy(net)
    assert type(reference.lm_head.weight) is nn.Parameter
    fully_shard(net.layer)
    fully_shard(net)
    follow(net, reference, lambda step: batch(step)[:, 0].abs().mul(10).long().clamp(max=39))
    assert net.lm_head.weight is net.embedding.weight
    assert type(local(net.lm_head.weight).detach()) is Tensor


@pytest.mark.parametrize("storage", STORAGES)
def test_a_head_tied_to_the_embedding_stays_dense_and_tied(storage: str) -> None:
    run_ranks_each(3, ("float8_row", "nvfp4"), _keeps_the_tied_head, storage)


# -- adapters on a frozen base -----------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """x + base(x) + up(down(x)), the base frozen and quantized, the adapters in bf16."""

    def __init__(self, width: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=torch.bfloat16)
        self.down = nn.Linear(width, rank, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(rank, width, bias=False, dtype=torch.bfloat16)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x)) + self.up(self.down(x))


def _adapted(name: str) -> Any:
    torch.manual_seed(0)
    net: Any = nn.Sequential(*(Adapted(K) for _ in range(3)))
    assert quantize_(net, RECIPES[name], include=["*.base"]) == [f"{i}.base.weight" for i in range(3)]
    return net


def _adapters_of(net: nn.Module) -> list[nn.Parameter]:
    return [param for param in net.parameters() if param.requires_grad]


def _trains_adapters(name: str, make: str) -> None:
    net = _adapted(name)
    reference = copy.deepcopy(net)
    for block in net:
        fully_shard(block)
    fully_shard(net)
    held = {key: value for key, value in snapshot(net).items() if ".base." in key}
    optimizer, its_optimizer = (
        MasterWeightOptimizer(torch.optim.AdamW, _adapters_of(model), lr=0.02)
        if make == "masters"
        else torch.optim.AdamW(_adapters_of(model), lr=0.02)
        for model in (net, reference)
    )
    for step in range(2):
        outputs = []
        with Collectives() as comms:
            outputs.append(net(batch(step)))
            assert comms.counts["_allgather_base_"] == 3
            outputs[0].float().square().mean().backward()
            assert comms.counts["_allgather_base_"] == 6, "gathered once more for backward"
        outputs.append(reference(batch(step)))
        outputs[1].float().square().mean().backward()
        assert_same_bytes(outputs[0].detach(), outputs[1].detach(), f"step {step}: output")
        for (fqn, param), its in zip(net.named_parameters(), reference.parameters(), strict=True):
            assert (param.grad is None) == (its.grad is None) == (".base." in fqn), fqn
            if its.grad is not None:
                mean = mean_of_ranks(its.grad)
                assert_same_bytes(param.grad.full_tensor(), mean, f"step {step}: gradient of {fqn}")
                its.grad = mean
        optimizer.step()
        its_optimizer.step()
        assert_reference_bytes(net, reference, f"step {step}")
        assert_gathers_exactly(net, f"step {step}")
        for each in (optimizer, its_optimizer):
            each.zero_grad()
    assert set(optimizer.state) == set(_adapters_of(net))
    assert_same_snapshot({key: value for key, value in snapshot(net).items() if key in held}, held, "the base")


@halves("names", ROW_RECIPES, ("float8_tensor", "nvfp4"))
@pytest.mark.parametrize("make", ["masters", "plain"])
def test_adapters_train_on_a_frozen_quantized_base(make: str, names: tuple[str, ...]) -> None:
    run_ranks_each(2, names, _trains_adapters, make)


MESH = 199  # bytes: the numbers of its ranks


def _bytes_of_adapters(width: int) -> tuple[int, int]:
    """(what a training step leaves allocated, what it should) on this rank."""
    torch.manual_seed(0)
    before = held()
    net: Any = Adapted(width, rank=2)
    quantize_(net, RECIPES["mxfp8"], include=["base"])
    fully_shard(net)
    optimizer = torch.optim.AdamW(_adapters_of(net), lr=0.02)
    x = torch.randn(3, width).bfloat16()
    for _ in range(2):
        net(x).float().square().mean().backward()
        optimizer.step()
    payload = sum(part.nbytes for _, _, q in quantized(net) for part in q.parts().values())
    dense = sum(local(param).nbytes for param in net.parameters() if not isinstance(local(param), QuantizedTensor))
    state = [value for entries in optimizer.state.values() for value in entries.values() if isinstance(value, Tensor)]
    moments = sum(local(value).nbytes for value in state)
    grads = sum(local(param.grad).nbytes for param in _adapters_of(net))
    expected = x.nbytes + payload + dense + moments + grads
    return held_since(before, expected, slack=MESH), expected


def _costs_its_payload(width: int) -> None:
    _bytes_of_adapters(width)  # meshes and caches, which hold a few numbers
    found, expected = _bytes_of_adapters(width)
    assert 0 <= found - expected <= MESH, (found, expected)


def test_a_frozen_quantized_base_costs_its_payload_while_adapters_train() -> None:
    run_ranks(2, _costs_its_payload, 128)


# -- vectors -----------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, recipe: Any, columns: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(quantize(torch.linspace(-3, 5, columns), recipe))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain.dequantize()


def _shards_a_vector(name: str) -> None:
    net = Scaled(RECIPES[name], 128)
    with Collectives() as comms:
        try:
            fully_shard(net)
        finally:
            assert not comms.counts


@pytest.mark.parametrize("name", ["float8_row", "float8_tensor", "mxfp8", "nvfp4"])
def test_sharding_a_quantized_vector_is_refused(name: str) -> None:
    for ranks in (1, 2):
        messages = run_ranks_catching(ranks, _shards_a_vector, name)
        assert len(set(messages)) == 1, messages
        assert messages[0].startswith("NotImplementedError: ")
        assert "(128,)" in messages[0]


def _stays_beside_fsdp(name: str) -> None:
    """A vector may be kept out of FSDP, as it is."""
    net = Scaled(RECIPES[name], 128)
    reference = copy.deepcopy(net)
    fully_shard(net, ignored_params={net.gain})
    assert not isinstance(net.gain, DTensor)
    assert_same_bytes(net(torch.ones(128)).detach(), reference(torch.ones(128)).detach(), name)
    assert sync_scales(net) == 0


def test_a_quantized_vector_may_be_ignored_by_fsdp() -> None:
    run_ranks_each(2, ROW_RECIPES, _stays_beside_fsdp)
