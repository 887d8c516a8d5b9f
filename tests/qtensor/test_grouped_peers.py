"""Grouped products beside other libraries.

torchao prepares groups, their columns and their scales for the kernels of scaled_grouped_mm; transformers has experts
that call grouped_mm.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torchao.prototype.moe_training.kernels.mxfp8.quant import (
    torch_pad_token_groups,
    torch_to_blocked_2d_K_groups,
    torch_to_blocked_2d_M_groups,
    torch_to_blocked_per_group_3d,
)
from torchao.prototype.moe_training.utils import torch_to_float8_per_group_colwise

from qtensor import Float8CurrentScaling, MXFP8BlockScaling, quantize
from qtensor.products.grouped.layout import places, spread
from qtensor.products.grouped.operands import encode_group_columns
from qtensor.products.grouped.scales import swizzle_column_groups, swizzle_row_groups, swizzle_stack
from qtensor.spec.registry import specs_of
from tests.qtensor.recipes_under_test import raw
from tests.qtensor.test_grouped import ends_of, tokens


def codes(*shape: int) -> Tensor:
    return torch.randint(1, 255, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sizes", [(5, 33, 20), (128, 1), (300, 200), (37,)], ids=str)
@pytest.mark.parametrize("blocks", [4, 8])
def test_scales_of_grouped_rows_stand_as_torchao_has_them(sizes: tuple[int, ...], blocks: int) -> None:
    ends, scale = ends_of(sizes), codes(sum(sizes), blocks)
    found = swizzle_row_groups(scale, ends).flatten()
    wanted, starts = torch_to_blocked_2d_M_groups(scale, ends)
    used = int(starts[-1]) * blocks
    assert torch.equal(found[:used], wanted.flatten()[:used])


@pytest.mark.parametrize("sizes", [(5, 3, 20), (4, 1), (8, 16), (37,)], ids=str)
@pytest.mark.parametrize("rows", [128, 200])
def test_scales_of_grouped_columns_stand_as_torchao_has_them(sizes: tuple[int, ...], rows: int) -> None:
    ends, scale = ends_of(sizes), codes(rows, sum(sizes))
    found = swizzle_column_groups(scale, ends).flatten()
    wanted, starts = torch_to_blocked_2d_K_groups(scale, ends)
    used = int(starts[-1]) * -(-rows // 128) * 128
    assert torch.equal(found[:used], wanted.flatten()[:used])


@pytest.mark.parametrize("shape", [(3, 128, 4), (2, 200, 6), (1, 16, 1)], ids=str)
def test_scales_of_a_stack_stand_as_torchao_has_them(shape: tuple[int, ...]) -> None:
    scale = codes(*shape)
    assert torch.equal(swizzle_stack(scale), torch_to_blocked_per_group_3d(scale))


@pytest.mark.parametrize("sizes", [(5, 33, 20), (16, 1), (37,)], ids=str)
def test_groups_are_filled_up_as_torchao_fills_them(sizes: tuple[int, ...]) -> None:
    ends, x = ends_of(sizes), tokens(sum(sizes), 8)
    at = places(ends, x.shape[0], 32)
    wanted, _, wide = torch_pad_token_groups(x, ends, 32)
    assert torch.equal(at.ends, wide)
    assert torch.equal(spread(x, at)[: wide[-1]], wanted[: wide[-1]])


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_columns_of_groups_are_quantized_as_torchao_does(element: str, power_of_two: bool) -> None:
    recipe = Float8CurrentScaling(element=element, power_of_two=power_of_two)
    ends = ends_of((16, 48, 32))
    x = tokens(96, 40)
    parts = encode_group_columns(x, places(ends, 96, 16), 3, recipe)
    dtype = specs_of(recipe)[0].dtype
    wanted, scales = torch_to_float8_per_group_colwise(x, ends, dtype, power_of_two)
    assert torch.equal(raw(parts["payload"][:, :96]), raw(wanted.t()))
    # theirs is what values are multiplied by
    assert torch.equal(parts["scale"].flatten(), scales.reciprocal())


# -- whose experts call grouped_mm -------------------------------------------------------------------------------------

RECIPES = {
    "float8": Float8CurrentScaling(activations="dynamic", gradients="e5m2"),
    "mxfp8": MXFP8BlockScaling(activations="dynamic", gradients="e4m3"),
}
both = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


def with_quantized_stacks(module: Any, recipe: Any) -> list[nn.Parameter]:
    """Put quantized stacks into the place of dense ones."""
    made = []
    for each in module.modules():
        for name, value in list(each.named_parameters(recurse=False)):
            if value.ndim == 3:
                made.append(nn.Parameter(quantize(value.detach(), recipe)))
                setattr(each, name, made[-1])
    return made


@both
def test_experts_of_transformers_are_those_of_its_own_loop(recipe: Any) -> None:
    """Its "eager" goes through the experts with F.linear; a token has two of them, whose sum has no order.

    The loop takes the tokens of an expert in another order, and so the sums over them, dw, are rounded elsewhere.
    """
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    model: Any = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    stacks, ids = with_quantized_stacks(model, recipe), torch.randint(0, 64, (2, 16))
    assert len(stacks) == 2
    found = []
    for implementation in ("eager", "grouped_mm"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        found.append({name: param.grad for name, param in model.named_parameters()} | {"logits": out.logits.detach()})
    for name, value in found[0].items():
        assert value.count_nonzero(), name
        if "experts" not in name:
            assert torch.equal(value, found[1][name]), name
