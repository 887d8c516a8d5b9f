"""State dicts and full tensors of sharded quantized models: the same bytes there and back."""

from __future__ import annotations

import copy
import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from qtensor import QuantizedTensor, quantize
from tests.fsdp_hooks.cases import (
    HANDS,
    RECIPES,
    ROW_RECIPES,
    TENSOR_WIDE,
    Collectives,
    assert_equals_reference,
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
    shard,
    snapshot,
)
from tests.ranks import run_ranks_each
from tests.sampling import halves, sampled


def _state_dicts_round_trip(name: str) -> None:
    source, target = shard(build(RECIPES[name], rows_for(name))), shard(build(RECIPES[name], rows_for(name), seed=1))
    expected = snapshot(source)
    out = source(batch(0)).detach()
    source.reshard()
    with torch.no_grad():
        target(batch(0))  # its buffers are there, so that stale ones would show
    target.reshard()
    for assign in (False, True):
        state = source.state_dict()
        for fqn, _, _ in quantized(source):
            assert isinstance(state[fqn], DTensor), fqn
            assert isinstance(local(state[fqn]), QuantizedTensor), fqn
        target.load_state_dict(copy.deepcopy(state), assign=assign)
        assert_same_snapshot(snapshot(target), expected, f"assign={assign}")
        assert_gathers_exactly(target, f"assign={assign}")
        assert_same_bytes(target(batch(0)).detach(), out, f"assign={assign}: forward")
        target.reshard()
        for _, _, q in quantized(target):  # stale on purpose, for the next round
            q.detach().zero_()
    target.load_state_dict(source.state_dict(), assign=False)
    for (fqn, _, q), (_, _, its) in zip(quantized(target), quantized(source), strict=True):
        for part, mine in q.parts().items():
            theirs = its.parts()[part]
            assert mine.data_ptr() != theirs.data_ptr() or not mine.numel(), f"{fqn}.{part} is shared"


@halves("names", ROW_RECIPES, ("float8_tensor", "mxfp8", "nvfp4"))
@sampled("world_size", [1, 4], [4])
def test_state_dicts_round_trip(world_size: int, names: tuple[str, ...]) -> None:
    run_ranks_each(world_size, names, _state_dicts_round_trip)


def _full_tensors_are_exact(name: str, shape: tuple[int, ...]) -> None:
    whole = build(RECIPES[name], rows_for(name))
    net = shard(build(RECIPES[name], rows_for(name)), mesh=mesh_of(*shape))
    expected = dict(whole.named_parameters())
    held = snapshot(net)
    for fqn, param, q in quantized(net):
        with Collectives() as comms:
            full = param.full_tensor()
        assert sum(comms.counts.values()) <= 2 * len(q.parts()), comms.counts
        assert type(full) is type(q)
        assert not isinstance(full, DTensor)
        for part, bytes_ in parts_of(expected[fqn]).items():
            assert_same_bytes(full.parts()[part], bytes_, f"{fqn}.{part}")
        assert_same_bytes(full.dequantize(), expected[fqn].dequantize(), fqn)
        if shape[-1] == 1:
            continue  # torch gives the shard itself there
        value = 5 * torch.ones(param.shape)
        with torch.no_grad():
            full.detach().copy_(value)  # a tensor of its own, with a scale of its own
        assert_same_bytes(full.payload, quantize(value, RECIPES[name]).payload, f"{fqn}: writing to it")
    assert_same_snapshot(snapshot(net), held, "the shards")


@sampled(
    ("shape", "hand"),
    [((1,), 0), ((2,), 1), ((3,), 2), ((4,), 0), ((4,), 1), ((4,), 2), ((2, 2), 0)],
    [((3,), 2), ((4,), 1), ((2, 2), 0)],
)
def test_full_tensor_has_the_bytes_from_before_sharding(shape: tuple[int, ...], hand: int) -> None:
    run_ranks_each(math.prod(shape), HANDS[hand], _full_tensors_are_exact, shape)


def _full_tensors_of_different_scales(name: str) -> None:
    net = shard(build(RECIPES[name], rows_for(name)))
    for _, _, q in quantized(net):
        q.detach().copy_(torch.randn(q.shape) * 10.0 ** dist.get_rank())
    for fqn, param, q in quantized(net):
        expected = torch.cat(exchanged(q.dequantize(torch.float32)))
        assert_same_bytes(param.full_tensor().dequantize(torch.float32), expected, fqn)


@sampled("world_size", [2, 3, 4], [3])
def test_full_tensor_is_exact_where_shards_have_different_scales(world_size: int) -> None:
    run_ranks_each(world_size, TENSOR_WIDE, _full_tensors_of_different_scales)


def _module_moves(name: str) -> None:
    """Casts and moves rebuild every shard; the bytes and the padding stay."""
    reference = build(RECIPES[name], rows_for(name))
    net = shard(build(RECIPES[name], rows_for(name)))
    held = {key: value for key, value in snapshot(net).items() if ".weight." in key}  # parts
    for where in (torch.float32, torch.bfloat16, "cpu"):
        net.to(where)
        for _, param, q in quantized(net):
            assert q.dtype == param.dtype
        assert_same_snapshot({key: value for key, value in snapshot(net).items() if key in held}, held, "moved")
    assert_equals_reference(gathered(net), reference, "moved")
    net(batch(0)).float().sum().backward()


@halves("names", ROW_RECIPES, ("float8_tensor", "mxfp8", "nvfp4"))
@sampled("world_size", [1, 3], [3])
def test_moving_and_casting_a_sharded_model_keeps_the_bytes(world_size: int, names: tuple[str, ...]) -> None:
    run_ranks_each(world_size, names, _module_moves)
