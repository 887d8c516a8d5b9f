"""Ways to train a sharded quantized model: meta init on shards, recomputed activations, mixed precision, mixed models.

Each equals one process bit for bit, with either storage. Shared, frozen and stacked weights: test_matrix_weights and
test_matrix_experts.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fsdp_hooks import sync_scales, unsharded
from qtensor import MasterWeightOptimizer, QuantizedTensor, quantize, quantize_, quantized_model_init
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.registry import tensor_wide
from tests.fsdp_hooks.cases import (
    HANDS,
    RECIPES,
    ROW_RECIPES,
    TENSOR_WIDE,
    Collectives,
    Net,
    assert_gathers_exactly,
    assert_same_bytes,
    batch,
    build,
    exchanged,
    local,
    quantized,
    rows_for,
    shard,
)
from tests.fsdp_hooks.test_tensor_parallel import assert_reference_bytes
from tests.ranks import run_ranks, run_ranks_each
from tests.sampling import halves, sampled
from tests.torch_versions.release import RELEASE

STORAGES = ("quantized", "high_precision")
FP32 = torch.float32


def optimizer_of(net: nn.Module) -> MasterWeightOptimizer:
    params = [param for param in net.parameters() if param.requires_grad]
    return MasterWeightOptimizer(torch.optim.AdamW, params, lr=0.02, weight_decay=0.1)


def mean_of_ranks(grad: Tensor) -> Tensor:
    """What FSDP's reduce-scatter makes of a gradient that every rank has its own of; exact on 2 ranks."""
    grads = exchanged(grad)
    return sum(grads) / len(grads)


def follow(net: Any, reference: Any, x_of: Callable[[int], Tensor] = batch, *, own_gradients: bool = False) -> None:
    """Train both alike: outputs before every step, and all bytes after it, are the reference's.

    The reference gets the gradients FSDP produced, or, on up to 2 ranks, the mean of its own over the ranks, which then
    must be those of FSDP.
    """
    sync_scales(net)
    assert_reference_bytes(net, reference, "before the first step")
    optimizer, its_optimizer = optimizer_of(net), optimizer_of(reference)
    for step in range(2):
        outputs = [model(x_of(step)) for model in (net, reference)]
        assert_same_bytes(outputs[0].detach(), outputs[1].detach(), f"step {step}: output")
        for out in outputs:
            out.float().square().mean().backward()
        for (fqn, param), its in zip(net.named_parameters(), reference.parameters(), strict=True):
            assert (param.grad is not None) == (its.grad is not None) == param.requires_grad, fqn
            if param.grad is None:
                continue
            assert type(local(param.grad)) is Tensor, fqn
            full = param.grad.full_tensor()
            if own_gradients:
                assert_same_bytes(full, mean_of_ranks(its.grad), f"step {step}: gradient of {fqn}")
            its.grad = full
        before = {fqn: param.detach().clone() for fqn, param in reference.named_parameters()}
        optimizer.step()
        its_optimizer.step()
        for fqn, param in reference.named_parameters():
            assert not param.requires_grad or (values(param) != values(before[fqn])).any(), f"{fqn} was not trained"
        assert_reference_bytes(net, reference, f"step {step}")
        sync_scales(net)
        for each in (optimizer, its_optimizer):
            each.zero_grad()


def values(param: Tensor) -> Tensor:
    """The values behind an unsharded parameter."""
    if isinstance(param, HighPrecisionWeight):
        return param.dense.detach()
    return param.detach().dequantize() if isinstance(param, QuantizedTensor) else param.detach()


# -- meta init ---------------------------------------------------------------------------------------------------------


def _initialised(name: str, **init: Any) -> Net:
    """meta -> fully_shard -> to_empty -> drawn on the shards, from one seed, as a model's init_weights does."""
    with torch.device("meta"), quantized_model_init(RECIPES[name], **init):
        net: Any = Net(rows_for(name))
    shard(net).to_empty(device="cpu")
    torch.manual_seed(7)
    with warnings.catch_warnings():
        # torch's word on random numbers of DTensors on CPU, where every rank draws from its own generator
        warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
        for module in net.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.uniform_(module.bias, -0.1, 0.1)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
    return net


def _draws_what_a_plain_model_draws(name: str, storage: str) -> None:
    plain = _initialised(name, enabled=False)
    for agree in (sync_scales, optimizer_of):
        net = _initialised(name, storage=storage)
        for (fqn, param), its in zip(net.named_parameters(), plain.parameters(), strict=True):
            found, drawn = local(param), local(its).detach()
            if isinstance(found, QuantizedTensor):
                for part, tensor in quantize(drawn, RECIPES[name]).parts().items():
                    # a rank without rows keeps the scale it was allocated with
                    if drawn.numel():
                        assert_same_bytes(found.parts()[part], tensor, f"{fqn}.{part}")
            else:
                assert_same_bytes(values(found), drawn, fqn)
        agree(net)
        for fqn, _, q in quantized(net):
            if name in TENSOR_WIDE:
                assert len(set(exchanged(getattr(q, tensor_wide(q.recipe)).item()))) == 1, fqn
        if storage == "quantized":
            assert_gathers_exactly(net, "initialised on its shards")


@pytest.mark.parametrize("storage", STORAGES)
@sampled("world_size", [1, 4], [4])
def test_init_on_shards_draws_what_a_plain_model_draws(world_size: int, storage: str) -> None:
    names = ROW_RECIPES if world_size == 4 else TENSOR_WIDE
    run_ranks_each(world_size, names, _draws_what_a_plain_model_draws, storage)


# -- recomputed activations --------------------------------------------------------------------------------------------


def _around(net: Any, x: Tensor) -> Tensor:
    """Net.forward with every block, the FSDP module itself, in a checkpoint: backward gathers it once more."""
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return net.head(net.norm(x))


def _recomputes(case: tuple[str, str, bool, bool]) -> None:
    name, storage, around, reshard = case
    net: Any = build(RECIPES[name], rows_for(name), storage=storage)
    reference = copy.deepcopy(net)
    if around:
        net.forward = lambda x: _around(net, x)
    else:
        for block in net.blocks:
            block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)
    shard(net, reshard_after_forward=reshard)
    follow(net, reference, own_gradients=True)


# Every way in either storage, each with a format that has a scale to agree on or one that has none; in `make test` half
# of them, in which any two values meet.
RECOMPUTED = [
    (("float8_tensor", "mxfp8")[(number + around + reshard) % 2], storage, around, reshard)
    for number, storage in enumerate(STORAGES)
    for around in (True, False)
    for reshard in (True, False)
]


@halves("cases", RECOMPUTED, [case for case in RECOMPUTED if (case[1] == "quantized") == (case[2] == case[3])])
def test_activation_checkpointing_changes_no_bit(cases: tuple[tuple[str, str, bool, bool], ...]) -> None:
    run_ranks_each(2, cases, _recomputes)


# -- mixed precision ---------------------------------------------------------------------------------------------------

# In what FSDP reduces gradients of fp32 shards that are computed in bf16, where the policy does not say.
REDUCED_IN = torch.float32 if RELEASE >= (2, 15) else torch.bfloat16


def _fp32(name: str) -> Net:
    torch.manual_seed(0)
    with quantized_model_init(RECIPES[name]):
        net = Net(rows_for(name), head=96, dtype=torch.float32)
    for block in net.blocks:
        block.mix = block.mix.to(torch.bfloat16)  # FSDP casts parameters and inputs, no buffers
    return net


def _shown_in_bf16(net: Net) -> Net:
    """What FSDP computes with: the same bytes appearing in bf16, all other parameters in bf16."""
    shown = copy.deepcopy(net)
    for module in shown.modules():
        for key, param in module._parameters.items():
            module._parameters[key] = nn.Parameter(param.detach().to(torch.bfloat16))
    return shown


def _trains_in_mixed_precision(name: str, reduce_dtype: torch.dtype | None, output_dtype: torch.dtype | None) -> None:
    net: Any = _fp32(name)
    reference = copy.deepcopy(net)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, output_dtype=output_dtype)
    for block in net.blocks:  # outputs of inner modules stay in bf16
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype))
    fully_shard(net, mp_policy=policy)
    optimizer, its_optimizer = optimizer_of(net), optimizer_of(reference)
    for step in range(2):
        x, shown = batch(step).float(), _shown_in_bf16(reference)
        with unsharded(net):
            assert {param.dtype for param in net.parameters()} == {torch.bfloat16}
        out, its_out = net(x), shown(x.bfloat16())
        assert out.dtype == (output_dtype or torch.bfloat16)
        assert_same_bytes(out.detach(), its_out.detach().to(out.dtype), f"step {step}: output")
        for each in (out, its_out):
            each.float().square().mean().backward()
        for (fqn, param), bf16, its in zip(
            net.named_parameters(), shown.parameters(), reference.parameters(), strict=True
        ):
            assert param.dtype == param.grad.dtype == torch.float32, fqn
            its.grad = param.grad.full_tensor()
            mean = mean_of_ranks(bf16.grad.to(reduce_dtype or REDUCED_IN))
            assert_same_bytes(its.grad, mean.float(), f"step {step}: gradient of {fqn}")
        optimizer.step()
        its_optimizer.step()
        assert_reference_bytes(net, reference, f"step {step}")
        optimizer.zero_grad()


@sampled(
    ("world_size", "reduce_dtype", "output_dtype"),
    [(1, FP32, FP32), (2, None, None), (2, FP32, None), (2, FP32, FP32)],
    [(2, None, None), (2, FP32, FP32)],
)
def test_weights_that_appear_in_fp32_compute_in_bf16(
    world_size: int, reduce_dtype: torch.dtype | None, output_dtype: torch.dtype | None
) -> None:
    run_ranks_each(world_size, ("float8_tensor", "nvfp4"), _trains_in_mixed_precision, reduce_dtype, output_dtype)


# -- mixed models ------------------------------------------------------------------------------------------------------


def _trains_with_some_layers_quantized(name: str, *, one_group: bool) -> None:
    """Some layers quantized, in a group of their own or beside plain ones."""
    torch.manual_seed(0)
    net: Any = Net((192, 64, 192), head=192)  # shards are whole square blocks
    names = quantize_(net, RECIPES[name], include=("blocks.*", "head"), exclude=("blocks.1.*",))
    assert names == ["blocks.0.linear.weight", "blocks.2.linear.weight", "head.weight"]
    reference = copy.deepcopy(net)
    follow(fully_shard(net) if one_group else shard(net), reference)
    assert [fqn for fqn, _, _ in quantized(net)] == names


@sampled(("one_group", "hand"), [(True, 0), (True, 1), (True, 2), (False, 0)], [(True, 1), (False, 0)])
def test_models_with_plain_layers_among_quantized_ones(one_group: bool, hand: int) -> None:
    run_ranks_each(3, HANDS[hand], _trains_with_some_layers_quantized, one_group=one_group)


def _trains_with_a_recipe_a_layer(storage: str, *, one_group: bool) -> None:
    torch.manual_seed(0)
    net: Any = Net([192] * len(RECIPES), head=32)  # shards are whole square blocks
    for block, recipe in zip(net.blocks, RECIPES.values(), strict=True):
        weight = block.linear.weight
        with quantized_model_init(recipe, storage=storage):
            block.linear.weight = weight
    reference = copy.deepcopy(net)
    fully_shard(net) if one_group else shard(net)
    with Collectives() as comms:
        assert sync_scales(net) == 1
    assert comms.counts == {"allreduce_": 1}, "one for all recipes"
    follow(net, reference)
    kinds = [block.linear.weight for block in net.blocks]
    assert [local(weight).recipe for weight in kinds] == list(RECIPES.values())


@sampled(
    ("one_group", "storage"),
    itertools.product((True, False), STORAGES),
    [(True, "quantized"), (False, "high_precision")],
)
def test_models_with_another_recipe_in_every_layer(one_group: bool, storage: str) -> None:
    run_ranks(3, _trains_with_a_recipe_a_layer, storage, one_group=one_group)
