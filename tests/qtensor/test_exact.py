"""From recipe to recipe: exact exactly where the definitions of the formats allow it, else the bytes of quantize().

What is allowed is found by brute force over all scales that are powers of two, from tables of elements alone.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    Int4GroupScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantize,
    quantized_model_init,
)
from qtensor.numerics import exact
from qtensor.tensor.quantized_tensor import QuantizedTensor
from tests.recipes import E2M1, E4M3, E5M2, TABLE, Element, facts

ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2}
NAN = float("nan")


def magnitudes(element: Element) -> np.ndarray[Any, Any]:
    """The finite magnitudes of an element, fp64."""
    found = np.abs(element.values(np.arange(2**element.bits, dtype=np.uint8)))
    return np.unique(found[np.isfinite(found)])


EXPONENTS = range(-126, 127)
GRIDS = {element: magnitudes(element) for element in (E2M1, E4M3, E5M2)}


def powers(values: Tensor, element: Element) -> set[int]:
    """All t of normal scales 2^t under which elements hold the values; NaN is left out."""
    x = np.unique(np.abs(values.double().numpy()))
    x = x[~np.isnan(x)]
    if not x.any():
        return set(EXPONENTS)
    least = np.log2(x[-1] / element.largest)  # what is below saturates, what is far above rounds to 0
    near = [t for t in EXPONENTS if least - 1 <= t <= least + 40]
    return {t for t in near if np.isin(x / 2.0**t, GRIDS[element]).all()}


def fits(values: Tensor, element: Element) -> bool:
    return bool(powers(values, element))


def fits_nvfp4(values: Tensor, block_rows: int = 1) -> bool:
    """Whether some power of two as the global scale, and some among E4M3's for each block, hold all values."""
    rows = values.reshape(-1, block_rows, values.shape[-1])
    allowed = []
    for block in (each[:, start : start + 16] for each in rows for start in range(0, rows.shape[-1], 16)):
        if block.isnan().all() or not block.nan_to_num().any():
            if block.isnan().any() and not block.isnan().all():
                return False
            continue
        if block.isnan().any():
            return False
        allowed.append(powers(block, E2M1))
    return any(all(any(g + k in one for k in range(-9, 9)) for one in allowed) for g in range(-126, 120))


def mxfp4(codes: Tensor, exponents: Tensor) -> QuantizedTensor:
    """MXFP4 of E2M1 codes [N, K] and E8M0 codes [N, K // 32]."""
    payload = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    parts = {"payload": payload, "scale": exponents.to(torch.uint8)}
    return QuantizedTensor.from_parts(parts, MXFP4BlockScaling(), torch.bfloat16)


def mxfp8(codes: Tensor, exponents: Tensor) -> QuantizedTensor:
    parts = {"payload": codes.to(torch.uint8).view(torch.float8_e4m3fn), "scale": exponents.to(torch.uint8)}
    return QuantizedTensor.from_parts(parts, MXFP8BlockScaling(), torch.bfloat16)


def convert(q: QuantizedTensor, recipe: Any) -> QuantizedTensor:
    """As `copy_` and the command do, without a target."""
    parts = exact.convert_parts(q.dequantize(torch.float32), recipe, q.parts(), q.recipe)
    return QuantizedTensor.from_parts(parts, recipe, q.dtype)


def raw(part: Tensor) -> Tensor:
    return part.contiguous().reshape(-1).view(torch.uint8)


def same_parts(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return all(torch.equal(raw(part), raw(b.parts()[name])) for name, part in a.parts().items())


def alike(x: Tensor, y: Tensor) -> Tensor:
    """Where fp32 values are the same bits, or both NaN."""
    return (x.view(torch.int32) == y.view(torch.int32)) | (x.isnan() & y.isnan())


def is_exact(q: QuantizedTensor, result: QuantizedTensor) -> bool:
    return bool(alike(q.dequantize(torch.float32), result.dequantize(torch.float32)).all())


def regions(q: QuantizedTensor, recipe: Any) -> list[tuple[slice, slice]]:
    """What each scale of a recipe is decided for: tensor, rows or blocks."""
    known, (rows, columns) = facts(recipe), q.shape
    if known.tensor_wide is not None:
        return [(slice(None), slice(None))]
    width = columns if known.block == 1 else known.block
    return [
        (slice(row, row + known.rows), slice(column, column + width))
        for row in range(0, rows, known.rows)
        for column in range(0, columns, width)
    ]


def check(q: QuantizedTensor, recipe: Any, allowed: Any) -> None:
    """Every region is exact if `allowed(values)`, and has the bytes of quantize() where it is not exact."""
    result, values = convert(q, recipe), q.dequantize(torch.float32)
    plain = quantize(values, recipe)
    decoded, rounded = result.dequantize(torch.float32), plain.dequantize(torch.float32)
    for rows, columns in regions(q, recipe):
        same = bool(alike(decoded, values)[rows, columns].all())
        assert same == (allowed(values[rows, columns]) or bool(alike(rounded, values)[rows, columns].all()))
        if not same:
            assert torch.equal(decoded[rows, columns].nan_to_num(7), rounded[rows, columns].nan_to_num(7))
    if not any(alike(decoded, values)[region].all() for region in regions(q, recipe)):
        assert same_parts(result, plain)


# -- powers of two -----------------------------------------------------------------------------------------------------

CODES = torch.arange(32, dtype=torch.int32).remainder(16).reshape(1, 32)  # every E2M1 code, twice
FLOAT8 = [each.recipe for each in TABLE if type(each.recipe) in (Float8CurrentScaling, Float8BlockScaling)]


@pytest.mark.parametrize("recipe", FLOAT8, ids=repr)
@pytest.mark.parametrize("largest", [1, 3, 6, 7])
def test_mxfp4_becomes_float8_exactly_where_the_exponents_fit(recipe: Any, largest: int) -> None:
    """Every distance of two blocks, and every largest code of the upper one."""
    element = ELEMENTS[recipe.element]
    for distance in (0, 1, 5, *range(12, 19), *range(26, 32), 39):
        codes = torch.cat([CODES.clamp(max=largest), CODES], dim=1)
        q = mxfp4(codes, torch.tensor([[140, 140 - distance]], dtype=torch.int32))
        check(q, recipe, lambda values: fits(values, element))
        if largest == 7:  # 6 = 384 / 2^6 in E4M3, whose least is 2^-9; 6 = 49152 / 2^13 in E5M2, 2^-16
            span = {"e4m3": 14, "e5m2": 28}[recipe.element]
            assert is_exact(q, convert(q, recipe)) == (distance <= span)


@pytest.mark.parametrize("scales", [(0, 1), (0, 14), (1, 9), (238, 253), (253, 253)])
def test_the_ends_of_the_scales_lose_nothing_that_plain_encoding_keeps(scales: tuple[int, int]) -> None:
    codes = torch.cat([CODES.clamp(max=5), CODES.clamp(max=5)], dim=1)
    q = mxfp4(codes, torch.tensor([scales], dtype=torch.int32))
    for recipe in [*FLOAT8, NVFP4BlockScaling(), MXFP8BlockScaling()]:
        values = q.dequantize(torch.float32)
        assert values.isfinite().all()
        result, plain = convert(q, recipe), quantize(values, recipe)
        same, was = (alike(each.dequantize(torch.float32), values) for each in (result, plain))
        assert is_exact(q, result) or same_parts(result, plain) or bool((same | ~was).all()), recipe


@pytest.mark.parametrize("recipe", [each for each in FLOAT8 if each.element == "e4m3"], ids=repr)
def test_mxfp8_becomes_float8_exactly_where_the_exponents_fit(recipe: Any) -> None:
    every = torch.arange(256, dtype=torch.int32).reshape(8, 32)
    every = torch.where(every.remainder(128) == 127, 0, every)  # but NaN
    for distance, (one, other) in itertools.product(range(0, 20, 3), [(0, 4), (3, 1), (3, 0), (1, 3)]):
        codes = torch.cat([every[one : one + 1], every[other : other + 1]], dim=1)
        check(mxfp8(codes, torch.tensor([[140, 140 - distance]])), recipe, lambda values: fits(values, E4M3))


@pytest.mark.parametrize("blocks", ["row", "square"])
def test_mxfp4_becomes_nvfp4_exactly_where_the_exponents_fit(blocks: str) -> None:
    recipe, rows = NVFP4BlockScaling(blocks=blocks), 16 if blocks == "square" else 1
    reached = set()
    for distance in range(26):
        codes = torch.cat([CODES, CODES], dim=1).repeat(rows, 1)
        q = mxfp4(codes, torch.tensor([[140, 140 - distance]]).repeat(rows, 1))
        check(q, recipe, lambda values: fits_nvfp4(values, rows))
        if is_exact(q, convert(q, recipe)):
            reached.add(distance)
    assert reached == set(range(18))  # E4M3 has the powers 2^-9 .. 2^8; blocks of all codes leave no other choice


def test_elements_that_leave_room_reach_further() -> None:
    """A block of ones and twos alone may be written as fours and sixes under a lower scale, or as halves."""
    upper, lower = torch.full((1, 32), 1, dtype=torch.int32), torch.full((1, 32), 6, dtype=torch.int32)  # 0.5 and 4
    for distance in range(30):
        q = mxfp4(torch.cat([upper, lower], dim=1), torch.tensor([[140, 140 - distance]]))
        assert is_exact(q, convert(q, NVFP4BlockScaling())) == fits_nvfp4(q.dequantize(torch.float32))
        assert is_exact(q, convert(q, NVFP4BlockScaling())) == (distance <= 23)  # as far as 0.5 .. 4 shift


@st.composite
def small_mxfp4(draw: st.DrawFn) -> QuantizedTensor:
    rows = draw(st.sampled_from([1, 2, 16]))
    high = draw(st.integers(1, 15))
    seed = draw(st.integers(0, 2**20))
    spread = draw(st.integers(0, 26))
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, high + 1, (rows, 64), generator=generator, dtype=torch.int32)
    scale = 100 + torch.randint(0, spread + 1, (rows, 2), generator=generator, dtype=torch.int32)
    if draw(st.booleans()):
        scale[draw(st.integers(0, rows - 1)), draw(st.integers(0, 1))] = 255
    if draw(st.booleans()):
        codes[draw(st.integers(0, rows - 1))] = draw(st.sampled_from([0, 8]))
    return mxfp4(codes, scale)


@settings(max_examples=20)
@given(small_mxfp4())
def test_any_mxfp4_is_exact_where_it_can_be(q: QuantizedTensor) -> None:
    for recipe in FLOAT8:
        check(q, recipe, lambda values, element=ELEMENTS[recipe.element]: fits(values, element))
    check(q, NVFP4BlockScaling(), fits_nvfp4)
    if q.shape[0] == 16:
        check(q, NVFP4BlockScaling(blocks="square"), lambda values: fits_nvfp4(values, 16))


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_mxfp4_is_always_exact_in_mxfp8(element: str) -> None:
    """Without another choice of scales: for every code of the scale whose values are finite, by plain encoding."""
    for code in [*range(254), 255]:
        q = mxfp4(CODES if code < 253 else CODES.remainder(8).clamp(max=5), torch.tensor([[code]]))
        for rounding in ("up", "floor"):
            recipe = MXFP8BlockScaling(element=element, scale_rounding=rounding)
            result = convert(q, recipe)
            assert is_exact(q, result), code
            assert same_parts(result, quantize(q.dequantize(torch.float32), recipe))


def test_a_block_that_is_half_nan_is_not_kept_by_a_format_that_marks_blocks() -> None:
    x = torch.ones(1, 32)
    x[0, 3] = NAN
    q = quantize(x, Float8CurrentScaling())
    assert same_parts(convert(q, NVFP4BlockScaling()), quantize(x, NVFP4BlockScaling()))
    q = quantize(torch.full((16, 32), NAN), MXFP8BlockScaling())
    for recipe in (NVFP4BlockScaling(), NVFP4BlockScaling(blocks="square"), Float8BlockScaling()):
        assert is_exact(q, convert(q, recipe))


def test_zeros_keep_their_signs_and_get_the_scales_of_zeros() -> None:
    q = mxfp4(torch.tensor([[0, 8] * 16]), torch.tensor([[130]]))
    for recipe in (NVFP4BlockScaling(), Float8BlockScaling(), Float8CurrentScaling(), MXFP8BlockScaling()):
        result = convert(q, recipe)
        assert is_exact(q, result)
        assert same_parts(result, quantize(q.dequantize(torch.float32), recipe))


# -- equal scales ------------------------------------------------------------------------------------------------------

ROW, TENSOR = Float8CurrentScaling(), Float8CurrentScaling(granularity="tensor")
SQUARES, STRIPS = Float8BlockScaling(), Float8BlockScaling(blocks="row")
ALWAYS = [
    (TENSOR, ROW),
    (TENSOR, SQUARES),
    (TENSOR, STRIPS),
    (Float8DelayedScaling(amax_history_len=4), TENSOR),
    (Float8DelayedScaling(amax_history_len=4), ROW),
    (ROW, STRIPS),
    (SQUARES, STRIPS),
    (MXFP8BlockScaling(blocks="square"), MXFP8BlockScaling()),
    (MXFP8BlockScaling(), MXFP8BlockScaling(scale_rounding="floor")),
    (MXFP4BlockScaling(scale_rounding="floor"), MXFP4BlockScaling()),
    (NVFP4BlockScaling(blocks="square"), NVFP4BlockScaling()),
    (Int4GroupScaling(group=128), Int4GroupScaling(group=32)),
]
SOMETIMES = [(b, a) for a, b in ALWAYS if not isinstance(a, Float8DelayedScaling)]


def weight(seed: int = 0) -> Tensor:
    x = torch.randn(160, 384, generator=torch.Generator().manual_seed(seed))
    return x * torch.exp(torch.randn(160, 1, generator=torch.Generator().manual_seed(seed + 1)))


@pytest.mark.parametrize(("a", "b"), ALWAYS, ids=repr)
def test_scales_that_are_repeated_keep_the_payload(a: Any, b: Any) -> None:
    x = weight()
    x[3, 40], x[64:96] = NAN, 0
    q = quantize(x, a)
    result = convert(q, b)
    assert torch.equal(raw(result.payload), raw(q.payload))
    assert is_exact(q, result)


@pytest.mark.parametrize(("a", "b"), SOMETIMES, ids=repr)
def test_scales_that_agree_are_joined_again(a: Any, b: Any) -> None:
    """There and back; every region of B under which A's scales differ is encoded, or in one tensor all of it."""
    q = quantize(weight(), b)
    fine = convert(q, a)
    assert same_parts(convert(fine, b), q)
    rows, columns = (slice(None), slice(None)) if facts(b).tensor_wide else regions(q, b)[0]
    spoiled = fine.clone()
    spoiled.scale.view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[spoiled.scale.itemsize])[0] += 3
    result, values = convert(spoiled, b), spoiled.dequantize(torch.float32)
    if facts(b).tensor_wide:
        assert same_parts(result, quantize(values, b))
        return
    kept = torch.ones(q.shape, dtype=torch.bool)
    kept[rows, columns] = False
    decoded = result.dequantize(torch.float32)
    assert alike(decoded, values)[kept].all()
    assert alike(decoded, quantize(values, b).dequantize(torch.float32))[rows, columns].all()


def test_scales_that_are_no_powers_of_two_stay_out_of_a_recipe_of_powers() -> None:
    recipe = Float8CurrentScaling(power_of_two=True)
    q = quantize(weight(), TENSOR)
    assert same_parts(convert(q, recipe), quantize(q.dequantize(torch.float32), recipe))
    q = quantize(weight(), Float8CurrentScaling(granularity="tensor", power_of_two=True))
    assert torch.equal(raw(convert(q, recipe).payload), raw(q.payload))


def test_a_scale_that_is_nan_is_not_kept() -> None:
    q = quantize(weight(), TENSOR)
    q.scale.fill_(NAN)
    for recipe in (ROW, SQUARES):
        assert convert(q, recipe).dequantize().isnan().all()


def test_another_element_is_another_kind() -> None:
    q = quantize(weight(), Float8CurrentScaling(element="e5m2"))
    assert not torch.equal(raw(convert(q, ROW).payload), raw(q.payload))


# -- pieces ------------------------------------------------------------------------------------------------------------

WIDE = [ROW, TENSOR, NVFP4BlockScaling(), NVFP4BlockScaling(blocks="square"), Float8DelayedScaling(amax_history_len=4)]


@functools.cache
def sources() -> dict[str, QuantizedTensor]:
    fitting = quantize(weight().clamp(-2, 2), MXFP4BlockScaling())
    spoiled = fitting.clone()
    spoiled.scale[17, 3] = 60  # one block far below all others
    rows = quantize(weight(), TENSOR)
    equal = convert(rows, ROW)
    one_off = equal.clone()
    one_off.scale[-1] *= 2
    empty = quantize(torch.zeros(160, 384), MXFP4BlockScaling())
    nan = fitting.clone()
    nan.scale[5, 5] = 255
    squares = convert(quantize(weight(), NVFP4BlockScaling(blocks="square")), NVFP4BlockScaling())
    return {"fitting": fitting, "spoiled": spoiled, "equal": equal, "one off": one_off, "zeros": empty, "nan": nan,
            "squares": squares, "mxfp8": quantize(weight(), MXFP8BlockScaling())}  # fmt: skip


@pytest.mark.parametrize("recipe", WIDE, ids=repr)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", sources())
def test_pieces_get_the_bytes_of_the_whole(name: str, dim: int, recipe: Any) -> None:
    """Cuts that suit both sides' blocks; one piece has no values."""
    q = sources()[name]
    whole = convert(q, recipe)
    cuts = [48, 0, 96, 16] if dim == 0 else [128, 0, 224, 32]
    starts = [0, *itertools.accumulate(cuts)]
    if dim == 0 and recipe == ROW:
        return  # rows share nothing
    pieces = [q.narrow(dim, start, size).clone() for start, size in zip(starts, cuts, strict=False)]
    arguments = [
        (piece.dequantize(torch.float32), recipe, piece.parts() if piece.numel() else None, q.recipe)
        for piece in pieces
    ]
    claims = [exact.claim(*each) for each in arguments]
    agreed = torch.stack([claim for claim in claims if claim is not None]).amax(dim=0)
    found = [exact.convert_parts(*each, agreed) for each in arguments]
    for part, expected in whole.parts().items():
        wide = expected.ndim < 2 or expected.shape[dim] == 1
        for start, size, each in zip(starts, cuts, found, strict=False):
            ratio = 1 if wide else q.shape[dim] // expected.shape[dim]
            piece = expected if wide else expected.narrow(dim, start // ratio, size // ratio)
            assert torch.equal(raw(each[part]), raw(piece)), (part, start)


def test_the_sources_of_the_last_test_are_what_they_are_called() -> None:
    found = {name: is_exact(q, convert(q, NVFP4BlockScaling())) for name, q in sources().items()}
    assert found == {"fitting": True, "spoiled": False, "equal": False, "one off": False, "zeros": True, "nan": True,
                     "squares": True, "mxfp8": False}  # fmt: skip
    kept = {name: is_exact(q, convert(q, TENSOR)) for name, q in sources().items()}
    assert (kept["equal"], kept["one off"]) == (True, False)


# -- how it is run -----------------------------------------------------------------------------------------------------


def test_copy_is_this_conversion_and_keeps_no_alias() -> None:
    q = quantize(weight(), TENSOR)
    target = quantize(torch.zeros_like(weight()), ROW)
    target.copy_(q)
    assert same_parts(target, convert(q, ROW))
    q.payload.view(torch.uint8).zero_()
    assert target.dequantize().any()


def test_a_transposed_source_has_no_parts_in_order_but_may_fit() -> None:
    codes = torch.randint(0, 16, (32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    q = mxfp4(codes, torch.full((32, 1), 120))
    target = quantize(torch.zeros(32, 32), NVFP4BlockScaling())
    target.copy_(q.t())
    assert torch.equal(target.dequantize(torch.float32), q.dequantize(torch.float32).t())


def test_parts_of_other_elements_are_not_kept() -> None:
    """Where one scale becomes one a row, the payload stays; not that of a transposed or a broadcast source."""
    q = quantize(weight()[:96, :96], TENSOR)
    target = quantize(torch.zeros(96, 96), ROW)
    for source in (q.t(), q[:1], q[5]):
        target.copy_(source)
        values = source.dequantize(torch.float32).expand(96, 96)
        assert same_parts(target, quantize(values, ROW)), source.shape
    target.copy_(q)
    assert same_parts(target, convert(q, ROW))
    assert not same_parts(target, quantize(q.dequantize(torch.float32), ROW))


def test_values_in_several_chunks_come_out_as_in_one() -> None:
    q = quantize(torch.randn(96, 8192, generator=torch.Generator().manual_seed(0)), MXFP4BlockScaling())
    assert q.numel() > 2 * exact.CHUNK
    for recipe in (NVFP4BlockScaling(), STRIPS, TENSOR):
        result = convert(q, recipe)
        assert is_exact(q, result)
        assert same_parts(convert(q[:32].clone(), recipe), result[:32]) or facts(recipe).tensor_wide


@pytest.mark.parametrize("recipe", [NVFP4BlockScaling(), STRIPS, ROW], ids=repr)
@pytest.mark.parametrize("name", ["fitting", "spoiled", "nan"])
def test_without_branches_the_bytes_are_the_same(name: str, recipe: Any) -> None:
    """Without branches on values, every choice is made and the first that holds is taken."""
    q = sources()[name]
    wanted = convert(q, recipe)
    with patch.object(exact, "is_tracing", return_value=True):
        assert same_parts(convert(q, recipe), wanted)


def test_load_state_dict_of_another_recipe_encodes_anew() -> None:
    """As docs/numerics.md says: it goes through dense values, whose scales shards agree on."""
    q = quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), MXFP4BlockScaling())
    with quantized_model_init(ROW):
        model = torch.nn.Linear(64, 32, bias=False)
    model.load_state_dict({"weight": q})
    found: Any = model.weight.detach()
    assert same_parts(found, quantize(q.dequantize(torch.float32), ROW))
    assert is_exact(q, convert(q, ROW))
    assert not is_exact(q, found)
