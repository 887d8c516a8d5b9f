"""Sharded training equals one process bit for bit, whatever the world size, mesh or FSDP options.

The reference is the same model, unsharded, with its own MasterWeightOptimizer; it is given the averaged gradients that
FSDP produced. Every step compares, on every rank: the output on this rank's batch, the gathered bytes with the
reference's, and the gathered bytes with the concatenation of the shards'.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_hooks import sync_scales
from qtensor import MasterWeightOptimizer, QuantizedTensor, quantized_model_init
from tests.fsdp_hooks.cases import (
    RECIPES,
    ROW_RECIPES,
    TRAINED,
    Net,
    assert_equals_reference,
    assert_gathers_exactly,
    assert_same_bytes,
    assert_same_snapshot,
    batch,
    build,
    gathered,
    mesh_of,
    quantized,
    rows_for,
    shard,
    snapshot,
)
from tests.ranks import run_ranks_each
from tests.sampling import halves, sampled

STEPS = 2


def _optimizer(net: nn.Module) -> MasterWeightOptimizer:
    return MasterWeightOptimizer(torch.optim.AdamW, net.parameters(), lr=0.02, weight_decay=0.1)


def _backward(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x)
    out.float().square().mean().backward()
    return out.detach()


def _train(net: Net, reference: Net, *, steps: int = STEPS, micro_batches: int = 1, group: Any = None) -> None:
    """Train `net` and `reference` alike and compare after every step."""
    optimizer, its_optimizer = _optimizer(net), _optimizer(reference)
    assert_equals_reference(gathered(net), reference, "before the first step")
    for step in range(steps):
        for micro in range(micro_batches):
            net.set_requires_gradient_sync(micro == micro_batches - 1)
            x = batch(step * micro_batches + micro)
            out = _backward(net, x)
            with torch.no_grad():
                assert_same_bytes(out, reference(x), f"step {step}: output")
        for (fqn, param), its in zip(net.named_parameters(), reference.parameters(), strict=True):
            assert (param.grad is None) != param.requires_grad, fqn
            its.grad = None if param.grad is None else param.grad.full_tensor()
            assert not isinstance(its.grad, QuantizedTensor)
        before = snapshot(net)
        optimizer.step()
        its_optimizer.step()
        moved = [name for name, now in snapshot(net).items() if not torch.equal(now, before[name])]
        assert moved or not any(p.numel() for p in before.values()), "nothing was trained"
        full = gathered(net)
        assert_equals_reference(full, reference, f"step {step}")
        assert_gathers_exactly(net, f"step {step}", group, full=full)
        optimizer.zero_grad()


def _trains_like_one_process(name: str, *, reshard: bool = True) -> None:
    net = build(RECIPES[name], rows_for(name))
    reference = copy.deepcopy(net)
    _train(shard(net, reshard_after_forward=reshard), reference)


@pytest.mark.parametrize(("world_size", "names"), TRAINED)
def test_training_equals_one_process_with_uneven_and_empty_shards(world_size: int, names: tuple[str, ...]) -> None:
    run_ranks_each(world_size, names, _trains_like_one_process)


@sampled("world_size", [1, 3], [3])
def test_training_equals_one_process_without_reshard_after_forward(world_size: int) -> None:
    run_ranks_each(world_size, ("float8_tensor", "mxfp8"), _trains_like_one_process, reshard=False)


def _trains_on_a_mesh(name: str, shape: Sequence[int]) -> None:
    net = build(RECIPES[name], rows_for(name))
    reference = copy.deepcopy(net)
    mesh = mesh_of(*shape)
    _train(shard(net, mesh=mesh), reference, group=mesh.get_group("shard"))


@sampled(("world_size", "shape"), [(4, (2, 2)), (2, (2, 1)), (2, (1, 2))], [(4, (2, 2)), (2, (2, 1))])
def test_training_equals_one_process_under_hsdp(world_size: int, shape: Sequence[int]) -> None:
    run_ranks_each(world_size, ("float8_tensor", "nvfp4", "mxfp8_square"), _trains_on_a_mesh, shape)


def _trains_offloaded(name: str) -> None:
    net = build(RECIPES[name], rows_for(name))
    reference = copy.deepcopy(net)
    _train(shard(net, offload_policy=CPUOffloadPolicy(pin_memory=False)), reference)


@sampled("world_size", [1, 2, 4], [2])
def test_training_equals_one_process_under_cpu_offload(world_size: int) -> None:
    run_ranks_each(world_size, ("float8_row", "nvfp4"), _trains_offloaded)


def _accumulates_gradients(name: str) -> None:
    net = build(RECIPES[name], rows_for(name))
    reference = copy.deepcopy(net)
    _train(shard(net), reference, micro_batches=3, steps=2)


@sampled("world_size", [1, 3], [3])
def test_training_equals_one_process_with_gradient_accumulation(world_size: int) -> None:
    run_ranks_each(world_size, ("mxfp8", "float8_tensor"), _accumulates_gradients)


def _trains_around_frozen_weights(name: str) -> None:
    net = build(RECIPES[name], rows_for(name))
    net.blocks[0].requires_grad_(False)
    net.head.weight.requires_grad_(False)
    reference = copy.deepcopy(net)
    shard(net)
    sync_scales(net)
    frozen = {fqn for fqn, param in net.named_parameters() if not param.requires_grad}
    assert len(frozen) == 3
    before = {key: value for key, value in snapshot(net).items() if key.startswith(tuple(frozen))}
    _train(net, reference)
    after = {key: value for key, value in snapshot(net).items() if key.startswith(tuple(frozen))}
    assert_same_snapshot(after, before, "frozen weights")


@halves("names", ROW_RECIPES, ("float8_row", "nvfp4"))
def test_frozen_quantized_weights_keep_their_bytes_while_others_train(names: tuple[str, ...]) -> None:
    run_ranks_each(2, names, _trains_around_frozen_weights)


def _trains_from_meta(name: str) -> None:
    with torch.device("meta"), quantized_model_init(RECIPES[name]):
        net = Net(rows_for(name))
    assert all(param.is_meta for param in net.parameters())
    shard(net)
    assert all(param.is_meta for param in net.parameters())
    net.to_empty(device="cpu")
    with warnings.catch_warnings():
        # torch's word on random numbers of DTensors on CPU: every rank draws its own, which is what is wanted here
        warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
        for position, module in enumerate(net.modules()):
            if hasattr(module, "reset_parameters"):
                torch.manual_seed(100 * position + dist.get_rank())
                module.reset_parameters()
    for block, rows in zip(net.blocks, rows_for(name), strict=True):
        block.mix.copy_(torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)) / rows**0.5)
    sync_scales(net)
    assert len(list(quantized(net))) == len(rows_for(name)) + 1
    for fqn, param, q in quantized(net):
        assert not param.is_meta
        assert q.numel() == 0 or bool(q.dequantize().ne(0).any()), fqn
    full = gathered(net)
    reference = build(RECIPES[name], rows_for(name), seed=1, head=96)
    with torch.no_grad():
        for fqn, param in reference.named_parameters():
            if isinstance(param, QuantizedTensor):
                for part, target in param.parts().items():
                    target.copy_(full[fqn][part][0] if target.ndim == 0 else full[fqn][part])
            else:
                param.copy_(full[fqn])
    _train(net, reference, steps=2)


@halves("names", ("float8_tensor", "mxfp8", "nvfp4"), ("nvfp4",))
@sampled("world_size", [1, 4], [4])
def test_a_model_built_on_meta_sharded_and_initialised_trains_like_one_process(
    world_size: int, names: tuple[str, ...]
) -> None:
    run_ranks_each(world_size, names, _trains_from_meta)
