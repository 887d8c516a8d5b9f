"""What needs a GPU: parity under NCCL on one device, and CPU offload into pinned memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from fsdp_hooks import sync_scales, unsharded
from qtensor import MasterWeightOptimizer, QuantizedTensor
from qtensor.scales.high_precision import HighPrecisionWeight
from tests.devices import told_of_waits
from tests.fsdp_hooks.cases import RECIPES, Net, assert_same_bytes, batch, build, local, rows_for
from tests.ranks import run_ranks, run_ranks_each

pytestmark = pytest.mark.gpu


def _on_gpu(net: Net, **options: Any) -> Net:
    mesh = init_device_mesh("cuda", (1,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def _optimizer(net: nn.Module) -> MasterWeightOptimizer:
    return MasterWeightOptimizer(torch.optim.AdamW, net.parameters(), lr=0.02, weight_decay=0.1)


def _bytes(param: Tensor) -> dict[str, Tensor]:
    """The parts of a weight, or its dense value, on the CPU."""
    held = local(param).detach()
    if isinstance(held, HighPrecisionWeight):
        return {"": held.dense.cpu()}
    parts = held.parts() if isinstance(held, QuantizedTensor) else {"": held}
    return {name: part.cpu() for name, part in parts.items()}


def _backward(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x)
    out.float().square().mean().backward()
    return out.detach().cpu()


def _trains_like_one_process(name: str, storage: str, *, home: str, **options: Any) -> None:
    """The reference computes on the GPU too, and is updated where the shards are at home."""
    net: Any = build(RECIPES[name], rows_for(name), storage=storage)
    reference = copy.deepcopy(net).to(home)
    _on_gpu(net, **options)
    optimizer, its_optimizer = _optimizer(net), _optimizer(reference)
    for step in range(2):
        x, shown = batch(step).to("cuda"), copy.deepcopy(reference).to("cuda")
        assert_same_bytes(_backward(net, x), _backward(shown, x), f"step {step}: output")
        pairs = zip(net.named_parameters(), shown.parameters(), reference.parameters(), strict=True)
        for (fqn, param), on_gpu, its in pairs:
            held = local(param)
            assert held.device.type == home, fqn
            assert type(local(param.grad)) is Tensor, fqn
            assert_same_bytes(local(param.grad).cpu(), on_gpu.grad.cpu(), f"step {step}: gradient of {fqn}")
            its.grad = on_gpu.grad.to(home)
        optimizer.step()
        its_optimizer.step()
        sync_scales(net)
        for (fqn, param), its in zip(net.named_parameters(), reference.parameters(), strict=True):
            for part, expected in _bytes(its).items():
                assert_same_bytes(_bytes(param)[part], expected, f"step {step}: {fqn}.{part}")
        optimizer.zero_grad()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
@pytest.mark.parametrize("name", RECIPES)
def test_training_under_nccl_equals_one_process(name: str, storage: str, reshard: bool) -> None:
    run_ranks(1, _trains_like_one_process, name, storage, home="cuda", reshard_after_forward=reshard, backend="nccl")


def _keeps_its_shards_pinned(name: str, storage: str) -> None:
    offload = CPUOffloadPolicy(pin_memory=True)
    net = _on_gpu(build(RECIPES[name], rows_for(name), storage=storage), offload_policy=offload)
    for fqn, param in net.named_parameters():
        held = local(param)
        parts = held.parts().values() if isinstance(held, QuantizedTensor) else [getattr(held, "dense", held)]
        assert all(part.device.type == "cpu" and part.is_pinned() for part in parts), fqn
    _trains_like_one_process(name, storage, home="cpu", offload_policy=offload)


@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
def test_training_with_shards_in_pinned_memory_equals_one_process(storage: str) -> None:
    run_ranks_each(1, ("float8_row", "nvfp4"), _keeps_its_shards_pinned, storage, backend="nccl")


def _gathers_what_it_shards(name: str) -> None:
    net: Any = _on_gpu(build(RECIPES[name], rows_for(name)).to("cuda"))
    held = {fqn: _bytes(param) for fqn, param in net.named_parameters()}
    for _ in range(2):  # a first gather, and a refill
        with unsharded(net):
            for fqn, param in net.named_parameters():
                for part, tensor in _bytes(param).items():
                    assert_same_bytes(tensor.reshape(held[fqn][part].shape), held[fqn][part], f"{fqn}.{part}")


def test_a_gather_on_the_gpu_is_exact() -> None:
    run_ranks_each(1, RECIPES, _gathers_what_it_shards, backend="nccl")


def _waits_for_no_value(name: str, storage: str) -> None:
    net: Any = _on_gpu(build(RECIPES[name], rows_for(name), storage=storage).to("cuda"))
    x = batch(0).to("cuda")
    net(x).sum().backward()  # kernels are chosen, and communicators made
    torch.cuda.synchronize()
    with told_of_waits("error"):
        net(x).sum().backward()
        out = net(x)
    assert out.isfinite().all()


@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
def test_forward_and_backward_of_a_sharded_model_wait_for_no_value(storage: str) -> None:
    run_ranks_each(1, RECIPES, _waits_for_no_value, storage, backend="nccl")
