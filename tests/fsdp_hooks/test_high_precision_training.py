"""storage="high_precision": training equals one process bit for bit, and what else happens to a model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from fsdp_hooks import sync_scales, unsharded
from qtensor import MasterWeightOptimizer, QuantizedTensor, quantize, quantized_model_init
from qtensor.scales.high_precision import HighPrecisionWeight
from tests.fsdp_hooks.cases import (
    RECIPES,
    TRAINED,
    Collectives,
    K,
    Net,
    assert_same_bytes,
    batch,
    build,
    exchanged,
    local,
    mesh_of,
    rows_for,
    shard,
)
from tests.fsdp_hooks.dense_shards import (
    OPTIMIZERS,
    assert_gathers,
    assert_shards,
    backward,
    build_dense,
    train_dense,
    values,
    weights,
    whole,
)
from tests.ranks import run_ranks, run_ranks_each
from tests.sampling import sampled
from tests.torch_versions.release import RELEASE

# -- parity ------------------------------------------------------------------------------------------------------------


def _trains_like_one_process(
    name: str, *, shape: Sequence[int] | None = None, make: str = "adamw", hook: bool = False, **options: Any
) -> None:
    net = build_dense(name)
    reference = copy.deepcopy(net)
    if shape:
        options["mesh"] = mesh_of(*shape)
    train_dense(shard(net, **options), reference, RECIPES[name], make=make, hook=hook)


@pytest.mark.parametrize(("world_size", "names"), TRAINED)
def test_training_equals_one_process_with_uneven_and_empty_shards(world_size: int, names: tuple[str, ...]) -> None:
    run_ranks_each(world_size, names, _trains_like_one_process)


def _trains_with(make: str) -> None:
    _trains_like_one_process("nvfp4", make=make)
    _trains_like_one_process("float8_tensor", make=make, hook=True)


def test_training_equals_one_process_with_any_torch_optimizer() -> None:
    run_ranks_each(2, [make for make in OPTIMIZERS if make != "adamw"], _trains_with)


@sampled(("world_size", "shape"), [(4, (2, 2)), (2, (2, 1))], [(4, (2, 2))])
def test_training_equals_one_process_under_hsdp(world_size: int, shape: Sequence[int]) -> None:
    run_ranks_each(world_size, ("float8_tensor", "mxfp8_square"), _trains_like_one_process, shape=shape)


@sampled("world_size", [1, 2, 4], [2])
def test_training_equals_one_process_under_cpu_offload(world_size: int) -> None:
    offload = CPUOffloadPolicy(pin_memory=False)
    run_ranks_each(world_size, ("float8_row", "nvfp4"), _trains_like_one_process, offload_policy=offload)


@sampled("world_size", [1, 3], [3])
def test_training_equals_one_process_without_reshard_after_forward(world_size: int) -> None:
    run_ranks_each(world_size, ("float8_tensor", "mxfp8"), _trains_like_one_process, reshard_after_forward=False)


@sampled("world_size", [1, 2], [2])
def test_scales_may_be_agreed_on_by_a_hook_of_the_optimizer(world_size: int) -> None:
    run_ranks_each(world_size, ("float8_tensor", "nvfp4_square"), _trains_like_one_process, hook=True)


def _accumulates(name: str) -> None:
    net = build_dense(name)
    reference = copy.deepcopy(net)
    train_dense(shard(net), reference, RECIPES[name], micro_batches=3)


@sampled("world_size", [1, 3], [3])
def test_training_equals_one_process_with_gradient_accumulation(world_size: int) -> None:
    run_ranks_each(world_size, ("mxfp8", "float8_tensor"), _accumulates)


def _trains_around_frozen_weights(name: str) -> None:
    net = build_dense(name)
    net.blocks[0].requires_grad_(False)
    net.head.weight.requires_grad_(False)
    reference = copy.deepcopy(net)
    assert not reference.head.weight.requires_grad
    shard(net)
    before = whole(net)
    train_dense(net, reference, RECIPES[name])
    after = whole(net)
    for fqn in ("blocks.0.linear.weight", "blocks.0.linear.bias", "head.weight"):
        assert_same_bytes(after[fqn], before[fqn], fqn)


def test_frozen_weights_stay_while_others_train() -> None:
    run_ranks(2, _trains_around_frozen_weights, "float8_tensor")


def _clips_gradients(name: str) -> None:
    net = build_dense(name)
    reference = copy.deepcopy(net)
    shard(net)
    backward(net, batch(0))
    for param, its in zip(net.parameters(), reference.parameters(), strict=True):
        its.grad = param.grad.full_tensor()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    its_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
    torch.testing.assert_close(norm.full_tensor(), its_norm, rtol=1e-2, atol=0)  # bf16 norms, summed in another order
    assert norm.full_tensor() > 1e-3
    for param, its in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), its.grad, rtol=3e-2, atol=1e-9)


def test_gradients_can_be_clipped() -> None:
    run_ranks(2, _clips_gradients, "nvfp4")


def _recomputes(name: str) -> None:
    """Activation checkpointing gathers once more in backward; outputs and gradients are those without it."""
    net, other = shard(build_dense(name)), build_dense(name)
    for block in other.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    shard(other)
    for model in (net, other):
        sync_scales(model)
    assert_same_bytes(backward(other, batch(0)), backward(net, batch(0)), "output")
    for (fqn, param), its in zip(net.named_parameters(), other.parameters(), strict=True):
        assert_same_bytes(its.grad.to_local(), param.grad.to_local(), fqn)


@pytest.mark.parametrize("world_size", [1, 2])
def test_activation_checkpointing_changes_no_bit(world_size: int) -> None:
    run_ranks(world_size, _recomputes, "float8_tensor")


def _runs_in_inference_mode(name: str) -> None:
    net = build_dense(name)
    reference = copy.deepcopy(net)
    shard(net)
    sync_scales(net)
    with torch.inference_mode():
        for _ in range(2):
            assert_same_bytes(net(batch(0)), reference(batch(0)), name)
        net.reshard()
    assert len(list(weights(net))) == len(rows_for(name)) + 1
    sync_scales(net)
    assert_gathers(net, whole(net), RECIPES[name], "after inference")


@pytest.mark.parametrize("world_size", [2, 4])  # FSDP2 of one rank knows no inference mode, for plain weights either
def test_a_first_forward_may_be_one_in_inference_mode(world_size: int) -> None:
    run_ranks(world_size, _runs_in_inference_mode, "nvfp4")


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
            value = values(param).to(torch.bfloat16)
            if isinstance(param, HighPrecisionWeight):
                parts = quantize(param.dense, param.recipe).parts()
                value = QuantizedTensor.from_parts(parts, param.recipe, torch.bfloat16)
            its._parameters[key] = nn.Parameter(value)
    return shown


def _trains_in_mixed_precision(case: tuple[str, torch.dtype | None]) -> None:
    name, reduce_dtype = case
    # With no reduce_dtype torch reduces the gradients of fp32 shards in fp32 from 2.15 on, before as they are.
    reduced = reduce_dtype or (torch.float32 if RELEASE >= (2, 15) else torch.bfloat16)
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
        out, its_out = backward(net, x), backward(shown, x.to(torch.bfloat16))
        assert_same_bytes(out, its_out, f"step {step}")
        pairs = zip(net.named_parameters(), shown.parameters(), reference.parameters(), strict=True)
        for (fqn, param), bf16, its in pairs:
            assert param.dtype == param.grad.dtype == torch.float32, fqn
            its.grad = param.grad.full_tensor()
            grads = [grad.to(reduced) for grad in exchanged(bf16.grad)]
            assert_same_bytes(its.grad, (sum(grads) / len(grads)).float(), f"step {step}: gradient of {fqn}")
        optimizer.step()
        its_optimizer.step()
        sync_scales(net)
        full = {fqn: values(param) for fqn, param in reference.named_parameters()}
        assert_shards(net, full, f"step {step}")
        optimizer.zero_grad()


@sampled("world_size", [1, 2], [2])
def test_fp32_shards_are_gathered_quantized_and_computed_with_in_bf16(world_size: int) -> None:
    cases = [(name, dtype) for dtype in (None, torch.float32) for name in ("float8_tensor", "mxfp8")]
    run_ranks_each(world_size, cases, _trains_in_mixed_precision)


# -- the life of a model -----------------------------------------------------------------------------------------------


def _trains_from_meta(name: str) -> None:
    with torch.device("meta"), quantized_model_init(RECIPES[name], storage="high_precision"):
        net: Any = Net(rows_for(name))
    shard(net)
    assert all(param.is_meta for param in net.parameters())
    with pytest.raises(ValueError, match="meta device"):
        sync_scales(net)
    net.to_empty(device="cpu")
    assert len(list(weights(net))) == len(rows_for(name)) + 1
    with warnings.catch_warnings():
        # torch's word on random numbers of DTensors on CPU: every rank draws its own, which is what is wanted here
        warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
        for position, module in enumerate(net.modules()):
            if hasattr(module, "reset_parameters"):
                torch.manual_seed(100 * position + dist.get_rank())
                module.reset_parameters()
    for block, rows in zip(net.blocks, rows_for(name), strict=True):
        block.mix.copy_(torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)) / rows**0.5)
    full = whole(net)
    assert all(bool(full[fqn].ne(0).any()) for fqn, _, _ in weights(net))
    reference = build(RECIPES[name], rows_for(name), seed=1, head=96, storage="high_precision")
    reference.load_state_dict(full)
    train_dense(net, reference, RECIPES[name])


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_model_built_on_meta_sharded_and_initialised_trains_like_one_process(world_size: int) -> None:
    run_ranks(world_size, _trains_from_meta, "float8_tensor")


def _moves(name: str) -> None:
    reference = build_dense(name)
    net = shard(build_dense(name))
    sync_scales(net)
    for move in (nn.Module.float, nn.Module.bfloat16, nn.Module.cpu):  # FSDP's buffers are fixed by the first gather
        move(net)
        move(reference)
        full = {fqn: values(param) for fqn, param in reference.named_parameters()}
        assert len(list(weights(net))) == len(rows_for(name)) + 1
        assert all(param.dtype == full[fqn].dtype for fqn, param in net.named_parameters())
        assert_shards(net, full, move.__name__)
    assert_gathers(net, full, RECIPES[name], "moved")
    train_dense(net, reference, RECIPES[name])


@sampled("world_size", [1, 3], [3])
def test_moving_and_casting_a_sharded_model_keeps_values_and_kind(world_size: int) -> None:
    run_ranks_each(world_size, ("float8_tensor", "mxfp8"), _moves)


def _trains_masters(name: str) -> None:
    """bf16 shards under fp32 masters: the shard is the rounded master, what is gathered its quantization."""
    net = build_dense(name)
    reference = copy.deepcopy(net)
    shard(net)
    optimizers = [MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3) for model in (net, reference)]
    start = whole(net)
    for step in range(3):
        with torch.no_grad():
            out = reference(batch(step))
        assert_same_bytes(backward(net, batch(step)), out, f"step {step}")
        for param, its in zip(net.parameters(), reference.parameters(), strict=True):
            its.grad = param.grad.full_tensor()
        with Collectives() as comms:  # it agrees on scales, too
            optimizers[0].step()
        assert comms.counts["allreduce_"] == (dist.get_world_size() > 1), comms.counts
        optimizers[1].step()
        full = {fqn: values(param) for fqn, param in reference.named_parameters()}
        assert_shards(net, full, f"step {step}")
        assert_gathers(net, full, RECIPES[name], f"step {step}")
        for fqn, param, shard_ in weights(net):
            master = optimizers[0].state[param]["master_weight"]
            assert type(local(master)) is Tensor, fqn
            assert master.dtype == torch.float32, fqn
            assert_same_bytes(shard_.dense, local(master).to(torch.bfloat16), fqn)
        optimizers[0].zero_grad()
    assert not torch.equal(full["head.weight"], start["head.weight"])


@sampled("world_size", [1, 3], [3])
def test_masters_of_bf16_shards_train_like_one_process(world_size: int) -> None:
    run_ranks_each(world_size, ("float8_tensor", "nvfp4"), _trains_masters)


def _reads_and_writes_gathered_weights(name: str) -> None:
    """The gathered weight is quantized, so what is written into it reaches the dense shards through its rounding."""
    net = shard(build_dense(name))
    sync_scales(net)
    full = whole(net)
    with unsharded(net):
        for fqn in (fqn for fqn, _, _ in weights(shard(build_dense(name)))):
            param = net.get_parameter(fqn)
            assert isinstance(param, QuantizedTensor), fqn
            assert_same_bytes(param.dequantize(), quantize(full[fqn], RECIPES[name]).dequantize(), fqn)
    assert_shards(net, full, "read")
    value = torch.randn(net.head.weight.shape, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    with unsharded(net, writeback=True), torch.no_grad():
        net.head.weight.copy_(value)
    after = {**full, "head.weight": quantize(value, RECIPES[name]).dequantize()}
    assert_shards(net, after, "written")
    sync_scales(net)
    assert_gathers(net, after, RECIPES[name], "written")
    with unsharded(net, writeback=True):
        net.blocks[0].linear.weight = nn.Parameter(full["blocks.0.linear.weight"] * 2)
    after["blocks.0.linear.weight"] = quantize(full["blocks.0.linear.weight"] * 2, RECIPES[name]).dequantize()
    assert_shards(net, after, "replaced")
    with pytest.raises(RuntimeError, match="writeback=True"), unsharded(net), torch.no_grad():
        net.head.weight.zero_()
    assert_shards(net, after, "refused")


@sampled("world_size", [1, 4], [4])
def test_what_is_written_into_gathered_weights_comes_back_dequantized(world_size: int) -> None:
    run_ranks_each(world_size, ("float8_tensor", "mxfp8"), _reads_and_writes_gathered_weights)
