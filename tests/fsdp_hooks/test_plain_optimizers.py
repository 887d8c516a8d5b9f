"""Ordinary torch optimizers on sharded quantized weights: plain sharded state, and the bytes of one process.

Formats whose every scale belongs to rows, or to blocks that no shard boundary cuts, give the bytes of one process on
any number of ranks. Where a scale is tensor-wide every shard chooses its own in an ordinary optimizer's step; gathers
stay exact, since scales travel with the bytes, and sync_scales makes them agreed.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_hooks import sync_scales
from qtensor import QuantizedTensor, stochastic_rounding
from qtensor.spec.registry import tensor_wide
from tests.fsdp_hooks.cases import (
    RECIPES,
    TENSOR_WIDE,
    Net,
    assert_gathers_exactly,
    assert_same_bytes,
    assert_same_snapshot,
    batch,
    build,
    gathered,
    local,
    parts_of,
    quantized,
    rows_for,
    shard,
    shards_of,
    snapshot,
)
from tests.ranks import run_ranks, run_ranks_each
from tests.recipes import facts
from tests.sampling import sampled

BLOCKWISE = [name for name in RECIPES if name not in TENSOR_WIDE]
WHOLE = [name for name in BLOCKWISE if facts(RECIPES[name]).rows <= 32]  # no shard cuts a block
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
}


def _backward(net: nn.Module, step: int) -> None:
    net(batch(step)).float().square().mean().backward()


def _lend_grads(net: nn.Module, reference: nn.Module) -> None:
    for param, its in zip(net.parameters(), reference.parameters(), strict=True):
        its.grad = param.grad.full_tensor()


def _assert_plain_state(optimizer: torch.optim.Optimizer) -> None:
    for param, entries in optimizer.state.items():
        for name, value in entries.items():
            if name == "step":
                assert type(value) is Tensor
            elif value is not None:
                assert type(value) is DTensor, name
                assert value.placements == param.placements
                assert type(local(value)) is Tensor, name
                assert value.dtype == param.dtype == torch.bfloat16
                assert local(value).shape == local(param).shape


def _assert_quantized_weights_equal(full: dict[str, Any], reference: Net, what: str) -> None:
    """Not the biases: torch's bf16 kernels round what is left over after whole vectors otherwise than the rest."""
    for fqn, _, q in quantized(reference):
        for name, part in parts_of(q).items():
            expected = part.repeat(full[fqn][name].shape) if part.ndim == 0 else part
            assert_same_bytes(full[fqn][name], expected, f"{what}: {fqn}.{name}")


def _train(net: Net, kind: str, *, foreach: bool, reference: Net | None) -> None:
    """Two steps under a schedule; compared with `reference` where there is one, and with the shards always."""
    optimizer_cls, options = OPTIMIZERS[kind]
    nets = [net] if reference is None else [net, reference]
    optimizers = [optimizer_cls(one.parameters(), foreach=foreach, **options) for one in nets]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in optimizers]
    for step in range(2):
        _backward(net, step)
        if reference is not None:
            _lend_grads(net, reference)
        before = snapshot(net)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        moved = [name for name, now in snapshot(net).items() if not torch.equal(now, before[name])]
        assert moved or not any(part.numel() for part in before.values()), "nothing was trained"
        _assert_plain_state(optimizers[0])
        full = gathered(net)
        if reference is not None:
            _assert_quantized_weights_equal(full, reference, f"{kind} step {step}")
        assert_gathers_exactly(net, f"{kind} step {step}", full=full)
        optimizers[0].zero_grad()


def _trains_like_one_process(case: tuple[str, str]) -> None:
    name, kind = case
    net = build(RECIPES[name], rows_for(name))
    reference = copy.deepcopy(net)
    # Either way of stepping for every format, and for every number of ranks.
    foreach = [*BLOCKWISE, *TENSOR_WIDE].index(name) % 2 == dist.get_world_size() // 2 % 2
    _train(shard(net), kind, foreach=foreach, reference=reference)


@sampled("world_size", [1, 2, 4], [1, 4])
def test_the_bytes_are_those_of_one_process(world_size: int) -> None:
    """Every format meets every optimizer once and every number of ranks; one of them all optimizers on each.

    In `make test` each meets two optimizers, on 1 rank and on 4.
    """
    names, kinds = BLOCKWISE if world_size == 1 else WHOLE, list(OPTIMIZERS)
    turn = {name: kinds[(BLOCKWISE.index(name) + world_size // 2) % 3] for name in WHOLE if name != "mxfp8"}
    cases = [(name, kind) for name in names for kind in kinds if turn.get(name, kind) == kind]
    run_ranks_each(world_size, cases, _trains_like_one_process)


def test_one_rank_gives_the_bytes_of_one_process_for_tensor_wide_scales_too() -> None:
    run_ranks_each(1, [(name, "adamw") for name in TENSOR_WIDE], _trains_like_one_process)


def _scales(net: nn.Module, part: str) -> list[int]:
    """How many different tensor-wide scales the shards with rows hold, a parameter each."""
    shards = shards_of(net).values()
    return [len({piece[part].item() for piece in pieces if piece["payload"].numel()}) for pieces in shards]


def _scales_part_and_are_agreed_again(name: str, kind: str) -> None:
    net = shard(build(RECIPES[name], rows_for(name)))
    _train(net, kind, foreach=True, reference=None)
    part = {tensor_wide(q.recipe) for _, _, q in quantized(net)}.pop()
    if name != "nvfp4_square" or kind != "adamw":  # whose first steps are all alike, and so is the amax of every shard
        assert max(_scales(net, part)) > 1
    assert sync_scales(net) == 1
    assert set(_scales(net, part)) == {1}
    assert_gathers_exactly(net, "after sync_scales")


@sampled(("kind", "world_size"), itertools.product(("sgd", "adamw"), (2, 4)), [("sgd", 4), ("adamw", 2)])
def test_tensor_wide_scales_part_in_a_step_until_sync_scales(kind: str, world_size: int) -> None:
    run_ranks_each(world_size, TENSOR_WIDE, _scales_part_and_are_agreed_again, kind)


# -- what stands around an optimizer ---------------------------------------------------------------------------------


def _clips(name: str) -> None:
    net = build(RECIPES[name], rows_for(name))
    twins = [nn.Parameter(torch.zeros(param.shape, dtype=param.dtype)) for param in net.parameters()]
    shard(net)
    _backward(net, 0)
    for param, twin in zip(net.parameters(), twins, strict=True):
        twin.grad = param.grad.full_tensor().clone()  # of one rank it aliases
    found, expected = (nn.utils.clip_grad_norm_(some, 0.01) for some in (net.parameters(), twins))
    assert isinstance(found, DTensor)
    assert expected > 0.01
    # Each side rounds the norm of a gradient (or of its shard) and the total to bf16, 2^-9 relative each, sharded ones
    # also the sum over ranks and its root: six roundings in all. Sums in fp32 are far below one more.
    bound = 7 * 2.0**-9
    assert abs(found.full_tensor().item() - expected.item()) <= bound * expected.item()
    for param, twin in zip(net.parameters(), twins, strict=True):
        whole = param.grad.full_tensor().float()
        # the coefficient carries the norm's error and is rounded, and so is each product
        assert ((whole - twin.grad.float()).abs() <= (bound + 4 * 2.0**-9) * twin.grad.float().abs()).all()


@sampled("world_size", [1, 2, 4], [4])
def test_clipping_has_the_norm_of_the_dense_model(world_size: int) -> None:
    run_ranks_each(world_size, ("mxfp8", "nvfp4"), _clips)


def _skips_infinite_gradients(name: str) -> None:
    net = shard(build(RECIPES[name], rows_for(name)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(3):
        scaler.scale(net(batch(step)).float().square().mean()).backward()
        if step == 1 and dist.get_rank() == 0:  # on one rank alone
            local(net.blocks[0].linear.weight.grad)[0, 0] = math.inf
        before = snapshot(net)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 1:
            assert_same_snapshot(snapshot(net), before, "a skipped step")
        else:
            assert any(not torch.equal(now, before[key]) for key, now in snapshot(net).items())
    assert scaler.get_scale() == 128.0


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_grad_scaler_skips_the_step_on_all_ranks_when_one_has_infinite_gradients(world_size: int) -> None:
    run_ranks(world_size, _skips_infinite_gradients, "mxfp8")


def _fused() -> str:
    net = shard(build(RECIPES["mxfp8"], rows_for("mxfp8")))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, fused=True)
    _backward(net, 0)
    before = snapshot(net)
    with pytest.raises(NotImplementedError) as error:
        optimizer.step()
    assert_same_snapshot(snapshot(net), before, "fused")
    return str(error.value)


@pytest.mark.parametrize("world_size", [1, 2])
def test_fused_optimizers_are_refused_on_all_ranks(world_size: int) -> None:
    for message in run_ranks(world_size, _fused):
        assert message.startswith("fused=True: fused optimizers can not update a quantized weight of shape (")
        assert message.endswith("or use MasterWeightOptimizer, whose fp32 masters are plain tensors")


# -- stochastic rounding ---------------------------------------------------------------------------------------------


def _trained_stochastically(name: str, seed: int) -> dict[str, Tensor]:
    net = shard(build(RECIPES[name], rows_for(name)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)
    state = torch.get_rng_state()
    with stochastic_rounding(torch.Generator().manual_seed(seed + dist.get_rank())):
        for step in range(2):
            _backward(net, step)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(torch.get_rng_state(), state)
    assert_gathers_exactly(net, "stochastic")
    return snapshot(net)


def _stochastic(name: str) -> None:
    first, again, other = (_trained_stochastically(name, seed) for seed in (0, 0, 100))
    assert_same_snapshot(again, first, "equal seeds")
    assert any(not torch.equal(part, other[key]) for key, part in first.items() if key.endswith("payload"))


@sampled("world_size", [1, 4], [4])
def test_equal_seeds_a_rank_give_equal_shards(world_size: int) -> None:
    run_ranks_each(world_size, ("float8_row", "nvfp4"), _stochastic)


def _averages() -> None:
    net, ema = (shard(build(RECIPES["mxfp8"], rows_for("mxfp8"), seed=seed)) for seed in (1, 2))

    def distance() -> float:
        found = torch.zeros(())
        for (_, _, q), (_, _, average) in zip(quantized(net), quantized(ema), strict=True):
            found += (q.dequantize(torch.float32) - average.dequantize(torch.float32)).square().sum().detach()
        dist.all_reduce(found)
        return found.item() ** 0.5

    def update() -> None:
        for average, param in zip(ema.parameters(), net.parameters(), strict=True):
            average.lerp_(param, 0.02)

    before = distance()
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"lerp_ with weight 0\.02 on a quantized weight"):
            update()
        with stochastic_rounding(torch.Generator().manual_seed(dist.get_rank())):
            for _ in range(100):
                update()
    assert all(isinstance(q, QuantizedTensor) for _, _, q in quantized(ema))
    assert distance() < 0.3 * before  # (1 - 0.02)^100 = 0.13, and noise
    assert_gathers_exactly(ema, "average")


@sampled("world_size", [1, 2], [2])
def test_a_sharded_moving_average_follows_inside_stochastic_rounding(world_size: int) -> None:
    run_ranks(world_size, _averages)
