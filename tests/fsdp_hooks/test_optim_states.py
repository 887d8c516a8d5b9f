"""MasterWeightOptimizer on sharded parameters: its state through every form of state dict, and what can be copied."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from qtensor import MasterWeightOptimizer, NVFP4BlockScaling, quantize_
from tests.optimizer_states import FORMS, INNER, assert_same_model, bytes_of, masters_in, round_trip
from tests.ranks import run_ranks, run_ranks_each
from tests.sampling import sampled


class Net(nn.Module):
    """Uneven shards, an empty one on two ranks, and a layer whose parameters are their own masters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 33, dtype=torch.bfloat16)
        self.b = nn.Linear(64, 1, bias=False, dtype=torch.bfloat16)
        self.out = nn.Linear(33, 2)  # fp32, and not quantized

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((self.a(x) * self.b(x)).float())


def sharded() -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    for linear in (net.a, net.b):
        quantize_(linear, NVFP4BlockScaling())
    fully_shard(net.out)
    return fully_shard(net)


def train(model: nn.Module, optimizer: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    model(torch.randn(3, 64, generator=generator).to(torch.bfloat16)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def comes_back(name: str) -> None:
    for form in FORMS:
        for steps in (0, 2):
            round_trip(sharded, train, INNER[name], form, steps)


@sampled(("ranks", "names"), [(1, ("momentum",)), (2, ("adamw",)), (2, ("sgd", "adagrad"))], [(2, ("adamw",))])
def test_a_state_comes_back_whole_and_training_goes_on(ranks: int, names: tuple[str, ...]) -> None:
    run_ranks_each(ranks, names, comes_back)


def is_pickled() -> None:
    """As torch's own: pickled with its parameters; deepcopy fails in FSDP (of the model) and DTensor (alone)."""
    model = sharded()
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=0.01)
    train(model, optimizer, 0)
    twin = pickle.loads(pickle.dumps(optimizer))
    assert masters_in(twin.state_dict()) == 3
    before = bytes_of(model)
    own = nn.ParameterList(twin.param_groups[0]["params"])
    generator = torch.Generator().manual_seed(3)
    for param, its in zip(model.parameters(), own, strict=True):
        param.grad = torch.zeros_like(its, dtype=param.dtype) + torch.rand(1, generator=generator).item()
        its.grad = param.grad.clone()
    twin.step()
    assert_same_model(model, before, "the original")
    optimizer.step()
    for param, its in zip(model.parameters(), own, strict=True):
        assert_same_model(nn.ParameterList([its]), bytes_of(nn.ParameterList([param])), "the copy")
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy((model, optimizer))


def test_an_optimizer_of_shards_is_pickled_with_them() -> None:
    run_ranks(2, is_pickled)


def refuses_adafactor() -> None:
    model = sharded()
    with pytest.raises(NotImplementedError, match=r"Adafactor can not step sharded parameters \(DTensors\), with or"):
        MasterWeightOptimizer(torch.optim.Adafactor, model.parameters())
    optimizer = MasterWeightOptimizer(torch.optim.Adafactor, [nn.Parameter(torch.ones(4))])
    with pytest.raises(NotImplementedError, match=r"use another optimizer, such as torch\.optim\.AdamW"):
        optimizer.add_param_group({"params": model.parameters()})
    assert len(optimizer.param_groups) == 1
    plain = fully_shard(nn.Linear(8, 8, dtype=torch.bfloat16))
    plain(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(RuntimeError, match=r"aten\.pow_"):  # where this passes, take the refusal away
        torch.optim.Adafactor(plain.parameters()).step()


@pytest.mark.parametrize("ranks", [1, 2])
def test_adafactor_is_refused_for_shards_which_torchs_own_can_not_step(ranks: int) -> None:
    run_ranks(ranks, refuses_adafactor)
