"""The numerics against the formulas written a second time, in numpy and ml_dtypes, and against other libraries.

hypothesis chooses the values (any finite fp32, subnormals included); the examples are the same in every run
"""

import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Int4GroupScaling,
    Int8RowScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NF4BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    quantize,
)
from qtensor.spec.registry import adopt, format_of, tensor_wide
from tests.qtensor.recipes_under_test import (
    FP32_SLACK,
    RECIPES,
    WIDE,
    all_recipes,
    error_bound,
    raw,
    same_bytes,
    same_parts,
    unit,
    weight,
)
from tests.recipes import E8M0, MAIN, QUANTILES, WIDER_BLOCKS, facts, recipes
from tests.sampling import sampled

F32 = np.float32
FLT_MAX = np.finfo(F32).max
ELEMENT = {"e4m3": (ml_dtypes.float8_e4m3fn, F32(448)), "e5m2": (ml_dtypes.float8_e5m2, F32(57344))}

quick = settings(
    max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
bound = float(np.finfo(F32).max)
any_float = st.floats(-bound, bound, width=32)
everyday = st.floats(-1024, 1024, width=32).filter(lambda value: value == 0 or abs(value) > 2.0**-20)


def matrices(elements: st.SearchStrategy[float], rows: int = 32) -> st.SearchStrategy[np.ndarray]:
    """fp32 [rows, 64]; hypothesis leaves most elements at a fill value."""
    return hnp.arrays(F32, (rows, 64), elements=elements, fill=elements)


# -- the formulas, a second time -------------------------------------------------------------------------------------


def blockwise_amax(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """[N, K // columns]: the amax of each rows x columns block, repeated over its rows."""
    n, k = x.shape
    amax = np.abs(x).reshape(n // rows, rows, k // columns, columns).max(axis=(1, 3))
    return np.repeat(amax, rows, axis=0)


def reference_float8(x: np.ndarray, recipe: Float8CurrentScaling) -> dict[str, np.ndarray]:
    dtype, largest = ELEMENT[recipe.element]
    amax = np.abs(x).max(axis=-1, keepdims=True) if recipe.granularity == "row" else np.abs(x).max()
    enc = np.where(amax == 0, F32(1), np.minimum(largest / amax, FLT_MAX)).astype(F32)
    if recipe.power_of_two:
        enc = np.ldexp(F32(0.5), np.frexp(enc)[1]).astype(F32)
    return {"payload": np.clip(x * enc, -largest, largest).astype(dtype), "scale": (F32(1) / enc).astype(F32)}


def reference_float8_blocks(x: np.ndarray, recipe: Float8BlockScaling) -> dict[str, np.ndarray]:
    """Each block as a tensor of its own."""
    whole = Float8CurrentScaling(element=recipe.element, granularity="tensor", power_of_two=recipe.power_of_two)
    rows = 128 if recipe.blocks == "square" else 1
    payload, scale = np.empty(x.shape, ELEMENT[recipe.element][0]), np.empty((len(x), -(-x.shape[1] // 128)), F32)
    for top in range(0, len(x), rows):
        for left in range(0, x.shape[1], 128):
            found = reference_float8(x[top : top + rows, left : left + 128], whole)
            payload[top : top + rows, left : left + 128] = found["payload"]
            scale[top : top + rows, left // 128] = found["scale"]
    return {"payload": payload, "scale": scale}


def e8m0_code(amax: np.ndarray, rounding: str, largest: Any) -> np.ndarray:
    if rounding == "up":
        mantissa, exponent = np.frexp(amax * (F32(1) / largest))  # v = mantissa 2^exponent, mantissa in [0.5, 1)
        exponent = exponent - (mantissa == 0.5)  # the power of two at or above v
    else:
        exponent = np.frexp(amax)[1] - np.frexp(largest)[1]
    code = np.where(amax == 0, 0, np.clip(exponent + 127, 0, 254)).astype(np.uint8)
    code[(amax * (F32(1) / largest) == 0) & (rounding == "up")] = 0
    return code


def reference_mxfp8(x: np.ndarray, recipe: MXFP8BlockScaling) -> dict[str, np.ndarray]:
    dtype, largest = ELEMENT[recipe.element]
    amax = blockwise_amax(x, 32 if recipe.blocks == "square" else 1, 32)
    code = e8m0_code(amax, recipe.scale_rounding, largest)
    scaled = np.ldexp(x, 127 - np.repeat(code, 32, axis=-1).astype(np.int32))
    return {"payload": np.clip(scaled, -largest, largest).astype(dtype), "scale": code}


def reference_nvfp4(x: np.ndarray, recipe: NVFP4BlockScaling) -> dict[str, np.ndarray]:
    amax = np.abs(x).max()
    s = F32(1) if amax == 0 else np.minimum(F32(1536 if recipe.scale_choice else 2688) / amax, FLT_MAX)
    global_scale = F32(1) / s
    block = blockwise_amax(x, 16 if recipe.blocks == "square" else 1, 16)
    six = np.minimum(block * (s * (F32(1) / F32(6))), FLT_MAX)
    scale = np.clip(six, F32(0), F32(448)).astype(ml_dtypes.float8_e4m3fn)
    if recipe.scale_choice:
        four = np.clip(six * F32(1.5), F32(0), F32(448)).astype(ml_dtypes.float8_e4m3fn)
        better = squared_error(x, four, global_scale) < squared_error(x, scale, global_scale)
        scale = np.where(better, four, scale)
    enc = np.minimum(F32(1) / (scale.astype(F32) * global_scale), FLT_MAX)
    codes = np.clip(x * np.repeat(enc, 16, axis=-1), F32(-6), F32(6)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return {"payload": codes[:, 0::2] | (codes[:, 1::2] << 4), "scale": scale, "global_scale": np.asarray(global_scale)}


def squared_error(x: np.ndarray, scale: np.ndarray, global_scale: np.ndarray) -> np.ndarray:
    """[rows, blocks]: of rounding under block scales, by pairs of sums; differences are rounded to fp32 once."""
    dec = np.repeat(scale.astype(F32) * global_scale, 16, axis=-1)
    scaled = np.clip(x * np.minimum(F32(1) / dec, FLT_MAX), F32(-6), F32(6))
    elements = scaled.astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    off = (elements * dec.astype(np.float64) - x.astype(np.float64)).astype(F32).astype(np.float64)
    squares = (off * off).reshape(len(x), -1, 16)
    for half in (8, 4, 2, 1):
        squares = squares[..., :half] + squares[..., half:]
    return squares[..., 0]


def nibbles(codes: np.ndarray) -> np.ndarray:
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def reference_mxfp4(x: np.ndarray, recipe: MXFP4BlockScaling) -> dict[str, np.ndarray]:
    code = e8m0_code(blockwise_amax(x, 1, 32), recipe.scale_rounding, F32(6))
    scaled = np.ldexp(x, 127 - np.repeat(code, 32, axis=-1).astype(np.int32))
    elements = np.clip(scaled, F32(-6), F32(6)).astype(ml_dtypes.float4_e2m1fn)
    return {"payload": nibbles(elements.view(np.uint8)), "scale": code}


def reference_int4(x: np.ndarray, recipe: Int4GroupScaling) -> dict[str, np.ndarray]:
    scale = (blockwise_amax(x, 1, recipe.group) / F32(7.5)).astype(ml_dtypes.bfloat16)
    scale[scale == 0] = 1
    scaled = x / np.repeat(scale.astype(F32), recipe.group, axis=-1)
    return {"payload": nibbles((np.clip(np.rint(scaled), -8, 7) + 8).astype(np.uint8)), "scale": scale}


def reference_int8(x: np.ndarray, recipe: Int8RowScaling) -> dict[str, np.ndarray]:
    scale = np.maximum(blockwise_amax(x, 1, x.shape[-1]) / F32(127.5), F32(2.0**-126))
    return {"payload": np.clip(np.rint(x * (F32(1) / scale)), -128, 127).astype(np.int8), "scale": scale}


def reference_nf4(x: np.ndarray, recipe: NF4BlockScaling) -> dict[str, np.ndarray]:
    scale, table = blockwise_amax(x, 1, recipe.block), np.array(QUANTILES, F32)
    scaled = x * np.repeat(F32(1) / np.maximum(scale, F32(1e-38)), recipe.block, axis=-1)
    codes = np.searchsorted((table[1:] + table[:-1]) / F32(2), scaled)  # on a bound: the code below
    return {"payload": nibbles(codes.astype(np.uint8)), "scale": scale}


REFERENCES: dict[type, Callable[[np.ndarray, Any], dict[str, np.ndarray]]] = {
    Float8CurrentScaling: reference_float8,
    Int4GroupScaling: reference_int4,
    Int8RowScaling: reference_int8,
    NF4BlockScaling: reference_nf4,
    MXFP4BlockScaling: reference_mxfp4,
    Float8BlockScaling: reference_float8_blocks,
    MXFP8BlockScaling: reference_mxfp8,
    NVFP4BlockScaling: reference_nvfp4,
}


@all_recipes
@quick
@given(x=matrices(any_float))
def test_bytes_are_those_of_the_formulas(recipe: Any, x: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        expected = REFERENCES[type(recipe)](x, recipe)
    for name, part in quantize(torch.from_numpy(x), recipe).parts().items():
        assert raw(part).numpy().tobytes() == expected[name].tobytes(), name


@all_recipes
@pytest.mark.parametrize("exponent", [-140, -126, -60, 0, 60, 120])
def test_bytes_are_those_of_the_formulas_for_dense_matrices(recipe: Any, exponent: int) -> None:
    x = torch.ldexp(weight(64, 64, torch.float32), torch.tensor(exponent)).numpy()
    with np.errstate(all="ignore"):
        expected = REFERENCES[type(recipe)](x, recipe)
    for name, part in quantize(torch.from_numpy(x), recipe).parts().items():
        assert raw(part).numpy().tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("name", WIDER_BLOCKS)
@pytest.mark.parametrize("exponent", [-140, 0, 120])
def test_bytes_of_wider_blocks_are_those_of_the_formulas(name: str, exponent: int) -> None:
    recipe: Any = WIDER_BLOCKS[name]
    x = torch.ldexp(weight(16, 256, torch.float32), torch.tensor(exponent))
    with np.errstate(all="ignore"):
        expected = REFERENCES[type(recipe)](x.numpy(), recipe)
    q = quantize(x, recipe)
    for part, value in q.parts().items():
        assert raw(value).numpy().tobytes() == expected[part].tobytes(), part
    if exponent == 0:
        assert ((q.dequantize().double() - x.double()).abs() <= error_bound(x, q)).all()


def test_int4_codes_are_those_of_a_division() -> None:
    """Around every tie, under all mantissas that a scale can have; a product with an fp32 reciprocal misses some."""
    scales = torch.arange(128, 256, dtype=torch.float32) / 128
    exact = (torch.arange(-9, 9).float() + 0.5) * scales.view(-1, 1)  # [128, 18]
    near = [torch.nextafter(exact, torch.tensor(to)) for to in (-100.0, 100.0)]
    x = torch.cat(
        [exact, *near, torch.randn(128, 10, generator=torch.Generator().manual_seed(0)) * 4], dim=1
    )  # [128, 64]
    recipe, dec = Int4GroupScaling(group=64), scales.view(-1, 1)
    fmt, quantizer = format_of(recipe), {"scale": dec.bfloat16()}
    expected = (x / dec).round().clamp(-8, 7)
    assert torch.equal(fmt.decode(fmt.encode_with(x, recipe, quantizer), recipe), expected * dec)
    assert not torch.equal((x * (1 / dec)).round().clamp(-8, 7), expected)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_mxfp8_scales_turn_exactly_at_the_powers_of_two(element: str) -> None:
    """Amaxes a few ulps around largest * 2^k, for every k, the smallest and largest included."""
    largest = ELEMENT[element][1]
    with np.errstate(over="ignore"):
        exact = np.ldexp(largest, np.arange(-160, 128)).astype(F32)
    exact = exact[np.isfinite(exact)]
    amaxes = np.concatenate([(exact.view(np.int32) + ulps).clip(0).view(F32) for ulps in range(-3, 4)])
    x = np.zeros((len(amaxes), 64), F32)
    x[:, 0], x[:, 63] = amaxes, -amaxes
    x = x[np.isfinite(x).all(axis=-1)]
    recipe = MXFP8BlockScaling(element=element)
    expected, q = reference_mxfp8(x, recipe), quantize(torch.from_numpy(x), recipe)
    assert raw(q.scale).numpy().tobytes() == expected["scale"].tobytes()
    assert raw(q.payload).numpy().tobytes() == expected["payload"].tobytes()


# -- properties ------------------------------------------------------------------------------------------------------


@all_recipes
@quick
@given(x=matrices(everyday))
def test_decoded_values_are_within_half_a_step(recipe: Any, x: np.ndarray) -> None:
    q = quantize(torch.from_numpy(x), recipe)
    assert ((q.dequantize().double() - torch.from_numpy(x).double()).abs() <= error_bound(torch.from_numpy(x), q)).all()


# These follow from the formulas, which are compared above for each element and rounding: in `make test` one form of
# each format.
main_first = sampled("recipe", RECIPES.values(), MAIN.values(), ids=RECIPES)


@main_first
@quick
@given(x=matrices(everyday), shift=st.integers(-20, 20))
def test_powers_of_two_move_into_the_scale(recipe: Any, x: np.ndarray, shift: int) -> None:
    """Multiplying by 2^k changes no element and no decoded value but by 2^k: scales take it up exactly."""
    dense = torch.from_numpy(x)
    a, b = quantize(dense, recipe), quantize(torch.ldexp(dense, torch.tensor(shift)), recipe)
    assert same_bytes(a.payload, b.payload)
    assert same_bytes(torch.ldexp(a.dequantize(), torch.tensor(shift)), b.dequantize())


@pytest.mark.parametrize("recipe", recipes(lambda each: each.element.floating and not each.history).values())
@quick
@given(x=matrices(any_float))
def test_negation_changes_signs_alone(recipe: Any, x: np.ndarray) -> None:
    dense = torch.from_numpy(x)
    a, b = quantize(dense, recipe), quantize(-dense, recipe)
    assert torch.equal(a.dequantize(), -b.dequantize())
    assert same_bytes(a.scale, b.scale)


@main_first
@quick
@given(x=matrices(everyday), seed=st.integers(0, 99))
def test_rows_do_not_depend_on_their_order(recipe: Any, x: np.ndarray, seed: int) -> None:
    dense = torch.from_numpy(x)
    block = 32 if facts(recipe).square else 1
    order = torch.randperm(32 // block, generator=torch.Generator().manual_seed(seed))
    rows = (order[:, None] * block + torch.arange(block)).flatten()
    a, b = quantize(dense, recipe).parts(), quantize(dense[rows], recipe).parts()
    for name, part in a.items():
        assert torch.equal(raw(part.view(torch.uint8)[rows] if part.ndim else part), raw(b[name]))


@main_first
@quick
@given(
    x=matrices(everyday),
    places=st.lists(st.integers(0, 32 * 64 - 1), max_size=5),
    bad=st.sampled_from([np.nan, np.inf, -np.inf]),
)
def test_non_finite_elements_decode_to_nan_and_the_others_as_if_they_were_zeros(
    recipe: Any, x: np.ndarray, places: list[int], bad: float
) -> None:
    broken, zeroed = torch.from_numpy(x.copy()).flatten(), torch.from_numpy(x.copy()).flatten()
    broken[places], zeroed[places] = bad, 0.0
    found, expected = (quantize(one.view(32, 64), recipe).dequantize().flatten() for one in (broken, zeroed))
    assert found[places].isnan().all()
    kept = ~found.isnan()
    assert same_bytes(found[kept], expected[kept])


@pytest.mark.parametrize("recipe", recipes(lambda each: each.scale is E8M0 and each.excess == 1).values())
@quick
@given(x=matrices(everyday))
def test_e8m0_scales_are_the_smallest_that_do_not_saturate(recipe: Any, x: np.ndarray) -> None:
    """v = amax/largest <= 2^code < 2v, up to one rounding of v."""
    dense = torch.from_numpy(x)
    q = quantize(dense, recipe)
    one = unit(q)[:, ::32]
    amax = torch.from_numpy(blockwise_amax(x, facts(recipe).rows, 32)).double()
    needed = amax / facts(recipe).element.largest
    assert (needed <= one * FP32_SLACK)[amax > 0].all()
    assert (one < 2 * needed * FP32_SLACK)[amax > 0].all()


@quick
@given(x=matrices(everyday))
def test_the_largest_element_of_float8_uses_the_whole_range(x: np.ndarray) -> None:
    """|q| = 448 for the amax of each row: x * (448 / x) is within an ulp of 448, which E4M3 rounds away."""
    payload = quantize(torch.from_numpy(x), Float8CurrentScaling()).payload.float().abs().amax(dim=-1)
    assert (payload[torch.from_numpy(np.abs(x).max(axis=-1) > 0)] == 448).all()


@pytest.mark.parametrize("name", WIDE)
@quick
@given(x=matrices(everyday), factor=st.floats(1, 100, width=32))
def test_adopting_a_larger_scale_loses_half_a_step_of_that_scale(name: str, x: np.ndarray, factor: float) -> None:
    recipe, dense = RECIPES[name], torch.from_numpy(x)
    q = quantize(dense, recipe)
    wide = tensor_wide(q.recipe)
    scale = getattr(q, wide) * factor
    adopted = QuantizedTensor.from_parts(adopt(dense, recipe, scale), recipe, torch.float32)
    assert same_bytes(getattr(adopted, wide), scale)
    assert ((adopted.dequantize().double() - dense.double()).abs() <= error_bound(dense, adopted)).all()


@pytest.mark.parametrize("name", WIDE)
def test_adopting_a_scale_as_large_as_any_keeps_zeros(name: str) -> None:
    recipe = RECIPES[name]
    adopted = adopt(torch.zeros(32, 64), recipe, torch.tensor(3.0))
    assert (QuantizedTensor.from_parts(adopted, recipe, torch.float32).dequantize() == 0).all()


# -- elements, all of them -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [(Float8CurrentScaling(), ml_dtypes.float8_e4m3fn), (Float8CurrentScaling(element="e5m2"), ml_dtypes.float8_e5m2)],
    ids=["e4m3", "e5m2"],
)
def test_every_float8_code_decodes_to_its_value(recipe: Any, dtype: Any) -> None:
    codes = np.arange(256, dtype=np.uint8)
    parts = {
        "payload": torch.from_numpy(codes)
        .view(torch.float8_e4m3fn if recipe.element == "e4m3" else torch.float8_e5m2)
        .view(1, 256)
    }
    parts["scale"] = torch.ones(1, 1)
    found = QuantizedTensor.from_parts(parts, recipe, torch.float32).dequantize().numpy()[0]
    np.testing.assert_array_equal(found, codes.view(dtype).astype(F32))


def test_every_e2m1_pair_decodes_to_its_values() -> None:
    codes = np.arange(256, dtype=np.uint8)
    parts = {
        "payload": torch.from_numpy(codes).view(32, 8),
        "scale": torch.ones(32, 1).to(torch.float8_e4m3fn),
        "global_scale": torch.ones(()),
    }
    found = QuantizedTensor.from_parts(parts, NVFP4BlockScaling(), torch.float32).dequantize().numpy().reshape(256, 2)
    expected = np.stack([codes & 0xF, codes >> 4], axis=-1).view(ml_dtypes.float4_e2m1fn).astype(F32)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


def test_every_e8m0_code_decodes_to_its_power_of_two() -> None:
    codes = np.arange(256, dtype=np.uint8)
    parts = {"payload": torch.ones(256, 32).to(torch.float8_e4m3fn), "scale": torch.from_numpy(codes).view(256, 1)}
    found = QuantizedTensor.from_parts(parts, MXFP8BlockScaling(), torch.float32).dequantize().numpy()[:, 0]
    np.testing.assert_array_equal(found, codes.view(ml_dtypes.float8_e8m0fnu).astype(F32))


def test_e2m1_rounds_ties_to_even_and_saturates() -> None:
    """A first element of 6 makes the block scale 448 and one unit 1."""
    grid = torch.arange(-6, 6.01, 1 / 64)
    for chunk in grid.split(14):
        x = torch.nn.functional.pad(torch.cat([torch.tensor([6.0]), chunk]), (0, 15 - len(chunk)))
        found = quantize(x, NVFP4BlockScaling()).dequantize()
        expected = x.numpy().astype(ml_dtypes.float4_e2m1fn).astype(F32)
        # unit = 448 * fp32(6 / 2688), off 1 by a rounding
        np.testing.assert_allclose(found.numpy(), expected, rtol=2.0**-22)


# -- other libraries -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torchao_mx() -> Any:
    pytest.importorskip("torchao")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its kernels for other machines
        from torchao.prototype.mx_formats import mx_tensor
    return mx_tensor


@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp8_bytes_are_those_of_torchao(torchao_mx: Any, rounding: str, element: str, dtype: torch.dtype) -> None:
    """The same formulas: "up" is its RCEIL mode, "floor" its FLOOR mode."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    x = torch.ldexp(weight(256, 256, torch.float32), torch.arange(256).view(-1, 1) % 40 - 20).to(dtype)
    mode = ScaleCalculationMode.RCEIL if rounding == "up" else ScaleCalculationMode.FLOOR
    scale, payload = torchao_mx.to_mx(x, torch.float8_e4m3fn if element == "e4m3" else torch.float8_e5m2, 32, mode)
    q = quantize(x, MXFP8BlockScaling(element=element, scale_rounding=rounding))
    assert torch.equal(raw(q.payload), raw(payload))
    assert torch.equal(raw(q.scale), raw(scale))


@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_bytes_are_those_of_torchao(torchao_mx: Any, rounding: str, dtype: torch.dtype) -> None:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    x = torch.ldexp(weight(256, 256, torch.float32), torch.arange(256).view(-1, 1) % 40 - 20).to(dtype)
    mode = ScaleCalculationMode.RCEIL if rounding == "up" else ScaleCalculationMode.FLOOR
    scale, payload = torchao_mx.to_mx(x, torch.float4_e2m1fn_x2, 32, mode)
    q = quantize(x, MXFP4BlockScaling(scale_rounding=rounding))
    assert torch.equal(raw(q.payload), raw(payload))
    assert torch.equal(raw(q.scale), raw(scale))


@pytest.fixture(scope="module")
def compressed_int4() -> Any:
    """group -> its quantization arguments, and its functions."""
    pytest.importorskip("compressed_tensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors import quantization
        from compressed_tensors.compressors import pack_quantized
        from compressed_tensors.quantization.lifecycle import forward
        from compressed_tensors.quantization.utils import helpers
    return quantization, pack_quantized.helpers, forward, helpers


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_bytes_are_those_of_compressed_tensors(compressed_int4: Any, group: int) -> None:
    quantization, packing, forward, helpers = compressed_int4
    args = quantization.QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=group, symmetric=True)
    x = torch.ldexp(weight(256, 256), torch.arange(256).view(-1, 1) % 40 - 20)
    blocks = x.unflatten(-1, (-1, group))
    scale, zero_point = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    q = quantize(x, Int4GroupScaling(group=group))
    assert same_bytes(q.scale, scale)
    codes = forward.quantize(x.float(), scale.float(), zero_point, args, dtype=torch.int8)
    own = torch.stack([q.payload & 0xF, q.payload >> 4], -1).flatten(-2).to(torch.int8) - 8
    assert torch.equal(own, codes)
    assert torch.equal(
        forward.dequantize(codes, scale.float(), args=args, dtype=torch.float32), q.dequantize(torch.float32)
    )
    packed = packing.pack_to_int32(codes, 4)
    assert torch.equal(packed.view(torch.uint8), q.payload)  # eight codes a word, the first lowest: the same bytes
    assert torch.equal(packing.unpack_from_int32(packed, 4, x.shape), own)


@pytest.mark.usefixtures("torchao_mx")
def test_nvfp4_bytes_are_those_of_torchao_where_its_rounding_is_the_same() -> None:
    """It divides where here a rounded reciprocal is multiplied by; a power of two as global scale makes both exact."""
    from torchao.prototype.mx_formats import nvfp4_tensor

    x = weight(256, 256, torch.float32).clamp(-0.3, 0.3)
    x[0, 0] = 2688 / 8192
    q = quantize(x, NVFP4BlockScaling())
    global_scale = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max())
    scale, payload = nvfp4_tensor.nvfp4_quantize(x, 16, global_scale)
    assert q.global_scale == global_scale == 1 / 8192
    assert torch.equal(raw(q.scale), raw(scale))
    assert torch.equal(raw(q.payload), raw(payload))


@pytest.fixture(scope="module")
def fp4_helpers() -> Any:
    pytest.importorskip("compressed_tensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors.compressors.nvfp4 import helpers
    return helpers


@pytest.mark.parametrize("blocks", ["row", "square"])
def test_nvfp4_payload_is_packed_as_compressed_tensors_reads_it(fp4_helpers: Any, blocks: str) -> None:
    q = quantize(weight(64, 96, torch.float32), NVFP4BlockScaling(blocks=blocks))
    unpacked = fp4_helpers.unpack_fp4_from_uint8(q.payload, 64, 96, dtype=torch.float32)
    scale = (q.scale.float() * q.global_scale).repeat_interleave(16, dim=-1)
    assert torch.equal(unpacked * scale, q.dequantize())
    assert torch.equal(fp4_helpers.pack_fp4_to_uint8(unpacked), q.payload)


def test_float8_decodes_as_compressed_tensors_does() -> None:
    """Only decoding: it divides by the scale where the formula here multiplies by its unrounded inverse."""
    pytest.importorskip("compressed_tensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
        from compressed_tensors.quantization.lifecycle.forward import dequantize
    arguments = QuantizationArgs(
        num_bits=8, type=QuantizationType.FLOAT, strategy=QuantizationStrategy.CHANNEL, symmetric=True
    )
    q = quantize(weight(dtype=torch.float32), Float8CurrentScaling())
    found: Tensor = dequantize(q.payload, q.scale, args=arguments, dtype=torch.float32)
    assert torch.equal(found, q.dequantize())


def test_quantizing_twice_gives_the_same_bytes() -> None:
    for recipe in RECIPES.values():
        assert same_parts(quantize(weight(), recipe), quantize(weight(), recipe))
