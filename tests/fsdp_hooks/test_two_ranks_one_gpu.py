"""Two ranks on one device, whose collectives are real: gloo sends tensors of a GPU, too.

Both ranks get the same batch, so the mean of their gradients is the gradient of one process, bit for bit: twice a value
is exact in binary, and so is half of that.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_hooks import sync_scales, unsharded
from fsdp_hooks.torch_private import dtensor_around, local_of
from qtensor import MasterWeightOptimizer, QuantizedTensor
from tests.devices import every_device
from tests.fsdp_hooks.cases import RECIPES, SQUARE_RECIPES, STAND_INS, Net, assert_same_bytes, batch, build, rows_for
from tests.ranks import run_ranks_each

NAMES = [name for name in RECIPES if name not in SQUARE_RECIPES]
STAND_INS_OF_ROWS = [name for name in STAND_INS if name in NAMES]


def sharded(net: Net, device: str) -> Net:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def whole_of(tensor: Tensor) -> Tensor:
    """All shards of a tensor, gathered on the CPU.

    On the GPU torch gathers with its functional collectives, which over gloo end the process (in `wait_tensor`).
    """
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = init_device_mesh("cpu", tuple(tensor.device_mesh.shape))
    return dtensor_around(local_of(tensor).detach().cpu(), mesh, tensor.placements, tensor.shape).full_tensor()


def bytes_of(tensor: Tensor) -> dict[str, Tensor]:
    """The parts of a whole weight, or its values, on the CPU."""
    whole = whole_of(tensor)
    parts = whole.detach().parts() if isinstance(whole, QuantizedTensor) else {"": whole.detach()}
    return {name: part.cpu() for name, part in parts.items()}


def assert_alike(net: Net, reference: Net, what: str) -> None:
    for (fqn, param), its in zip(net.named_parameters(), reference.parameters(), strict=True):
        for part, expected in bytes_of(its).items():
            found = bytes_of(param)[part]
            assert_same_bytes(found.reshape(expected.shape), expected, f"{what}: {fqn}.{part}")


def trains_like_one_process(name: str, device: str) -> None:
    built: Any = build(RECIPES[name], rows_for(name)).to(device)
    reference = copy.deepcopy(built)
    net = sharded(built, device)
    assert_alike(net, reference, "sharded")
    optimizers = [
        MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=0.02, weight_decay=0.1)
        for model in (net, reference)
    ]
    for step in range(2):
        x = batch(step, rank=0).to(device)
        found, expected = net(x), reference(x)
        assert_same_bytes(found.detach().cpu(), expected.detach().cpu(), f"step {step}: output")
        found.float().square().mean().backward()
        expected.float().square().mean().backward()
        for (fqn, param), its in zip(net.named_parameters(), reference.parameters(), strict=True):
            assert param.grad is not None
            assert its.grad is not None
            assert_same_bytes(whole_of(param.grad), its.grad.cpu(), f"step {step}: gradient of {fqn}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(net, reference, f"step {step}")
    sync_scales(net)
    assert_alike(net, reference, "agreed")
    with unsharded(net):
        assert {param.device.type for param in net.parameters()} == {device}


@every_device
def test_two_ranks_on_one_device_train_like_one_process(device: str) -> None:
    # on the CPU test_train_parity has all formats; here the test itself is tested
    run_ranks_each(2, NAMES if device == "cuda" else STAND_INS_OF_ROWS, trains_like_one_process, device)
