"""storage="high_precision" without FSDP: a dense weight that linear layers quantize on the spot."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_hooks import sync_scales
from fsdp_hooks.scale_sync import scales_of
from qtensor import (
    Float8CurrentScaling,
    MXFP8BlockScaling,
    clear_high_precision_init_val,
    high_precision_init_val,
    quantize,
    quantize_,
    quantized_model_init,
)
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.registry import tensor_wide
from tests.qtensor.recipes_under_test import RECIPES, same_bytes, same_parts, weight

ROWS, COLUMNS = 64, 96
all_recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
RECIPE = Float8CurrentScaling(granularity="tensor")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _linear(recipe: Any, dtype: torch.dtype = torch.bfloat16, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    with quantized_model_init(recipe, storage="high_precision"):
        layer = nn.Linear(COLUMNS, ROWS, bias=bias, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(weight(ROWS, COLUMNS, dtype))
    return layer


def _input(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(3, 5, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def _plain(layer: nn.Linear) -> nn.Linear:
    """The same layer without a recipe."""
    other = nn.Linear(COLUMNS, ROWS, bias=layer.bias is not None, dtype=layer.weight.dtype)
    with torch.no_grad():
        for mine, its in zip(other.parameters(), layer.parameters(), strict=True):
            mine.copy_(its)
    return other


# -- F.linear ----------------------------------------------------------------------------------------------------------


@all_recipes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_linear_is_that_of_the_quantized_weight(recipe: Any, dtype: torch.dtype) -> None:
    layer, x = _linear(recipe, dtype), _input(dtype)
    q = nn.Parameter(quantize(weight(ROWS, COLUMNS, dtype), recipe))
    its_x, bias = x.detach().clone().requires_grad_(), layer.bias.detach().clone().requires_grad_()
    out, expected = layer(x), F.linear(its_x, q, bias)
    assert type(out) is Tensor
    assert same_bytes(out, expected)
    plain = F.linear(x.detach(), weight(ROWS, COLUMNS, dtype), bias.detach())
    assert not torch.equal(out, plain), "not quantized"
    out.float().square().mean().backward()
    expected.float().square().mean().backward()
    for found, its in ((x, its_x), (layer.weight, q), (layer.bias, bias)):
        assert type(found.grad) is Tensor
        assert found.grad.dtype == dtype
        assert same_bytes(found.grad, its.grad)


def test_gradients_accumulate_and_optimizers_step() -> None:
    layer = _linear(RECIPE)
    for _ in range(2):
        layer(_input()).float().sum().backward()
    once = _linear(RECIPE)
    once(_input()).float().sum().backward()
    assert torch.equal(layer.weight.grad, 2 * once.weight.grad)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    optimizer.step()
    assert isinstance(layer.weight, HighPrecisionWeight)
    assert all(type(value) is Tensor for value in optimizer.state[layer.weight].values())
    moved = (layer.weight.dense - weight(ROWS, COLUMNS)).abs()
    assert bool((moved > 0.05).all())
    assert same_parts(layer.weight.quantize(), quantize(layer.weight.dense, RECIPE))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_linear_without_gradients(mode: Any) -> None:
    layer = _linear(RECIPE)
    expected = layer(_input()).detach()
    with mode():
        for _ in range(2):
            assert same_bytes(layer(_input().detach()), expected)
        dense = layer.weight.dense.double().sum()
        assert layer.weight.double().sum() == dense  # composite operations, too
        assert layer.weight.narrow(0, 0, 4).shape == (4, COLUMNS)
    layer(_input()).float().sum().backward()


def test_an_input_or_bias_may_be_dense_storage_of_another_layer() -> None:
    """Only the weight argument is quantized."""
    layer = _linear(RECIPE, bias=False)
    x = torch.randn(COLUMNS, COLUMNS, dtype=torch.bfloat16)
    expected = F.linear(x, quantize(layer.weight.dense, RECIPE))
    assert same_bytes(F.linear(input=x, weight=layer.weight), expected)


def test_autocast_is_that_of_the_quantized_weight() -> None:
    layer, x = _linear(RECIPE, torch.float32), _input(torch.float32)
    q = quantize(layer.weight.dense, RECIPE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = layer(x), F.linear(x, q, layer.bias)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert same_bytes(found, expected)
    found.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


# -- everything else sees the dense tensor -----------------------------------------------------------------------------


@all_recipes
def test_other_operations_are_those_of_the_dense_tensor(recipe: Any) -> None:
    layer = _linear(recipe)
    plain, param = weight(ROWS, COLUMNS), layer.weight
    operations = {
        "add": lambda w: w + 1,
        "norm": torch.linalg.vector_norm,
        "float": lambda w: w.float() * 2,
        "zeros_like": torch.zeros_like,
        "equal": lambda w: w == w.abs(),
        "gather": lambda w: F.embedding(torch.tensor([0, 3]), w),
        "stack": lambda w: torch.stack([w, w]),
        "item": lambda w: torch.tensor(w[0, 0].item()),
        "sum": lambda w: w.sum(dim=0),
    }
    with torch.no_grad():
        for name, operation in operations.items():
            found = operation(param)
            assert type(found) is Tensor, name
            assert same_bytes(found, operation(plain)), name


def test_writes_reach_the_dense_tensor_of_every_alias() -> None:
    layer = _linear(RECIPE)
    param, plain = layer.weight, weight(ROWS, COLUMNS)
    aliases = [param, param.detach(), param.data, layer.state_dict()["weight"], param.view(ROWS, COLUMNS)]
    with torch.no_grad():
        for number, alias in enumerate(aliases, 1):
            assert isinstance(alias, HighPrecisionWeight), number
            assert alias.mul_(2) is alias
            assert same_bytes(param.dense, plain * 2**number)
        torch._foreach_mul_([param], 2.0)
        torch._foreach_add_([torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)], [param])
        param[:4].zero_()
        param[4:8] = 0
    expected = plain * 2 ** (len(aliases) + 1)
    expected[:8] = 0
    assert same_bytes(param.dense, expected)
    other = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    assert type(other.copy_(param.detach())) is Tensor
    assert same_bytes(other, expected)
    version = param._version
    with torch.no_grad():
        param.zero_()
    assert param._version > version


def test_new_tensors_like_a_weight() -> None:
    param = _linear(RECIPE).weight
    assert type(torch.zeros_like(param)) is Tensor
    assert type(param.new_zeros(3)) is Tensor
    assert isinstance(torch.empty_like(param, device="meta"), HighPrecisionWeight)
    copied = param.detach().clone()
    assert isinstance(copied, HighPrecisionWeight)
    copied.zero_()
    assert bool(param.ne(0).any())
    for dtype in (torch.float32, torch.float16):
        cast = param.detach().to(dtype)
        assert isinstance(cast, HighPrecisionWeight)
        assert same_bytes(cast.dense, weight(ROWS, COLUMNS).to(dtype))


def test_only_the_first_rows_of_a_padded_shard_stay_that_shard() -> None:
    padded = _linear(RECIPE).weight.detach().new_zeros(ROWS, COLUMNS)
    assert padded.padded_rows == ROWS
    for first in (padded[:3], padded[0:3], padded.view(-1)):
        assert first.padded_rows == ROWS
        assert first.agreement is padded.agreement
    for other in (padded[3:], *padded.split(3)):
        assert other.padded_rows is None
        assert other.agreement is not padded.agreement


def test_casting_a_module_keeps_kind_and_tie() -> None:
    layer = _linear(RECIPE)
    model = nn.ModuleList([layer, layer])
    for move in (nn.Module.float, nn.Module.half, nn.Module.bfloat16):
        move(model)
        assert isinstance(layer.weight, HighPrecisionWeight)
        assert layer.weight.dtype == layer.weight.dense.dtype == layer.bias.dtype
        assert model[1].weight is layer.weight
    model.to("meta")
    model.to_empty(device="cpu")
    assert isinstance(layer.weight, HighPrecisionWeight)
    layer.reset_parameters()
    assert layer(_input()).shape == (3, 5, ROWS)


def test_deepcopy_and_repr() -> None:
    layer = _linear(RECIPE)
    layer.weight.requires_grad_(False)
    found = copy.deepcopy(layer)
    assert isinstance(found.weight, HighPrecisionWeight)
    assert isinstance(found.weight, nn.Parameter)
    assert not found.weight.requires_grad
    assert same_bytes(found.weight.dense, layer.weight.dense)
    assert found.weight.dense.data_ptr() != layer.weight.dense.data_ptr()
    assert "HighPrecisionWeight" in repr(layer.weight)
    assert repr(RECIPE) in repr(layer.weight)


# -- building a model --------------------------------------------------------------------------------------------------


def test_what_a_constructor_writes_is_kept_exactly() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(COLUMNS, ROWS, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with quantized_model_init(RECIPE, storage="high_precision", preserve_high_precision_init_val=True):
        layer = nn.Linear(COLUMNS, ROWS, dtype=torch.bfloat16)
    assert isinstance(layer.weight, HighPrecisionWeight)
    assert type(layer.bias) is nn.Parameter
    assert same_bytes(layer.weight.dense, plain.weight)
    assert high_precision_init_val(layer.weight) is None
    clear_high_precision_init_val(layer.weight)
    assert sync_scales(layer) == 0


@pytest.mark.parametrize("name", ["float8_row", "float8_tensor", "nvfp4"])
def test_the_shared_scale_is_that_of_the_gather_whatever_was_agreed_on(name: str) -> None:
    param = _linear(RECIPES[name]).weight
    scales: Any = scales_of(param)
    for factor in (1, 2):
        scales.adopt(scales.claim() * factor)
        parts = param.quantize().parts()
        scale = parts[tensor_wide(param.recipe) or "scale"]
        assert torch.equal(param.shared_scale(), scale)
        assert param.shared_scale().shape == scale.shape


def test_a_tie_with_an_embedding_stays_plain() -> None:
    with quantized_model_init(RECIPE, storage="high_precision"):
        head, embedding = nn.Linear(COLUMNS, ROWS, bias=False), nn.Embedding(ROWS, COLUMNS)
        value = head.weight.detach().dense.clone()
        embedding.weight = head.weight
    assert type(head.weight) is nn.Parameter
    assert head.weight is embedding.weight
    assert same_bytes(head.weight, value)


def test_quantize_leaves_such_weights_alone() -> None:
    model = nn.Sequential(_linear(RECIPE))
    assert quantize_(model, MXFP8BlockScaling()) == []
    assert isinstance(model[0].weight, HighPrecisionWeight)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_an_unknown_storage_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="storage='dense' is not one of 'quantized', 'high_precision'"),
        quantized_model_init(RECIPE, storage="dense"),
    ):
        pass


def test_a_shape_that_does_not_fit_the_blocks_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"K=48, which is not a multiple of 32"),
        quantized_model_init(MXFP8BlockScaling(), storage="high_precision"),
    ):
        nn.Linear(48, 8)


def test_assigning_data_is_refused() -> None:
    layer = _linear(RECIPE)
    words = r"assigning \.data of a quantized weight of shape \(64, 96\).*copy_\(value\)"
    with pytest.raises(NotImplementedError, match=words):
        layer.weight.data = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    assert same_bytes(layer.weight.dense, weight(ROWS, COLUMNS))


# -- compiled ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["float8_tensor", "mxfp8", "nvfp4_square"])
def test_a_compiled_block_changes_no_byte(name: str) -> None:
    layer, x = _linear(RECIPES[name]), _input()
    block = nn.Sequential(layer, nn.Tanh())
    expected = block(x)
    expected.float().square().sum().backward()
    grads = [x.grad, layer.weight.grad, layer.bias.grad]
    x.grad = layer.weight.grad = layer.bias.grad = None
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        found = compiled(x)
        assert same_bytes(found, expected)
    found.float().square().sum().backward()
    for now, before in zip((x.grad, layer.weight.grad, layer.bias.grad), grads, strict=True):
        assert type(now) is Tensor
        assert same_bytes(now, before)
    with torch.no_grad():
        layer.weight.mul_(3)
    assert same_bytes(compiled(x), block(x)), "a stale quantization"


def test_in_place_changes_of_the_shape_are_refused() -> None:
    layer = _linear(RECIPE)
    weight_ = layer.weight.detach()
    for change in (weight_.t_, lambda: weight_.transpose_(0, 1), lambda: weight_.unsqueeze_(0)):
        with pytest.raises(NotImplementedError, match="use the op that returns a new tensor"):
            change()
    assert weight_.shape == weight_.dense.shape == (ROWS, COLUMNS)


def test_products_with_the_transposed_weight_are_those_of_linear() -> None:
    layer, x = _linear(RECIPE, bias=False), torch.randn(3, COLUMNS).to(torch.bfloat16)
    with torch.no_grad():
        assert same_bytes(x @ layer.weight.t(), layer(x))
    with torch.inference_mode():
        assert same_bytes(x @ layer.weight.t(), layer(x))
