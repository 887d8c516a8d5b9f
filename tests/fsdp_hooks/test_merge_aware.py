"""merge_aware under FSDP2: every rank's forward computes with the weight that merge_ then writes to the shards.

Rows are no multiple of the ranks, or fewer than they are, so that shards are uneven or empty, and cut square blocks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from qtensor import LowRankUpdate, QuantizedTensor, linear_through_merge, merge_, merge_aware, quantized_model_init
from tests import recipes
from tests.fsdp_hooks.cases import assert_same_bytes, mesh_of
from tests.fsdp_hooks.test_cut_blocks import assert_bytes_of
from tests.ranks import run_ranks, run_ranks_catching, run_ranks_each
from tests.sampling import sampled

RECIPES = recipes.MAIN | recipes.WITH_HISTORY
NAMES = ("up", "small")
K = 256


class Net(nn.Module):
    """`up` has uneven shards, `small` leaves ranks without rows."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        facts = recipes.facts(recipe)
        step = facts.block if facts.square else 4
        self.up = nn.Linear(K, 9 * step, dtype=torch.bfloat16)
        self.small = nn.Linear(K, step if facts.square and not facts.ragged else 2, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.up(x), self.small(x)], dim=-1)


class Block(nn.Module):
    """What is sharded as one, with a module around it, as models are."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def built(name: str) -> Any:
    """A model of peft with bf16 adapters that are not zero; the rows of its weights have different magnitudes."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    with quantized_model_init(RECIPES[name]):
        net = Net(RECIPES[name])
    with torch.no_grad():
        for linear in (net.up, net.small):
            rows = torch.linspace(-3, 3, linear.weight.shape[0])[:, None].exp2()
            linear.weight.copy_(torch.randn(linear.weight.shape) * rows)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=list(NAMES), init_lora_weights=False)
    model = get_peft_model(Block(net), config)
    for each, param in model.named_parameters():
        if "lora_" in each:
            param.data = param.data.bfloat16() * 10
    return model


def sharded(name: str, **options: Any) -> Any:
    model = built(name)
    fully_shard(model.base_model.model.net, **options)
    return fully_shard(model, **options)


def tokens(rank: int) -> Tensor:
    return torch.randn(5, K, generator=torch.Generator().manual_seed(rank)).bfloat16()


def _forwards_compute_what_merge_writes(name: str) -> None:
    reference, model, ranks = built(name), sharded(name), dist.get_world_size()
    names = list(model.state_dict())
    mine = merge_aware(reference)
    mine.start()
    with merge_aware(model) as aware:
        y = model(tokens(dist.get_rank()))
        assert_same_bytes(y.detach(), reference(tokens(dist.get_rank())).detach(), name)
        y.sum().backward()
    assert list(model.state_dict()) == names
    for rank in range(ranks):  # each rank's own backward, one after the other: the same roundings, then their mean
        reference(tokens(rank)).sum().backward()
    own = dict(reference.named_parameters())
    for each, param in model.named_parameters():
        assert (param.grad is not None) == ("lora_" in each), each
        if param.grad is not None:
            # two or three bf16 gradients, added and divided in another order: at most 4 roundings of 2^-9 each
            total, bound = own[each].grad.float() / ranks, 4 * 2**-8
            scale = total.abs().max()
            assert ((param.grad.full_tensor().float() - total).abs() <= bound * scale).all(), each
    report = merge_(model, aware.updates())
    assert [line.name for line in report.weights] == [f"base_model.model.net.{one}.base_layer.weight" for one in NAMES]
    merge_(reference, mine.updates())
    expected = {
        fqn: param.detach() for fqn, param in reference.named_parameters() if isinstance(param, QuantizedTensor)
    }
    assert len(expected) == 2
    assert_bytes_of(model, expected, name)
    with model.disable_adapter(), torch.no_grad():
        assert_same_bytes(model(tokens(dist.get_rank())), y.detach(), f"{name}, merged")


CASES = [(ranks, names) for ranks in (2, 3) for names in (tuple(RECIPES),)]


@sampled(("ranks", "names"), [*CASES, (3, ("float8_block_square", "nvfp4"))], [(3, ("float8_block_square", "nvfp4"))])
def test_forwards_compute_what_merge_writes_to_the_shards(ranks: int, names: tuple[str, ...]) -> None:
    run_ranks_each(ranks, names, _forwards_compute_what_merge_writes)


def _with_fp32_factors() -> Any:
    model = built("mxfp8")
    for each, param in model.named_parameters():
        if "lora_" in each:
            param.data = param.data.float() * 1.01
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def _rounded_by_a_policy() -> None:
    model = _with_fp32_factors()
    with merge_aware(model), pytest.raises(RuntimeError, match=r"this forward sees torch\.bfloat16.*adapter_dtype="):
        model(tokens(0))
    model = _with_fp32_factors()
    with merge_aware(model, adapter_dtype=torch.bfloat16) as aware:
        y = model(tokens(0)).detach()
    updates: Any = aware.updates()
    assert all(update.a.dtype == torch.bfloat16 for update in updates.values())
    merge_(model, updates)
    with model.disable_adapter(), torch.no_grad():
        assert_same_bytes(model(tokens(0)), y, "merged")


def test_factors_that_a_policy_rounds_are_refused_until_the_user_says_so() -> None:
    run_ranks(2, _rounded_by_a_policy)


def _dense_base_rounded_by_a_policy() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(nn.Sequential(nn.Linear(K, 64)), LoraConfig(r=2, target_modules=["0"]))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with merge_aware(model, adapter_dtype=torch.bfloat16):
        model(tokens(0))


def test_a_dense_base_that_a_policy_rounds_is_refused() -> None:
    errors = run_ranks_catching(2, _dense_base_rounded_by_a_policy)
    assert len({*errors}) == 1
    assert "0.base_layer.weight is dense and was torch.float32, and this forward sees torch.bfloat16" in errors[0]


def _own_layer_sharded(inside: bool) -> None:
    model = built("mxfp8")
    layer = model.base_model.model.net.up
    fully_shard(layer.base_layer if inside else layer)
    plain = built("mxfp8")
    with merge_aware(model), merge_aware(plain):
        assert_same_bytes(model(tokens(0)).detach(), plain(tokens(0)).detach(), "sharded by itself")


def test_a_layer_may_be_sharded_by_itself_but_not_taken_apart() -> None:
    run_ranks(2, _own_layer_sharded, False)
    errors = run_ranks_catching(2, _own_layer_sharded, True)
    assert len({*errors}) == 1
    assert errors[0].startswith(
        "ValueError: merge_aware: base_model.model.net.up: fully_shard has taken a module inside of it"
    )


def _tensor_parallel() -> None:
    model = built("mxfp8")
    parallelize_module(model.base_model.model.net.up.base_layer, mesh_of(2), ColwiseParallel(), src_data_rank=None)
    with merge_aware(model):
        model(tokens(0))


def test_tensor_parallel_layers_are_refused_by_name() -> None:
    errors = run_ranks_catching(2, _tensor_parallel)
    assert len({*errors}) == 1
    assert "base_model.model.net.up" in errors[0]
    assert "its base layer has hooks on its forward, as tensor parallelism and rotated inputs" in errors[0]


class Own(nn.Module):
    """An adapter written by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        with quantized_model_init(RECIPES["nvfp4_square"]):
            self.linear = nn.Linear(K, 144, dtype=torch.bfloat16)
        self.a, self.b = (nn.Parameter(torch.randn(*shape).bfloat16() / 4) for shape in ((2, K), (144, 2)))
        self.linear.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        update = LowRankUpdate(a=self.a, b=self.b, scaling=0.5)
        return linear_through_merge(x, self.linear.weight, self.linear.bias, update)


def _by_hand() -> None:
    reference, model = Own(), fully_shard(Own())
    y = model(tokens(dist.get_rank()))
    assert_same_bytes(y.detach(), reference(tokens(dist.get_rank())).detach(), "forward")
    y.sum().backward()
    assert model.b.grad.full_tensor().abs().sum() > 0
    model.reshard()
    update = LowRankUpdate(a=model.a.detach().full_tensor(), b=model.b.detach().full_tensor(), scaling=0.5)
    merge_(model, {"linear.weight": update})
    merge_(reference, {"linear.weight": update})
    assert_bytes_of(model, {"linear.weight": reference.linear.weight.detach()}, "merged")


def test_adapters_written_by_hand_are_merged_alike() -> None:
    run_ranks(3, _by_hand)
