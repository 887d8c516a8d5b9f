"""Tensor-wide scales: gathers are exact whatever they are, and the library's writes leave them agreed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fsdp_hooks import sync_scales, unsharded
from fsdp_hooks.scale_sync import parameters_at_rest
from qtensor import MasterWeightOptimizer, high_precision_init_val, quantize, quantized_model_init
from qtensor.spec.registry import tensor_wide
from tests.fsdp_hooks.cases import (
    HANDS,
    RECIPES,
    ROW_RECIPES,
    STAND_INS,
    TENSOR_WIDE,
    TRAINED,
    UNEVEN,
    Collectives,
    K,
    Net,
    assert_gathers_exactly,
    assert_same_bytes,
    assert_same_snapshot,
    batch,
    build,
    exchanged,
    gathered,
    local,
    mesh_of,
    parts_of,
    quantized,
    rows_for,
    rows_of,
    shard,
    shards_of,
    snapshot,
)
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each
from tests.recipes import facts
from tests.sampling import sampled

ONE_ALL_REDUCE = {"allreduce_": 1}


def _value(rows: int, seed: int = 3) -> Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def _write_shards(net: nn.Module, factor: float) -> None:
    """Other values, and other magnitudes, in every shard; the last shard that has rows gets the largest."""
    with torch.no_grad():
        for _, param, q in quantized(net):
            coordinate = param.device_mesh.get_local_rank("shard")
            rows = rows_of(_value(param.shape[0]), q, coordinate, param.device_mesh["shard"].size())
            q.copy_(rows * factor**coordinate)


def _wide(q: Any) -> Tensor:
    return q.parts()[tensor_wide(q.recipe)]


def _assert_agreed(net: nn.Module, what: str) -> None:
    for fqn, _, q in quantized(net):
        if tensor_wide(q.recipe):
            values = {_wide(q).item()} | set(exchanged(_wide(q).item()))
            assert len(values) == 1, f"{what}: {fqn}: {values}"


def _model(name: str, *shape: int, **init: Any) -> Net:
    mesh = mesh_of(*(shape or (dist.get_world_size(),)))
    return shard(build(RECIPES[name], rows_for(name), **init), mesh=mesh)


def _gathers_disagreeing_shards(name: str) -> None:
    net = _model(name)
    _write_shards(net, factor=37.0)
    ranks = dist.get_world_size()
    for _ in range(2):  # a first gather, and a refill
        pieces = shards_of(net)
        for fqn, _, q in quantized(net):
            scales = {piece[tensor_wide(q.recipe)].item() for piece in pieces[fqn]}
            assert len(scales) > 1 or ranks == 1, f"{fqn}: the test wants different scales"
        dense = {fqn: exchanged(q.dequantize(torch.float32)) for fqn, _, q in quantized(net)}
        assert_gathers_exactly(net, "different scales")
        x = torch.randn(4, K, dtype=torch.bfloat16)
        with unsharded(net):
            for fqn, param in net.named_parameters():
                if fqn in dense:
                    expected = torch.cat(dense[fqn])
                    assert_same_bytes(param.dequantize(torch.float32), expected, fqn)
                    linear = nn.functional.linear(x, param.detach())
                    assert_same_bytes(linear, nn.functional.linear(x, expected.to(param.dtype)), f"{fqn}: linear")
                    for rows in (slice(1, 3), slice(0, param.shape[0] // 2), slice(param.shape[0] // 3, None)):
                        some = param.detach()[rows]
                        assert_same_bytes(some.dequantize(torch.float32), expected[rows], f"{fqn}: rows")
        _write_shards(net, factor=0.2)


@sampled("world_size", [1, 2, 3, 4], [4])
def test_shards_with_different_scales_gather_exactly(world_size: int) -> None:
    run_ranks_each(world_size, TENSOR_WIDE, _gathers_disagreeing_shards)


def _agrees(name: str, shape: tuple[int, ...]) -> None:
    net = _model(name, *shape)
    _write_shards(net, factor=5.0)
    before = {fqn: (parts_of(q), q.dequantize(torch.float32)) for fqn, _, q in quantized(net)}
    largest = {fqn: max(exchanged(_wide(q).item() if q.numel() else 0.0)) for fqn, _, q in quantized(net)}
    alone = shape[-1] == 1
    with Collectives() as comms:
        count = sync_scales(net)
    assert (count, comms.counts) == ((0, {}) if alone else (1, ONE_ALL_REDUCE)), (count, comms.counts)
    _assert_agreed(net, "after sync_scales")
    for fqn, _, q in quantized(net):
        parts, values = before[fqn]
        assert _wide(q).item() == largest[fqn], f"{fqn}: not the largest scale"
        if parts[tensor_wide(q.recipe)].item() == largest[fqn]:  # held it already: keeps its bytes
            for part, bytes_ in parts.items():
                assert_same_bytes(q.parts()[part], bytes_, f"{fqn}.{part}")
        elif name == "float8_tensor":  # the nearest code under the new scale
            expected = (values / largest[fqn]).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert_same_bytes(q.payload, expected, f"{fqn}.payload")
    assert_gathers_exactly(net, "agreed", net.head.weight.device_mesh.get_group("shard"))
    held = snapshot(net)
    assert sync_scales(list(net.parameters())) == count
    assert_same_snapshot(snapshot(net), held, "a second sync_scales")


@sampled(
    ("world_size", "shape"),
    [(1, (1,)), (2, (2,)), (3, (3,)), (4, (4,)), (4, (2, 2)), (2, (2, 1))],
    [(3, (3,)), (4, (2, 2)), (2, (2, 1))],
)
def test_sync_scales_makes_them_agreed_by_one_all_reduce(world_size: int, shape: tuple[int, ...]) -> None:
    run_ranks_each(world_size, TENSOR_WIDE, _agrees, shape)


def _agrees_on_nothing(name: str) -> None:
    net = _model(name)
    _write_shards(net, factor=5.0)
    held = snapshot(net)
    with Collectives() as comms:
        assert sync_scales(net) == 0
    assert comms.counts == {"allreduce_": 1}, "no rank has anything to agree on"
    assert_same_snapshot(snapshot(net), held, name)
    with quantized_model_init(RECIPES[name]):
        assert sync_scales(nn.Linear(K, 32)) == 0  # not sharded at all


def test_sync_scales_has_nothing_to_do_for_scales_of_rows_and_blocks() -> None:
    names = [name for name in RECIPES if name not in TENSOR_WIDE and not facts(RECIPES[name]).square]
    run_ranks_each(2, names, _agrees_on_nothing)


def _zero_shards_do_not_decide(name: str) -> None:
    net = _model(name)
    for _, _, q in quantized(net):
        with torch.no_grad():
            # the scale of zeros is 1, larger than that of these values
            q.copy_(torch.zeros(q.shape)) if dist.get_rank() == 0 else q.copy_(torch.full(q.shape, 2.0**-20))
    held = snapshot(net)
    sync_scales(net)
    for fqn, _, q in quantized(net):
        if dist.get_rank() == 1 and q.numel():
            for part, bytes_ in q.parts().items():
                assert_same_bytes(bytes_, held[f"{fqn}.{part}"], f"{fqn}.{part} of the shard with values")
        elif dist.get_rank() == 0:
            assert not q.dequantize().any()
    _assert_agreed(net, "zeros in one shard")
    for _, _, q in quantized(net):
        q.detach().zero_()
    sync_scales(net)
    for _, _, q in quantized(net):
        assert not q.dequantize().any()
        assert _wide(q).item() == 1.0
    assert_gathers_exactly(net, "zeros everywhere")


def test_shards_of_zeros_never_decide_a_scale() -> None:
    run_ranks_each(2, TENSOR_WIDE, _zero_shards_do_not_decide)


def _meta_raises() -> None:
    with torch.device("meta"), quantized_model_init(RECIPES["nvfp4"]):
        net = Net((4,), head=4)
    sync_scales(shard(net))


def test_a_parameter_of_several_names_is_known_by_the_least() -> None:
    """Ranks may have registered them in different orders."""
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    for order in (("b", "a", "c"), ("c", "b", "a"), ("a", "c", "b")):
        model = nn.Module()
        for name in order:
            model.add_module(name, two if name == "c" else one)
        found = dict(parameters_at_rest(model))
        assert sorted(found) == ["a.bias", "a.weight", "c.bias", "c.weight"]
        assert found["a.weight"] is one.weight


def test_sync_scales_of_a_meta_model_raises() -> None:
    for message in run_ranks_catching(2, _meta_raises):
        assert message.startswith("ValueError: sync_scales")
        assert "meta device" in message
        assert "to_empty()" in message


def _meta_on_one_rank(builds: bool) -> None:
    rank, mesh = dist.get_rank(), mesh_of(2)
    local = quantize(torch.ones(2, K), RECIPES["nvfp4"])
    local = local.to("meta") if rank else local
    weight = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((4, K)), stride=(K, 1))
    if builds:
        MasterWeightOptimizer(torch.optim.SGD, [nn.Parameter(weight)], lr=0.1)
    sync_scales([weight])


@pytest.mark.parametrize("builds", [False, True])
def test_a_rank_whose_weights_are_on_the_meta_device_tells_the_others(builds: bool) -> None:
    waits, raises = run_ranks_catching(2, _meta_on_one_rank, builds)
    assert "rank 1 failed before the ranks could agree on scales, see its error" in waits
    assert raises.startswith("ValueError: " + ("MasterWeightOptimizer" if builds else "sync_scales"))
    assert "on the meta device" in raises


def _preserved_value_decides(name: str) -> None:
    """Shards initialised by hand from slices of a dense weight, with the high-precision value preserved."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    with torch.device("meta"), quantized_model_init(RECIPES[name], preserve_high_precision_init_val=True):
        net = Net(rows_for(name), head=rows_for(name)[0])
    shard(net)
    net.to_empty(device="cpu")
    dense = {fqn: _value(param.shape[0], seed=len(fqn)) for fqn, param, _ in quantized(net)}
    with torch.no_grad():
        for fqn, _, q in quantized(net):
            q.copy_(rows_of(dense[fqn], q, rank, ranks))
    sync_scales(net)
    full = gathered(net)
    for fqn, param, q in quantized(net):
        assert_same_bytes(high_precision_init_val(param), rows_of(dense[fqn], q, rank, ranks), f"{fqn}: preserved")
        for part, bytes_ in quantize(dense[fqn], RECIPES[name]).parts().items():
            expected = bytes_.repeat(full[fqn][part].shape) if bytes_.ndim == 0 else bytes_
            assert_same_bytes(full[fqn][part], expected, f"{fqn}.{part}")


@pytest.mark.parametrize(("world_size", "names"), TRAINED)
def test_with_a_preserved_value_shard_then_quantize_equals_quantize_then_shard(
    world_size: int, names: tuple[str, ...]
) -> None:
    run_ranks_each(world_size, names, _preserved_value_decides)


def _row_formats_commute(name: str) -> None:
    """The scales belong to rows or blocks of a row: nothing has to be agreed on."""
    net = _model(name)
    whole = quantize(_value(33), RECIPES[name])
    q = local(net.blocks[1].linear.weight)
    with torch.no_grad():
        q.copy_(rows_of(_value(33), q, dist.get_rank(), dist.get_world_size()))
    with unsharded(net):
        for part, expected in whole.parts().items():
            assert_same_bytes(net.blocks[1].linear.weight.parts()[part], expected, part)


@sampled("world_size", [2, 4], [4])
def test_row_formats_quantize_then_shard_equals_shard_then_quantize(world_size: int) -> None:
    run_ranks_each(world_size, set(ROW_RECIPES) - set(TENSOR_WIDE), _row_formats_commute)


# -- the optimizer ---------------------------------------------------------------------------------------------


def _backward(net: nn.Module, step: int) -> None:
    net(batch(step)).float().square().mean().backward()


def _one_all_reduce_a_step(name: str, shape: tuple[int, ...]) -> None:
    net = _model(name, *shape)
    assert len(net.blocks) >= (2 if rows_for(name) != UNEVEN else 3)
    _write_shards(net, factor=5.0)
    alone = shape[-1] == 1
    with Collectives() as comms:
        optimizer = MasterWeightOptimizer(torch.optim.AdamW, net.parameters(), lr=0.01)
    assert comms.counts == (ONE_ALL_REDUCE if not alone else {}), comms.counts
    _assert_agreed(net, "built")
    for step in range(2):
        _backward(net, step)
        before = snapshot(net)
        with Collectives() as comms:
            optimizer.step()
        expected = ONE_ALL_REDUCE if not alone else {}
        assert comms.counts == expected, (name, step, comms.counts)
        _assert_agreed(net, f"step {step}")
        assert any(not torch.equal(now, before[key]) for key, now in snapshot(net).items())
        optimizer.zero_grad()


@pytest.mark.parametrize(("world_size", "shape"), [(3, (3,)), (4, (2, 2)), (2, (2, 1))])
def test_a_step_leaves_scales_agreed_by_one_all_reduce_for_the_whole_model(
    world_size: int, shape: tuple[int, ...]
) -> None:
    """Every format on one of the meshes: each has formats with and without a scale to agree on."""
    hand = {(3,): HANDS[0], (2, 2): HANDS[1], (2, 1): HANDS[2]}[shape]
    run_ranks_each(world_size, hand, _one_all_reduce_a_step, shape)


def _without_a_move_no_byte_moves(name: str) -> None:
    net = _model(name)
    _write_shards(net, factor=3.0)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, net.parameters(), lr=0.0, weight_decay=0.1)
    for round_ in ("fresh", "after a step"):
        held = snapshot(net)
        for step in range(2):
            _backward(net, step)
            optimizer.step()
            assert_same_snapshot(snapshot(net), held, f"{round_}: lr=0")
            optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        _backward(net, 5)
        optimizer.step()
        optimizer.zero_grad()
        moved = [key for key, now in snapshot(net).items() if not torch.equal(now, held[key])]
        assert moved
        for group in optimizer.param_groups:
            group["lr"] = 0.0


@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        pytest.param(1, tuple(HANDS[2]), id="1"),
        pytest.param(3, ("float8_tensor", *STAND_INS), id="3"),
        pytest.param(1, (*HANDS[0], *HANDS[1]), id="1-others", marks=pytest.mark.full),
        pytest.param(3, ("float8_block_square", "int4_32", "nvfp4_square"), id="3-others", marks=pytest.mark.full),
    ],
)
def test_a_step_with_lr_0_changes_no_byte(world_size: int, names: tuple[str, ...]) -> None:
    """On three ranks those that agree on scales, and formats of rows, blocks and squares."""
    run_ranks_each(world_size, names, _without_a_move_no_byte_moves)


def _negative_zeros_stay() -> None:
    recipe = RECIPES["nvfp4"]
    value = torch.full((2, K), -1e-4)  # under the smallest code of their block
    value[:, ::16] = 1.0
    weight = nn.Parameter(quantize(value, recipe))
    assert (weight.payload == 0x88).any(), "the test wants codes of -0.0"
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, [weight], lr=0.1, weight_decay=0.0)
    weight.grad = torch.zeros(2, K)
    weight.grad[0, 0] = 1.0
    optimizer.step()  # moves the parameter, but not its zeros
    held = parts_of(weight)
    optimizer.param_groups[0]["lr"] = 0.0
    for grad in (1.0, -1.0, 1.0):
        weight.grad = torch.full((2, K), grad)
        optimizer.step()
        for part, bytes_ in held.items():
            assert_same_bytes(weight.parts()[part], bytes_, part)


def test_a_step_with_lr_0_does_not_turn_the_sign_of_zeros() -> None:
    run_ranks(1, _negative_zeros_stay)


def _keeps_what_is_agreed(name: str) -> None:
    """Also where a preserved initial value, rounded to bf16, would give other bytes."""
    net = shard(build(RECIPES[name], (64,), preserve_high_precision_init_val=True))
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, net.parameters(), lr=0.05)
    for step in range(3):
        net(batch(step)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before, masters = snapshot(net), [local(optimizer.state[p]["master_weight"]).clone() for _, p, _ in quantized(net)]
    assert sync_scales(net) == 1
    assert_same_snapshot(snapshot(net), before, name)
    net(batch(0)).sum().mul(0).backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for master, (_, param, _) in zip(masters, quantized(net), strict=True):
        assert torch.equal(local(optimizer.state[param]["master_weight"]), master)


def test_sync_scales_changes_no_byte_of_what_is_agreed() -> None:
    run_ranks_each(2, TENSOR_WIDE, _keeps_what_is_agreed)


def _syncs_after_an_eval(storage: str) -> None:
    net = shard(build(RECIPES["float8_tensor"], (64,), storage=storage))
    with torch.no_grad():
        shard_ = local(net.head.weight)
        shard_.copy_((shard_.dense if storage == "high_precision" else shard_.dequantize()) * (dist.get_rank() * 3 + 1))
        net(batch(0))  # leaves the head gathered
    with pytest.raises(
        ValueError, match=r"^sync_scales: the parameters are those gathered for a forward, not the shards"
    ):
        sync_scales([net.head.weight])
    with pytest.raises(ValueError, match=r"^MasterWeightOptimizer: the parameters are those gathered for a forward"):
        MasterWeightOptimizer(torch.optim.AdamW, [net.head.weight], lr=0.1)
    assert sync_scales(net) == 1
    with unsharded(net):
        assert bool((net.head.weight.scale == net.head.weight.scale[0]).all())


def test_sync_scales_finds_the_shards_of_gathered_weights() -> None:
    run_ranks_each(2, ("quantized", "high_precision"), _syncs_after_an_eval)
