"""Writes through views and slices arrive, or raise; what is preserved beside a weight follows it."""

import copy

import pytest
import torch
from torch import nn

from qtensor import (
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    high_precision_init_val,
    quantize,
    quantized_model_init,
)
from qtensor.tensor.contents import initial_value, preserve
from tests.qtensor.recipes_under_test import every_recipe, same_parts, weight

TENSOR_WIDE = Float8CurrentScaling(granularity="tensor")


@every_recipe
def test_a_write_into_some_columns_is_refused(recipe) -> None:
    q = quantize(weight(64, 256), recipe)
    before = q.clone()
    with pytest.raises(RuntimeError, match="a slice of columns is a copy, so the write would be lost"):
        q[:, :128] = 0.0
    with pytest.raises(RuntimeError, match="clone\\(\\) the slice to own it"):
        q[:, 128:].zero_()
    assert same_parts(q, before)
    own = q[:, 128:].clone()
    assert torch.equal(own.zero_().dequantize(), torch.zeros(64, 128, dtype=own.dtype))


def test_the_first_rows_of_an_fsdp_shard_share_its_scale_and_refuse_another_one() -> None:
    padded = quantize(weight(8, 64), TENSOR_WIDE).new_zeros((8, 64))  # as FSDP allocates a shard
    padded.narrow(0, 0, 6).copy_(quantize(weight(6, 64), TENSOR_WIDE))
    shard = padded.narrow(0, 0, 6)
    before = shard.clone()
    with pytest.raises(RuntimeError, match="would change its scale, which the other rows share"):
        shard[:1].fill_(1000.0)
    assert same_parts(shard, before)


@pytest.mark.parametrize("recipe", [NVFP4BlockScaling(), TENSOR_WIDE], ids=["nvfp4", "float8-tensor"])
def test_a_matrix_of_a_view_of_some_refuses_a_scale_that_the_others_share(recipe) -> None:
    q = quantize(weight(128, 64).view(2, 64, 64), recipe)
    before = q.clone()
    with pytest.raises(RuntimeError, match="which the other rows share"):
        q[:1][0].fill_(1000.0)
    assert same_parts(q, before)


@every_recipe
def test_a_matrix_of_some_columns_is_a_copy_and_refuses_writes(recipe) -> None:
    q = quantize(weight(128, 256).view(2, 64, 256), recipe)
    with pytest.raises(RuntimeError, match="a slice of columns is a copy"):
        q[:, :, :128][0].zero_()


def test_views_and_indices_out_of_range_raise() -> None:
    q = quantize(weight(8, 64), MXFP8BlockScaling())
    for shape in ((5,), (7, -1), (-1, -1)):
        with pytest.raises(RuntimeError, match="is invalid for a quantized tensor of 512 elements"):
            q.view(shape)
    for index in (8, -9):
        with pytest.raises(IndexError, match="out of range"):
            q.select(0, index)


@every_recipe
def test_flat_views_keep_their_shape(recipe) -> None:
    flat = quantize(weight(32, 64), recipe).view(-1)
    for other in (flat.detach(), flat.clone(), flat.to(torch.float32)):
        assert other.shape == (2048,)
        assert torch.equal(other.dequantize(torch.float32), flat.dequantize(torch.float32))


def test_regrouping_square_blocks_keeps_them_square() -> None:
    q = quantize(weight(64, 64), MXFP8BlockScaling(blocks="square"))
    grouped = q.view(4, 16, 64)
    grouped.copy_(weight(64, 64, seed=3).view(4, 16, 64))
    assert same_parts(q, quantize(weight(64, 64, seed=3), q.recipe))


def test_dequantize_hands_the_gradient_to_the_weight() -> None:
    param = nn.Parameter(quantize(weight(32, 64), NVFP4BlockScaling()))
    x = torch.randn(4, 64, dtype=param.dtype)
    (x @ param.dequantize().T * 2.0).sum().backward()
    reference = param.detach().dequantize().requires_grad_()
    (x @ reference.T * 2.0).sum().backward()
    assert type(param.grad) is torch.Tensor
    assert torch.equal(param.grad, reference.grad)


def _preserving() -> nn.Linear:
    with quantized_model_init(NVFP4BlockScaling(), preserve_high_precision_init_val=True):
        return nn.Linear(64, 32, bias=False)


def test_the_preserved_value_is_computed_on_not_the_quantized_one() -> None:
    linear = _preserving()
    torch.manual_seed(1)
    with torch.no_grad():
        linear.weight.normal_()
        linear.weight.mul_(0.02)
    torch.manual_seed(1)
    assert torch.equal(high_precision_init_val(linear.weight), torch.empty(32, 64).normal_().mul_(0.02))


@pytest.mark.parametrize("write", [lambda w: w.view(-1).fill_(3.0), lambda w: w[0].fill_(3.0)], ids=["flat", "row"])
def test_the_preserved_value_follows_writes_through_views(write) -> None:
    with quantized_model_init(MXFP8BlockScaling(), preserve_high_precision_init_val=True):
        linear = nn.Linear(64, 32, bias=False)
    with torch.no_grad():
        write(linear.weight)
    kept = high_precision_init_val(linear.weight)
    assert torch.equal(quantize(kept, MXFP8BlockScaling()).dequantize(), linear.weight.dequantize())
    assert (kept[0] == 3.0).all()


def test_quantized_bytes_copied_in_end_what_was_preserved() -> None:
    linear = _preserving()
    with torch.no_grad():
        linear.weight.copy_(quantize(weight(32, 64, seed=5).float(), NVFP4BlockScaling()))
    assert high_precision_init_val(linear.weight) is None


def test_weights_tied_before_they_are_given_to_modules_stay_tied() -> None:
    with quantized_model_init(MXFP8BlockScaling()):
        shared, lent = nn.Parameter(torch.randn(32, 64)), nn.Parameter(torch.randn(32, 64))
        a, b, head, embedding = (nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(64, 32), nn.Embedding(32, 64))
        a.weight = shared
        b.weight = shared
        head.weight = lent
        embedding.weight = lent
    assert a.weight is b.weight
    assert isinstance(a.weight, QuantizedTensor)
    assert head.weight is embedding.weight is lent


def test_a_quantized_weight_of_a_copied_linear_can_not_be_given_to_an_embedding() -> None:
    with quantized_model_init(MXFP8BlockScaling()):
        linear = copy.deepcopy(nn.Linear(64, 32))
        with pytest.raises(RuntimeError, match="which nn\\.Linear holds it is not known"):
            nn.Embedding(32, 64).weight = linear.weight


@pytest.mark.parametrize("alias", [lambda q: q.detach(), lambda q: q.view_as(q), lambda q: q.view(-1)])
def test_what_is_preserved_is_forgotten_through_every_alias(alias) -> None:
    """FSDP2's to_local() of a parameter is such a view: what an optimizer forgets through it is forgotten."""
    q = quantize(weight(64, 64), MXFP8BlockScaling())
    preserve(q, weight(64, 64))
    preserve(alias(q), None)
    assert initial_value(q) is None


def test_a_piece_cut_along_k_has_a_preserved_value_of_its_own() -> None:
    q = quantize(weight(64, 64), MXFP8BlockScaling())
    preserve(q, weight(64, 64))
    before = initial_value(q).clone()
    left, right = q.split(32, dim=1)
    left.fill_(3.0)
    assert (initial_value(left) == 3.0).all()
    assert torch.equal(initial_value(right), before[:, 32:])
    assert torch.equal(initial_value(q), before)
