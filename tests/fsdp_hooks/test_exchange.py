"""What ranks agree on is matched by name; a rank that lists something else, or fails, is an error on all of them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_adapters import QuantizedLoadPlanner, QuantizedSavePlanner
from fsdp_hooks import sync_scales
from fsdp_hooks.ranks import exchange
from fsdp_hooks.ranks.exchange import Channel, RanksDifferError, channel_of, in_order, reduce_max
from qtensor import (
    Float8CurrentScaling,
    MasterWeightOptimizer,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
    quantized_model_init,
    stochastic_rounding,
)
from qtensor.model.loading import quantize_dense_entries
from qtensor.optim import master_step
from qtensor.spec.registry import tensor_wide
from tests.fsdp_hooks.cases import Collectives, assert_same_bytes, exchanged, local, mesh_of
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each
from tests.recipes import ROW, WITH_HISTORY, facts

K = 32
NAMES = ("a", "b", "c")
TENSOR = Float8CurrentScaling(granularity="tensor")
RECIPES = {name: recipe for name, recipe in (ROW | WITH_HISTORY).items() if name != "float8_row"}


class Parts(nn.Module):
    """Linears of one shape, under names, in the order given."""

    def __init__(self, order: Any, rows: int) -> None:
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(K, rows, bias=False, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([getattr(self, name)(x).sum() for name in NAMES if hasattr(self, name)]).sum()


def value(name: str, rows: int) -> Tensor:
    """Of another magnitude for every name."""
    generator = torch.Generator().manual_seed(ord(name))
    return (torch.randn(rows, K, generator=generator) * 10.0 ** (ord(name) - ord("a"))).to(torch.bfloat16)


def model(order: Any = NAMES, rows: int = 64, recipe: Any = TENSOR, **init: Any) -> Parts:
    with quantized_model_init(recipe, **init):
        net = Parts(order, rows)
    with torch.no_grad():
        for name, param in net.named_parameters():
            param.copy_(value(name[0], rows))
    for child in net.children():  # each for itself: FSDP gathers the weights of a group by their order
        fully_shard(child)
    return net


def assert_whole(net: Parts, values: dict[str, Tensor], recipe: Any, what: str) -> None:
    """Every shard holds its rows of the quantized full value."""
    for name, param in net.named_parameters():
        full = quantize(values[name[0]], recipe).parts()
        for part, own in local(param).parts().items():
            whole = full[part]
            if part in local(param)._part_names().along:
                size = -(-whole.shape[0] // dist.get_world_size())
                whole = whole[dist.get_rank() * size :][:size]
            assert_same_bytes(own, whole, f"{what}: {name}.{part}")


def own_order() -> tuple[str, ...]:
    return NAMES[::-1] if dist.get_rank() else NAMES


def placed(full: Tensor, mesh: Any) -> Any:
    return distribute_tensor(full, mesh, [Shard(0)])


# -- order -------------------------------------------------------------------------------------------------------------


def _another_order_on_one_rank() -> None:
    net = model(own_order())
    values = {name: value(name, 64) for name in NAMES}
    state = {f"{name}.weight": placed(values[name], net.a.weight.device_mesh) for name in NAMES}
    net.load_state_dict(  # a dense one, in this rank's order
        dict(sorted(state.items(), reverse=dist.get_rank() == 1))
    )
    assert_whole(net, values, TENSOR, "load_state_dict")
    with torch.no_grad():
        for name, param in net.named_parameters():
            q = local(param)
            q.copy_(value(name[0], 64)[: q.shape[0]] * (1 + dist.get_rank()))
    with Collectives() as comms:
        assert sync_scales(net) == 1
    assert comms.counts == {"allreduce_": 1}
    scales = exchanged({name: local(param).scale.item() for name, param in sorted(net.named_parameters())})
    assert scales[0] == scales[1]
    assert len({*scales[0].values()}) == len(NAMES)

    net = model(own_order())
    optimizer = MasterWeightOptimizer(torch.optim.SGD, net.named_parameters(), lr=0.5)
    net(torch.ones(1, K, dtype=torch.bfloat16)).backward()
    optimizer.step()
    start = {name: quantize(values[name], TENSOR).dequantize(torch.float32) for name in NAMES}
    assert_whole(net, {name: start[name] - 0.5 for name in NAMES}, TENSOR, "step")


def test_ranks_with_another_order_agree_by_name() -> None:
    run_ranks(2, _another_order_on_one_rank)


def test_a_value_finds_its_place_in_one_message_or_two() -> None:
    calls: list[int] = []
    channel = Channel(0, [0], lambda message: calls.append(message.numel()))
    for sizes, expected in (((3, 0, 5), [exchange.FIRST]), ((3, 5000, 5), [exchange.FIRST, 5017 - exchange.FIRST])):
        calls.clear()
        values = [torch.randn(size) for size in sizes]
        found, count = reduce_max("x", [("c",), ("a",), ("b",)], values, channel)
        assert (calls, count) == (expected, len(expected))
        for one, other in zip(found, values, strict=True):
            assert torch.equal(one, other)


def _long_and_unequal() -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    channel, rank, errors = channel_of(group), dist.get_rank(), []
    values = [torch.full((3000,), 10.0 * ord(name) + rank) for name in own_order()]
    found, _ = reduce_max("x", [(name,) for name in own_order()], values, channel)
    for name, one in zip(own_order(), found, strict=True):
        assert torch.equal(one, torch.full((3000,), 10.0 * ord(name) + 1))
    for labels, sizes in (
        ([["a"], ["b"]][: 1 + rank], [4] * (1 + rank)),  # one more
        ([["a" if rank else "c"]], [4]),
        ([["a"]], [4 + 9000 * rank]),
    ):
        with pytest.raises(RanksDifferError) as caught:
            reduce_max("x", [tuple(label) for label in labels], [torch.zeros(size) for size in sizes], channel)
        errors.append(str(caught.value))
    assert in_order([("b",), ("a",)], [[group], [group]]) == [group]
    return errors


def test_ranks_that_list_other_values_are_told_which() -> None:
    one, other = run_ranks(2, _long_and_unequal)
    assert one == other
    assert "only rank 1 has 'b'" in one[0]
    assert "only rank 1 has 'a'; only rank 0 has 'c'" in one[1]
    assert "different sizes" in one[2]


def _differ(what: str) -> None:
    second = dist.get_rank() == 1
    if what == "recipe":
        sync_scales(model(recipe=Float8CurrentScaling(granularity="tensor", element="e5m2") if second else TENSOR))
    elif what == "count":
        params = [*model().parameters()]
        sync_scales(params[: 2 + second])
    elif what == "names":
        named = [*model().named_parameters()]
        MasterWeightOptimizer(torch.optim.SGD, [("other", named[0][1]), *named[1:]] if second else named, lr=0.1)
    elif what == "groups":
        params = [*model().parameters()]
        cut = 1 + second
        MasterWeightOptimizer(torch.optim.SGD, [{"params": params[:cut]}, {"params": params[cut:]}], lr=0.1)
    elif what == "shape":
        sync_scales(model(rows=32 if second else 64))
    elif what == "frozen":
        net = model(recipe=MXFP8BlockScaling())
        optimizer = MasterWeightOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
        net(torch.ones(1, K, dtype=torch.bfloat16)).backward()
        net.a.weight.requires_grad_(not second)
        optimizer.step()
    elif what == "dense entries":
        net = model()
        state = net.state_dict()
        mesh = net.a.weight.device_mesh
        given = {f"{name}.weight": placed(value(name, 64), mesh) for name in NAMES}
        for name in [*given][: 1 + second]:
            state[name] = given[name]
        net.load_state_dict(state)


@pytest.mark.parametrize("what", ["recipe", "count", "names", "groups", "shape", "frozen", "dense entries"])
def test_a_rank_that_lists_something_else_is_an_error_on_all(what: str) -> None:
    errors = run_ranks_catching(2, _differ, what, timeout=60)
    assert errors[0] == errors[1]
    assert "do not list the same weights" in errors[0]
    assert "only rank " in errors[0]


def _lists_nothing(what: str) -> None:
    """Rank 1 has nothing to say in a group in which rank 0 has."""
    second = dist.get_rank() == 1
    if what == "synced recipe":  # one shares a scale, the other does not
        sync_scales(model(recipe=MXFP8BlockScaling() if second else TENSOR))
    elif what == "synced dense":
        sync_scales(model(enabled=not second))
    elif what == "synced parameters":  # without names
        sync_scales([*model(enabled=not second).parameters()])
    elif what == "entries":
        net = model()
        state, dense = net.state_dict(), placed(value("a", 64), net.a.weight.device_mesh)
        net.load_state_dict(state if second else state | {"a.weight": dense})
    elif what == "recipe":
        MasterWeightOptimizer(torch.optim.SGD, model(recipe=MXFP8BlockScaling() if second else TENSOR).parameters())
    elif what == "dense":
        MasterWeightOptimizer(torch.optim.SGD, model(enabled=not second).parameters())
    elif what == "empty group":
        net = model()
        optimizer = MasterWeightOptimizer(torch.optim.SGD, net.a.parameters())
        optimizer.add_param_group({"params": [] if second else [*net.b.parameters()]})
    elif what == "steps":
        net = model(recipe=MXFP8BlockScaling())
        optimizer = MasterWeightOptimizer(torch.optim.SGD, net.parameters())
        net(torch.ones(1, K, dtype=torch.bfloat16)).backward()
        net.requires_grad_(not second)
        optimizer.step()
    elif what == "dense steps":
        net = model(recipe=MXFP8BlockScaling(), enabled=not second)
        optimizer = MasterWeightOptimizer(torch.optim.SGD, net.parameters())
        optimizer.step()
    elif what == "replicas":
        mesh = mesh_of(1, 2)  # its groups stand beside the default one, in which replicas are compared
        params = [distribute_tensor(value("a", 64), mesh, [Replicate(), Shard(0)]), value("b", 64)]
        MasterWeightOptimizer(torch.optim.SGD, params[: 1 + (not second)], check_replicas=True).step()


@pytest.mark.parametrize(
    "what",
    [
        "synced recipe",
        "synced dense",
        "synced parameters",
        "entries",
        "recipe",
        "dense",
        "empty group",
        "steps",
        "dense steps",
        "replicas",
    ],
)
def test_a_rank_that_lists_nothing_is_an_error_on_all(what: str) -> None:
    """And none waits for it."""
    errors = run_ranks_catching(2, _lists_nothing, what, timeout=60)
    assert errors[0] == errors[1]
    assert "do not list the same weights" in errors[0]
    assert "only rank 0 has " in errors[0]


def _stands_outside() -> None:
    """Rank 2 is not in the mesh."""
    mesh = DeviceMesh("cpu", torch.tensor([0, 1]))
    fulls = value("a", 64), quantize(value("b", 64), TENSOR)
    params = [distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None) for full in fulls]
    assert sync_scales(params) == (dist.get_rank() < 2)


def test_a_rank_outside_of_a_mesh_has_no_group_in_it() -> None:
    run_ranks(3, _stands_outside)


def _adds_twice() -> None:
    net = model(recipe=MXFP8BlockScaling())
    optimizer = MasterWeightOptimizer(torch.optim.SGD, net.a.parameters())
    optimizer.add_param_group({"params": net.a.parameters() if dist.get_rank() == 1 else net.b.parameters()})


def test_a_group_that_torch_refuses_on_one_rank_is_an_error_on_all() -> None:
    other, failed = run_ranks_catching(2, _adds_twice, timeout=60)
    assert failed.startswith("ValueError: some parameters appear in more than one parameter group")
    assert "MasterWeightOptimizer: rank 1 failed before the ranks could agree on scales" in other


def _converts(path: Path, rows: int) -> None:
    values = {name: value(name, rows) for name in NAMES}
    saved = {"model": {f"{name}.weight": one for name, one in values.items()}}  # whose names dcp.load does not sort
    dcp.save(saved, checkpoint_id=path, planner=QuantizedSavePlanner())
    net = model(rows=rows)
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    state = dict(sorted(net.state_dict().items(), reverse=dist.get_rank() == 1))
    dcp.load({"model": state}, checkpoint_id=path, planner=QuantizedLoadPlanner(on_mismatch="convert"))
    assert_whole(net, values, TENSOR, "converting load")


@pytest.mark.parametrize(("ranks", "rows"), [(2, 64), (3, 2)])
def test_a_converting_load_matches_by_name_and_knows_empty_shards(ranks: int, rows: int, shared_tmp_path: Path) -> None:
    run_ranks(ranks, _converts, shared_tmp_path / "saved", rows)


# -- failures ----------------------------------------------------------------------------------------------------------


class Failing(torch.optim.SGD):
    """Fails on rank 1, in its second step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if dist.get_rank() == 1 and self.steps == 2:
            raise ArithmeticError("of its own")
        return super().step(closure)


def _fails_alone(name: str) -> None:
    net = model(recipe=RECIPES[name])
    optimizer = MasterWeightOptimizer(Failing, net.parameters(), lr=0.1)
    held: list[Any] = []
    try:
        for _ in range(2):
            held = [{part: one.clone() for part, one in local(param).parts().items()} for param in net.parameters()]
            net(torch.ones(1, K, dtype=torch.bfloat16)).backward()
            optimizer.step()
    finally:
        for param, parts in zip(net.parameters(), held, strict=True):
            for part, before in parts.items():
                assert_same_bytes(local(param).parts()[part], before, part)


@pytest.mark.parametrize("name", ["float8_tensor", "mxfp8"])
def test_an_inner_optimizer_that_fails_on_one_rank_is_an_error_on_all(name: str) -> None:
    other, failed = run_ranks_catching(2, _fails_alone, name, timeout=60)
    assert failed == "ArithmeticError: of its own"
    assert "MasterWeightOptimizer.step: rank 1 failed before the ranks could agree on scales" in other


def _copies_nothing(pairs: Any) -> None:
    raise ArithmeticError("of its own")


def _fails_to_copy() -> None:
    """Fails on rank 1 after the inner optimizer's step, as without memory."""
    dense = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    dense.grad = torch.ones_like(dense)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, [*model().parameters(), dense], lr=0.1)
    with patch.object(master_step, "copy_many", _copies_nothing) if dist.get_rank() == 1 else nullcontext():
        optimizer.step()


def test_a_failure_behind_the_inner_optimizer_is_told_too() -> None:
    other, failed = run_ranks_catching(2, _fails_to_copy, timeout=60)
    assert failed == "ArithmeticError: of its own"
    assert "MasterWeightOptimizer.step: rank 1 failed before the ranks could agree on scales" in other


def _bad_entry(where: str) -> None:
    with torch.device(where):
        net = model()
    mesh = net.a.weight.device_mesh
    rows = 64 if dist.get_rank() else 62
    state = {f"{name}.weight": placed(value(name, 64), mesh) for name in NAMES}
    part, shape = value("b", 64)[: rows // 2], torch.Size((64, K))
    state["b.weight"] = DTensor.from_local(part, mesh, [Shard(0)], shape=shape, stride=(K, 1))
    net.load_state_dict(state, assign=where == "meta")


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_an_entry_that_one_rank_refuses_is_an_error_on_all(where: str) -> None:
    failed, other = run_ranks_catching(2, _bad_entry, where, timeout=60)
    assert "b.weight: this rank's part of the state dict's entry has shape (31, 32)" in failed
    assert "load_state_dict: rank 0 failed before the ranks could agree" in other


def _bad_entry_beside_quantized_ones(first: Any) -> None:
    net = nn.ModuleList([model(recipe=first), model(recipe=MXFP8BlockScaling())])
    net.register_load_state_dict_pre_hook(quantize_dense_entries)
    state = net.state_dict()
    if dist.get_rank() == 0:
        mesh = net[0].a.weight.device_mesh
        part, shape = value("b", 64)[:31], torch.Size((64, K))
        state["1.b.weight"] = DTensor.from_local(part, mesh, [Shard(0)], shape=shape, stride=(K, 1))
    with Collectives() as comms:
        try:
            net.load_state_dict(state)
        finally:
            assert comms.counts == ({"allreduce_": 1} if first == TENSOR else {})


def test_a_rank_that_refuses_an_entry_tells_those_that_have_quantized_ones() -> None:
    failed, other = run_ranks_catching(2, _bad_entry_beside_quantized_ones, TENSOR, timeout=60)
    assert "1.b.weight: this rank's part of the state dict's entry has shape (31, 32)" in failed
    assert "load_state_dict: rank 0 failed before the ranks could agree" in other


def test_where_nothing_is_shared_a_rank_that_fails_does_not_wait_to_tell() -> None:
    failed, other = run_ranks_catching(2, _bad_entry_beside_quantized_ones, MXFP8BlockScaling(), timeout=60)
    assert "1.b.weight: this rank's part of the state dict's entry has shape (31, 32)" in failed
    assert not other


# -- empty shards ------------------------------------------------------------------------------------------------------


def _empty_shards(name: str) -> None:
    """Three ranks and weights of two rows."""
    recipe = RECIPES[name]
    rows = 2
    values = {one: value(one, rows) for one in NAMES}
    net = model(rows=rows, recipe=recipe)
    assert exchanged([*local(net.a.weight).shape]) == [[1, K], [1, K], [0, K]]
    sync_scales(net)
    assert_whole(net, values, recipe, "init")
    optimizer = MasterWeightOptimizer(torch.optim.SGD, net.parameters(), lr=0.5)
    start = {one: quantize(values[one], recipe).dequantize(torch.float32) for one in NAMES}
    for step in (1, 2):
        optimizer.zero_grad()
        net(torch.ones(1, K, dtype=torch.bfloat16)).backward()
        optimizer.step()
        if not facts(recipe).history:  # its scale is that of the step before
            assert_whole(net, {one: start[one] - 0.5 * step for one in NAMES}, recipe, f"step {step}")
    for param in net.parameters():
        wide = tensor_wide(local(param).recipe)
        if wide:
            assert len({one.item() for one in exchanged(local(param).parts()[wide].clone())}) == 1
    mesh = net.a.weight.device_mesh
    net.load_state_dict({f"{one}.weight": placed(values[one], mesh) for one in NAMES})
    assert_whole(net, values, recipe, "dense load")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for foreach in (False, True):
        with stochastic_rounding(generator):
            torch.optim.SGD(net.parameters(), lr=0.1, foreach=foreach).step()
    sync_scales(net)


def test_shards_without_rows_take_part_in_everything() -> None:
    run_ranks_each(3, RECIPES, _empty_shards)


def _empty_others() -> None:
    net = model(rows=2, storage="high_precision")
    assert sync_scales(net) == 1
    optimizer = MasterWeightOptimizer(torch.optim.SGD, net.parameters(), lr=0.5)
    net(torch.ones(1, K, dtype=torch.bfloat16)).backward()
    optimizer.step()
    for recipe in (TENSOR, NVFP4BlockScaling()):  # experts [E, N, K], cut along E
        mesh = net.a.weight.device_mesh
        full = {name: torch.stack([value(name, 4), value(name, 4) / 2]) for name in NAMES}
        held = nn.Module()
        for name in NAMES:
            held.register_parameter(name, nn.Parameter(quantize(full[name], recipe)))
        experts = [*fully_shard(held).parameters()]
        optimizer = MasterWeightOptimizer(torch.optim.SGD, experts, lr=0.5)
        start = [quantize(full[name], recipe).dequantize(torch.float32) for name in NAMES]
        for param in experts:
            param.grad = placed(torch.ones(param.shape, dtype=torch.bfloat16), mesh)
        optimizer.step()
        for param, begun in zip(experts, start, strict=True):
            q: Any = local(param)
            assert isinstance(q, QuantizedTensor)
            wanted = quantize(begun - 0.5, recipe).parts()
            for part, own in q.parts().items():
                piece = wanted[part][dist.get_rank() :][:1] if wanted[part].ndim else wanted[part]
                assert_same_bytes(own, piece, f"experts {part}")


def test_empty_shards_of_other_kinds() -> None:
    run_ranks(3, _empty_others, timeout=60)
