"""merge_ on sharded weights: the bytes, and the report, of one process, whatever the sharding; errors on all ranks.

The reference is the quantization of the full sum in one process. Ranks hold rows that are no multiple of a block, fewer
rows than a block, or none.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcp_adapters import expand
from fsdp_hooks import unsharded
from qtensor import LowRankUpdate, QuantizedTensor, merge_, quantize, quantized_model_init
from tests import recipes
from tests.fsdp_hooks.cases import Collectives, assert_same_bytes, local, mesh_of
from tests.fsdp_hooks.test_cut_blocks import assert_bytes_of, piece
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each
from tests.sampling import halves, sampled

RECIPES = recipes.MAIN | recipes.WITH_HISTORY
MESHES: dict[str, tuple[Any, ...]] = {
    "1 rank": (1,),
    "2 ranks": (2,),
    "3 ranks": (3,),
    "HSDP": (2, 2),
    "FSDP x TP": (2, 2, "tp"),
}


def ranks(shape: tuple[Any, ...]) -> int:
    return shape[0] if len(shape) == 1 else 4


class Net(nn.Module):
    """`up` and `down` are cut by tensor parallelism, `small` leaves ranks without rows, `table` is dense."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        facts = recipes.facts(recipe)
        step = facts.block if facts.square else 4
        self.up = nn.Linear(256, 9 * step, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(512, 5 * step, dtype=torch.bfloat16)
        self.small = nn.Linear(256, step if facts.square and not facts.ragged else 2, bias=False, dtype=torch.bfloat16)
        self.table = nn.Embedding(7, 32, dtype=torch.bfloat16)


def build(name: str, storage: str = "quantized") -> Net:
    torch.manual_seed(0)
    with quantized_model_init(RECIPES[name], storage=storage):
        net = Net(RECIPES[name])
    with torch.no_grad():
        for number, linear in enumerate((net.up, net.down, net.small)):  # every row has another magnitude
            rows = torch.linspace(-3, 3, linear.weight.shape[0])[:, None].exp2()
            linear.weight.copy_(torch.randn(linear.weight.shape) * (rows if number else rows.flip(0)))
    return net


def sharded(name: str, shape: tuple[Any, ...], storage: str = "quantized") -> Net:
    net = build(name, storage)
    if shape[-1] != "tp":
        return fully_shard(net, mesh=mesh_of(*shape))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None)
    return fully_shard(net, mesh=mesh["dp"])


def full_update(name: str, like: Tensor) -> LowRankUpdate:
    generator = torch.Generator().manual_seed(len(name))
    a, b = torch.randn(5, like.shape[-1], generator=generator), torch.randn(like.shape[0], 5, generator=generator)
    return LowRankUpdate(a=a.bfloat16(), b=b.bfloat16(), scaling=0.3)


def updates_of(reference: nn.Module) -> dict[str, Any]:
    """Factors for all weights but one; that and a bias get callables."""
    found: dict[str, Any] = {fqn: full_update(fqn, p) for fqn, p in reference.named_parameters() if p.ndim == 2}
    values = torch.linspace(-1, 1, reference.get_parameter("down.bias").shape[0])
    found["down.bias"] = lambda index: values[index]
    factors = found["small.weight"]
    found["small.weight"] = lambda index: factors(index).double()
    return found


def expected_of(reference: nn.Module, updates: dict[str, Any]) -> dict[str, Any]:
    """What full_tensor() of each parameter should be after the merge, by plain arithmetic."""
    found = {}
    for name, param in reference.named_parameters():
        held = param.detach()
        change = updates[name](tuple(slice(0, size) for size in held.shape)).float()
        if isinstance(held, QuantizedTensor):
            found[name] = quantize(held.dequantize(torch.float32) + change, held.recipe)
        else:
            found[name] = (held.float() + change).bfloat16()
    return found


def _merges(name: str, shape: tuple[Any, ...]) -> None:
    reference, net = build(name), sharded(name, shape)
    updates = updates_of(reference)
    expected = expected_of(reference, updates)
    report = merge_(net, updates)
    quantized = {fqn: one for fqn, one in expected.items() if isinstance(one, QuantizedTensor)}
    assert_bytes_of(net, quantized, f"{name} on {shape}")
    for fqn in expected.keys() - quantized.keys():
        param: Any = net.get_parameter(fqn)
        assert_same_bytes(local(param), piece(expected[fqn], param), f"{name} on {shape}: {fqn}")
    alone = merge_(reference, updates)
    for ours, its in zip(report.weights, alone.weights, strict=True):
        assert (ours.name, ours.elements, ours.changed) == (its.name, its.elements, its.changed)
        # sums of at most 590000 terms in another order: 590000 * 2^-53 < 1e-10
        for figure in ("survived", "update_norm", "merged_norm", "error_norm"):
            assert getattr(ours, figure) == pytest.approx(getattr(its, figure), rel=1e-10), (name, shape, figure)


# In `make test` each format on one mesh. What is cut and agreed on depends on mesh and trait, so each of these meshes
# has a tensor-wide, a square and a packed format.
DEALT: dict[tuple[Any, ...], Any] = {
    (3,): recipes.HANDS[1] | recipes.WITH_HISTORY,
    (2, 2): recipes.HANDS[2],
    (2, 2, "tp"): recipes.HANDS[0],
}
DEALT_OUT = [(shape, tuple(DEALT[shape])) for shape in DEALT]
ON_ALL = [(shape, tuple(name for name in RECIPES if name not in DEALT.get(shape, ()))) for shape in MESHES.values()]


@sampled(("shape", "names"), [*DEALT_OUT, *ON_ALL], DEALT_OUT)
def test_the_bytes_and_the_report_are_those_of_one_process(shape: Any, names: tuple[str, ...]) -> None:
    run_ranks_each(ranks(shape), names, _merges, shape)


STACK = (4, 96, 256)  # experts [E, N, K]


def _merges_stacks(name: str) -> None:
    """Ranks hold 24 rows, or 48 of some matrices or columns: hardly a block of any size is whole."""
    generator = torch.Generator().manual_seed(0)
    before, change = (torch.randn(STACK, generator=generator, dtype=torch.float32) for _ in range(2))
    whole = quantize(before.bfloat16(), RECIPES[name])
    expected = whole.clone()
    merge_([("experts", expected)], {"experts": lambda index: change[index]})
    for shape, placements in (((4,), [Shard(1)]), ((2, 2), [Shard(0), Shard(1)]), ((2, 2), [Shard(1), Shard(2)])):
        param = nn.Parameter(distribute_tensor(whole, init_device_mesh("cpu", shape), placements, src_data_rank=None))
        merge_([("experts", param)], {"experts": lambda index: change[index]})
        parts = expand({"experts": param})
        for part, tensor in expected.parts().items():
            found: Any = parts[f"experts.{part}"]
            assert_same_bytes(found.to_local(), piece(tensor, found), f"{name}, {placements}: {part}")


@halves("names", RECIPES, ("float8_block_square", *recipes.STAND_INS))
def test_stacked_experts_may_be_cut_anywhere(names: tuple[str, ...]) -> None:
    run_ranks_each(4, names, _merges_stacks)


def _counts(name: str, shape: tuple[Any, ...]) -> dict[str, int]:
    net = sharded(name, shape)
    with Collectives() as comms:
        merge_(net, updates_of(build(name)))
    return dict(comms.counts)


@pytest.mark.parametrize(("shape", "groups"), [((1,), 0), ((3,), 1), ((2, 2), 1), ((2, 2, "tp"), 2)], ids=str)
def test_a_merge_is_one_agreement_and_one_sum_a_group(shape: Any, groups: int) -> None:
    assert all(
        each == {"allreduce_": 2 * groups} for each in run_ranks(ranks(shape), _counts, "nvfp4_square", shape) if groups
    )


def _has_empty_and_uneven_shards(name: str) -> list[int]:
    net = sharded(name, (3,))
    return [local(param).shape[0] for param in (net.small.weight, net.table.weight)]


def test_three_ranks_have_uneven_and_empty_shards() -> None:
    assert run_ranks(3, _has_empty_and_uneven_shards, "float8_row") == [[1, 3], [1, 3], [0, 1]]


def _merges_what_is_gathered_quantized(name: str, shape: tuple[Any, ...]) -> None:
    reference, net = build(name, "high_precision"), sharded(name, shape, "high_precision")
    updates = {fqn: full_update(fqn, reference.get_parameter(fqn)) for fqn in ("up.weight", "down.weight")}
    dense: dict[str, Any] = {fqn: reference.get_parameter(fqn) for fqn in updates}
    whole = {fqn: tuple(slice(0, size) for size in param.shape) for fqn, param in dense.items()}
    wanted = {fqn: (p.dense.detach().float() + updates[fqn](whole[fqn])).bfloat16() for fqn, p in dense.items()}
    merge_(net, updates)
    for fqn, values in wanted.items():
        assert_same_bytes(local(net.get_parameter(fqn)).dense, piece(values, net.get_parameter(fqn)), fqn)
    with unsharded(net):
        for fqn, values in wanted.items():
            gathered: Any = net.get_parameter(fqn)
            for part, right in quantize(values, RECIPES[name]).parts().items():
                found = getattr(gathered, part)
                # a gathered weight has a tensor-wide part of each shard
                assert_same_bytes(found, right.expand(found.shape).contiguous(), f"{name} on {shape}: {fqn}.{part}")


GATHERED = [name for name in RECIPES if "high_precision" in recipes.facts(RECIPES[name]).storages]


@halves("names", GATHERED, ("float8_block_square", *recipes.STAND_INS))
@sampled("shape", [(3,), (2, 2)], [(3,)], ids=["3 ranks", "HSDP"])
def test_what_is_gathered_quantized_agrees_on_scales(shape: Any, names: tuple[str, ...]) -> None:
    run_ranks_each(ranks(shape), names, _merges_what_is_gathered_quantized, shape)


def _merges_after_a_forward(name: str) -> None:
    """The root's weights stay gathered behind a forward."""
    reference = build(name)
    net = sharded(name, (2,))
    updates = {"up.weight": full_update("up.weight", reference.up.weight)}
    expected = expected_of(
        reference, {fqn: updates.get(fqn, lambda index: torch.zeros(())) for fqn, _ in reference.named_parameters()}
    )
    net.unshard()
    merge_(net, updates)
    assert_bytes_of(net, {"up.weight": expected["up.weight"]}, name)


def test_what_a_forward_left_gathered_is_put_back() -> None:
    run_ranks(2, _merges_after_a_forward, "nvfp4")


# -- refusals ----------------------------------------------------------------------------------------------------------


def _held(net: nn.Module) -> dict[str, Tensor]:
    return {name: local(part).clone() for name, part in expand(dict(net.named_parameters())).items()}


def _refuses(case: str, shape: tuple[Any, ...]) -> str:
    reference, net = build("nvfp4"), sharded("nvfp4", shape)
    updates, before = updates_of(reference), _held(net)
    rank = dist.get_rank()
    right = updates["up.weight"]
    broken = right.b.clone()
    broken[0] = torch.inf
    one_row = LowRankUpdate(a=right.a, b=broken, scaling=right.scaling)  # of the first rank alone

    def fails(index: tuple[slice, ...]) -> Tensor:
        raise OSError("no such adapter") if rank == 1 else ZeroDivisionError

    cases: dict[str, dict[str, Any]] = {
        "a name": {"up.wait": right},
        "a shape": {"up.weight": LowRankUpdate(a=right.a[:, :5], b=right.b)},
        "not finite": {"up.weight": one_row},
        "a name on one rank": {"up.wait": right} if rank == 1 else {},
        "fails on one rank": {"up.weight": fails} if rank == 1 else {},
        "less on one rank": {"up.weight": None} if rank == 1 else {},
        "another scaling": {"up.weight": LowRankUpdate(a=right.a, b=right.b, scaling=1.0 + rank)},
    }
    alone = {"all of them on one rank": {}, "the only name on one rank": {"up.wait": right}}
    given = {name: update for name, update in (updates | cases.get(case, {})).items() if update is not None}
    if case in alone:
        given = alone[case] if rank == 1 else {"up.weight": right}
    error = ""
    try:
        merge_(net, given)
    except (ValueError, RuntimeError, OSError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    for name, part in _held(net).items():
        assert_same_bytes(part, before[name], name)
    merge_(net, updates)  # and the ranks are still in step
    return error


ALIKE = {
    "a name": "up.wait: no parameter",
    "a shape": "the update has shape",
    "not finite": "up.weight: the update, or",
}


@sampled(
    ("case", "shape"),
    itertools.product(ALIKE, [(2,), (2, 2), (2, 2, "tp")]),
    [("a name", (2, 2)), ("a shape", (2,)), ("not finite", (2,)), ("not finite", (2, 2, "tp"))],
)
def test_what_cannot_be_merged_is_refused_by_name_on_all_ranks(case: str, shape: Any) -> None:
    errors = run_ranks(ranks(shape), _refuses, case, shape)
    assert all(error.startswith("ValueError: merge_: ") and ALIKE[case] in error for error in errors), errors
    assert len({*errors}) == 1


RANK_1_FAILED = "RuntimeError: merge_: rank 1 failed before the ranks could agree on scales, see its error"
NOT_THE_SAME = "RuntimeError: merge_: the ranks of a group do not list the same weights"
ON_ONE_RANK = {
    "a name on one rank": (
        "merge_: rank 1 failed before the ranks could agree",
        "ValueError: merge_: up.wait: no parameter",
    ),
    "fails on one rank": ("merge_: rank 1 failed before the ranks could agree", "OSError: no such adapter"),
    "less on one rank": ("do not list the same weights", "do not list the same weights"),
    "another scaling": ("do not list the same weights", "do not list the same weights"),
    "all of them on one rank": ('only rank 0 has "up.weight: ', 'only rank 0 has "up.weight: '),
    "the only name on one rank": (
        "merge_: rank 1 failed before the ranks could agree",
        "ValueError: merge_: up.wait: no parameter",
    ),
}


@pytest.mark.parametrize("case", ON_ONE_RANK)
def test_a_rank_that_differs_or_fails_stops_all(case: str) -> None:
    first, second = run_ranks(2, _refuses, case, (2,))
    theirs, own = ON_ONE_RANK[case]
    assert theirs in first
    assert own in second
    if case == "another scaling":
        assert "update of rank 5 times 2.0" in first


def _nan_in_one_replica() -> None:
    mesh, ones = mesh_of(2, 2), torch.ones(8, 64)
    placed = {"a": [Replicate(), Shard(0)], "b": [Shard(0), Shard(1)]}
    whole = quantize(ones.to(torch.bfloat16), RECIPES["mxfp8"])
    params = {
        name: nn.Parameter(distribute_tensor(whole, mesh, places, src_data_rank=None))
        for name, places in placed.items()
    }
    factor = torch.nan if dist.get_rank() == 0 else 1.0
    merge_(params.items(), {"a": lambda index: ones[index] * factor, "b": lambda index: ones[index]})


def test_values_that_are_not_finite_in_one_replica_stop_the_others_that_it_meets() -> None:
    *replica, third, fourth = run_ranks_catching(4, _nan_in_one_replica)
    assert all(error.startswith("ValueError: merge_: a: the update, or the weight with") for error in replica)
    assert third == fourth
    assert third.startswith("ValueError: merge_: on another rank an update, or the weight with it, is not finite")


def _fails_while_weights_are_written() -> None:
    net, calls = sharded("nvfp4", (2,)), 0

    def once(index: tuple[slice, ...]) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2 and dist.get_rank() == 1:
            raise OSError("the adapter is gone")
        return torch.ones([place.stop - place.start for place in index])

    merge_(net, {"up.weight": once})


def test_a_rank_that_fails_while_weights_are_written_lets_no_other_wait() -> None:
    first, second = run_ranks_catching(2, _fails_while_weights_are_written)
    assert first == (
        "RuntimeError: merge_: another rank failed while weights were written, see its error: some weights hold the "
        "merged values and some do not; load them again"
    )
    assert second == "OSError: the adapter is gone"


def _gives_sharded_factors() -> None:
    net = sharded("nvfp4", (2,))
    table: Any = net.table.weight
    LowRankUpdate(a=table.detach(), b=torch.ones(64, 7))


def test_sharded_factors_are_refused() -> None:
    for error in run_ranks_catching(2, _gives_sharded_factors):
        assert error == (
            "TypeError: LowRankUpdate: a is a DTensor; give the full factor as a plain tensor (full_tensor() of a "
            "sharded one, dequantize() of a quantized one)"
        )


def _gives_gathered_weights() -> None:
    net = sharded("nvfp4", (2,))
    net.unshard()
    merge_([("up.weight", net.up.weight)], {"up.weight": full_update("up.weight", net.up.weight)})


def test_gathered_weights_are_refused() -> None:
    for error in run_ranks_catching(2, _gives_gathered_weights):
        assert error == (
            "ValueError: merge_: up.weight: it is gathered for a forward, not a shard; call reshard() on its FSDP "
            "module, and take it anew. No weight was written"
        )


# -- warnings ----------------------------------------------------------------------------------------------------------


def _loses_an_update() -> tuple[list[str], list[bool]]:
    """Only the rows of the last rank get a part of it, and lose it; `down` has an update that arrives."""
    reference, net = build("mxfp8"), sharded("mxfp8", (3,))
    change = torch.zeros(reference.up.weight.shape)
    change[-1] = reference.up.weight.dequantize(torch.float32)[-1] * 2.0**-7  # half a step is at least 2^-5 of a value
    updates = {
        "up.weight": lambda index: change[index],
        "down.weight": full_update("down.weight", reference.down.weight),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = merge_(net, updates)
    return [str(each.message) for each in caught], [weight.lost for weight in report.weights]


def test_all_ranks_warn_of_an_update_that_one_of_them_lost() -> None:
    for texts, lost in run_ranks(3, _loses_an_update):
        assert lost == [True, False]
        assert [text.partition(":")[0] for text in texts] == ["merge_"]
        assert "took the update back from up.weight: nearly all" in texts[0]
