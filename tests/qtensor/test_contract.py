"""One contract for all formats: what a quantized tensor promises, whatever its recipe."""

import copy
import io
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
)
from qtensor.spec.registry import encode, format_of, shared_amax, tensor_wide
from tests.qtensor.recipes_under_test import (
    FP32_SLACK,
    RECIPES,
    error_bound,
    every_recipe,
    per_row_recipes,
    same_bytes,
    same_parts,
    tensor_wide_recipes,
    unit,
    weight,
)
from tests.recipes import E8M0, FP32, facts, recipes


def payload_bytes(q: QuantizedTensor) -> int:
    return sum(part.numel() * part.itemsize for part in q.parts().values())


def storages(q: QuantizedTensor) -> set[int]:
    return {part.untyped_storage().data_ptr() for part in q.parts().values() if part.numel()}


def aliases(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return storages(a) == storages(b)


def without_nan(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=12345.0)


# -- values ----------------------------------------------------------------------------------------------------------


def whole_blocks(recipe: Any) -> tuple[int, int]:
    """(rows, columns) of pieces that hold whole blocks."""
    return max(32, facts(recipe).rows), max(32, facts(recipe).block)


@every_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_round_trip_is_within_half_a_step(recipe: Any, dtype: torch.dtype) -> None:
    x = weight(dtype=dtype)
    q = quantize(x, recipe)
    decoded = q.dequantize(torch.float32)
    assert ((decoded.double() - x.double()).abs() <= error_bound(x, q)).all()


@every_recipe
def test_public_attributes_are_parts_what_users_call_and_what_fsdp_asks_for(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    own = {name for name in {*dir(q)} - {*dir(torch.Tensor)} if not name.startswith("_")}
    fsdp = {"fsdp_pre_all_gather", "fsdp_post_all_gather"}
    assert own == {"recipe", "parts", "from_parts", "safe_globals", *q.parts()} | fsdp


@every_recipe
def test_scales_saturate_nothing_they_should_not(recipe: Any) -> None:
    """|x| / unit <= largest, but for what the rounding of scales adds."""
    x = weight(dtype=torch.float32)
    q = quantize(x, recipe)
    known = facts(recipe)
    assert (x.double().abs() / unit(q)).max() <= known.element.largest * known.excess * FP32_SLACK


@every_recipe
def test_dequantize_rounds_fp32_values_once_to_the_appearance_dtype(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    values = q.dequantize(torch.float32)
    assert q.dequantize().dtype == torch.bfloat16
    assert same_bytes(q.dequantize(), values.to(torch.bfloat16))
    assert same_bytes(q.dequantize(torch.float16), values.to(torch.float16))


@every_recipe
def test_half_precision_input_is_widened_exactly(recipe: Any) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = weight(dtype=dtype)
        q = quantize(x, recipe)
        assert q.dtype == dtype
        assert same_parts(q, quantize(x.float(), recipe))


@every_recipe
def test_input_layout_does_not_matter(recipe: Any) -> None:
    x = weight(64, 64)
    assert same_parts(quantize(x.t(), recipe), quantize(x.t().contiguous(), recipe))
    assert same_parts(quantize(x[::2, :32], recipe), quantize(x[::2, :32].contiguous(), recipe))


@every_recipe
def test_stacks_are_quantized_like_their_rows(recipe: Any) -> None:
    height, _ = whole_blocks(recipe)
    x = weight(3 * height, 64)
    stack, rows = quantize(x.view(3, height, 64), recipe), quantize(x, recipe)
    assert stack.shape == (3, height, 64)
    for name, part in stack.parts().items():
        assert torch.equal(part.flatten().view(torch.uint8), rows.parts()[name].flatten().view(torch.uint8))


@pytest.mark.parametrize("recipe", recipes(lambda each: not each.square and not each.history).values())
def test_vectors_are_one_row(recipe: Any) -> None:
    x = weight(1, 64)
    vector, row = quantize(x[0], recipe), quantize(x, recipe)
    assert vector.shape == (64,)
    assert same_bytes(vector.dequantize(), row.dequantize()[0])


@every_recipe
@pytest.mark.parametrize("shape", [(0, 64), (0, 32, 64), (2, 0, 64), (32, 0)])
def test_empty_tensors_quantize_to_empty_tensors(recipe: Any, shape: tuple[int, ...]) -> None:
    q = quantize(torch.empty(shape, dtype=torch.bfloat16), recipe)
    assert q.shape == shape
    assert q.dequantize().shape == shape
    assert same_parts(q.clone(), q)


@every_recipe
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_decode_to_zeros(recipe: Any, zero: float) -> None:
    assert (quantize(torch.full((32, 64), zero), recipe).dequantize() == 0).all()


@every_recipe
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_input_never_decodes_to_a_finite_number_and_spoils_nothing_else(recipe: Any, bad: float) -> None:
    x = weight(dtype=torch.float32)
    x[40, 50] = bad
    zeroed = x.clone()
    zeroed[40, 50] = 0.0  # amaxes run over the finite elements
    q, expected = quantize(x, recipe).dequantize(), quantize(zeroed, recipe).dequantize()
    spoiled = torch.zeros(x.shape, dtype=torch.bool)
    known = facts(recipe)
    # Float8 marks elements, INT8 the scale of the row, the others the scales of blocks
    contained = known.scale is FP32 and known.element.floating
    block, rows = (1, 1) if contained else (known.block if known.block > 1 else 96, known.rows)
    spoiled[40 // rows * rows : 40 // rows * rows + rows, 50 // block * block : 50 // block * block + block] = True
    assert q[spoiled].isnan().all()
    assert same_bytes(q[~spoiled], expected[~spoiled])


@every_recipe
def test_a_tensor_without_a_finite_element_decodes_to_nan(recipe: Any) -> None:
    q = quantize(torch.full((32, 64), math.nan), recipe)
    assert q.dequantize().isnan().all()
    assert all(part.isfinite().all() for name, part in q.parts().items() if name == "global_scale")


def test_non_finite_markers_are_those_of_the_formats() -> None:
    x = weight(dtype=torch.float32)
    x[3, 33] = math.nan
    assert quantize(x, Float8CurrentScaling()).payload.view(torch.uint8)[3, 33] == 0x7F
    assert quantize(x, MXFP8BlockScaling()).scale[3, 1] == 255
    assert quantize(x, NVFP4BlockScaling()).scale.view(torch.uint8)[3, 2] == 0x7F


@every_recipe
def test_requantizing_decoded_values_is_stable_in_value(recipe: Any) -> None:
    """A value that a format holds is held again, where its scale is a power of two.

    The others' scales come from an amax that decoding has changed, and round again: there only the error bound holds.
    """
    q = quantize(weight(dtype=torch.float32), recipe)
    again = quantize(q.dequantize(), recipe)
    assert ((again.dequantize().double() - q.dequantize().double()).abs() <= error_bound(q.dequantize(), again)).all()
    if facts(recipe).scale is E8M0:
        assert same_bytes(again.dequantize(), q.dequantize())


# -- what it pretends to be ------------------------------------------------------------------------------------------


@every_recipe
def test_it_looks_like_a_dense_tensor(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    assert isinstance(q, torch.Tensor)
    assert q.shape == (64, 96)
    assert q.stride() == (96, 1)
    assert q.is_contiguous()
    assert q.dtype == torch.bfloat16
    assert q.device == torch.device("cpu")
    assert q.is_leaf
    assert not q.requires_grad


@every_recipe
def test_one_stored_copy_of_the_documented_size(recipe: Any) -> None:
    """Float8 1 byte an element + 4 a row or tensor, and 4 a step of history; MXFP8 1 + 1/32; MXFP4 1/2 + 1/32;
    INT4 1/2 + 2 a group; NF4 1/2 + 4 a block; NVFP4 1/2 + 1/16, + 4; INT8 1 + 4 a row.
    """
    rows, columns = 64, 96
    q = quantize(weight(rows, columns), recipe)
    expected = facts(recipe).stored_bytes(rows, columns)
    held = [value for value in vars(q).values() if isinstance(value, Tensor)]
    assert sum(value.untyped_storage().nbytes() for value in held) == payload_bytes(q) == expected


def zeros_of(recipe: Any) -> int:
    """A byte of the payload of zeros."""
    element = facts(recipe).element
    return 0x77 if element.table else 0x88 if element.uniform and element.bits == 4 else 0


@every_recipe
def test_parts_alias_and_are_attributes(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    assert list(q.parts()) == ["payload", "scale", *facts(recipe).parts]
    for name, part in q.parts().items():
        assert getattr(q, name) is part
        assert type(part) is Tensor
    q.parts()["payload"].view(torch.uint8).fill_(zeros_of(recipe))
    assert (q.dequantize() == 0).all()


@every_recipe
def test_repr_says_what_it_is(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    assert repr(q) == f"{type(q).__name__}(shape=(64, 96), dtype=torch.bfloat16, device='cpu', recipe={recipe})"
    assert repr(recipe) in repr(nn.Parameter(q))


@every_recipe
def test_from_parts_is_the_inverse_of_parts(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    again = QuantizedTensor.from_parts(q.parts(), recipe, torch.float16)
    assert type(again) is type(q)
    assert again.shape == q.shape
    assert again.dtype == torch.float16
    assert aliases(again, q)


@every_recipe
def test_flatten_and_unflatten(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    names, context = q.__tensor_flatten__()
    assert names == list(q.parts())
    again = type(q).__tensor_unflatten__({name: getattr(q, name) for name in names}, context, q.shape, q.stride())
    assert type(again) is type(q)
    assert (again.shape, again.dtype, again.recipe) == (q.shape, q.dtype, q.recipe)
    assert aliases(again, q)
    assert torch.utils._python_dispatch.is_traceable_wrapper_subclass(q)
    assert hash(context[0]) == hash(copy.copy(context[0]))  # the recipe is what compile caches and guards compare


# -- aliases ---------------------------------------------------------------------------------------------------------


@every_recipe
def test_row_slices_alias_the_same_rows_of_all_parts(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    cut = q[16:48]
    assert type(cut) is type(q)
    assert cut.shape == (32, 96)
    assert aliases(cut, q)
    for name, part in q.parts().items():
        assert same_bytes(cut.parts()[name], part[16:48] if part.ndim > 1 else part)
    assert same_bytes(cut.dequantize(), q.dequantize()[16:48])
    cut.payload.view(torch.uint8).fill_(zeros_of(recipe))
    assert (q.dequantize()[16:48] == 0).all()
    assert (q.dequantize()[48:] != 0).any()


@every_recipe
def test_a_slice_is_the_quantized_slice(recipe: Any) -> None:
    """Equal to quantizing the rows alone, with the amax of the whole where the format has a tensor-wide scale."""
    multiple, (height, _) = facts(recipe).rows, whole_blocks(recipe)
    x = weight(3 * height, 64)
    q = quantize(x, recipe)
    for start, stop in [
        (0, height),
        (height, 3 * height),
        (multiple, 3 * multiple),
        (2 * height, 2 * height + 1 if multiple == 1 else 3 * height),
        (0, 3 * height),
        (50 // multiple * multiple,) * 2,
    ]:
        amax = shared_amax(x.float(), recipe)  # of the tensor, or of each row
        alone = encode(x[start:stop].float(), recipe, amax[start:stop] if amax is not None and amax.ndim else amax)
        assert same_parts(q[start:stop], QuantizedTensor.from_parts(alone, recipe, x.dtype))


@every_recipe
def test_column_slices_are_copies_on_block_boundaries(recipe: Any) -> None:
    _, width = whole_blocks(recipe)
    q = quantize(weight(64, 3 * width), recipe)
    cut = q[:, width : 2 * width]
    assert same_bytes(cut.dequantize(), q.dequantize()[:, width : 2 * width])
    assert not storages(cut) & storages(q)
    assert q[:, :].shape == q.shape
    if facts(recipe).block > 1:
        with pytest.raises(ValueError, match=f"cuts along K must be multiples of {facts(recipe).block}"):
            q[:, 8:40]


@every_recipe
def test_split_and_chunk_are_slices(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    for pieces, sizes in ((q.split(24), [24, 24, 16]), (q.chunk(3), [22, 22, 20]), (q.split([10, 54]), [10, 54])):
        assert [piece.shape[0] for piece in pieces] == sizes
        start = 0
        for piece, size in zip(pieces, sizes, strict=True):
            assert same_parts(piece, q[start : start + size])
            assert aliases(piece, q)
            start += size
    _, width = whole_blocks(recipe)
    q = quantize(weight(64, 3 * width), recipe)
    thirds = q.split(width, dim=1)
    assert same_bytes(torch.cat([third.dequantize() for third in thirds], dim=1), q.dequantize())


@every_recipe
def test_select_is_one_matrix_of_a_stack(recipe: Any) -> None:
    q = quantize(weight(96, 64).view(3, 32, 64), recipe)
    for index in (0, 2, -1):
        one = q[index]
        assert one.shape == (32, 64)
        assert aliases(one, q)
        assert same_bytes(one.dequantize(), q.dequantize()[index])
    for one, values in zip(q, q.dequantize(), strict=True):  # unbind
        assert same_bytes(one.dequantize(), values)
        assert aliases(one, q)


@every_recipe
def test_stacks_slice_and_split_between_matrices_and_within(recipe: Any) -> None:
    _, width = whole_blocks(recipe)
    q = quantize(weight(128, 2 * width).view(2, 64, 2 * width), recipe)
    assert same_bytes(q[1:].dequantize(), q.dequantize()[1:])
    assert same_bytes(q[:, 32:].dequantize(), q.dequantize()[:, 32:])
    assert same_bytes(q[..., width:].dequantize(), q.dequantize()[..., width:])
    assert same_bytes(q[1, 32:, :width].dequantize(), q.dequantize()[1, 32:, :width])


@every_recipe
def test_detach_and_view_are_new_tensors_over_the_same_bytes(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    for other in (q.detach(), q.view(q.shape), q.view(-1), q.view_as(q), q[:]):
        assert other is not q
        assert type(other) is type(q)
        assert aliases(other, q)
        assert other.recipe == recipe


@every_recipe
def test_view_minus_one_stays_quantized_and_goes_back(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    flat = q.view(-1)
    assert flat.shape == (64 * 96,)
    assert same_bytes(flat.dequantize(), q.dequantize().view(-1))
    back = flat.view(64, 96)
    assert same_parts(back, q)
    assert aliases(back, q)
    assert same_parts(back[16:32], q[16:32])
    with pytest.raises(NotImplementedError, match="view it back first"):
        flat[:96]


def test_matrices_that_no_block_spans_are_regrouped_whatever_their_rows() -> None:
    """200 rows hold a square block and a part of one; they stay together when dims in front of them change."""
    q = quantize(torch.randn(4, 200, 64, generator=torch.Generator().manual_seed(0)), Float8BlockScaling())
    viewed = q.view(2, 2, 200, 64)
    assert viewed.parts()["payload"].shape == (2, 2, 200, 64)
    assert same_parts(viewed[1, 0], q[2])


@every_recipe
def test_a_view_fills_in_one_size_as_torch_does(recipe: Any) -> None:
    q = quantize(weight(), recipe)  # [64, 96]
    for shape in ((-1, 96), (2, -1, 96), (64, -1), (1, -1, 96)):
        viewed = q.view(shape)
        assert viewed.shape == torch.empty(64, 96, device="meta").view(shape).shape
        assert same_bytes(viewed.dequantize(), q.dequantize().view(shape))
    for shape in ((-1, 95), (-1, -1, 96), (65, 96), (0, -1)):
        with pytest.raises(RuntimeError, match="is invalid for a quantized tensor of 6144 elements"):
            q.view(shape)


@every_recipe
def test_view_regroups_rows(recipe: Any) -> None:
    height, _ = whole_blocks(recipe)
    q = quantize(weight(2 * height, 64), recipe)
    stack = q.view(2, -1, 64)
    assert stack.shape == (2, height, 64)
    assert same_bytes(stack.dequantize(), q.dequantize().view(2, height, 64))
    assert same_bytes(stack[1].dequantize(), q.dequantize()[height:])
    assert aliases(stack, q)
    assert same_parts(stack.view(2 * height, 64), q)


@every_recipe
def test_as_strided_crops_rows_and_nothing_else(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    assert same_parts(q.as_strided((40, 96), (96, 1)), q[:40])
    for size, stride in (((64, 48), (96, 1)), ((96, 64), (1, 96)), ((65, 96), (96, 1))):
        with pytest.raises(NotImplementedError, match="only its first rows are defined"):
            q.as_strided(size, stride)


# -- copies ----------------------------------------------------------------------------------------------------------


@every_recipe
def test_clone_is_deep(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    before, copied = copy.deepcopy(q.parts()), q.clone()
    assert same_parts(copied, q)
    assert not storages(copied) & storages(q)
    copied.copy_(weight(seed=1) * 100)  # other scales too
    assert not same_bytes(copied.scale, q.scale)
    assert all(same_bytes(part, before[name]) for name, part in q.parts().items())


@every_recipe
def test_clone_of_a_slice_owns_its_rows_alone(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    part = q[32:64].clone()
    assert sum(value.untyped_storage().nbytes() for value in part.parts().values()) == payload_bytes(part)
    part.zero_()
    assert (q.dequantize()[32:64] != 0).any()


@every_recipe
def test_copy_of_the_same_recipe_copies_bytes(recipe: Any) -> None:
    """Also bytes that quantizing would not choose."""
    src, dst = quantize(weight(), recipe), quantize(weight(seed=1), recipe)
    src.payload.view(torch.uint8).bitwise_xor_(0x11)
    addresses = storages(dst)
    assert dst.copy_(src) is dst
    assert same_parts(dst, src)
    assert storages(dst) == addresses
    assert not addresses & storages(src)


@every_recipe
@pytest.mark.parametrize("source", RECIPES.values(), ids=RECIPES.keys())
def test_copy_across_recipes_keeps_the_values_or_requantizes_them(recipe: Any, source: Any) -> None:
    """See test_exact.py for when they are kept."""
    src, dst = quantize(weight(), source), quantize(weight(seed=1), recipe)
    dst.copy_(src)
    assert dst.recipe == recipe
    if source == recipe:
        assert same_parts(dst, src)
        return
    values, plain = src.dequantize(torch.float32), quantize(src.dequantize(torch.float32), recipe)
    kept = dst.dequantize(torch.float32) == values
    assert (kept | (dst.dequantize(torch.float32) == plain.dequantize(torch.float32))).all()
    if not kept.all(dim=1).any():
        assert same_parts(dst, plain)


def test_e5m2_is_not_copied_into_e4m3_as_bytes() -> None:
    src = quantize(weight(), Float8CurrentScaling(element="e5m2"))
    dst = quantize(weight(seed=1), Float8CurrentScaling())
    dst.copy_(src)
    assert (
        (dst.dequantize(torch.float32) - src.dequantize(torch.float32)).abs() <= error_bound(src.dequantize(), dst)
    ).all()
    assert not torch.equal(dst.payload.view(torch.uint8), src.payload.view(torch.uint8))


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_copy_from_dense_quantizes_in_place(recipe: Any, dtype: torch.dtype) -> None:
    q, x = quantize(weight(seed=1), recipe), weight(dtype=dtype)
    addresses = storages(q)
    q.copy_(x)
    assert same_parts(q, quantize(x, recipe))
    assert storages(q) == addresses
    assert q.dtype == torch.bfloat16


@every_recipe
def test_copy_broadcasts_like_torch(recipe: Any) -> None:
    q, row = quantize(weight(), recipe), weight(1, 96)
    q.copy_(row)
    assert same_parts(q, quantize(row.expand(64, 96), recipe))
    with pytest.raises(RuntimeError, match=r"expanded size .* \(64\) must match the existing size \(63\)"):
        q.copy_(weight(63, 96))


@every_recipe
def test_copy_into_dense_dequantizes(recipe: Any) -> None:
    q, dense = quantize(weight(), recipe), torch.zeros(64, 96)
    dense.copy_(q)
    assert same_bytes(dense, q.dequantize().float())


@per_row_recipes
def test_writes_through_slices_reach_the_whole(recipe: Any) -> None:
    height, _ = whole_blocks(recipe)
    dense, x = weight(2 * height), weight(height, 96, seed=1)
    q = quantize(dense, recipe)
    q[height:].copy_(x)
    assert same_parts(q[height:], quantize(x, recipe))
    assert same_parts(q[:height], quantize(dense, recipe)[:height])


@tensor_wide_recipes
def test_a_slice_refuses_to_change_the_scale_it_shares(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    before = q.clone()
    for view in (q[32:], q.split(16)[1], q.view(2, 32, 96)[0], q[32:].detach()):
        with pytest.raises(RuntimeError, match="which the other rows share; write the whole tensor"):
            view.copy_(torch.full(view.shape, 1000.0))
    assert same_parts(q, before)
    q[32:].copy_(before[32:])  # the scale is the same
    q[:].copy_(weight(seed=1))  # the whole tensor
    assert same_parts(q, quantize(weight(seed=1), recipe))


@tensor_wide_recipes
def test_clones_of_slices_may_change_their_scale(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    before = q.clone()
    for owned in (q[:, 32:64].clone(), q[32:].clone(), copy.deepcopy(q[32:])):
        owned.copy_(torch.full(owned.shape, 1000.0))
        assert (owned.dequantize() - 1000).abs().max() <= 1000 / 4  # E2M1's relative half step, the coarsest
    assert same_parts(q, before)


@every_recipe
def test_zero_writes_exact_zeros(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    assert q.zero_() is q
    assert (q.dequantize() == 0).all()
    assert same_parts(q, quantize(torch.zeros(64, 96), recipe))


@every_recipe
def test_fills_quantize_what_a_dense_tensor_would_hold(recipe: Any) -> None:
    """The same draws from the generator: it is as if a dense parameter were initialised, then quantized."""
    for fill in (
        lambda t: t.fill_(1.5),
        lambda t: nn.init.uniform_(t, -0.1, 0.1),
        lambda t: nn.init.normal_(t, std=0.02),
        lambda t: nn.init.kaiming_uniform_(t, a=math.sqrt(5)),
        nn.init.xavier_normal_,
        lambda t: nn.init.constant_(t, 0.25),
        nn.init.zeros_,
    ):
        q, dense = quantize(weight(), recipe), torch.zeros(64, 96, dtype=torch.bfloat16)
        torch.manual_seed(0)
        fill(dense)
        state = torch.get_rng_state()
        torch.manual_seed(0)
        fill(q)
        assert torch.equal(torch.get_rng_state(), state)
        error = (q.dequantize(torch.float32).double() - dense.double()).abs()
        assert (error <= error_bound(dense, q)).all()


@every_recipe
def test_to_dtype_changes_the_appearance_only(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    other = q.to(torch.float32)
    assert type(other) is type(q)
    assert other.dtype == torch.float32
    assert same_parts(other, q)
    assert same_bytes(other.dequantize(), q.dequantize(torch.float32))
    assert q.half().dtype == torch.float16
    for dtype in (torch.float64, torch.int8, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match="can appear as bfloat16, float16 or float32"):
            q.to(dtype)


@every_recipe
def test_to_device_moves_all_parts(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    assert q.to("cpu") is q  # as for any tensor
    there = q.to("meta")
    assert there.device.type == "meta"
    assert {part.device.type for part in there.parts().values()} == {"meta"}
    assert {name: (part.shape, part.dtype) for name, part in there.parts().items()} == {
        name: (part.shape, part.dtype) for name, part in q.parts().items()
    }


@pytest.mark.gpu
@every_recipe
def test_a_trip_over_the_gpu_keeps_every_byte(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    there = q.cuda()
    assert {part.device.type for part in there.parts().values()} == {"cuda"}
    assert same_parts(there.cpu(), q)
    assert same_parts(q.pin_memory(), q)
    assert q.pin_memory().is_pinned()


@every_recipe
def test_cpu_tensors_are_not_pinned(recipe: Any) -> None:
    assert not quantize(weight(), recipe).is_pinned()


@every_recipe
def test_allocations_have_the_same_class(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    state = torch.get_rng_state()
    for new, shape in (
        (torch.empty_like(q), (64, 96)),
        (torch.empty_like(q, device="meta"), (64, 96)),
        (q.new_empty((0, 96)), (0, 96)),
        (q.new_zeros((40, 96)), (40, 96)),
        (torch.zeros_like(q, device="cpu"), (64, 96)),
    ):
        assert type(new) is type(q)
        assert new.shape == shape
        assert new.recipe == recipe
        assert new.dtype == q.dtype
        for spec in format_of(recipe).parts(recipe):
            assert new.parts()[spec.name].shape == spec.shape(shape)
            assert new.parts()[spec.name].dtype == spec.dtype
    assert (q.new_zeros((40, 96)).dequantize() == 0).all()
    assert torch.equal(torch.get_rng_state(), state)


@every_recipe
def test_likes_that_optimizers_allocate_are_plain(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    for plain in (
        torch.zeros_like(q),
        torch.zeros_like(q, memory_format=torch.preserve_format),
        torch.zeros_like(q, dtype=torch.float32),
        torch.ones_like(q),
        torch.full_like(q, 3.0),
        torch.rand_like(q),
        torch.randn_like(q),
    ):
        assert type(plain) is Tensor
        assert plain.shape == q.shape
    assert torch.zeros_like(q).dtype == torch.bfloat16
    assert torch.zeros_like(q, dtype=torch.float32).dtype == torch.float32


# -- leaving the process and coming back -----------------------------------------------------------------------------


def assert_works(q: QuantizedTensor, like: QuantizedTensor) -> None:
    """Everything a training loop, a stager or a checkpoint does to a weight works on `q`, and leaves `like` alone."""
    assert type(q) is type(like)
    assert same_parts(q, like)
    assert (q.shape, q.dtype, q.recipe) == (like.shape, like.dtype, like.recipe)
    before = like.clone()
    staged = torch.empty_like(q, device="cpu")
    staged.copy_(q)
    assert same_parts(staged, q)
    assert same_parts(q.clone(), q)
    assert same_parts(copy.deepcopy(q), q)
    assert same_bytes(q[16:32].dequantize(), like[16:32].dequantize())
    parameter = nn.Parameter(q)
    x = torch.randn(5, q.shape[1], dtype=q.dtype)
    nn.functional.linear(x, parameter).sum().backward()
    torch.optim.SGD([parameter], lr=0.1).step()
    assert not same_parts(parameter, before)
    assert same_parts(like, before)


@every_recipe
def test_deepcopy_keeps_parameters_parameters(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    plain = copy.deepcopy(q)
    assert not isinstance(plain, nn.Parameter)
    assert_works(plain, q)
    for requires_grad in (True, False):
        parameter = nn.Parameter(q, requires_grad=requires_grad)
        copied = copy.deepcopy(parameter)
        assert isinstance(copied, nn.Parameter)
        assert copied.requires_grad == requires_grad
        assert not storages(copied) & storages(q)
    pair = copy.deepcopy([parameter, parameter])
    assert pair[0] is pair[1]


@every_recipe
def test_deepcopy_of_a_module_keeps_ties(recipe: Any) -> None:
    model = nn.Module()
    model.a, model.b = nn.Linear(96, 64, bias=False), nn.Linear(96, 64, bias=False)
    model.a.weight = model.b.weight = nn.Parameter(quantize(weight(), recipe))
    copied = copy.deepcopy(model)
    assert copied.a.weight is copied.b.weight
    assert same_parts(copied.a.weight, model.a.weight)


@every_recipe
def test_pickle_gives_a_working_tensor(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    assert_works(pickle.loads(pickle.dumps(q)), q)
    parameter = pickle.loads(pickle.dumps(nn.Parameter(q, requires_grad=False)))
    assert isinstance(parameter, nn.Parameter)
    assert not parameter.requires_grad
    stack = quantize(weight(96, 64).view(3, 32, 64), recipe)
    assert pickle.loads(pickle.dumps(stack)).shape == (3, 32, 64)
    flat = pickle.loads(pickle.dumps(q.view(-1)))
    assert same_parts(flat.view(64, 96), q)


@every_recipe
def test_pickling_a_slice_takes_its_rows_alone(recipe: Any) -> None:
    q = quantize(weight(1024, 96), recipe)
    piece = q[32:64]
    data = pickle.dumps(piece)
    assert len(data) < payload_bytes(piece) + 4096
    assert_works(pickle.loads(data), piece)


def saved(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


@every_recipe
def test_torch_load_weights_only_gives_a_working_tensor(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    buffer = saved({"w": q, "p": nn.Parameter(q), "epoch": 3})
    with torch.serialization.safe_globals(QuantizedTensor.safe_globals()):
        loaded = torch.load(buffer, weights_only=True)
    assert isinstance(loaded["p"], nn.Parameter)
    assert loaded["p"].requires_grad
    assert same_parts(loaded["p"], q)
    assert aliases(loaded["p"], loaded["w"])  # as they were saved
    assert_works(loaded["w"], q)


@every_recipe
def test_torch_load_weights_only_refuses_without_permission(recipe: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match="qtensor"):
        torch.load(saved(quantize(weight(), recipe)), weights_only=True)


@every_recipe
def test_torch_load_of_a_parameter_moves_with_map_location(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    loaded = torch.load(saved(q), weights_only=False, map_location="meta")
    assert loaded.device.type == "meta"
    assert loaded.shape == q.shape


# -- in modules ------------------------------------------------------------------------------------------------------


def linear(recipe: Any, *, bias: bool = True, seed: int = 0) -> nn.Linear:
    module = nn.Linear(96, 64, bias=bias, dtype=torch.bfloat16)
    module.weight = nn.Parameter(quantize(weight(seed=seed), recipe))
    return module


@every_recipe
def test_module_to_moves_parameters_and_keeps_bytes(recipe: Any) -> None:
    module = linear(recipe)
    before = module.weight.detach().clone()
    for step in (module.float, lambda: module.to(torch.bfloat16), module.cpu):
        step()
        assert isinstance(module.weight, nn.Parameter)
        assert module.weight.requires_grad
        assert same_parts(module.weight, before)
    assert module.weight.dtype == torch.bfloat16


@every_recipe
def test_module_to_works_by_swapping_too(recipe: Any) -> None:
    module = linear(recipe)
    before, identity = module.weight.detach().clone(), id(module.weight)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert id(module.weight) == identity
    assert module.weight.dtype == torch.float32
    assert same_parts(module.weight, before)


@every_recipe
def test_swap_tensors_exchanges_everything(recipe: Any) -> None:
    a, b = quantize(weight(), recipe), quantize(weight(32, 64, seed=1), recipe)
    first, second = a.clone(), b.clone()
    torch.utils.swap_tensors(a, b)
    assert same_parts(a, second)
    assert same_parts(b, first)
    assert (a.shape, b.shape) == ((32, 64), (64, 96))


@every_recipe
def test_to_empty_from_meta_gives_parameters_that_can_be_written(recipe: Any) -> None:
    module = linear(recipe).to("meta")
    module.to_empty(device="cpu")
    assert isinstance(module.weight, nn.Parameter)
    with torch.no_grad():
        module.weight.copy_(weight())
    assert same_parts(module.weight, quantize(weight(), recipe))


@every_recipe
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip_keeps_bytes(recipe: Any, assign: bool) -> None:
    source, target = linear(recipe), linear(recipe, seed=1)
    state = source.state_dict()
    assert aliases(state["weight"], source.weight)
    target.load_state_dict(state, assign=assign)
    assert same_parts(target.weight, source.weight)
    assert isinstance(target.weight, nn.Parameter)
    assert target.weight.requires_grad
    assert aliases(target.weight, source.weight) == assign


@every_recipe
def test_a_dense_state_dict_is_quantized_on_its_way_in(recipe: Any) -> None:
    dense = nn.Linear(96, 64, dtype=torch.bfloat16)
    target = linear(recipe)
    target.load_state_dict(dense.state_dict())
    assert same_parts(target.weight, quantize(dense.weight, recipe))
    assert type(target.weight.detach()) is type(quantize(weight(), recipe))


@every_recipe
def test_a_quantized_state_dict_fills_a_dense_model_with_values(recipe: Any) -> None:
    dense, source = nn.Linear(96, 64, dtype=torch.bfloat16), linear(recipe)
    dense.load_state_dict(source.state_dict())
    assert same_bytes(dense.weight, source.weight.dequantize())


# -- autograd --------------------------------------------------------------------------------------------------------


@every_recipe
def test_quantize_detaches(recipe: Any) -> None:
    q = quantize(weight().requires_grad_(), recipe)
    assert not q.requires_grad
    assert q.grad_fn is None


@every_recipe
def test_requires_grad_is_a_property_like_any_other(recipe: Any) -> None:
    q = quantize(weight(), recipe).requires_grad_()
    assert q.requires_grad
    assert not q.detach().requires_grad
    assert q.dequantize().requires_grad
    assert not q.detach().dequantize().requires_grad
    parameter = nn.Parameter(q.detach())
    assert parameter.requires_grad
    assert not nn.Parameter(q.detach(), requires_grad=False).requires_grad
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        parameter.copy_(weight())


@every_recipe
def test_gradients_may_be_accumulated_and_cleared(recipe: Any) -> None:
    parameter = nn.Parameter(quantize(weight(), recipe))
    parameter.grad = torch.ones(64, 96, dtype=torch.bfloat16)
    assert type(parameter.grad) is Tensor
    with pytest.raises(RuntimeError, match="dtype"):
        parameter.grad = torch.ones(64, 96, dtype=torch.float32)


# -- in-place arithmetic and torch's own optimizers ------------------------------------------------------------------


@every_recipe
def test_in_place_arithmetic_updates_the_values_and_requantizes(recipe: Any) -> None:
    x, other = weight(), weight(seed=1)
    for update in (
        lambda t: t.add_(other, alpha=0.5),
        lambda t: t.sub_(other),
        lambda t: t.mul_(0.5),
        lambda t: t.mul_(other),
        lambda t: t.div_(3.0),
        lambda t: t.addcmul_(other, other, value=0.1),
        lambda t: t.addcdiv_(other, other.abs() + 1, value=0.1),
        lambda t: t.lerp_(other, 0.3),
        lambda t: t.clamp_(-0.1, 0.1),
        lambda t: t.neg_(),
        lambda t: torch._foreach_add_([t], [other], alpha=2.0),
        lambda t: torch._foreach_mul_([t], 0.9),
        lambda t: torch._foreach_lerp_([t], [other], 0.25),
        lambda t: torch._foreach_addcdiv_([t], [other], [other.abs() + 1], value=-0.1),
    ):
        q = quantize(x, recipe)
        values = q.dequantize()
        update(values)
        update(q)
        assert same_parts(q, quantize(values, recipe))


@every_recipe
def test_dense_tensors_take_quantized_operands_in_place(recipe: Any) -> None:
    q, dense = quantize(weight(), recipe), torch.ones(64, 96, dtype=torch.bfloat16)
    dense.add_(q, alpha=2.0)
    assert same_bytes(dense, 1 + 2 * q.dequantize())


@every_recipe
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1})],
    ids=["SGD", "AdamW"],
)
def test_torch_optimizers_update_quantized_parameters(
    recipe: Any, kind: Any, options: dict[str, Any], foreach: bool
) -> None:
    """Large enough steps learn; the state is plain, and bit for bit what the same gradients of a dense one give."""
    target = torch.ones(64, 96, dtype=torch.bfloat16)
    parameter, norm = nn.Parameter(quantize(-target, recipe)), nn.Parameter(torch.zeros(96, dtype=torch.bfloat16))
    dense = nn.Parameter(parameter.dequantize())
    optimizer = kind([parameter, norm], foreach=foreach, **{**options, "lr": 0.25})
    plain = kind([dense], foreach=foreach, **{**options, "lr": 0.25})
    for _ in range(20):
        parameter.grad = parameter.dequantize() - target
        dense.grad = parameter.grad.clone()
        norm.grad = torch.ones_like(norm)
        optimizer.step()
        plain.step()
    assert (parameter.dequantize(torch.float32) - target).abs().max() < 1  # from a distance of 2
    assert (norm != 0).all()
    for name, value in optimizer.state[parameter].items():
        assert type(value) is Tensor
        assert same_bytes(value, plain.state[dense][name])
    assert type(parameter.detach()) is type(quantize(target, recipe))


@every_recipe
@pytest.mark.parametrize("foreach", [False, True])
def test_one_sgd_step_is_dequantize_update_requantize(recipe: Any, foreach: bool) -> None:
    parameter, grad = nn.Parameter(quantize(weight(), recipe)), weight(seed=1)
    expected = quantize(parameter.dequantize().add_(grad, alpha=-0.1), recipe)
    parameter.grad = grad
    torch.optim.SGD([parameter], lr=0.1, foreach=foreach).step()
    assert same_parts(parameter, expected)


# -- what raises -----------------------------------------------------------------------------------------------------


@every_recipe
def test_unknown_ops_raise_instead_of_dequantizing(recipe: Any) -> None:
    q, dense = quantize(weight(), recipe), weight()
    for op in (
        lambda: q + 1,
        lambda: q * dense,
        lambda: dense - q,
        q.sum,
        q.exp,
        lambda: q == dense,
        q.sort,
        lambda: q[[0, 2]],
        lambda: q.index_select(0, torch.tensor([1])),
        lambda: torch.equal(q, q),
        lambda: q.flip(0),
    ):
        with pytest.raises(
            NotImplementedError,
            match=rf"aten\..* is not defined for quantized tensors \(got .*{type(q).__name__}.*\); call .dequantize",
        ):
            op()


@every_recipe
def test_cat_joins_pieces_that_share_their_scales(recipe: Any) -> None:
    wide = quantize(weight(64, 3 * whole_blocks(recipe)[1]), recipe)
    for dim, size in ((0, 32), (1, whole_blocks(recipe)[1])):
        assert same_parts(torch.cat(wide.split(size, dim), dim), wide)
    q = quantize(weight(), recipe)
    other = quantize(weight(seed=1) * 3, recipe)
    mixed = [q, quantize(weight(), MXFP8BlockScaling(element="e5m2", scale_rounding="floor"))]
    for pieces in (mixed, [q, weight()], *([[q, other]] if tensor_wide(q.recipe) else [])):
        with pytest.raises(NotImplementedError, match=r"^cat of \[.*\]: only quantized tensors of one recipe whose"):
            torch.cat(pieces)


@every_recipe
def test_python_and_numpy_values_raise(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    for read in (q.tolist, q.numpy, q.__dlpack__, lambda: np.asarray(q), lambda: torch.from_dlpack(q)):
        with pytest.raises(NotImplementedError, match="dequantize"):
            read()
    for read in (q.untyped_storage, q.share_memory_, lambda: torch.empty(0, dtype=q.dtype).set_(q)):
        with pytest.raises(
            (RuntimeError, NotImplementedError), match=r"no single storage|is not defined for quantized tensors"
        ):
            read()


@every_recipe
def test_strided_slices_and_other_selects_raise(recipe: Any) -> None:
    q = quantize(weight(), recipe)
    with pytest.raises(NotImplementedError, match="only step 1"):
        q[::2]
    with pytest.raises(NotImplementedError, match="only dim 0"):
        q[:, 0]
    with pytest.raises(IndexError, match="index 64 is out of"):
        q[64]
