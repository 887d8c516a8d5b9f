"""torch's state-dict functions on quantized models: dense weights become quantize-then-shard, bytes stay bytes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_hooks import sync_scales, unsharded
from qtensor import (
    MasterWeightOptimizer,
    QuantizedTensor,
    high_precision_init_val,
    quantize,
    quantize_,
    quantized_model_init,
)
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.registry import tensor_wide
from tests.fsdp_hooks.cases import (
    HANDS,
    RECIPES,
    ROW_RECIPES,
    STAND_INS,
    TENSOR_WIDE,
    Collectives,
    K,
    Net,
    assert_equals_reference,
    assert_gathers_exactly,
    assert_same_bytes,
    batch,
    build,
    cuts_blocks,
    gathered,
    local,
    mesh_of,
    parts_of,
    quantized,
    rows_for,
    shard,
)
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each
from tests.sampling import halves, sampled

FULL = StateDictOptions(full_state_dict=True)
FULL_RUN = pytest.mark.full
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def set_full(net: nn.Module, state: dict[str, Any], options: StateDictOptions) -> None:
    with warnings.catch_warnings():  # torch asks itself for a deprecated default where all parameters are on meta
        warnings.filterwarnings("ignore", "`_get_pg_default_device` will be deprecated", UserWarning)
        warnings.filterwarnings("ignore", "Multiple backends are registered with this ProcessGroup", UserWarning)
        set_model_state_dict(net, state, options=options)


def dense_model(name: str) -> Net:
    """A bf16 model whose shards, cut by rows, have very different largest values."""
    torch.manual_seed(7)
    net = Net(rows_for(name), head=rows_for(name)[0])
    with torch.no_grad():
        for param in net.parameters():
            if param.ndim == 2:
                param.mul_(torch.logspace(-2, 1, param.shape[0])[:, None])
    return net


def dense_state(name: str) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in dense_model(name).state_dict().items()}


def reference_of(name: str, *, storage: str = "quantized") -> Net:
    """The dense model quantized as a whole."""
    with quantized_model_init(RECIPES[name], storage=storage):
        net = Net(rows_for(name), head=rows_for(name)[0])
    net.load_state_dict(dense_state(name))
    return net


def sharded(name: str, *, meta: bool = False, **init: Any) -> Net:
    if not meta:
        return shard(build(RECIPES[name], rows_for(name), seed=3, **init))
    with torch.device("meta"), quantized_model_init(RECIPES[name], **init):
        net = Net(rows_for(name), head=rows_for(name)[0])
    for block, its in zip(net.blocks, dense_model(name).blocks, strict=True):
        block.register_buffer("mix", its.mix, persistent=False)
    return shard(net)


def distributed(state: dict[str, Tensor], net: nn.Module) -> dict[str, Any]:
    """The dense state dict as DTensors placed as the model's parameters are."""
    params: dict[str, Any] = dict(net.named_parameters())
    return {
        key: distribute_tensor(value, params[key].device_mesh, params[key].placements, src_data_rank=None)
        for key, value in state.items()
    }


def loads_dense(name: str, how: str, *, meta: bool, storage: str) -> None:
    net, state = sharded(name, meta=meta, storage=storage), dense_state(name)
    with Collectives() as comms:
        if how == "set_model_state_dict":
            set_full(net, state, FULL)
        else:
            net.load_state_dict(distributed(state, net), assign=meta or how == "assign")
    shared = (name in TENSOR_WIDE and dist.get_world_size() > 1) or cuts_blocks(name)
    assert comms.counts["allreduce_"] == shared, comms.counts
    kind = QuantizedTensor if storage == "quantized" else HighPrecisionWeight
    assert sum(isinstance(local(param), kind) for param in net.parameters()) == len(rows_for(name)) + 1
    reference = reference_of(name)
    assert_equals_reference(gathered(net), reference, f"{how}, meta={meta}")
    if storage == "quantized":
        assert_gathers_exactly(net, how)
    with torch.no_grad():
        assert_same_bytes(net(batch(0)), reference(batch(0)), "output")


@pytest.mark.parametrize(
    ("how", "ranks", "hands"),
    [
        ("load_state_dict", 4, (0, 1)),
        ("assign", 2, (2, 0)),
        ("set_model_state_dict", 2, (1, 2)),
        pytest.param("load_state_dict", 1, (1, 2), marks=pytest.mark.full),
        pytest.param("load_state_dict", 4, (1, 0), marks=pytest.mark.full),
        pytest.param("load_state_dict", 4, (2, 2), marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("meta", [False, True], ids=["materialised", "meta"])
def test_a_dense_state_dict_gives_the_bytes_of_quantize_then_shard(
    meta: bool, how: str, ranks: int, hands: tuple[int, int]
) -> None:
    """Every way, and either kind of model, has formats with a scale to agree on, square and packed ones.

    `make test-all` has all formats on 4 ranks.
    """
    run_ranks_each(ranks, HANDS[hands[meta]], loads_dense, how, meta=meta, storage="quantized")


@pytest.mark.parametrize("how", ["load_state_dict", "assign", "set_model_state_dict"])
@pytest.mark.parametrize("meta", [False, True], ids=["materialised", "meta"])
def test_a_dense_state_dict_into_dense_shards_is_agreed_on_too(meta: bool, how: str) -> None:
    run_ranks_each(2, ("float8_tensor", "nvfp4"), loads_dense, how, meta=meta, storage="high_precision")


def loads_fp32(name: str, storage: str) -> None:
    """Values that bf16 cannot hold: quantized from fp32, but stored in bf16 where the shard is dense."""
    net, state = sharded(name, storage=storage), dense_state(name)
    state = {key: value.float() * 1.0009765625 for key, value in state.items()}
    net.load_state_dict(distributed(state, net))
    reference = build(RECIPES[name], rows_for(name), seed=3, storage=storage)
    reference.load_state_dict(state)
    with torch.no_grad():
        assert_same_bytes(net(batch(0)), reference(batch(0)), "output")


@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
def test_fp32_values_into_a_bf16_model_are_agreed_on_as_they_are_stored(storage: str) -> None:
    run_ranks_each(2, ("float8_tensor", "nvfp4"), loads_fp32, storage)


def loads_under_hsdp(name: str) -> None:
    net = shard(build(RECIPES[name], rows_for(name), seed=3), mesh=mesh_of(2, 2))
    net.load_state_dict(distributed(dense_state(name), net))
    assert_equals_reference(gathered(net), reference_of(name), "hsdp")


def loads_wrapped(name: str) -> None:
    net = sharded(name)
    model = nn.ModuleDict({"policy": net})
    state = {f"policy.{key}": value for key, value in distributed(dense_state(name), net).items()}
    model.load_state_dict(state)
    assert_equals_reference(gathered(net), reference_of(name), "wrapped")


def loads_a_copy(name: str) -> None:
    net = copy.deepcopy(build(RECIPES[name], rows_for(name), seed=3))
    shard(net)
    net.load_state_dict(distributed(dense_state(name), net))
    assert_equals_reference(gathered(net), reference_of(name), "deep copy")


def loads_after_quantize_(name: str) -> None:
    net = dense_model(name)
    quantize_(net, RECIPES[name], include=["blocks.*"])
    quantize_(net, RECIPES[name], include=["head"])
    shard(net)
    net.load_state_dict(distributed(dense_state(name), net))
    assert_equals_reference(gathered(net), reference_of(name), "quantize_")


def loads_a_part(name: str) -> None:
    """Only some names: what is absent keeps its bytes."""
    net = sharded(name)
    sync_scales(net)
    before = {fqn: parts_of(q) for fqn, _, q in quantized(net)}
    state = {key: value for key, value in distributed(dense_state(name), net).items() if key.startswith("head")}
    net.load_state_dict(state, strict=False)
    for fqn, _, q in quantized(net):
        for part, value in q.parts().items():
            if not fqn.startswith("head"):
                assert_same_bytes(value, before[fqn][part], f"{fqn}.{part}")
    head = gathered(net)["head.weight"]
    for part, value in parts_of(reference_of(name).head.weight).items():
        assert_same_bytes(head[part], value.repeat(head[part].shape) if value.ndim == 0 else value, part)


@pytest.mark.parametrize(
    ("case", "ranks"),
    [(loads_under_hsdp, 4), (loads_wrapped, 2), (loads_a_copy, 2), (loads_after_quantize_, 2), (loads_a_part, 2)],
)
def test_the_agreement_is_found_from_wherever_a_model_is_loaded(case: Any, ranks: int) -> None:
    run_ranks_each(ranks, ("float8_tensor", "nvfp4"), case)


def preserves_what_was_loaded(name: str) -> None:
    net = sharded(name, preserve_high_precision_init_val=True)
    state = distributed(dense_state(name), net)
    net.load_state_dict(state)
    for fqn, param, _ in quantized(net):
        assert_same_bytes(high_precision_init_val(param), local(state[fqn]), fqn)
    optimizer = MasterWeightOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    for fqn, param, _ in quantized(net):
        net(batch(0)).sum().backward()
        optimizer.step()
        assert fqn
        assert optimizer.state[param]["master_weight"].dtype == torch.float32
        break


def test_a_preserved_initial_value_is_the_loaded_one() -> None:
    run_ranks(2, preserves_what_was_loaded, "nvfp4")


def broadcasts_dense(name: str, *, meta: bool) -> None:
    net = sharded(name, meta=meta)
    set_full(net, dense_state(name) if dist.get_rank() == 0 else {}, FROM_RANK_0)
    assert sum(1 for _ in quantized(net)) == len(rows_for(name)) + 1
    assert_gathers_exactly(net, "broadcast")  # with the scales of the shards, whatever they are
    reference = reference_of(name)
    if name not in TENSOR_WIDE or meta:  # a meta-init model assigns, through the hook
        assert_equals_reference(gathered(net), reference, "broadcast")
    sync_scales(net)
    for fqn, _, q in quantized(net):
        if (wide := tensor_wide(q.recipe)) is not None:
            full: Any = dict(reference.named_parameters())[fqn]
            assert torch.equal(getattr(q, wide), getattr(full, wide)), fqn


@halves("names", ROW_RECIPES, ("float8_tensor", "mxfp8"))
@pytest.mark.parametrize("meta", [False, True], ids=["materialised", "meta"])
def test_dense_values_broadcast_from_rank_0_gather_exactly(meta: bool, names: tuple[str, ...]) -> None:
    run_ranks_each(2, names, broadcasts_dense, meta=meta)


def refuses_to_broadcast(name: str) -> None:
    net = sharded(name)
    state = get_model_state_dict(net, options=FULL)
    set_full(net, state, FROM_RANK_0)


def test_quantized_values_are_not_broadcast_as_if_they_were_dense() -> None:
    errors = run_ranks_catching(1, refuses_to_broadcast, "mxfp8")  # others would wait for what rank 0 never sends
    assert "With broadcast_from_rank0=True: give every rank the full state dict and leave that option off" in errors[0]


def refuses_to_replicate_over_all_ranks(name: str) -> None:
    net = shard(build(RECIPES[name], rows_for(name)), mesh=mesh_of(2, 1))
    set_full(net, dict(build(RECIPES[name], rows_for(name)).state_dict()), FULL)


def test_a_mesh_dim_that_replicates_over_all_ranks_is_refused_with_the_way_out() -> None:
    """torch broadcasts there as it does from rank 0; `test_a_whole_state_dict_fills_replicas` goes the way out."""
    for error in run_ranks_catching(2, refuses_to_replicate_over_all_ranks, "mxfp8"):
        assert "to all ranks is not defined, for they may expect dense values" in error
        assert "distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)" in error


def fills_replicas(name: str, storage: str) -> None:
    source = build(RECIPES[name], rows_for(name), seed=5)
    for shape, way_out in (((2, 2), False), ((4, 1), True)):
        net = shard(build(RECIPES[name], rows_for(name), seed=11, storage=storage), mesh=mesh_of(*shape))
        state: dict[str, Any] = dict(source.state_dict())
        if way_out:
            params: dict[str, Any] = dict(net.named_parameters())
            for key, value in state.items():
                param = params[key]
                state[key] = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
            net.load_state_dict(state)
        else:
            set_full(net, state, FULL)
        held = dict(net.named_parameters())
        for fqn, param in source.named_parameters():
            full = held[fqn].full_tensor().detach()
            if isinstance(param, QuantizedTensor) and storage == "quantized":
                for part, value in param.parts().items():
                    assert_same_bytes(full.parts()[part], value, f"{fqn}.{part}")
            else:
                wanted = param.dequantize() if isinstance(param, QuantizedTensor) else param.detach()
                assert_same_bytes(getattr(full, "dense", full), wanted, fqn)


@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
def test_a_whole_state_dict_fills_replicas(storage: str) -> None:
    """HSDP; a shard with storage="high_precision" takes the values of a quantized entry."""
    run_ranks_each(4, HANDS[1], fills_replicas, storage)


def full_and_back(name: str, cpu_offload: bool) -> None:
    net = sharded(name)
    sync_scales(net)
    state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload))
    if cpu_offload and dist.get_rank() != 0:
        assert not state
    full = gathered(net)
    for fqn, _, _ in quantized(net):
        if state:
            assert isinstance(state[fqn], QuantizedTensor)
            for part, value in state[fqn].parts().items():
                expected = full[fqn][part] if value.ndim else full[fqn][part].flatten()[0]
                assert_same_bytes(value, expected, f"{fqn}.{part}")
    if cpu_offload:
        return
    other = shard(build(RECIPES[name], rows_for(name), seed=11))
    set_model_state_dict(other, state, options=FULL)
    for fqn, parts in gathered(other).items():
        for part, value in parts.items() if isinstance(parts, dict) else [("", parts)]:
            assert_same_bytes(value, full[fqn][part] if part else full[fqn], f"{fqn}.{part}")


@pytest.mark.parametrize(
    ("ranks", "cpu_offload", "names"),
    [
        pytest.param(3, False, tuple(STAND_INS), id="3"),
        pytest.param(2, True, tuple(HANDS[0]), id="2-offloaded"),
        pytest.param(3, False, tuple(name for name in RECIPES if name not in STAND_INS), id="3-others", marks=FULL_RUN),
        pytest.param(1, False, tuple(HANDS[1]), id="1", marks=FULL_RUN),
        pytest.param(1, True, tuple(HANDS[2]), id="1-offloaded", marks=FULL_RUN),
        pytest.param(2, False, tuple(HANDS[2]), id="2", marks=FULL_RUN),
        pytest.param(3, True, tuple(HANDS[1]), id="3-offloaded", marks=FULL_RUN),
    ],
)
def test_a_full_state_dict_is_quantized_and_loads_bit_for_bit(
    ranks: int, cpu_offload: bool, names: tuple[str, ...]
) -> None:
    """On 3 ranks, where shards are uneven, and back into the model; `make test-all` has all formats there."""
    run_ranks_each(ranks, names, full_and_back, cpu_offload)


def sharded_and_back(name: str, assign: bool) -> None:
    net, other = sharded(name), shard(build(RECIPES[name], rows_for(name), seed=11))
    sync_scales(net)
    with Collectives() as comms:
        if assign:
            other.load_state_dict(get_model_state_dict(net), assign=True)
        else:
            set_model_state_dict(other, get_model_state_dict(net))
    shared = name in TENSOR_WIDE or cuts_blocks(name)
    assert comms.counts["allreduce_"] == shared, "quantized values need no agreement; ranks prove that they have them"
    full = gathered(net)
    for fqn, parts in gathered(other).items():
        for part, value in parts.items() if isinstance(parts, dict) else [("", parts)]:
            assert_same_bytes(value, full[fqn][part] if part else full[fqn], f"{fqn}.{part}")


@sampled(("assign", "hand"), [(False, 0), (False, 1), (False, 2), (True, 0)], [(False, 1), (True, 0)])
def test_a_sharded_state_dict_loads_bit_for_bit(assign: bool, hand: int) -> None:
    run_ranks_each(2, HANDS[hand], sharded_and_back, assign)


def optimizer_full_and_back(name: str, cls: Any) -> None:
    def made(seed: int) -> tuple[Net, Any]:
        net = shard(build(RECIPES[name], rows_for(name), seed=seed))
        if cls is MasterWeightOptimizer:
            return net, MasterWeightOptimizer(torch.optim.AdamW, net.parameters(), lr=0.01)
        return net, cls(net.parameters(), lr=0.01)

    def step(net: Net, optimizer: Any, number: int) -> None:
        net(batch(number)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    net, optimizer = made(3)
    step(net, optimizer, 0)
    sync_scales(net)
    states = [get_model_state_dict(net, options=FULL), get_optimizer_state_dict(net, optimizer, options=FULL)]
    for values in states[1]["state"].values():
        for value in values.values():
            assert not isinstance(value, QuantizedTensor), "optimizer state is dense"
    states = copy.deepcopy(states)
    other, its = made(4)
    set_model_state_dict(other, states[0], options=FULL)
    set_optimizer_state_dict(other, its, states[1], options=FULL)
    step(net, optimizer, 1)
    step(other, its, 1)
    full = gathered(net)
    for fqn, parts in gathered(other).items():
        for part, value in parts.items() if isinstance(parts, dict) else [("", parts)]:
            assert_same_bytes(value, full[fqn][part] if part else full[fqn], f"{fqn}.{part}")


@pytest.mark.parametrize("cls", [MasterWeightOptimizer, torch.optim.AdamW])
def test_optimizer_state_dicts_go_full_and_back(cls: Any) -> None:
    run_ranks_each(2, ("float8_row", "nvfp4"), optimizer_full_and_back, cls)


def keeps_bytes_through_dtensors(name: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    q = quantize(torch.randn(96, 64).to(torch.bfloat16), RECIPES[name])
    for source in (None, 0):
        d = distribute_tensor(q, mesh, [Shard(0)], src_data_rank=source)
        for full in (d.full_tensor(), d.redistribute(mesh, [Replicate()]).to_local()):
            assert isinstance(full, QuantizedTensor)
            for part, value in q.parts().items():
                assert_same_bytes(full.parts()[part], value, f"{part}, source {source}")
    again = d.redistribute(mesh, [Replicate()]).redistribute(mesh, [Shard(0)])
    for part, value in local(d).parts().items():
        assert_same_bytes(local(again).parts()[part], value, part)


def test_distribute_full_tensor_and_redistribute_keep_the_bytes() -> None:
    for ranks, names in ((1, STAND_INS), (3, RECIPES)):
        run_ranks_each(ranks, names, keeps_bytes_through_dtensors)


def test_a_plain_model_loads_dense_values_in_both_ways() -> None:
    for name in RECIPES:
        for assign in (False, True):
            net = build(RECIPES[name], rows_for(name), seed=3)
            net.load_state_dict(dense_state(name), assign=assign)
            for (fqn, param), dense in zip(net.named_parameters(), dense_model(name).parameters(), strict=True):
                if isinstance(param, QuantizedTensor):
                    for part, value in quantize(dense, RECIPES[name]).parts().items():
                        assert_same_bytes(param.parts()[part], value, f"{fqn}.{part}")
                else:
                    assert not fqn.endswith("linear.weight")


def test_shapes_that_differ_stay_torchs_own_error() -> None:
    net = build(RECIPES["mxfp8"], (32,))
    state = {key: value[:16] if key == "head.weight" else value for key, value in dense_state("mxfp8").items()}
    with pytest.raises(RuntimeError, match=r"size mismatch for head.weight"):
        net.load_state_dict(state, strict=False)


def unsharded_after_load(name: str) -> None:
    net = sharded(name)
    net.load_state_dict(distributed(dense_state(name), net))
    with unsharded(net):
        assert isinstance(net.head.weight, QuantizedTensor)
    assert isinstance(net.head.weight, DTensor)
    fully = [module for module in net.modules() if hasattr(module, "unshard")]
    assert len(fully) == len(rows_for(name)) + 1
    assert callable(fully_shard)


def test_a_loaded_model_goes_on_as_before() -> None:
    run_ranks(2, unsharded_after_load, "float8_tensor")


def loads_after_an_eval(name: str, storage: str, assign: bool) -> None:
    """A forward without backward leaves the root's own weights gathered."""
    net = sharded(name, storage=storage)
    with torch.no_grad():
        net(batch(0))
    net.load_state_dict(distributed(dense_state(name), sharded(name)), assign=assign)
    kind = QuantizedTensor if storage == "quantized" else HighPrecisionWeight
    assert isinstance(local(net.head.weight), kind)
    assert_equals_reference(gathered(net), reference_of(name), "after an eval")


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
def test_a_load_after_an_eval_finds_the_shards(storage: str, assign: bool) -> None:
    run_ranks_each(2, ("float8_tensor", "nvfp4"), loads_after_an_eval, storage, assign)


def loads_one_block(name: str, assign: bool) -> None:
    net = sharded(name)
    state = {
        key.removeprefix("blocks.0."): value
        for key, value in distributed(dense_state(name), net).items()
        if key.startswith("blocks.0.")
    }
    net.blocks[0].load_state_dict(state, assign=assign)
    found = gathered(net)["blocks.0.linear.weight"]
    for part, value in parts_of(reference_of(name).blocks[0].linear.weight).items():
        assert_same_bytes(found[part], value.repeat(found[part].shape) if value.ndim == 0 else value, part)


@pytest.mark.parametrize("assign", [False, True])
def test_a_part_of_a_model_loads_like_the_whole(assign: bool) -> None:
    run_ranks_each(2, ("float8_tensor", "nvfp4"), loads_one_block, assign)


@pytest.mark.parametrize("storage", ["quantized", "high_precision"])
def test_models_made_of_deep_copies_are_loaded_like_others(storage: str) -> None:
    recipe = RECIPES["float8_tensor"]
    with quantized_model_init(recipe, storage=storage):
        template = nn.Linear(K, 32)
        net = nn.ModuleList(copy.deepcopy(template) for _ in range(2))
    dense = {
        key: torch.randn_like(value.dequantize() if storage == "quantized" else value.dense)
        for key, value in net.state_dict().items()
        if key.endswith("weight")
    }
    net.load_state_dict(dense, strict=False, assign=True)
    for index, linear in enumerate(net):
        kind = QuantizedTensor if storage == "quantized" else HighPrecisionWeight
        assert isinstance(linear.weight, kind)
        q = linear.weight if storage == "quantized" else linear.weight.quantize()
        for part, value in quantize(dense[f"{index}.weight"], recipe).parts().items():
            assert_same_bytes(q.parts()[part], value, part)


def loads_from_another_mesh(assign: bool) -> None:
    net = sharded("mxfp8")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("elsewhere",))
    state = {
        key: distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
        for key, value in dense_state("mxfp8").items()
    }
    net.load_state_dict(state, assign=assign)


@pytest.mark.parametrize("assign", [False, True])
def test_entries_on_another_mesh_are_refused_by_name(assign: bool) -> None:
    for error in run_ranks_catching(2, loads_from_another_mesh, assign):
        assert error.startswith("ValueError: blocks.0.linear.weight: the state dict holds a DTensor on DeviceMesh(")
        assert error.endswith("distribute it on the parameter's mesh")
