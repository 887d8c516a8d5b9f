"""`unsharded(module)`: gathers exactly, gives back exactly, stores what was changed and nothing else."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_hooks import unsharded
from qtensor import MXFP8BlockScaling, QuantizedTensor, quantize
from tests.fsdp_hooks.cases import (
    HANDS,
    RECIPES,
    Collectives,
    K,
    Net,
    assert_gathers_exactly,
    assert_same_bytes,
    assert_same_snapshot,
    batch,
    build,
    gathered,
    local,
    mesh_of,
    parts_of,
    rows_for,
    shard,
    snapshot,
)
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each
from tests.sampling import sampled


def _model(name: str = "mxfp8", **options: Any) -> Net:
    return shard(build(RECIPES[name], rows_for(name)), **options)


def _assert_sharded(net: nn.Module, what: str) -> None:
    plain = [fqn for fqn, param in net.named_parameters() if not isinstance(param, DTensor)]
    assert not plain, f"{what}: not sharded: {plain}"


@contextlib.contextmanager
def _raises(kind: type[Exception], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def _value(rows: int, seed: int = 7) -> Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


# -- reading ---------------------------------------------------------------------------------------------------


def _gathers_and_gives_back(name: str) -> None:
    net = build(RECIPES[name], rows_for(name))
    whole = {
        fqn: parts_of(p) if isinstance(p, QuantizedTensor) else p.detach().clone() for fqn, p in net.named_parameters()
    }
    shard(net)
    sharded = dict(net.named_parameters())
    before = snapshot(net)
    for module, inside in ((net, net.named_parameters()), (net.blocks[1], net.blocks[1].named_parameters())):
        names = [fqn for fqn, _ in inside]
        with unsharded(module) as same:
            assert same is module
            for fqn, param in module.named_parameters():
                assert not isinstance(param, DTensor), fqn
                expected = whole[fqn] if module is net else whole[f"blocks.1.{fqn}"]
                if isinstance(param, QuantizedTensor):
                    assert_same_bytes(param.payload, expected["payload"], fqn)
                    dense = type(param)(expected, param.recipe, param.dtype).dequantize()
                    assert_same_bytes(param.dequantize(), dense, fqn)
                else:
                    assert_same_bytes(param, expected, fqn)
            if module is not net:
                assert isinstance(net.head.weight, DTensor), "more was gathered than asked for"
        assert names == [fqn for fqn, _ in module.named_parameters()]
        for fqn, param in net.named_parameters():
            assert param is sharded[fqn], f"{fqn} is another object afterwards"
    assert_same_snapshot(snapshot(net), before, "after reading")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_gathered_weights_are_those_before_sharding_and_the_shards_come_back_untouched(world_size: int) -> None:
    run_ranks_each(world_size, RECIPES if world_size == 4 else HANDS[world_size - 1], _gathers_and_gives_back)


def _without_fsdp() -> None:
    net = build(RECIPES["mxfp8"], (4,))
    weight = net.head.weight
    with unsharded(net, writeback=True) as same:
        assert same is net
        assert net.head.weight is weight
        weight.detach().copy_(_value(4))
    assert_same_bytes(weight.payload, quantize(_value(4), weight.recipe).payload, "a plain module")


def test_a_module_without_fsdp_is_left_alone() -> None:
    run_ranks(1, _without_fsdp)


def _counts_gathers() -> None:
    net = _model()
    x = batch(0)
    net(x)  # root and blocks are initialised
    block = net.blocks[0]
    with Collectives() as comms, unsharded(block):
        for _ in range(5):
            block.forward(x)
    assert comms.counts == {"_allgather_base_": 1}, comms.counts
    with Collectives() as comms, unsharded(net, writeback=True):
        net.head.bias.detach().zero_()
    assert comms.counts == {"_allgather_base_": len(net.blocks) + 1}, comms.counts


def test_five_forwards_of_a_layer_cost_one_all_gather() -> None:
    run_ranks(2, _counts_gathers)


# -- being left ------------------------------------------------------------------------------------------------


class _Stop(Exception):
    """Raised by a hook in the middle of a forward, as an early stop does."""


def _stop_in(module: nn.Module) -> Any:
    def hook(*_: Any) -> None:
        raise _Stop

    return module.register_forward_pre_hook(hook)


def _reshards_whatever_happens(*, reshard: bool, first: bool) -> None:
    """`first`: the early stop is the very first forward."""
    net = _model("float8_tensor", reshard_after_forward=reshard)
    x = batch(0)
    if not first:
        net(x).float().sum().backward()
        net.zero_grad()
    before, full = snapshot(net), gathered(net)
    expected = None if first else net(x).detach()

    def check(what: str) -> None:
        _assert_sharded(net, what)
        assert_same_snapshot(snapshot(net), before, what)

    # exceptions of the body, with and without write-back; what was written is dropped
    for module in (net, net.blocks[0]):
        for writeback in (True, False):
            with contextlib.suppress(_Stop), unsharded(module, writeback=writeback):
                for param in module.parameters():
                    param.detach().zero_()
                raise _Stop
            check("after an exception in the body")
    # a forward left early inside the block: of the block itself, and of the whole model
    for stop_at, run in ((net.blocks[1].linear, net.blocks[1]), (net.blocks[1].linear, net), (net.head, net)):
        handle = _stop_in(stop_at)
        with unsharded(run):
            for _ in range(2):
                with contextlib.suppress(_Stop):
                    run(x)
        if first:  # a forward of a block made it its own root: that is FSDP's rule, start anew
            handle.remove()
            check("after an early stop inside")
            return
        check("after an early stop inside")
        # and a forward left early before
        with contextlib.suppress(_Stop):
            run(x)
        with unsharded(run):
            for fqn, param in run.named_parameters():
                assert not isinstance(param, DTensor), fqn
        handle.remove()
        check("after an early stop before")
    for fqn, parts in gathered(net).items():
        for name, part in parts.items() if isinstance(parts, dict) else []:
            assert_same_bytes(part, full[fqn][name], f"gathered again: {fqn}.{name}")
    out = net(x)
    assert_same_bytes(out.detach(), expected, "the next forward")
    out.float().square().mean().backward()
    for fqn, param in net.named_parameters():
        assert param.grad is not None, fqn
    _assert_sharded(net.blocks, "after a whole iteration")


@pytest.mark.parametrize("reshard", [True, False])
def test_everything_is_sharded_again_after_exceptions_and_early_stops(reshard: bool) -> None:
    for world_size in (1, 2):
        run_ranks(world_size, _reshards_whatever_happens, reshard=reshard, first=False)
        run_ranks(world_size, _reshards_whatever_happens, reshard=reshard, first=True)


def _keeps_reshard_after_forward() -> None:
    """What unsharded() does to a stuck group must not change how it reshards afterwards."""
    net = _model(reshard_after_forward=False)
    x = batch(0)
    net(x).float().sum().backward()
    handle = _stop_in(net.blocks[0].linear)
    with contextlib.suppress(_Stop), unsharded(net.blocks[0]):
        net.blocks[0](x)
    handle.remove()
    _assert_sharded(net, "left early")
    with torch.no_grad():
        net(x)
    kept = [fqn for fqn, param in net.blocks[0].named_parameters() if not isinstance(param, DTensor)]
    assert kept == ["linear.weight", "linear.bias"], "the group now reshards after forward"


def test_a_group_that_keeps_its_weights_after_forward_goes_on_doing_so() -> None:
    run_ranks(2, _keeps_reshard_after_forward)


class _Nested(nn.Module):
    """A layer with FSDP modules inside: an expert of its own, and two that share a group."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(K, K, bias=False, dtype=torch.bfloat16)
        self.expert = nn.Linear(K, K, bias=False, dtype=torch.bfloat16)
        self.pair = nn.ModuleList(nn.Linear(K, K, bias=False, dtype=torch.bfloat16) for _ in range(2))
        self.ignored = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.pair[1](self.pair[0](self.expert(self.before(x)))) * self.ignored.sum().to(x.dtype)


def _nested_groups_keep_theirs() -> None:
    """Of nested groups each has a setting of its own, which a stuck one around them does not change."""
    net = _Nested()
    fully_shard(net.expert, reshard_after_forward=False)
    fully_shard(list(net.pair), reshard_after_forward=True)
    fully_shard(net, ignored_params={net.ignored}, reshard_after_forward=False)
    x = torch.ones(2, K, dtype=torch.bfloat16)

    def kept() -> set[str]:
        with torch.no_grad():
            net(x)
        return {fqn for fqn, param in net.named_parameters() if not isinstance(param, DTensor)}

    expected = {"before.weight", "expert.weight", "ignored"}
    assert kept() == expected
    handle = _stop_in(net.before)
    with contextlib.suppress(_Stop), unsharded(net):
        net(x)
    handle.remove()
    assert not {fqn for fqn, param in net.named_parameters() if not isinstance(param, DTensor)} - {"ignored"}
    assert kept() == expected


def test_groups_inside_a_stuck_one_keep_their_own_setting() -> None:
    run_ranks(2, _nested_groups_keep_theirs)


def _nested() -> None:
    from qtensor import quantized_model_init

    with quantized_model_init(MXFP8BlockScaling()):
        net = _Nested()
    fully_shard(net.expert)
    fully_shard(list(net.pair))
    fully_shard(net, ignored_params={net.ignored})
    sharded = {fqn for fqn, p in net.named_parameters() if isinstance(p, DTensor)}
    assert sharded == {"before.weight", "expert.weight", "pair.0.weight", "pair.1.weight"}
    for round_ in range(2):
        with unsharded(net, writeback=True):
            assert not any(isinstance(p, DTensor) for p in net.parameters())
            for i, linear in enumerate((net.before, net.expert, *net.pair)):
                with torch.no_grad():
                    linear.weight.copy_(_value(K, seed=i))
            with unsharded(net.expert):  # what an outer one holds stays with the outer one
                assert not isinstance(net.expert.weight, DTensor)
            assert not isinstance(net.expert.weight, DTensor)
        assert {fqn for fqn, p in net.named_parameters() if isinstance(p, DTensor)} == sharded
        full = gathered(net)
        for i, fqn in enumerate(("before.weight", "expert.weight", "pair.0.weight", "pair.1.weight")):
            expected = quantize(_value(K, seed=i), MXFP8BlockScaling())
            assert_same_bytes(full[fqn]["payload"], expected.payload, fqn)
        net(batch(round_)).float().sum().backward()


@sampled("world_size", [1, 2], [2])
def test_nested_and_grouped_fsdp_modules_and_ignored_parameters(world_size: int) -> None:
    run_ranks(world_size, _nested)


# -- writing ---------------------------------------------------------------------------------------------------


def _in_place(linear: nn.Linear, weight: Any, bias: Tensor) -> None:
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)


def _through_data(linear: nn.Linear, weight: Any, bias: Tensor) -> None:
    linear.weight.data.copy_(weight)
    linear.bias.data.copy_(bias)


def _replaced(linear: nn.Linear, weight: Any, bias: Tensor) -> None:
    linear.weight = nn.Parameter(weight.clone())
    linear.bias = nn.Parameter(bias.clone())


def _assigned_data(linear: nn.Linear, weight: Any, bias: Tensor) -> None:
    linear.weight.detach().copy_(weight)
    linear.bias.data = bias.clone()


def _part_by_part(linear: nn.Linear, weight: Any, bias: Tensor) -> None:
    q = weight if isinstance(weight, QuantizedTensor) else quantize(weight, linear.weight.recipe)
    for name, part in linear.weight.parts().items():
        part.copy_(q.parts()[name])
    linear.bias[:1].copy_(bias[:1])
    linear.bias[1:].copy_(bias[1:])


WAYS: dict[str, Callable[[nn.Linear, Any, Tensor], None]] = {
    "in place": _in_place,
    "through .data": _through_data,
    "replaced": _replaced,
    "assigned .data": _assigned_data,
    "part by part": _part_by_part,
}


def _stores_what_was_written(name: str, shape: tuple[int, ...]) -> None:
    net = shard(build(RECIPES[name], rows_for(name)), mesh=mesh_of(*shape))
    group = net.head.weight.device_mesh.get_group("shard")
    x = batch(0, rank=0)
    net(x)
    net.reshard()
    for seed, (way, write) in enumerate(WAYS.items()):
        before = snapshot(net)
        expected = {}
        with unsharded(net, writeback=True), torch.no_grad():
            for index, block in enumerate(net.blocks):
                rows = block.linear.out_features
                dense, bias = 3 * _value(rows, seed=10 * seed + index), _value(1, seed=index)[0, :1].repeat(rows)
                q = quantize(dense, RECIPES[name])
                given = q if (seed + index) % 2 else dense  # quantized values and dense ones
                write(block.linear, given, bias)
                expected[f"blocks.{index}.linear.weight"] = parts_of(q)
                expected[f"blocks.{index}.linear.bias"] = bias
            if way == "replaced":  # by a dense weight, which is quantized on its way into the shards
                net.blocks[0].linear.weight = nn.Parameter(quantize(net.blocks[0].linear.weight, RECIPES[name]))
            inside = net.blocks[0].forward(x)
        _assert_sharded(net, way)
        full = gathered(net)
        for fqn, want in expected.items():
            if not isinstance(want, dict):
                assert_same_bytes(full[fqn], want, f"{way}: {fqn}")
                continue
            for part, bytes_ in want.items():
                values = bytes_.repeat(full[fqn][part].shape) if bytes_.ndim == 0 else bytes_
                assert_same_bytes(full[fqn][part], values, f"{way}: {fqn}.{part}")
        untouched = {key: value for key, value in before.items() if key.startswith(("norm", "head"))}
        now = {key: value for key, value in snapshot(net).items() if key in untouched}
        assert_same_snapshot(now, untouched, way)
        # FSDP goes on with the new values, and with its own buffers
        assert_gathers_exactly(net, way, group, full=full)
        with torch.no_grad():
            assert_same_bytes(net.blocks[0](x), inside, f"{way}: forward afterwards")
        net(x).float().square().mean().backward()
        assert all(param.grad is not None for param in net.parameters())


# Every format of rows somewhere: most on three ranks, where the shards of all of them are uneven.
MESHES: list[tuple[tuple[int, ...], tuple[str, ...]]] = [
    ((1,), ("float8_tensor", "nvfp4")),
    ((2,), ("mxfp8", "float8_tensor")),
    ((3,), ("float8_row", "float8_tensor", "mxfp4", "nvfp4")),
    ((4,), ("int4_32", "nvfp4")),
    ((2, 2), ("mxfp8", "nvfp4")),
]


@sampled(("shape", "recipes"), MESHES, [MESHES[2], MESHES[4]])
def test_writeback_stores_every_way_of_writing(shape: tuple[int, ...], recipes: tuple[str, ...]) -> None:
    run_ranks_each(math.prod(shape), recipes, _stores_what_was_written, shape)


def _refuses_unstored_changes(way: str) -> None:
    net = _model("nvfp4")
    before = snapshot(net)
    full = gathered(net)
    names = ["blocks.0.linear.weight", "blocks.0.linear.bias"]
    with _raises(RuntimeError, "writeback=True", *names), unsharded(net), torch.no_grad():
        linear = net.blocks[0].linear
        WAYS[way](linear, _value(linear.out_features), torch.ones(linear.out_features, dtype=torch.bfloat16))
    _assert_sharded(net, way)
    assert_same_snapshot(snapshot(net), before, way)
    for fqn, parts in gathered(net).items():
        if isinstance(parts, dict):
            for name, part in parts.items():
                assert_same_bytes(part, full[fqn][name], f"{way}: gathered {fqn}.{name}")
        else:
            assert_same_bytes(parts, full[fqn], f"{way}: gathered {fqn}")


@sampled("world_size", [1, 2], [2])
def test_changes_without_writeback_raise_by_name_and_leave_the_shards(world_size: int) -> None:
    run_ranks_each(world_size, WAYS, _refuses_unstored_changes)


def _reading_is_no_change(param_dtype: torch.dtype | None) -> None:
    """Reads of every kind, on dtypes whose gathered value is another than the shard's."""
    net = build(RECIPES["float8_tensor"], rows_for("float8_tensor"))
    net.norm.float()
    fully_shard(net.norm, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    shard(net)
    with torch.no_grad():
        local(net.norm.weight).fill_(1 / 3)
        if dist.get_rank() == 0:
            local(net.norm.weight)[:1] = torch.nan
    x = batch(0)
    with unsharded(net):
        net.blocks[0].forward(x).sum().backward()
        for param in net.parameters():
            param.detach().view(-1)
            param.data.clone()
        net.blocks[0].linear.weight.dequantize().zero_()
        net.blocks[0](x)  # a complete forward shards it again, which is no change either
    with unsharded(net, writeback=True):
        for param in net.parameters():
            param.detach().clone()
    _assert_sharded(net, "after reading")


def test_reading_is_never_taken_for_a_change() -> None:
    for world_size in (1, 2):
        run_ranks_each(world_size, (None, torch.bfloat16), _reading_is_no_change)


def _keeps_full_precision() -> None:
    net = Net((5,), dtype=torch.float32)
    fully_shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with torch.no_grad():
        for param in net.parameters():
            local(param).normal_()
    before = snapshot(net)
    with unsharded(net, writeback=True), torch.no_grad():
        assert net.head.weight.dtype == torch.bfloat16
        net.head.bias.fill_(1 / 3)
    after = snapshot(net)
    written = after.pop("head.bias")
    before.pop("head.bias")
    assert_same_snapshot(after, before, "untouched fp32 shards")
    third = torch.full_like(written, 1 / 3).bfloat16().float()
    assert_same_bytes(written, third, "the one that was written")


def test_under_mixed_precision_untouched_shards_keep_their_bits() -> None:
    for world_size in (1, 2):
        run_ranks(world_size, _keeps_full_precision)


def _raises_and_stays_whole() -> None:
    net = _model("nvfp4")
    before = snapshot(net)

    def check(what: str) -> None:
        _assert_sharded(net, what)
        assert_same_snapshot(snapshot(net), before, what)

    linear = net.blocks[0].linear
    with _raises(ValueError, "blocks.0.linear.weight", "(7, 64)", "(112, 64)"), unsharded(net, writeback=True):
        net.head.bias.detach().zero_()  # is not stored either
        linear.weight = nn.Parameter(_value(7))
    check("another shape")
    with _raises(ValueError, "blocks.0.linear.bias", "gone"), unsharded(net, writeback=True):
        linear.bias = None
    check("no parameter")
    with _raises(NotImplementedError, "copy_", "nn.Parameter"), unsharded(net, writeback=True):
        linear.weight.data = _value(112)
    check(".data of a quantized weight")
    for writeback in (True, False):
        with (
            _raises(RuntimeError, "linear.weight", "lost" if writeback else "writeback=True"),
            unsharded(net.blocks[0], writeback=writeback),
        ):
            linear.weight.detach().copy_(_value(112))
            net.state_dict()
            net.blocks[0].reshard()
        check("sharded inside")
    net(batch(0)).float().sum().backward()


def test_what_can_not_be_stored_raises_by_name_and_stores_nothing() -> None:
    for world_size in (1, 2):
        run_ranks(world_size, _raises_and_stays_whole)


def _works_under_inference_mode(name: str) -> None:
    net = _model(name)
    x = batch(0)
    expected = net(x).detach().clone()
    with torch.inference_mode():
        assert_same_bytes(net(x).clone(), expected, "forward after a normal one")
    fresh = _model(name)
    with torch.inference_mode():
        assert_same_bytes(fresh(x).clone(), expected, "the first forward")
        with unsharded(fresh.blocks[0], writeback=True):
            rows = fresh.blocks[0].linear.out_features
            fresh.blocks[0].linear.weight.copy_(_value(rows))
            inside = fresh.blocks[0].forward(x)
        assert_same_bytes(fresh.blocks[0](x).clone(), inside.clone(), "after a write")
        full = gathered(fresh)["blocks.0.linear.weight"]
        assert_same_bytes(full["payload"], quantize(_value(rows), RECIPES[name]).payload, "stored")


# On one rank FSDP2 cannot unshard twice under it, dense models included.
@pytest.mark.parametrize("world_size", [2, 3])
def test_inference_mode(world_size: int) -> None:
    run_ranks_each(world_size, ("mxfp8", "nvfp4"), _works_under_inference_mode)


def _data_write_into_the_rows_of_one_rank() -> None:
    torch.manual_seed(0)
    net = fully_shard(nn.Linear(64, 32, bias=False))
    with unsharded(net):
        net.weight.data[:2].fill_(9.0)  # rows of rank 0, uncounted by any version counter


def test_a_write_that_only_one_rank_has_rows_of_raises_on_all_ranks() -> None:
    errors = run_ranks_catching(2, _data_write_into_the_rows_of_one_rank)
    assert all("parameters were changed inside unsharded(writeback=False): weight" in error for error in errors), errors
