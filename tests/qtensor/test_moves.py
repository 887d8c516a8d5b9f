"""fully_shard moves a model to the mesh's device: what was frozen stays frozen.

A mesh of CPUs never moves anything, so the mesh here is of another device: "meta", whose tensors every build has.
"""

import gc
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from qtensor import MXFP8BlockScaling, quantized_model_init
from tests.recipes import HANDS

STORAGES = ["quantized", "high_precision"]


@pytest.fixture
def mesh(monkeypatch):
    """Two ranks with a device that is not the CPU, of which this process is the first; no byte is ever sent."""
    device = types.ModuleType("meta")
    device.current_device = lambda: 0
    device.device_count = lambda: 2
    device.is_available = lambda: True
    device.is_initialized = lambda: True
    device.set_device = lambda index: None
    monkeypatch.setattr(torch, "meta", device, raising=False)
    monkeypatch.setitem(sys.modules, "torch.meta", device)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("meta", (2,))
    dist.destroy_process_group()


def _net(recipe, storage):
    with quantized_model_init(recipe, storage=storage):
        net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).to(torch.bfloat16)
    net[0].requires_grad_(False)
    return net


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("recipe", HANDS[0].values(), ids=HANDS[0])
def test_fully_shard_keeps_frozen_weights_frozen_and_trained_ones_trained(mesh, recipe, storage):
    net = _net(recipe, storage)
    fully_shard(net, mesh=mesh)
    assert [weight.device.type for weight in net.parameters()] == ["meta", "meta"]
    assert [weight.requires_grad for weight in net.parameters()] == [False, True]


@pytest.mark.parametrize("storage", STORAGES)
def test_a_weight_that_module_to_moved_while_frozen_can_be_trained_afterwards(mesh, storage):
    net = _net(MXFP8BlockScaling(), storage).to("meta")
    assert not net[0].weight.requires_grad
    net[0].requires_grad_(True)
    fully_shard(net, mesh=mesh)
    assert all(weight.requires_grad for weight in net.parameters())


@pytest.mark.parametrize("storage", STORAGES)
def test_a_parameter_made_by_hand_of_a_frozen_one_is_trained_as_any(storage):
    frozen = _net(MXFP8BlockScaling(), storage)[0].weight
    with torch.no_grad():
        made = nn.Parameter(frozen.to("meta"))
    made.split(32)
    assert made.requires_grad
    assert not frozen.requires_grad


@pytest.mark.parametrize("storage", STORAGES)
def test_a_note_ends_with_the_parameter_that_it_is_about(storage):
    """A parameter that is made later can be where the frozen one was, and would pass for it."""
    frozen = _net(MXFP8BlockScaling(), storage)[0].weight
    with torch.no_grad():
        copy = frozen.to("meta")
    assert copy.detach()._note.of == id(frozen)
    del frozen
    gc.collect()
    assert copy.detach()._note is None
