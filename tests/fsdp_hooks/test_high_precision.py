"""storage="high_precision": dense shards that FSDP2 gathers quantized.

The reference is the same model, unsharded, with the same ordinary optimizer and the averaged gradients that FSDP
produced. What must be gathered is quantize(full dense weight), bit for bit, once the shards have agreed.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from fsdp_hooks import sync_scales, unsharded
from qtensor import MasterWeightOptimizer, QuantizedTensor, quantize, quantized_model_init
from qtensor.formats import specs_of
from qtensor.high_precision import HighPrecisionWeight
from tests.fsdp_hooks.cases import (
    RECIPES,
    TENSOR_WIDE,
    UNEVEN,
    Collectives,
    K,
    Net,
    assert_same_bytes,
    batch,
    bits,
    build,
    exchanged,
    gathered,
    local,
    mesh_of,
    parts_of,
    rows_for,
    rows_of,
    shard,
)
from tests.qtensor.recipes_under_test import element_of, unit
from tests.ranks import run_ranks, run_ranks_catching

ONE_ALL_REDUCE = {"allreduce_": 1}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=0.02, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.02, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
    "sgd-foreach": lambda params: torch.optim.SGD(params, lr=0.5, foreach=True),
}


def _build(name: str, **init: Any) -> Net:
    return build(RECIPES[name], rows_for(name), storage="high_precision", **init)


def _weights(net: nn.Module) -> Iterator[tuple[str, Any, HighPrecisionWeight]]:
    """(fqn, parameter, shard) of every weight that is gathered quantized."""
    for fqn, param in net.named_parameters():
        if isinstance(local(param), HighPrecisionWeight):
            yield fqn, param, local(param)


def _values(param: Tensor) -> Tensor:
    """The dense values behind a parameter of an unsharded model."""
    return (param.dense if isinstance(param, HighPrecisionWeight) else param).detach()


def _assert_parts(found: dict[str, Tensor], expected: QuantizedTensor, what: str) -> None:
    """Gathered parts are those of `expected`, with the tensor-wide scale in the entry of every shard."""
    for part, tensor in parts_of(expected).items():
        wanted = tensor.repeat(found[part].shape) if tensor.ndim == 0 else tensor
        assert_same_bytes(found[part], wanted, f"{what}.{part}")


def _assert_gathers(net: nn.Module, full: dict[str, Tensor], recipe: Any, what: str) -> None:
    """What FSDP gathers is quantize(full weight), and the dense tensor for all other parameters."""
    kinds = {fqn for fqn, _, _ in _weights(net)}
    assert kinds
    for fqn, found in gathered(net).items():
        if fqn in kinds:
            _assert_parts(found, quantize(full[fqn], recipe), f"{what}: gathered {fqn}")
        else:
            assert_same_bytes(found, full[fqn], f"{what}: gathered {fqn}")


def _assert_shards(net: nn.Module, full: dict[str, Tensor], what: str) -> None:
    """Every rank holds its rows of the full dense weights."""
    for fqn, param in net.named_parameters():
        mesh = param.device_mesh
        rows = rows_of(full[fqn], local(param), mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
        assert_same_bytes(_values(local(param)), rows, f"{what}: shard of {fqn}")


def _whole(net: nn.Module) -> dict[str, Tensor]:
    """fqn -> the full dense value, gathered as DTensors do; plain copies."""
    found = {}
    for fqn, param in net.named_parameters():
        full = param.full_tensor() if isinstance(param, DTensor) else param
        found[fqn] = _values(full).clone()
    return found


def _backward(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x)
    out.float().square().mean().backward()
    return out.detach()


def _train(
    net: Any, reference: Any, recipe: Any, *, make: str = "adamw", micro_batches: int = 1, hook: bool = False
) -> None:
    optimizer, its_optimizer = OPTIMIZERS[make](net.parameters()), OPTIMIZERS[make](reference.parameters())
    if hook:
        optimizer.register_step_post_hook(lambda *_: sync_scales(net))
    sync_scales(net)
    full = {fqn: _values(param) for fqn, param in reference.named_parameters()}  # alias what the reference trains
    _assert_gathers(net, full, recipe, "before the first step")
    for step in range(2):
        for micro in range(micro_batches):
            net.set_requires_gradient_sync(micro == micro_batches - 1)
            x = batch(step * micro_batches + micro)
            out = _backward(net, x)
            with torch.no_grad():
                assert_same_bytes(out, reference(x), f"step {step}: output")
        for (fqn, param), its in zip(net.named_parameters(), reference.parameters(), strict=True):
            assert (param.grad is None) != param.requires_grad, fqn
            if param.grad is not None:
                assert type(param.grad.to_local()) is Tensor, fqn
                its.grad = param.grad.full_tensor()
        before = {fqn: value.clone() for fqn, value in full.items()}
        optimizer.step()
        its_optimizer.step()
        assert any(not torch.equal(full[fqn], value) for fqn, value in before.items()), "nothing was trained"
        if not hook:
            sync_scales(net)
        _assert_shards(net, full, f"step {step}")
        _assert_gathers(net, full, recipe, f"step {step}")
        optimizer.zero_grad()
    x = batch(99)
    with torch.no_grad():
        assert_same_bytes(net(x), reference(x), "output without grad")
    net.reshard()


# -- parity ------------------------------------------------------------------------------------------------------------


def _trains_like_one_process(
    name: str, *, shape: Sequence[int] | None = None, make: str = "adamw", hook: bool = False, **options: Any
) -> None:
    net = _build(name)
    reference = copy.deepcopy(net)
    if shape:
        options["mesh"] = mesh_of(*shape)
    _train(shard(net, **options), reference, RECIPES[name], make=make, hook=hook)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", RECIPES)
def test_training_equals_one_process_with_uneven_and_empty_shards(name: str, world_size: int) -> None:
    run_ranks(world_size, _trains_like_one_process, name)


@pytest.mark.parametrize("make", [make for make in OPTIMIZERS if make != "adamw"])
def test_training_equals_one_process_with_any_torch_optimizer(make: str) -> None:
    run_ranks(2, _trains_like_one_process, "nvfp4-row", make=make)
    run_ranks(2, _trains_like_one_process, "float8-tensor", make=make, hook=True)


@pytest.mark.parametrize(("world_size", "shape"), [(4, (2, 2)), (2, (2, 1))])
def test_training_equals_one_process_under_hsdp(world_size: int, shape: Sequence[int]) -> None:
    for name in ("float8-tensor", "mxfp8-square"):
        run_ranks(world_size, _trains_like_one_process, name, shape=shape)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_equals_one_process_under_cpu_offload(world_size: int) -> None:
    for name in ("float8-row", "nvfp4-row"):
        offload = CPUOffloadPolicy(pin_memory=False)
        run_ranks(world_size, _trains_like_one_process, name, offload_policy=offload)


@pytest.mark.parametrize("world_size", [1, 3])
def test_training_equals_one_process_without_reshard_after_forward(world_size: int) -> None:
    for name in ("float8-tensor", "mxfp8-row"):
        run_ranks(world_size, _trains_like_one_process, name, reshard_after_forward=False)


@pytest.mark.parametrize("world_size", [1, 2])
def test_scales_may_be_agreed_on_by_a_hook_of_the_optimizer(world_size: int) -> None:
    for name in ("float8-tensor", "nvfp4-square"):
        run_ranks(world_size, _trains_like_one_process, name, hook=True)


def _accumulates(name: str) -> None:
    net = _build(name)
    reference = copy.deepcopy(net)
    _train(shard(net), reference, RECIPES[name], micro_batches=3)


@pytest.mark.parametrize("world_size", [1, 3])
def test_training_equals_one_process_with_gradient_accumulation(world_size: int) -> None:
    for name in ("mxfp8-row", "float8-tensor"):
        run_ranks(world_size, _accumulates, name)


def _trains_around_frozen_weights(name: str) -> None:
    net = _build(name)
    net.blocks[0].requires_grad_(False)
    net.head.weight.requires_grad_(False)
    reference = copy.deepcopy(net)
    assert not reference.head.weight.requires_grad
    shard(net)
    before = _whole(net)
    _train(net, reference, RECIPES[name])
    after = _whole(net)
    for fqn in ("blocks.0.linear.weight", "blocks.0.linear.bias", "head.weight"):
        assert_same_bytes(after[fqn], before[fqn], fqn)


def test_frozen_weights_stay_while_others_train() -> None:
    run_ranks(2, _trains_around_frozen_weights, "float8-tensor")


def _clips_gradients(name: str) -> None:
    net = _build(name)
    reference = copy.deepcopy(net)
    shard(net)
    _backward(net, batch(0))
    for param, its in zip(net.parameters(), reference.parameters(), strict=True):
        its.grad = param.grad.full_tensor()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    its_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
    torch.testing.assert_close(norm.full_tensor(), its_norm, rtol=1e-2, atol=0)  # bf16 norms, summed in another order
    assert norm.full_tensor() > 1e-3
    for param, its in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), its.grad, rtol=3e-2, atol=1e-9)


def test_gradients_can_be_clipped() -> None:
    run_ranks(2, _clips_gradients, "nvfp4-row")


def _recomputes(name: str) -> None:
    """Activation checkpointing gathers once more in backward; outputs and gradients are those without it."""
    net, other = shard(_build(name)), _build(name)
    for block in other.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    shard(other)
    for model in (net, other):
        sync_scales(model)
    assert_same_bytes(_backward(other, batch(0)), _backward(net, batch(0)), "output")
    for (fqn, param), its in zip(net.named_parameters(), other.parameters(), strict=True):
        assert_same_bytes(its.grad.to_local(), param.grad.to_local(), fqn)


@pytest.mark.parametrize("world_size", [1, 2])
def test_activation_checkpointing_changes_no_bit(world_size: int) -> None:
    run_ranks(world_size, _recomputes, "float8-tensor")


def _runs_in_inference_mode(name: str) -> None:
    net = _build(name)
    reference = copy.deepcopy(net)
    shard(net)
    sync_scales(net)
    with torch.inference_mode():
        for _ in range(2):
            assert_same_bytes(net(batch(0)), reference(batch(0)), name)
        net.reshard()
    assert len(list(_weights(net))) == len(rows_for(name)) + 1
    sync_scales(net)
    _assert_gathers(net, _whole(net), RECIPES[name], "after inference")


@pytest.mark.parametrize("world_size", [2, 4])  # FSDP2 of one rank knows no inference mode, for plain weights either
def test_a_first_forward_may_be_one_in_inference_mode(world_size: int) -> None:
    run_ranks(world_size, _runs_in_inference_mode, "nvfp4-row")


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
    net = shard(_build(name))
    for _ in range(2):  # a first gather, and a refill
        with torch.no_grad():
            for _, _, shard_ in _weights(net):
                shard_.mul_(3.7 ** dist.get_rank())
        pieces = {fqn: _alone(shard_) for fqn, _, shard_ in _weights(net)}
        _assert_gathers_pieces(net, pieces, "without sync_scales")
    if name in TENSOR_WIDE and dist.get_world_size() > 1:
        scales = gathered(net)["head.weight"]["scale" if name == "float8-tensor" else "global_scale"]
        assert len(set(scales.tolist())) > 1, "the test wants different scales"


@pytest.mark.parametrize("world_size", [1, 3])
def test_without_an_agreement_every_shard_is_quantized_by_itself(world_size: int) -> None:
    for name in RECIPES:
        run_ranks(world_size, _unagreed_shards_are_gathered_exactly, name)


def _agrees(name: str, shape: tuple[int, ...]) -> None:
    net = shard(_build(name), mesh=mesh_of(*shape))
    with torch.no_grad():
        for _, param, shard_ in _weights(net):
            shard_.mul_(5.0 ** param.device_mesh.get_local_rank("shard"))
    full = _whole(net)
    with Collectives() as comms:
        count = sync_scales(net)
    expected = (1, ONE_ALL_REDUCE) if name in TENSOR_WIDE and shape[-1] > 1 else (0, {})
    assert (count, comms.counts) == expected, (name, count, comms.counts)
    _assert_gathers(net, full, RECIPES[name], "agreed")
    _assert_shards(net, full, "agreed")


@pytest.mark.parametrize(("world_size", "shape"), [(1, (1,)), (3, (3,)), (4, (2, 2)), (2, (2, 1))])
def test_one_all_reduce_makes_gathers_those_of_the_full_weight(world_size: int, shape: tuple[int, ...]) -> None:
    for name in RECIPES if world_size == 3 else ("float8-tensor", "mxfp8-row", "nvfp4-square"):
        run_ranks(world_size, _agrees, name, shape)


class _Mixed(nn.Module):
    """Layers of every storage, and one recipe that shares nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

        def layer() -> nn.Linear:
            return nn.Linear(K, K, dtype=torch.bfloat16)

        self.plain = layer()
        with quantized_model_init(RECIPES["float8-tensor"], storage="high_precision"):
            self.dense = layer()
        with quantized_model_init(RECIPES["nvfp4-row"], storage="quantized"):
            self.stored = layer()
        with quantized_model_init(RECIPES["mxfp8-row"], storage="high_precision"):
            self.blocks = layer()
        with quantized_model_init(RECIPES["nvfp4-row"], storage="high_precision"):
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
    _backward(net, batch(0))
    optimizer.step()
    with Collectives() as comms:
        assert sync_scales(net) == 1
    assert comms.counts == ONE_ALL_REDUCE
    full = _whole(net)
    found = gathered(net)
    for name in ("dense", "blocks", "other"):
        recipe = local(getattr(net, name).weight).recipe
        _assert_parts(found[f"{name}.weight"], quantize(full[f"{name}.weight"], recipe), name)
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
    assert sync_scales(net) == (name != "mxfp8-row")
    size, rank = 2 * K // mesh.size(), mesh.get_local_rank()
    mine = slice(rank * size, (rank + 1) * size)
    for layer, its, cut in ((net.up, reference.up, mine), (net.down, reference.down, (slice(None), mine))):
        expected = quantize(its.weight.dense, RECIPES[name])[cut]
        _assert_parts(parts_of(local(layer.weight).quantized()), expected, name)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1))
    out, expected = net(x), reference(x)
    torch.testing.assert_close(out, expected)  # sums over K in another order
    for loss in (out, expected):
        loss.square().sum().backward()
    for param, its in zip(net.parameters(), reference.parameters(), strict=True):
        assert type(param.grad.to_local()) is Tensor
        torch.testing.assert_close(param.grad.full_tensor(), its.grad)


def test_tensor_parallel_shards_agree_and_compute_with_the_full_weights_bytes() -> None:
    for name in ("float8-row", "float8-tensor", "mxfp8-row", "nvfp4-row"):
        run_ranks(2, _is_tensor_parallel, name)


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
    net = shard(_build(name))
    for moment in ("sharded", "after a step", "after load_state_dict(assign=True)"):
        if moment == "after a step":
            _backward(net, batch(0))
        if moment.startswith("after load"):
            net.load_state_dict({key: value.clone() for key, value in net.state_dict().items()}, assign=True)
            net(batch(0))
            net.reshard()
        quantized_bytes = {fqn: _wire_bytes(param) for fqn, param, _ in _weights(net)}
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
    want = {"float8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}[name.split("-", maxsplit=1)[0]]
    assert want <= share <= want + 0.07, (name, share)  # fp32 scales of 64 columns, or of a small tensor


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_all_gather_is_given_the_payload_bytes(world_size: int) -> None:
    for name in ("float8-row", "mxfp8-square", "nvfp4-row", "float8-tensor"):
        run_ranks(world_size, _gathers_its_payload, name)


def _held() -> int:
    """Bytes in the storages of all tensors that python can reach."""
    gc.collect()
    gc.collect()  # what finalizers of the first pass let go
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _agreements(net: nn.Module) -> int:
    """Bytes of the agreed amaxes and of each shard's own: 2 fp32 for each shared scale."""
    agreed = [shard_.agreement.amaxes for _, _, shard_ in _weights(net)]
    assert all(amaxes is None or amaxes.numel() == 2 for amaxes in agreed)
    return sum(amaxes.nbytes for amaxes in agreed if amaxes is not None)


def _costs_its_dense_shard_at_rest(name: str, *, offload: bool) -> None:
    mesh = mesh_of(dist.get_world_size())  # holds the numbers of its ranks
    before = _held()
    net = shard(_build(name), mesh=mesh, **({"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}))
    dense = sum(buffer.nbytes for buffer in net.buffers()) + sum(_dense_bytes(param) for param in net.parameters())
    assert _held() - before == dense, ("sharded", _held() - before, dense)
    for step in range(2):
        _backward(net, batch(step))
        net.zero_grad()
        sync_scales(net)
        assert (_agreements(net) > 0) == (name in TENSOR_WIDE and dist.get_world_size() > 1)
        assert _held() - before == dense + _agreements(net), (f"agreed {step}", _held() - before, dense)
    with unsharded(net):
        assert dist.get_world_size() == 1 or _held() - before > dense + _agreements(net)
    assert _held() - before == dense + _agreements(net), ("after unsharded()", _held() - before, dense)
    for assign in (False, True):
        state = {key: value.clone() for key, value in net.state_dict().items()}
        net.load_state_dict(state, assign=assign)
        del state
        net(batch(0))
        net.reshard()
        found = _held() - before
        assert found == dense + _agreements(net), (f"after load_state_dict(assign={assign})", found, dense)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_shard_costs_its_dense_bytes_at_rest(world_size: int) -> None:
    run_ranks(world_size, _costs_its_dense_shard_at_rest, "mxfp8-row", offload=False)
    run_ranks(world_size, _costs_its_dense_shard_at_rest, "nvfp4-row", offload=True)


def _frees_what_it_gathered(name: str) -> None:
    net = shard(_build(name))
    kinds = {fqn for fqn, _, _ in _weights(net)}
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


@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_of_a_gathered_weight_stays_allocated_after_reshard(world_size: int) -> None:
    for name in ("float8-tensor", "mxfp8-row", "nvfp4-square"):
        run_ranks(world_size, _frees_what_it_gathered, name)


# -- stale agreements --------------------------------------------------------------------------------------------------


def _through_the_shard(net: Net, fqn: str, param: Any, factor: float) -> None:
    param.to_local().mul_(factor)


def _through_a_state_dict(net: Net, fqn: str, param: Any, factor: float) -> None:
    net.state_dict()[fqn].mul_(factor)


def _through_copy(net: Net, fqn: str, param: Any, factor: float) -> None:
    value = _values(param.to_local()) * factor
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
    element = element_of(q.recipe)
    return torch.maximum(x.abs() * element.relative, unit(q) * element.subnormal) * (1 + 2.0**-18)


def _survives_stale_agreements(name: str, factor: float) -> None:
    net = shard(_build(name))
    recipe, writer = RECIPES[name], dist.get_world_size() - 1
    for write in WRITES:
        sync_scales(net)
        agreed = {fqn: parts_of(shard_.quantized()) for fqn, _, shard_ in _weights(net)}
        for fqn, param, _ in _weights(net):
            with torch.no_grad():
                write(net, fqn, param, factor if dist.get_rank() == writer else 1.0)
        pieces = {}
        for fqn, _, shard_ in _weights(net):
            pieces[fqn] = _alone(shard_) if dist.get_rank() == writer and shard_.numel() else agreed[fqn]
            if shard_.numel():
                q = shard_.quantized()
                x = shard_.dense.double()
                error = (x - q.dequantize(torch.float32).double()).abs()
                assert bool((error <= _rounding(x, q)).all()), f"{write.__name__}: {fqn}: beyond rounding"
        _assert_gathers_pieces(net, pieces, f"{write.__name__}: stale")
        full = _whole(net)
        sync_scales(net)
        _assert_gathers(net, full, recipe, f"{write.__name__}: agreed again")
        with torch.no_grad():  # the next round starts from the magnitudes of this one
            for _, _, shard_ in _weights(net):
                shard_.mul_(1 / factor if dist.get_rank() == writer else 1.0)


@pytest.mark.parametrize(("world_size", "factor"), [(2, 1000.0), (3, 1000.0), (2, 0.001)])
def test_a_write_since_the_agreement_does_not_saturate(world_size: int, factor: float) -> None:
    for name in ("float8-tensor", "nvfp4-row"):
        run_ranks(world_size, _survives_stale_agreements, name, factor)


def _assigns_data(name: str) -> None:
    net = shard(_build(name))
    net.head.weight.to_local().data = torch.zeros_like(net.head.weight.to_local())


def test_assigning_data_of_a_shard_is_refused() -> None:
    messages = run_ranks_catching(2, _assigns_data, "float8-tensor")
    assert len(set(messages)) == 1
    assert "NotImplementedError" in messages[0]
    assert "copy_(value)" in messages[0]


def _agreements_do_not_outlive_values(name: str) -> None:
    """Copies, clones and loads: the gather is that of the values, whatever was agreed on before."""
    net = shard(_build(name))
    sync_scales(net)
    with torch.no_grad():
        for _, _, shard_ in _weights(net):
            shard_.mul_(100)
    sync_scales(net)
    others = shard(_build(name, seed=1))
    with torch.no_grad():
        for (_, param, _), (_, other, _) in zip(_weights(net), _weights(others), strict=True):
            param.copy_(other)
    _assert_gathers_pieces(net, {fqn: _alone(shard_) for fqn, _, shard_ in _weights(net)}, "copied")
    for assign in (False, True):
        net.load_state_dict(others.state_dict(), assign=assign)
        sync_scales(net)
        _assert_gathers(net, _whole(net), RECIPES[name], f"loaded and agreed, assign={assign}")
    held = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        for _, _, shard_ in _weights(net):
            shard_.mul_(100)
    net.load_state_dict(held, assign=True)
    _assert_gathers(net, _whole(net), RECIPES[name], "a copy kept its agreement")


@pytest.mark.parametrize("name", ["float8-tensor", "nvfp4-row"])
def test_an_agreement_belongs_to_the_values_it_was_made_on(name: str) -> None:
    run_ranks(2, _agreements_do_not_outlive_values, name)


# -- mixed precision ---------------------------------------------------------------------------------------------------


def _fp32(name: str) -> Net:
    torch.manual_seed(0)
    with quantized_model_init(RECIPES[name], storage="high_precision"):
        net = Net(rows_for(name), head=96, dtype=torch.float32)
    for block in net.blocks:
        block.mix = block.mix.to(torch.bfloat16)  # FSDP casts parameters and inputs, no buffers
    return net


def _cast(net: Net, name: str) -> Net:
    """What FSDP computes with: the fp32 weights quantized, appearing in bf16; all other parameters in bf16."""
    shown = Net(rows_for(name), head=96, dtype=torch.bfloat16)
    for module, its in zip(net.modules(), shown.modules(), strict=True):
        for key, param in module._parameters.items():
            value = _values(param).to(torch.bfloat16)
            if isinstance(param, HighPrecisionWeight):
                parts = quantize(param.dense, param.recipe).parts()
                value = QuantizedTensor.from_parts(parts, param.recipe, torch.bfloat16)
            its._parameters[key] = nn.Parameter(value)
    return shown


def _trains_in_mixed_precision(name: str, *, reduce_dtype: torch.dtype | None) -> None:
    net = _fp32(name)
    reference = copy.deepcopy(net)
    shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype))
    optimizer, its_optimizer = (torch.optim.AdamW(model.parameters(), lr=0.02) for model in (net, reference))
    sync_scales(net)
    for step in range(2):
        x = batch(step).float()
        shown = _cast(reference, name)
        with unsharded(net):
            for fqn, param in net.named_parameters():
                assert param.dtype == torch.bfloat16, fqn
        out, its_out = _backward(net, x), _backward(shown, x.to(torch.bfloat16))
        assert_same_bytes(out, its_out, f"step {step}")
        pairs = zip(net.named_parameters(), shown.parameters(), reference.parameters(), strict=True)
        for (fqn, param), bf16, its in pairs:
            assert param.dtype == param.grad.dtype == torch.float32, fqn
            its.grad = param.grad.full_tensor()
            grads = [grad.to(reduce_dtype or torch.bfloat16) for grad in exchanged(bf16.grad)]
            assert_same_bytes(its.grad, (sum(grads) / len(grads)).float(), f"step {step}: gradient of {fqn}")
        optimizer.step()
        its_optimizer.step()
        sync_scales(net)
        full = {fqn: _values(param) for fqn, param in reference.named_parameters()}
        _assert_shards(net, full, f"step {step}")
        optimizer.zero_grad()


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@pytest.mark.parametrize("world_size", [1, 2])
def test_fp32_shards_are_gathered_quantized_and_computed_with_in_bf16(
    world_size: int, reduce_dtype: torch.dtype | None
) -> None:
    for name in ("float8-tensor", "mxfp8-row"):
        run_ranks(world_size, _trains_in_mixed_precision, name, reduce_dtype=reduce_dtype)


# -- the life of a model -----------------------------------------------------------------------------------------------


def _trains_from_meta(name: str) -> None:
    with torch.device("meta"), quantized_model_init(RECIPES[name], storage="high_precision"):
        net: Any = Net(rows_for(name))
    shard(net)
    assert all(param.is_meta for param in net.parameters())
    with pytest.raises(ValueError, match="meta device"):
        sync_scales(net)
    net.to_empty(device="cpu")
    assert len(list(_weights(net))) == len(rows_for(name)) + 1
    with warnings.catch_warnings():
        # torch's word on random numbers of DTensors on CPU: every rank draws its own, which is what is wanted here
        warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
        for position, module in enumerate(net.modules()):
            if hasattr(module, "reset_parameters"):
                torch.manual_seed(100 * position + dist.get_rank())
                module.reset_parameters()
    for block, rows in zip(net.blocks, rows_for(name), strict=True):
        block.mix.copy_(torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)) / rows**0.5)
    full = _whole(net)
    assert all(bool(full[fqn].ne(0).any()) for fqn, _, _ in _weights(net))
    reference = build(RECIPES[name], rows_for(name), seed=1, head=96, storage="high_precision")
    reference.load_state_dict(full)
    _train(net, reference, RECIPES[name])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_model_built_on_meta_sharded_and_initialised_trains_like_one_process(world_size: int) -> None:
    run_ranks(world_size, _trains_from_meta, "float8-tensor")


def _moves(name: str) -> None:
    reference = _build(name)
    net = shard(_build(name))
    sync_scales(net)
    for move in (nn.Module.float, nn.Module.bfloat16, nn.Module.cpu):  # FSDP's buffers are fixed by the first gather
        move(net)
        move(reference)
        full = {fqn: _values(param) for fqn, param in reference.named_parameters()}
        assert len(list(_weights(net))) == len(rows_for(name)) + 1
        assert all(param.dtype == full[fqn].dtype for fqn, param in net.named_parameters())
        _assert_shards(net, full, move.__name__)
    _assert_gathers(net, full, RECIPES[name], "moved")
    _train(net, reference, RECIPES[name])


@pytest.mark.parametrize("world_size", [1, 3])
def test_moving_and_casting_a_sharded_model_keeps_values_and_kind(world_size: int) -> None:
    for name in ("float8-tensor", "mxfp8-row"):
        run_ranks(world_size, _moves, name)


def _trains_masters(name: str) -> None:
    """bf16 shards under fp32 masters: the shard is the rounded master, what is gathered its quantization."""
    net = _build(name)
    reference = copy.deepcopy(net)
    shard(net)
    optimizers = [MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3) for model in (net, reference)]
    start = _whole(net)
    for step in range(3):
        with torch.no_grad():
            out = reference(batch(step))
        assert_same_bytes(_backward(net, batch(step)), out, f"step {step}")
        for param, its in zip(net.parameters(), reference.parameters(), strict=True):
            its.grad = param.grad.full_tensor()
        with Collectives() as comms:  # it agrees on scales, too
            optimizers[0].step()
        assert comms.counts["allreduce_"] == (dist.get_world_size() > 1), comms.counts
        optimizers[1].step()
        full = {fqn: _values(param) for fqn, param in reference.named_parameters()}
        _assert_shards(net, full, f"step {step}")
        _assert_gathers(net, full, RECIPES[name], f"step {step}")
        for fqn, param, shard_ in _weights(net):
            master = optimizers[0].state[param]["master_weight"]
            assert type(local(master)) is Tensor, fqn
            assert master.dtype == torch.float32, fqn
            assert_same_bytes(shard_.dense, local(master).to(torch.bfloat16), fqn)
        optimizers[0].zero_grad()
    assert not torch.equal(full["head.weight"], start["head.weight"])


@pytest.mark.parametrize("world_size", [1, 3])
def test_masters_of_bf16_shards_train_like_one_process(world_size: int) -> None:
    for name in ("float8-tensor", "nvfp4-row"):
        run_ranks(world_size, _trains_masters, name)


def _reads_and_writes_gathered_weights(name: str) -> None:
    """The gathered weight is quantized, so what is written into it reaches the dense shards through its rounding."""
    net = shard(_build(name))
    sync_scales(net)
    full = _whole(net)
    with unsharded(net):
        for fqn in (fqn for fqn, _, _ in _weights(shard(_build(name)))):
            param = net.get_parameter(fqn)
            assert isinstance(param, QuantizedTensor), fqn
            assert_same_bytes(param.dequantize(), quantize(full[fqn], RECIPES[name]).dequantize(), fqn)
    _assert_shards(net, full, "read")
    value = torch.randn(net.head.weight.shape, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    with unsharded(net, writeback=True), torch.no_grad():
        net.head.weight.copy_(value)
    after = {**full, "head.weight": quantize(value, RECIPES[name]).dequantize()}
    _assert_shards(net, after, "written")
    sync_scales(net)
    _assert_gathers(net, after, RECIPES[name], "written")
    with unsharded(net, writeback=True):
        net.blocks[0].linear.weight = nn.Parameter(full["blocks.0.linear.weight"] * 2)
    after["blocks.0.linear.weight"] = quantize(full["blocks.0.linear.weight"] * 2, RECIPES[name]).dequantize()
    _assert_shards(net, after, "replaced")
    with pytest.raises(RuntimeError, match="writeback=True"), unsharded(net), torch.no_grad():
        net.head.weight.zero_()
    _assert_shards(net, after, "refused")


@pytest.mark.parametrize("world_size", [1, 4])
def test_what_is_written_into_gathered_weights_comes_back_dequantized(world_size: int) -> None:
    for name in ("float8-tensor", "mxfp8-row"):
        run_ranks(world_size, _reads_and_writes_gathered_weights, name)


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refused(name: str, **options: Any) -> None:
    net = _build(name)
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
    for name in ("float8-row", "nvfp4-square"):
        messages = run_ranks_catching(4, _refused, name, reshard_after_forward=2)
        _assert_alike(messages, "NotImplementedError", "reshard_after_forward=<int>", "use True or False")


def _on_columns(param: nn.Parameter) -> Shard:
    return Shard(1) if param.ndim == 2 else Shard(0)


def test_sharding_columns_is_refused() -> None:
    for name in ("float8-row", "nvfp4-square"):
        messages = run_ranks_catching(2, _refused, name, shard_placement_fn=_on_columns)
        _assert_alike(messages, "Shard(dim > 0)", "shard on dim 0", f"({rows_for(name)[0]}, {K})")


def _compiles(name: str) -> None:
    assert rows_for(name) == UNEVEN
    net = _build(name)
    reference = copy.deepcopy(net)
    for block in net.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    shard(net)
    sync_scales(net)
    with warnings.catch_warnings():
        # dynamo, of the unsharded parameters of FSDP, quantized or not
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        for _ in range(2):
            assert_same_bytes(_backward(net, batch(0)), _backward(reference, batch(0)), name)
    for param, its in zip(net.parameters(), reference.parameters(), strict=True):
        assert_same_bytes(param.grad.full_tensor(), its.grad, name)


def test_blocks_under_fully_shard_compile() -> None:
    run_ranks(1, _compiles, "float8-tensor")
