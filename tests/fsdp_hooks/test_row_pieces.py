"""Stacked experts [E, N, K] cut by `Shard(1)`: every rank has some rows of each expert.

They train like one process, gathers put the shards' bytes together in the order of the rows, and cost what those of
`Shard(0)` cost.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from fsdp_hooks import sync_scales, unsharded
from qtensor import MasterWeightOptimizer, QuantizedTensor, quantize, quantize_
from qtensor.scales.high_precision import HighPrecisionWeight
from tests import recipes
from tests.fsdp_hooks.cases import (
    HANDS,
    RECIPES,
    SQUARE_RECIPES,
    STAND_INS,
    TENSOR_WIDE,
    Collectives,
    K,
    assert_gathers_exactly,
    assert_same_bytes,
    assert_same_snapshot,
    exchanged,
    held,
    held_since,
    local,
    parts_of,
    snapshot,
)
from tests.fsdp_hooks.test_matrix import follow
from tests.fsdp_hooks.test_matrix_experts import PRODUCTS, ROWS, Experts, _tokens
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each
from tests.sampling import sampled

EXPERTS = 3
WAYS = ("offload", "replicas", "mixed", "high_precision", "kept", "compiled")


def on_rows(param: nn.Parameter) -> Shard | None:
    """Cut quantized experts along their rows, and all else as FSDP2 does by itself."""
    return Shard(1) if param.ndim == 3 and param.shape[1] > 1 else None


def shard(net: nn.Module, **options: Any) -> Any:
    return fully_shard(net, shard_placement_fn=on_rows, **options)


def _trains(case: tuple[str, str], **options: Any) -> None:
    name, product = case
    net: Any = Experts((RECIPES | recipes.WITH_HISTORY)[name], EXPERTS, product)
    reference = copy.deepcopy(net)
    shard(net, **options)
    ranks = dist.get_world_size()
    assert local(net.weight).shape == (EXPERTS, ROWS // ranks, K)
    follow(net, reference, lambda step: _tokens(step, EXPERTS), own_gradients=ranks == 2)
    if name in RECIPES:  # no history, which is not gathered
        assert_gathers_exactly(net, "after training", dim=1)


OTHERS = tuple(name for name in RECIPES if name not in HANDS[0])
TRAINED = [(2, (*HANDS[0], *recipes.WITH_HISTORY)), (4, tuple(STAND_INS)), (1, ("nvfp4",))]
MORE = [(2, OTHERS), (8, tuple(STAND_INS))]


@sampled(("world_size", "names"), TRAINED + MORE, TRAINED, ids=["2", "4", "1", "2-others", "8"])
def test_experts_cut_along_their_rows_train_like_one_process(world_size: int, names: tuple[str, ...]) -> None:
    """All formats on 2 ranks, which cut blocks of 32 and 128 rows; the stand-ins on 4, which cut those of 16."""
    products = list(PRODUCTS)
    run_ranks_each(world_size, [(name, products[number % 4]) for number, name in enumerate(names)], _trains)


@sampled("way", WAYS, WAYS[:4])
def test_ways_to_shard_experts_along_their_rows(way: str) -> None:
    run_ranks_each(4 if way == "replicas" else 2, ["nvfp4"], _trains_in_a_way, way)


def _trains_in_a_way(name: str, way: str) -> None:
    if way == "offload":
        _trains((name, "bmm"), offload_policy=CPUOffloadPolicy(pin_memory=False))
    elif way == "kept":
        _trains((name, "bmm"), reshard_after_forward=False)
    else:
        others = {"replicas": _trains_replicas, "mixed": _runs_mixed, "high_precision": _trains_dense}
        (others | {"compiled": _trains_compiled})[way](name)


def _trains_replicas(name: str) -> None:
    net: Any = Experts(RECIPES[name], EXPERTS, "bmm")
    reference = copy.deepcopy(net)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard(net, mesh=mesh)
    follow(net, reference, lambda step: _tokens(step, EXPERTS))
    assert_gathers_exactly(net, "replicas", mesh.get_group("shard"), dim=1)


def _trains_compiled(name: str) -> None:
    """Matrices of a gathered stack, whose rows come from all shards, in a graph."""
    for product in ("F.linear in a loop", "bmm"):
        net: Any = Experts(RECIPES[name], EXPERTS, product)
        reference = copy.deepcopy(net)
        net.compile(fullgraph=True, backend="aot_eager")
        shard(net)
        sync_scales(net)
        with warnings.catch_warnings():
            # dynamo, of the unsharded parameters of FSDP, quantized or not
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
            follow(net, reference, lambda step: _tokens(step, EXPERTS), own_gradients=True)


def _runs_mixed(name: str) -> None:
    """fp16 while gathered: the decoded values of the same bytes."""
    net: Any = Experts(RECIPES[name], EXPERTS, "bmm")
    x, weight = _tokens(0, EXPERTS).half(), net.weight.detach().dequantize(torch.float16)
    shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    for _ in range(2):
        assert_same_bytes(net(x).detach(), torch.tanh(torch.bmm(x, weight.transpose(1, 2))), name)


def _trains_dense(name: str) -> None:
    """storage="high_precision": the dense rows are quantized on their way into the gather."""
    net: Any = Experts(RECIPES[name], EXPERTS, "bmm")
    net.weight = nn.Parameter(HighPrecisionWeight(net.weight.detach().dequantize(), RECIPES[name]))
    reference = copy.deepcopy(net)
    shard(net)
    follow(net, reference, lambda step: _tokens(step, EXPERTS), own_gradients=True)


# -- what is gathered --------------------------------------------------------------------------------------------------


def _own_scales(name: str) -> None:
    """Shards that have not agreed keep the scales under which their bytes mean what they mean."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net: Any = shard(Experts(RECIPES[name], EXPERTS, "bmm"))
    torch.manual_seed(rank)
    with torch.no_grad():
        local(net.weight).copy_(torch.randn(EXPERTS, ROWS // ranks, K) * 4.0**rank)
    pieces = [torch.tensor(each) for each in exchanged(local(net.weight).dequantize(torch.float32).tolist())]
    expected = torch.cat(pieces, 1)
    assert_gathers_exactly(net, name, dim=1)
    with unsharded(net):
        whole = net.weight.detach()
        assert len(set(whole._sharding.shards and getattr(whole, TENSOR_WIDE_PART[name]).tolist())) == ranks
        assert torch.equal(whole.dequantize(torch.float32), expected)
        for expert in range(EXPERTS):
            for own in (whole[expert], whole.unbind()[expert], whole[expert : expert + 1][0]):
                assert torch.equal(own.dequantize(torch.float32), expected[expert]), expert
                assert torch.equal(own[3:21].dequantize(torch.float32), expected[expert, 3:21]), expert
        assert torch.equal(whole[1:, 5:30].dequantize(torch.float32), expected[1:, 5:30])
        stored = io.BytesIO()
        torch.save(whole[:2], stored)
        stored.seek(0)
        with torch.serialization.safe_globals(QuantizedTensor.safe_globals()):
            assert torch.equal(torch.load(stored).dequantize(torch.float32), expected[:2])
    assert sync_scales(net) == 1
    with unsharded(net):
        assert len(set(getattr(net.weight.detach(), TENSOR_WIDE_PART[name]).tolist())) == 1


def _multiplies_under_own_scales(case: tuple[str, str]) -> None:
    """Quantized tokens meet each row under the scale of its shard, in one product as in a loop."""
    name, product = case
    net: Any = Experts(dataclasses.replace(RECIPES[name], activations="dynamic"), EXPERTS, product)
    shard(net)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        local(net.weight).copy_(torch.randn(local(net.weight).shape) * 4.0 ** dist.get_rank())
    found = []
    for net.product in (product, "F.linear in a loop"):
        x = _tokens(0, EXPERTS).requires_grad_()
        y = net(x)
        y.float().square().mean().backward()
        found.append((y.detach(), x.grad))
    for one, other in zip(*found, strict=True):
        assert_same_bytes(one, other, product)


def test_quantized_tokens_meet_rows_under_the_scales_of_their_shards() -> None:
    cases = [(name, product) for name in ("nvfp4", "float8_tensor") for product in ("grouped_mm", "bmm")]
    run_ranks_each(2, cases, _multiplies_under_own_scales)


class Grid(nn.Module):
    """Experts in two dims, [2, 4, N, K]."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(quantize(torch.randn(2, 4, ROWS, K).bfloat16(), RECIPES[name]))

    def forward(self, x: Any) -> Any:
        return torch.tanh(torch.einsum("tk,abnk->tabn", x, self.weight.dequantize()))  # type: ignore[operator]


def _gathers_grids(name: str) -> None:
    for dim in (1, 2):
        net: Any = Grid(name)
        reference = copy.deepcopy(net)
        fully_shard(net, shard_placement_fn=lambda _, dim=dim: Shard(dim))
        x = _tokens(0, 1)[0]
        assert_same_bytes(net(x).detach(), reference(x).detach(), f"Shard({dim})")
        net.reshard()
        torch.manual_seed(dist.get_rank())
        with torch.no_grad():
            local(net.weight).copy_(torch.randn(local(net.weight).shape) * 4.0 ** dist.get_rank())
        pieces = [torch.tensor(each) for each in exchanged(local(net.weight).dequantize(torch.float32).tolist())]
        expected = torch.cat(pieces, dim)
        with unsharded(net):
            whole = net.weight.detach()
            for at in ((), (1,), (1, 2), (slice(None), slice(1, 3)), (0, 1, slice(3, 21))):
                assert torch.equal(whole[at].dequantize(torch.float32), expected[at]), (dim, at)


def test_stacks_of_four_dims_are_gathered_along_each() -> None:
    run_ranks_each(2, ["nvfp4", "mxfp8"], _gathers_grids)


TENSOR_WIDE_PART = {"float8_tensor": "scale", "nvfp4": "global_scale", "nvfp4_square": "global_scale"}


@sampled("world_size", [2, 4], [4])
def test_scales_of_shards_that_have_not_agreed_travel_with_their_rows(world_size: int) -> None:
    assert TENSOR_WIDE_PART.keys() == set(TENSOR_WIDE)
    run_ranks_each(world_size, TENSOR_WIDE, _own_scales)


class Mixed(nn.Module):
    """Experts, dense parameters and a quantized linear, all in one group."""

    def __init__(self, recipe: Any, experts: int) -> None:
        super().__init__()
        self.first = nn.Linear(K, K, dtype=torch.bfloat16)
        self.experts = Experts(recipe, experts, "bmm")
        self.linear = nn.Sequential(nn.Linear(K, 48, bias=False, dtype=torch.bfloat16))
        quantize_(self.linear, recipe)

    def forward(self, x: Any) -> Any:
        return self.experts(self.first(x)).float().sum() + self.linear(x).float().sum()


def _costs(name: str, dim: int) -> tuple[Any, list[int]]:
    """The collectives of two steps, by name, and the bytes that this rank gives to each all-gather."""
    experts = 2 * dist.get_world_size()
    net: Any = Mixed(RECIPES[name], experts)
    fully_shard(net.experts, shard_placement_fn=on_rows if dim else None)
    fully_shard(net, shard_placement_fn=on_rows if dim else None)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    with Collectives() as comms:
        for step in range(2):
            net(_tokens(step, experts)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return dict(comms.counts), comms.given


@sampled("world_size", [2, 4], [2])
def test_a_step_sends_as_many_bytes_in_as_many_collectives_as_with_shard_0(world_size: int) -> None:
    """Of formats without blocks of rows: whether blocks are cut, and how often, is another matter."""
    names = [name for name in HANDS[0] if name not in SQUARE_RECIPES]
    expected = run_ranks_each(world_size, names, _costs, 0)
    assert run_ranks_each(world_size, names, _costs, 1) == expected
    counts, given = expected[0][0]
    assert counts["_allgather_base_"] == len(given) >= 6  # two groups; that of the experts in backward, too


def _holds(name: str) -> None:
    """Gathered it costs its bytes, and nothing after it is sharded again; the gathered weight stays one object."""
    net: Any = shard(Experts(RECIPES[name], 2 * EXPERTS, "bmm"))
    x = _tokens(0, 2 * EXPERTS)
    net(x).float().sum().backward()
    net.zero_grad()
    at_rest = held()
    with unsharded(net):
        size = sum(part.nbytes for part in parts_of(net.weight).values()) + net.bias.nbytes
        assert held_since(at_rest, size, 4096) >= size
        once = net.weight
    with unsharded(net):
        assert net.weight is once
    del once
    assert held_since(at_rest, 0, 4096) <= 4096


def test_gathered_experts_are_held_once_and_freed() -> None:
    run_ranks_each(2, ["mxfp8", "nvfp4"], _holds)


# -- loads, write-backs, prefetching -----------------------------------------------------------------------------------


def _loads(name: str) -> None:
    """Shards that are replaced, moved or allocated anew are gathered like those that FSDP2 cut."""
    source: Any = shard(Experts(RECIPES[name], EXPERTS, "bmm"))
    expected, state = snapshot(source), source.state_dict()
    for assign in (False, True):
        net: Any = Experts(RECIPES[name], EXPERTS, "bmm")
        with torch.no_grad():
            net.weight.zero_()
        shard(net)
        net(_tokens(0, EXPERTS))  # a gather before, and one behind it
        net.reshard()
        net.load_state_dict(copy.deepcopy(state), assign=assign)
        assert_same_snapshot(snapshot(net), expected, f"assign={assign}")
        assert_same_bytes(net(_tokens(1, EXPERTS)), source(_tokens(1, EXPERTS)), f"assign={assign}")
        net.reshard()
        assert_gathers_exactly(net, f"assign={assign}", dim=1)
    with torch.device("meta"):
        net = Experts(RECIPES[name], EXPERTS, "bmm")
    shard(net).to_empty(device="cpu")
    net.load_state_dict(state)
    assert_gathers_exactly(net, "to_empty", dim=1)
    with torch.no_grad(), unsharded(source, writeback=True):
        source.weight.copy_(source.weight.dequantize() * 2)
        doubled = parts_of(source.weight)
    with unsharded(source):
        for part, tensor in parts_of(source.weight).items():
            assert_same_bytes(tensor, doubled[part], f"written back: {part}")


def test_shards_that_are_loaded_allocated_and_written_back_gather_exactly() -> None:
    run_ranks_each(2, list(STAND_INS), _loads)


class Layers(nn.Module):
    """Some layers of experts, each gathered while the one before it runs."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(RECIPES[name], EXPERTS, "bmm") for _ in range(count))
        self.back = nn.Linear(ROWS, K, dtype=torch.bfloat16)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(self.back(layer(x)))
        return x


def _prefetches(name: str) -> None:
    net: Any = Layers(name, 4)
    reference = copy.deepcopy(net)
    for layer in net.layers:
        shard(layer)
    shard(net)
    layers: list[FSDPModule] = list(net.layers)
    for before, layer in itertools.pairwise(layers):
        before.set_modules_to_forward_prefetch([layer])
        layer.set_modules_to_backward_prefetch([before])
    follow(net, reference, lambda step: _tokens(step, EXPERTS), own_gradients=True)


def _gathers_early(name: str) -> None:
    """Gathers that begin before the root's first forward, in which FSDP2 looks at all shards, and around a load."""
    net: Any = Layers(name, 2)
    reference, x = copy.deepcopy(net), _tokens(0, EXPERTS)
    for layer in net.layers:
        shard(layer)
    shard(net)
    state = copy.deepcopy(net.state_dict())
    handles = [layer.unshard(async_op=True) for layer in net.layers]
    assert_same_bytes(net(x).detach(), reference(x).detach(), "first forward")
    net.layers[0].reshard()
    handles.append(net.layers[0].unshard(async_op=True))
    net.load_state_dict(state)
    for handle in handles:
        handle.wait()
    assert_same_bytes(net(x).detach(), reference(x).detach(), "behind a load")
    with torch.inference_mode():
        assert_same_bytes(net(x), reference(x), "inference")
    follow(net, reference, lambda step: _tokens(step, EXPERTS), own_gradients=True)


def test_layers_of_experts_are_prefetched() -> None:
    for what in (_prefetches, _gathers_early):
        run_ranks(2, what, "mxfp8")


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refused(name: str, dim: int, experts: int, **options: Any) -> None:
    net: Any = Experts(RECIPES[name], experts, "bmm")
    with Collectives() as comms:
        try:
            fully_shard(net, shard_placement_fn=lambda param: Shard(dim) if param is net.weight else None, **options)
            net(_tokens(0, experts))
        finally:
            assert not comms.counts, comms.counts


@pytest.mark.parametrize(
    ("ranks", "dim", "experts", "options", "words"),
    [
        (3, 1, 3, {}, "does not support uneven sharding on dim 1: torch.Size([3, 32, 64]) (world size: 3)"),
        (2, 2, 3, {}, "new_zeros((3, 32, 32)) of a quantized weight of shape (3, 32, 64) (MXFP8BlockScaling"),
        (4, 1, 2, {"reshard_after_forward": 2}, "(2, 8, 64): FSDP2's reshard_after_forward=<int> is not supported"),
        (4, 1, 4, {"reshard_after_forward": 2}, "(4, 8, 64): FSDP2's reshard_after_forward=<int> is not supported"),
    ],
)
def test_what_cannot_be_cut_along_rows_is_refused(
    ranks: int, dim: int, experts: int, options: dict[str, Any], words: str
) -> None:
    messages = run_ranks_catching(ranks, _refused, "mxfp8", dim, experts, **options)
    assert len(set(messages)) == 1, messages
    assert words in messages[0], messages[0]
