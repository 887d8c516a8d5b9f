"""storage="high_precision": what is gathered and what it costs, stale agreements, refusals."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_hooks import sync_scales, unsharded
from qtensor import QuantizedTensor, quantize, quantize_, quantized_model_init
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.registry import specs_of
from tests.fsdp_hooks.cases import (
    RECIPES,
    TENSOR_WIDE,
    TRAINED,
    UNEVEN,
    Collectives,
    K,
    Net,
    assert_same_bytes,
    batch,
    bits,
    exchanged,
    gathered,
    held,
    held_since,
    local,
    mesh_of,
    parts_of,
    rows_for,
    shard,
)
from tests.fsdp_hooks.dense_shards import (
    ONE_ALL_REDUCE,
    assert_gathers,
    assert_parts,
    assert_shards,
    backward,
    build_dense,
    values,
    weights,
    whole,
)
from tests.qtensor.recipes_under_test import unit
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each
from tests.recipes import facts
from tests.sampling import sampled

# -- what is gathered --------------------------------------------------------------------------------------------------


def _alone(shard_: HighPrecisionWeight) -> dict[str, Tensor]:
    """The parts of a shard quantized by itself."""
    return parts_of(quantize(shard_.dense, shard_.recipe))


def _assert_gathers_pieces(net: nn.Module, pieces: dict[str, dict[str, Tensor]], what: str) -> None:
    """Gathered row parts are this and the other ranks' `pieces` in rank order; tensor-wide parts one value a shard."""
    full = gathered(net)
    for fqn, mine in pieces.items():
        for part, tensor in mine.items():
            everyone = [bits_ for bits_, _ in exchanged((bits(tensor), dist.get_rank()))]
            expected = torch.cat(everyone).view(tensor.dtype)
            assert_same_bytes(full[fqn][part], expected.reshape(full[fqn][part].shape), f"{what}: {fqn}.{part}")


def _unagreed_shards_are_gathered_exactly(name: str) -> None:
    net = shard(build_dense(name))
    for _ in range(2):  # a first gather, and a refill
        with torch.no_grad():
            for _, _, shard_ in weights(net):
                shard_.mul_(3.7 ** dist.get_rank())
        pieces = {fqn: _alone(shard_) for fqn, _, shard_ in weights(net)}
        _assert_gathers_pieces(net, pieces, "without sync_scales")
    if name in TENSOR_WIDE and dist.get_world_size() > 1:
        scales = gathered(net)["head.weight"]["scale" if name == "float8_tensor" else "global_scale"]
        assert len(set(scales.tolist())) > 1, "the test wants different scales"


@pytest.mark.parametrize(("world_size", "names"), TRAINED)
def test_without_an_agreement_every_shard_is_quantized_by_itself(world_size: int, names: tuple[str, ...]) -> None:
    run_ranks_each(world_size, names, _unagreed_shards_are_gathered_exactly)


def _agrees(name: str, shape: tuple[int, ...]) -> None:
    net = shard(build_dense(name), mesh=mesh_of(*shape))
    with torch.no_grad():
        for _, param, shard_ in weights(net):
            shard_.mul_(5.0 ** param.device_mesh.get_local_rank("shard"))
    full = whole(net)
    with Collectives() as comms:
        count = sync_scales(net)
    expected = int(name in TENSOR_WIDE and shape[-1] > 1), ONE_ALL_REDUCE if shape[-1] > 1 else {}  # shards meet
    assert (count, comms.counts) == expected, (name, count, comms.counts)
    assert_gathers(net, full, RECIPES[name], "agreed")
    assert_shards(net, full, "agreed")


@sampled(("world_size", "shape"), [(1, (1,)), (3, (3,)), (4, (2, 2)), (2, (2, 1))], [(3, (3,)), (2, (2, 1))])
def test_one_all_reduce_makes_gathers_those_of_the_full_weight(world_size: int, shape: tuple[int, ...]) -> None:
    run_ranks_each(
        world_size, RECIPES if world_size == 3 else ("float8_tensor", "mxfp8", "nvfp4_square"), _agrees, shape
    )


class _Mixed(nn.Module):
    """Layers of every storage, and one recipe that shares nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

        def layer() -> nn.Linear:
            return nn.Linear(K, K, dtype=torch.bfloat16)

        self.plain = layer()
        with quantized_model_init(RECIPES["float8_tensor"], storage="high_precision"):
            self.dense = layer()
        with quantized_model_init(RECIPES["nvfp4"], storage="quantized"):
            self.stored = layer()
        with quantized_model_init(RECIPES["mxfp8"], storage="high_precision"):
            self.blocks = layer()
        with quantized_model_init(RECIPES["nvfp4"], storage="high_precision"):
            self.other = layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.blocks(self.stored(self.dense(self.plain(x)))))


def _mixed_models_agree_at_once() -> None:
    reference = _Mixed()
    net: Any = _Mixed()
    for child in (net.dense, net.stored):
        fully_shard(child)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with Collectives() as comms:
        assert sync_scales(net) == 1
    assert comms.counts == ONE_ALL_REDUCE
    assert_same_bytes(net(batch(0)).detach(), reference(batch(0)).detach(), "output")
    backward(net, batch(0))
    optimizer.step()
    with Collectives() as comms:
        assert sync_scales(net) == 1
    assert comms.counts == ONE_ALL_REDUCE
    full = whole(net)
    found = gathered(net)
    for name in ("dense", "blocks", "other"):
        recipe = local(getattr(net, name).weight).recipe
        assert_parts(found[f"{name}.weight"], quantize(full[f"{name}.weight"], recipe), name)
    assert isinstance(local(net.stored.weight), QuantizedTensor)
    assert type(local(net.plain.weight)) is Tensor


def test_a_model_of_mixed_storages_agrees_by_one_all_reduce() -> None:
    run_ranks(2, _mixed_models_agree_at_once)


class _Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(K, 2 * K, bias=False)
        self.down = nn.Linear(2 * K, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def _is_tensor_parallel(name: str) -> None:
    """Shards along rows and along K, where scales a row are shared too."""
    torch.manual_seed(0)
    with quantized_model_init(RECIPES[name], storage="high_precision"):
        net: Any = _Parallel()
    reference = copy.deepcopy(net)
    mesh = mesh_of(dist.get_world_size())
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert sync_scales(net) == (name != "mxfp8")
    size, rank = 2 * K // mesh.size(), mesh.get_local_rank()
    mine = slice(rank * size, (rank + 1) * size)
    for layer, its, cut in ((net.up, reference.up, mine), (net.down, reference.down, (slice(None), mine))):
        expected = quantize(its.weight.dense, RECIPES[name])[cut]
        assert_parts(parts_of(local(layer.weight).quantize()), expected, name)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1))
    out, expected = net(x), reference(x)
    torch.testing.assert_close(out, expected)  # sums over K in another order
    for loss in (out, expected):
        loss.square().sum().backward()
    for param, its in zip(net.parameters(), reference.parameters(), strict=True):
        assert type(param.grad.to_local()) is Tensor
        torch.testing.assert_close(param.grad.full_tensor(), its.grad)


def test_tensor_parallel_shards_agree_and_compute_with_the_full_weights_bytes() -> None:
    run_ranks_each(2, ("float8_row", "float8_tensor", "mxfp8", "nvfp4"), _is_tensor_parallel)


# -- bytes -------------------------------------------------------------------------------------------------------------


def _padded_rows(param: Any) -> int:
    return -(-param.shape[0] // dist.get_world_size())


def _dense_bytes(param: Any) -> int:
    return _padded_rows(param) * (param.numel() // param.shape[0]) * param.element_size()


def _wire_bytes(param: Any) -> int:
    """Bytes of the parts of a padded shard."""
    shape = (_padded_rows(param), *param.shape[1:])
    return sum(torch.Size(spec.shape(shape)).numel() * spec.dtype.itemsize for spec in specs_of(local(param).recipe))


def _gathers_its_payload(name: str) -> None:
    net = shard(build_dense(name))
    for moment in ("sharded", "after a step", "after load_state_dict(assign=True)"):
        if moment == "after a step":
            backward(net, batch(0))
        if moment.startswith("after load"):
            net.load_state_dict({key: value.clone() for key, value in net.state_dict().items()}, assign=True)
            net(batch(0))
            net.reshard()
        quantized_bytes = {fqn: _wire_bytes(param) for fqn, param, _ in weights(net)}
        assert len(quantized_bytes) == len(rows_for(name)) + 1
        for module in [*net.blocks, net]:
            expected = 0
            for fqn, param in module.named_parameters():
                if module is net and fqn.startswith("blocks"):
                    continue  # not the root's own
                is_weight = isinstance(local(param), HighPrecisionWeight)
                expected += _wire_bytes(param) if is_weight else _dense_bytes(param)
            with Collectives() as comms:
                module.unshard()
            module.reshard()
            assert comms.given == [expected] * (dist.get_world_size() > 1), (name, moment, comms.given, expected)
    share = quantized_bytes["head.weight"] / (_padded_rows(net.head.weight) * K)
    want = {"float8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}[name.split("_", maxsplit=1)[0]]
    assert want <= share <= want + 0.07, (name, share)  # fp32 scales of 64 columns, or of a small tensor


@sampled("world_size", [1, 2, 3], [3])
def test_an_all_gather_is_given_the_payload_bytes(world_size: int) -> None:
    run_ranks_each(world_size, ("float8_row", "mxfp8_square", "nvfp4", "float8_tensor"), _gathers_its_payload)


def _agreements(net: nn.Module) -> int:
    """Bytes of the agreed amaxes and of each shard's own: 2 fp32 for each shared scale."""
    agreed = [shard_.agreement.claims for _, _, shard_ in weights(net)]
    assert all(amaxes is None or amaxes.numel() == 2 for amaxes in agreed)
    return sum(amaxes.nbytes for amaxes in agreed if amaxes is not None)


def _costs_its_dense_shard_at_rest(name: str, *, offload: bool) -> None:
    mesh = mesh_of(dist.get_world_size())  # holds the numbers of its ranks
    before = held()
    net = shard(
        build_dense(name), mesh=mesh, **({"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {})
    )
    dense = sum(buffer.nbytes for buffer in net.buffers()) + sum(_dense_bytes(param) for param in net.parameters())
    assert (found := held_since(before, dense)) == dense, ("sharded", found, dense)
    for step in range(2):
        backward(net, batch(step))
        net.zero_grad()
        sync_scales(net)
        assert (_agreements(net) > 0) == (name in TENSOR_WIDE and dist.get_world_size() > 1)
        expected = dense + _agreements(net)
        assert (found := held_since(before, expected)) == expected, (f"agreed {step}", found, dense)
    with unsharded(net):
        assert dist.get_world_size() == 1 or held() - before > dense + _agreements(net)
    expected = dense + _agreements(net)
    assert (found := held_since(before, expected)) == expected, ("after unsharded()", found, dense)
    for assign in (False, True):
        state = {key: value.clone() for key, value in net.state_dict().items()}
        net.load_state_dict(state, assign=assign)
        del state
        net(batch(0))
        net.reshard()
        expected = dense + _agreements(net)
        found = held_since(before, expected)
        assert found == expected, (f"after load_state_dict(assign={assign})", found, dense)


@sampled("world_size", [1, 2], [2])
def test_a_shard_costs_its_dense_bytes_at_rest(world_size: int) -> None:
    run_ranks(world_size, _costs_its_dense_shard_at_rest, "mxfp8", offload=False)
    run_ranks(world_size, _costs_its_dense_shard_at_rest, "nvfp4", offload=True)


def _frees_what_it_gathered(name: str) -> None:
    net = shard(build_dense(name))
    kinds = {fqn for fqn, _, _ in weights(net)}
    for _ in range(2):  # the first gather allocates, later ones refill
        with unsharded(net):
            parts = [
                (f"{fqn}.{part}", tensor)
                for fqn, param in net.named_parameters()
                if fqn in kinds
                for part, tensor in param.parts().items()
            ]
            assert len(parts) >= 2 * len(kinds)
            assert all(tensor.untyped_storage().nbytes() >= tensor.nbytes for _, tensor in parts)
        left = {fqn: tensor.untyped_storage().nbytes() for fqn, tensor in parts if tensor.untyped_storage().nbytes()}
        assert not left, f"still allocated after reshard: {left}"


@sampled("world_size", [1, 2], [2])
def test_nothing_of_a_gathered_weight_stays_allocated_after_reshard(world_size: int) -> None:
    run_ranks_each(world_size, ("float8_tensor", "mxfp8", "nvfp4_square"), _frees_what_it_gathered)


# -- stale agreements --------------------------------------------------------------------------------------------------


def _through_the_shard(net: Net, fqn: str, param: Any, factor: float) -> None:
    param.to_local().mul_(factor)


def _through_a_state_dict(net: Net, fqn: str, param: Any, factor: float) -> None:
    net.state_dict()[fqn].mul_(factor)


def _through_copy(net: Net, fqn: str, param: Any, factor: float) -> None:
    value = values(param.to_local()) * factor
    param.copy_(DTensor.from_local(value, param.device_mesh, param.placements, shape=param.shape, stride=(K, 1)))


def _through_data(net: Net, fqn: str, param: Any, factor: float) -> None:
    param.data.mul_(factor)


def _through_foreach(net: Net, fqn: str, param: Any, factor: float) -> None:
    torch._foreach_mul_([param], factor)


WRITES = (_through_the_shard, _through_a_state_dict, _through_copy, _through_data, _through_foreach)


def _rounding(x: Tensor, q: QuantizedTensor) -> Tensor:
    """Largest |x - decoded| that rounding alone gives: half a step of a normal or subnormal element.

    A block scale of NVFP4 is rounded to nearest too, which cuts off at most 2^-4 of the largest element: less than the
    half step of 2^-2.
    """
    element = facts(q.recipe).element
    return torch.maximum(x.abs() * element.relative, unit(q) * element.subnormal) * (1 + 2.0**-18)


def _survives_stale_agreements(name: str, factor: float) -> None:
    net = shard(build_dense(name))
    recipe, writer = RECIPES[name], dist.get_world_size() - 1
    for write in WRITES:
        sync_scales(net)
        agreed = {fqn: parts_of(shard_.quantize()) for fqn, _, shard_ in weights(net)}
        for fqn, param, _ in weights(net):
            with torch.no_grad():
                write(net, fqn, param, factor if dist.get_rank() == writer else 1.0)
        pieces = {}
        for fqn, _, shard_ in weights(net):
            pieces[fqn] = _alone(shard_) if dist.get_rank() == writer and shard_.numel() else agreed[fqn]
            if shard_.numel():
                q = shard_.quantize()
                x = shard_.dense.double()
                error = (x - q.dequantize(torch.float32).double()).abs()
                assert bool((error <= _rounding(x, q)).all()), f"{write.__name__}: {fqn}: beyond rounding"
        _assert_gathers_pieces(net, pieces, f"{write.__name__}: stale")
        full = whole(net)
        sync_scales(net)
        assert_gathers(net, full, recipe, f"{write.__name__}: agreed again")
        with torch.no_grad():  # the next round starts from the magnitudes of this one
            for _, _, shard_ in weights(net):
                shard_.mul_(1 / factor if dist.get_rank() == writer else 1.0)


@sampled(("world_size", "factor"), [(2, 1000.0), (3, 1000.0), (2, 0.001)], [(3, 1000.0), (2, 0.001)])
def test_a_write_since_the_agreement_does_not_saturate(world_size: int, factor: float) -> None:
    run_ranks_each(world_size, ("float8_tensor", "nvfp4"), _survives_stale_agreements, factor)


def _loads_what_is_cut_elsewhere(name: str) -> None:
    """Entries of a model with other placements on the same mesh: their values arrive, as those of dense weights do."""
    values, mesh = (
        torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16(),
        init_device_mesh("cpu", (2,)),
    )
    nets = []
    for seed, dim in ((0, 1), (1, 0)):
        net = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        quantize_(nn.Sequential(net), RECIPES[name])  # with its hook for loads
        dense = distribute_tensor(values * (1 - seed), mesh, [Shard(dim)], src_data_rank=None)
        shard_ = HighPrecisionWeight(dense.to_local().contiguous(), RECIPES[name])
        net.weight = nn.Parameter(DTensor.from_local(shard_, mesh, [Shard(dim)], run_check=False))
        nets.append(net)
    nets[1].load_state_dict(nets[0].state_dict())
    assert torch.equal(nets[1].weight.full_tensor(), values)


@pytest.mark.filterwarnings("ignore:CPU process group does not support alltoall")
def test_entries_that_are_cut_elsewhere_load() -> None:
    run_ranks_each(2, ["mxfp8", "nvfp4"], _loads_what_is_cut_elsewhere)


def _assigns_data(name: str) -> None:
    net = shard(build_dense(name))
    net.head.weight.to_local().data = torch.zeros_like(net.head.weight.to_local())


def test_assigning_data_of_a_shard_is_refused() -> None:
    messages = run_ranks_catching(2, _assigns_data, "float8_tensor")
    assert len(set(messages)) == 1
    assert "NotImplementedError" in messages[0]
    assert "copy_(value)" in messages[0]


def _agreements_do_not_outlive_values(name: str) -> None:
    """Copies, clones and loads: the gather is that of the values, whatever was agreed on before."""
    net = shard(build_dense(name))
    sync_scales(net)
    with torch.no_grad():
        for _, _, shard_ in weights(net):
            shard_.mul_(100)
    sync_scales(net)
    others = shard(build_dense(name, seed=1))
    with torch.no_grad():
        for (_, param, _), (_, other, _) in zip(weights(net), weights(others), strict=True):
            param.copy_(other)
    _assert_gathers_pieces(net, {fqn: _alone(shard_) for fqn, _, shard_ in weights(net)}, "copied")
    for assign in (False, True):
        net.load_state_dict(others.state_dict(), assign=assign)
        sync_scales(net)
        assert_gathers(net, whole(net), RECIPES[name], f"loaded and agreed, assign={assign}")
    held = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        for _, _, shard_ in weights(net):
            shard_.mul_(100)
    net.load_state_dict(held, assign=True)
    assert_gathers(net, whole(net), RECIPES[name], "a copy kept its agreement")


@pytest.mark.parametrize("name", ["float8_tensor", "nvfp4"])
def test_an_agreement_belongs_to_the_values_it_was_made_on(name: str) -> None:
    run_ranks(2, _agreements_do_not_outlive_values, name)


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refused(name: str, **options: Any) -> None:
    net = build_dense(name)
    mesh = mesh_of(dist.get_world_size())
    with Collectives() as comms:
        try:
            fully_shard(net.blocks[0], mesh=mesh, **options)
        finally:
            assert not comms.counts, comms.counts


def _assert_alike(messages: list[str], *words: str) -> None:
    assert len(set(messages)) == 1, messages
    for word in words:
        assert word in messages[0], messages[0]


def test_reshard_after_forward_to_a_smaller_mesh_is_refused() -> None:
    for name in ("float8_row", "nvfp4_square"):
        messages = run_ranks_catching(4, _refused, name, reshard_after_forward=2)
        _assert_alike(messages, "NotImplementedError", "reshard_after_forward=<int>", "use True or False")


def _on_columns(param: nn.Parameter) -> Shard:
    return Shard(1) if param.ndim == 2 else Shard(0)


def test_sharding_columns_is_refused() -> None:
    for name in ("float8_row", "nvfp4_square"):
        messages = run_ranks_catching(2, _refused, name, shard_placement_fn=_on_columns)
        _assert_alike(messages, "FSDP2 asks for", "shard on dim 0", f"({rows_for(name)[0]}, {K})")


def _compiles(name: str) -> None:
    assert rows_for(name) == UNEVEN
    net = build_dense(name)
    reference = copy.deepcopy(net)
    for block in net.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    shard(net)
    sync_scales(net)
    with warnings.catch_warnings():
        # dynamo, of the unsharded parameters of FSDP, quantized or not
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        for _ in range(2):
            assert_same_bytes(backward(net, batch(0)), backward(reference, batch(0)), name)
    for param, its in zip(net.parameters(), reference.parameters(), strict=True):
        assert_same_bytes(param.grad.full_tensor(), its.grad, name)


def test_blocks_under_fully_shard_compile() -> None:
    run_ranks(1, _compiles, "float8_tensor")
