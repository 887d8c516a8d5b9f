"""Q(x) @ Q(w).T: what the input is quantized to, the emulation, and what the hardware is asked to compute.

The kernels themselves run in the tests marked gpu. Everywhere else the calls are checked with what takes the kernels'
place: torch's own scaled_mm on the CPU for Float8, one written out here for the block formats.
"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_hooks.all_gather import Sharding, ShardRows
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
    use_kernels,
)
from qtensor.formats import float8, float8_blocks, mxfp8, nvfp4
from qtensor.numerics import kernels
from qtensor.products import dynamic as products
from qtensor.products import in_bf16 as bf16
from qtensor.products.dynamic import product, quantize_rows, scaled_mm_support, swizzle
from qtensor.spec.codecs import fp8
from qtensor.spec.registry import format_of
from tests.qtensor.recipes_under_test import RECIPES, all_recipes, raw, same_bytes, tensor_wide_recipes, weight
from tests.recipes import MAIN
from tests.torch_versions.release import RELEASE

INPUT_SHAPES = [(96,), (7, 96), (3, 5, 96), (2, 3, 5, 96), (0, 96), (2, 0, 96)]
EMULATED = (MXFP4BlockScaling, Int4GroupScaling, Int8RowScaling, NF4BlockScaling)  # by scaled_mm on no device
HARDWARE = {name: recipe for name, recipe in MAIN.items() if not isinstance(recipe, EMULATED)}
HARDWARE |= {"float8_row_power_of_two": Float8CurrentScaling(power_of_two=True)}
hardware_recipes = pytest.mark.parametrize("recipe", HARDWARE.values(), ids=HARDWARE.keys())


def tokens(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 3) -> Tensor:
    """Inputs whose tokens differ in magnitude by powers of ten: a scale of another token shows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (x * 10.0 ** torch.randint(-3, 4, (*shape[:-1], 1), generator=generator)).to(dtype)


def alone(token: Tensor, recipe: Any) -> QuantizedTensor:
    """One token [K] quantized as a tensor of its own."""
    if isinstance(recipe, Float8CurrentScaling):
        return quantize(token, dataclasses.replace(recipe, granularity="tensor"))
    return quantize(token, dataclasses.replace(recipe, blocks="row") if hasattr(recipe, "blocks") else recipe)


def reference(x: Tensor, w: QuantizedTensor) -> Tensor:
    """The product in plain torch operations, every token by itself until the matmul."""
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    values = [alone(token, w.recipe).dequantize(torch.float32) for token in flat]
    stacked = torch.stack(values) if values else flat.float()
    y = torch.matmul(stacked, w.dequantize(torch.float32).T).to(x.dtype)
    return y.reshape(*x.shape[:-1], w.shape[0])


def decoded(parts: Any, recipe: Any) -> Tensor:
    return format_of(recipe).decode(parts, recipe)


def gathered(recipe: Any, shards: int = 3, rows: int = 32, columns: int = 96) -> tuple[QuantizedTensor, Tensor]:
    """A gathered weight whose shards have different scales, and the fp32 values of the shards."""
    pieces = [quantize(weight(rows, columns, seed=i) * 7.0**i, recipe) for i in range(shards)]
    join = {name: torch.stack if part.ndim == 0 else torch.cat for name, part in pieces[0].parts().items()}
    parts = {
        name: how([piece.parts()[name].view(torch.uint8) for piece in pieces]).view(pieces[0].parts()[name].dtype)
        if how is torch.cat
        else how([piece.parts()[name] for piece in pieces])
        for name, how in join.items()
    }
    sharding = Sharding(shards=ShardRows(rows))
    whole = type(pieces[0])(parts, recipe, torch.bfloat16, sharding=sharding)
    return whole, torch.cat([piece.dequantize(torch.float32) for piece in pieces])


def accumulation_bound(x: Tensor, w: Tensor, dtype: torch.dtype, *, unit: float = 2.0**-24) -> Tensor:
    """Largest difference of two evaluations of x @ w.T ([M, K], [N, K] fp32) in different orders, each then rounded.

    Each evaluation of K products with roundings of at most `unit` differs from the exact one by at most g sum |x||w|,
    g = K unit / (1 - K unit); four fp32 roundings more may lie in the scales (elements or sums are multiplied by them).
    The outputs are rounded once each, by at most half an ulp of the value, which is at most 2^-p |y|.
    """
    magnitude = x.double().abs() @ w.double().abs().T
    terms = x.shape[-1] * unit
    before = 2 * (terms / (1 - terms) + 4 * 2.0**-24) * magnitude
    half_ulp = torch.finfo(dtype).eps / 2
    exact = (x.double() @ w.double().T).abs()
    return before + 2 * half_ulp * (exact + before) + 2 * torch.finfo(dtype).smallest_normal * half_ulp


# -- what the input becomes --------------------------------------------------------------------------------------------


@all_recipes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_token_is_quantized_as_if_it_were_alone(recipe: Any, dtype: torch.dtype) -> None:
    x = tokens(9, 96, dtype=dtype)
    parts = quantize_rows(x, recipe)
    for i, token in enumerate(x):
        for name, part in alone(token, recipe).parts().items():
            assert torch.equal(raw(parts[name][i]), raw(part)), name
    assert parts["payload"].shape[0] == parts["scale"].shape[0] == 9


@all_recipes
def test_a_batch_changes_nothing_about_a_token(recipe: Any) -> None:
    """The same bytes; the sums may be taken in another order, for matrices of other sizes are cut differently."""
    x, w = tokens(9, 96, dtype=torch.float32), quantize(weight(), recipe)
    together = quantize_rows(x, recipe)
    y = product(x, w)
    for i in range(9):
        single = quantize_rows(x[i : i + 1], recipe)
        for name, part in single.items():
            assert torch.equal(raw(part), raw(together[name][i : i + 1])), name
        values = alone(x[i], recipe).dequantize(torch.float32).unsqueeze(0)
        bound = accumulation_bound(values, w.dequantize(torch.float32), torch.float32)
        assert ((product(x[i], w).double() - y[i].double()).abs() <= bound).all()


@all_recipes
def test_what_is_not_finite_stays_in_its_token(recipe: Any) -> None:
    x, w = tokens(5, 96), quantize(weight(), recipe)
    broken = x.clone()
    broken[2, 40] = torch.nan
    broken[4, 3] = torch.inf
    y, clean = product(broken, w), product(x, w)
    assert y[[2, 4]].isnan().all()
    assert same_bytes(y[[0, 1, 3]], clean[[0, 1, 3]])


@all_recipes
def test_a_token_of_zeros_gives_zeros(recipe: Any) -> None:
    x = tokens(3, 96)
    x[1] = 0
    y = product(x, quantize(weight(), recipe))
    assert (y[1] == 0).all()
    assert (y[[0, 2]] != 0).any()


# -- the product -------------------------------------------------------------------------------------------------------


@all_recipes
@pytest.mark.parametrize("shape", INPUT_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_product_is_that_of_the_decoded_operands(recipe: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, w = tokens(*shape, dtype=dtype), quantize(weight(), recipe)
    y = product(x, w)
    assert type(y) is Tensor
    assert same_bytes(y, reference(x, w))


@all_recipes
def test_an_input_need_not_be_contiguous(recipe: Any) -> None:
    w = quantize(weight(), recipe)
    for x in (tokens(96, 7).T, tokens(2, 96, 5).transpose(1, 2), tokens(7, 192)[:, ::2], tokens(1, 96).expand(4, 96)):
        assert not x.is_contiguous()
        assert same_bytes(product(x, w), product(x.contiguous(), w))


def test_a_weight_without_columns_gives_zeros() -> None:
    y = product(torch.ones(2, 3, 0), quantize(torch.ones(4, 0), Float8CurrentScaling()))
    assert same_bytes(y, torch.zeros(2, 3, 4))


@tensor_wide_recipes
def test_a_gathered_weight_brings_the_scale_of_every_shard(recipe: Any) -> None:
    w, values = gathered(recipe)
    x = tokens(7, 96)
    expected = torch.matmul(decoded(quantize_rows(x, recipe), recipe), values.T).to(x.dtype)
    assert same_bytes(product(x, w), expected)


@all_recipes
def test_autocast_does_not_round_the_operands(recipe: Any) -> None:
    x, w = tokens(5, 96, dtype=torch.float32), quantize(weight(), recipe)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = product(x, w)
    assert same_bytes(y, product(x, w))


@all_recipes
def test_the_product_has_a_shape_on_the_meta_device(recipe: Any) -> None:
    y = product(torch.empty(2, 5, 96, device="meta"), quantize(torch.empty(64, 96, device="meta"), recipe))
    assert (y.shape, y.device.type) == ((2, 5, 64), "meta")


@pytest.mark.parametrize("shape", [(), (95,), (7, 64)], ids=str)
def test_shapes_that_do_not_fit_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="does not fit") as caught:
        product(torch.ones(shape), quantize(weight(), NVFP4BlockScaling()))
    assert str(caught.value) == (
        f"an input of shape {shape} does not fit a quantized weight of shape (64, 96) (NVFP4BlockScaling(blocks='row'))"
        "; expected [.., K] and [N, K]"
    )


# -- which route -------------------------------------------------------------------------------------------------------


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    major, minor = capability
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major, minor=minor))
    return torch.device("cuda")


@all_recipes
def test_the_cpu_emulates(recipe: Any) -> None:
    device, name = torch.device("cpu"), type(recipe).__name__
    unknown = isinstance(recipe, EMULATED)
    why = f"does not know {name}" if unknown else "is used on NVIDIA GPUs, not on this device (cpu)"
    assert scaled_mm_support(device, recipe, torch.bfloat16, 64, 96) == (False, f"scaled_mm {why}")


@pytest.mark.parametrize(
    ("recipe", "capability", "supported"),
    [
        (Float8CurrentScaling(), (8, 6), False),
        (Float8CurrentScaling(), (8, 9), True),
        (Float8CurrentScaling(granularity="tensor"), (9, 0), True),
        (Float8CurrentScaling(), (10, 3), True),
        (Float8CurrentScaling(), (12, 0), False),
        (MXFP8BlockScaling(), (9, 0), False),
        (MXFP8BlockScaling(blocks="square"), (10, 0), True),
        (NVFP4BlockScaling(), (9, 0), False),
        (NVFP4BlockScaling(), (12, 0), True),
        (Float8BlockScaling(), (8, 9), False),
        (Float8BlockScaling(), (9, 0), True),
        (Float8BlockScaling(blocks="row"), (10, 0), False),
    ],
    ids=str,
)
def test_a_capability_decides(
    recipe: Any, capability: tuple[int, int], supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = pretend_gpu(monkeypatch, capability)
    found, reason = scaled_mm_support(device, recipe, torch.bfloat16, 64, 128)
    assert found is supported
    assert bool(reason) is not supported


def test_blocks_need_a_torch_that_has_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    device = pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert scaled_mm_support(device, Float8BlockScaling(), torch.bfloat16, 64, 128) == (
        False,
        "scaled_mm knows Float8BlockScaling in torch built for CUDA 12.9 or later",
    )
    assert scaled_mm_support(device, Float8CurrentScaling(), torch.bfloat16, 64, 128) == (True, "")


@pytest.mark.parametrize(
    ("recipe", "operands", "reason"),
    [
        (MXFP8BlockScaling(element="e5m2"), (torch.bfloat16, 64, 96), "scaled_mm does not multiply e5m2 by e5m2"),
        (Float8CurrentScaling(element="e5m2"), (torch.bfloat16, 64, 96), "scaled_mm does not multiply e5m2 by e5m2"),
        (
            MXFP8BlockScaling(),
            (torch.float32, 64, 96),
            "scaled_mm is used for bfloat16 inputs, not for torch.float32",
        ),
        (
            Float8CurrentScaling(),
            (torch.bfloat16, 64, 100),
            "scaled_mm needs N a multiple of 16 and K of 16, not N=64 and K=100",
        ),
        (
            NVFP4BlockScaling(),
            (torch.bfloat16, 64, 48),
            "scaled_mm needs N a multiple of 16 and K of 32, not N=64 and K=48",
        ),
        (
            MXFP8BlockScaling(),
            (torch.bfloat16, 33, 96),
            "scaled_mm needs N a multiple of 16 and K of 32, not N=33 and K=96",
        ),
        (
            Float8CurrentScaling(),
            (torch.bfloat16, 0, 96),
            "scaled_mm needs N a multiple of 16 and K of 16, not N=0 and K=96",
        ),
    ],
    ids=str,
)
def test_what_the_kernels_do_not_take_is_said(
    recipe: Any, operands: tuple[torch.dtype, int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = pretend_gpu(monkeypatch, (10, 0))
    assert scaled_mm_support(device, recipe, *operands) == (False, reason)


def test_a_device_without_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    device = pretend_gpu(monkeypatch, (9, 0))
    assert scaled_mm_support(device, NVFP4BlockScaling(), torch.bfloat16, 64, 96) == (
        False,
        "scaled_mm knows NVFP4BlockScaling on compute capability 10.0, 11.0, 12.0, not on 9.0",
    )
    monkeypatch.setattr(torch.version, "cuda", None)  # a ROCm build calls its devices cuda as well
    assert not scaled_mm_support(device, Float8CurrentScaling(), torch.bfloat16, 64, 96)[0]


# -- what the hardware is asked ----------------------------------------------------------------------------------------


def unswizzled(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """[rows, blocks] of a swizzled scale, element by element as cuBLAS documents the layout."""
    assert scale.ndim == 1
    assert scale.numel() == -(-rows // 128) * -(-blocks // 4) * 512
    r, b = torch.arange(rows)[:, None], torch.arange(blocks)[None, :]
    tile = (r // 128) * -(-blocks // 4) + b // 4
    return scale.view(torch.uint8)[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + b % 4].view(scale.dtype)


def block_scaled_mm(  # noqa: PLR0917 - the signature of scaled_mm
    a: Tensor, b: Tensor, a_scale: Tensor, a_kind: Any, b_scale: Tensor, b_kind: Any, **options: Any
) -> Tensor:
    """What scaled_mm computes for blocks with swizzled scales, in fp32; refuses what the kernels refuse."""
    from torch.nn.functional import ScalingType, SwizzleType

    assert a_kind == b_kind
    assert options.pop("swizzle_a") == options.pop("swizzle_b") == SwizzleType.SWIZZLE_32_4_4
    dtype = options.pop("output_dtype")
    assert not options
    assert a.is_contiguous()
    assert b.T.is_contiguous()
    assert b.shape[1] % 16 == 0 == b.shape[0] % 16
    fp4 = a_kind == ScalingType.BlockWise1x16
    expected = (torch.float4_e2m1fn_x2, torch.float8_e4m3fn) if fp4 else (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    assert {(a.dtype, a_scale.dtype), (b.dtype, b_scale.dtype)} == {expected}
    assert fp4 or a_kind == ScalingType.BlockWise1x32

    def values(payload: Tensor, scale: Tensor) -> Tensor:
        if fp4:
            codes = payload.view(torch.uint8)
            table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
            nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).int()
            elements, block = table[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0), 16
        else:
            elements, block = payload.float(), 32
        rows, columns = elements.shape
        blocks = unswizzled(scale, rows, columns // block).float()
        return elements * blocks.repeat_interleave(block, dim=1)

    return (values(a, a_scale) @ values(b.T, b_scale).T).to(dtype)


def float8_scaled_mm(  # noqa: PLR0917 - the signature of scaled_mm
    a: Tensor, b: Tensor, a_scale: Tensor, a_kind: Any, b_scale: Tensor, b_kind: Any, **options: Any
) -> Tensor:
    """What scaled_mm computes for Float8 in blocks, in fp32; refuses what the kernels refuse."""
    from torch.nn.functional import ScalingType

    (rows, inner), columns = a.shape, b.shape[1]
    blocks = -(-inner // 128)
    dtype = options.pop("output_dtype")
    assert not options
    assert a.is_contiguous()
    assert b.T.is_contiguous()
    assert {a.dtype, b.dtype} == {torch.float8_e4m3fn}
    assert {a_scale.dtype, b_scale.dtype} == {torch.float32}
    assert a_kind == ScalingType.BlockWise1x128
    assert rows % 4 == 0
    assert (a_scale.shape, a_scale.T.is_contiguous()) == ((rows, blocks), True)
    assert b_kind == ScalingType.BlockWise1x128
    assert (b_scale.shape, b_scale.T.is_contiguous()) == ((columns, blocks), True)

    def values(elements: Tensor, scale: Tensor) -> Tensor:
        return elements.float() * scale.repeat_interleave(128, dim=1)[:, :inner]

    return (values(a, a_scale) @ values(b.T, b_scale).T).to(dtype)


def asked(monkeypatch: pytest.MonkeyPatch, recipe: Any) -> Callable[..., Tensor]:
    """`product` by way of the hardware's route, with stand-ins for the kernels that the CPU lacks."""
    if isinstance(recipe, Float8CurrentScaling) and RELEASE < (2, 12):
        pytest.skip("torch 2.11 has no scaled_mm for Float8 on the CPU")
    monkeypatch.setattr(products, "scaled_mm_support", lambda *args: (True, ""))
    monkeypatch.setattr(products, "emulate", None)
    monkeypatch.setattr(mxfp8, "scaled_mm", block_scaled_mm)
    monkeypatch.setattr(nvfp4, "scaled_mm", block_scaled_mm)
    monkeypatch.setattr(float8_blocks, "scaled_mm", float8_scaled_mm)
    return product


def assert_close_to_the_emulation(y: Tensor, x: Tensor, values: Tensor, recipe: Any) -> None:
    flat = x.reshape(-1, x.shape[-1])
    rows = decoded(quantize_rows(flat, recipe), recipe)
    expected = (rows @ values.T).to(x.dtype)
    error = (y.reshape(expected.shape).double() - expected.double()).abs()
    assert (error <= accumulation_bound(rows, values, x.dtype)).all()


def test_the_hardware_is_given_the_scales_of_rows_that_begin_within_a_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a shard, or of a fused weight's piece, may: their first row tells the scales of no square."""
    recipe = Float8BlockScaling(activations="dynamic")
    w = quantize(weight(320, 256) * torch.exp2(torch.arange(320) // 64)[:, None].bfloat16(), recipe)
    x = tokens(7, 256)
    for first, last in ((64, 192), (192, 320)):
        piece = w[first:last]
        y = asked(monkeypatch, recipe)(x, piece)
        assert_close_to_the_emulation(y, x, w.dequantize(torch.float32)[first:last], recipe)


@hardware_recipes
@pytest.mark.parametrize("shape", [(96,), (0, 96), (1, 96), (7, 96), (3, 50, 96)], ids=str)
def test_the_operands_of_the_hardware_are_those_of_the_emulation(
    recipe: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    w, x = quantize(weight(160, 96), recipe), tokens(*shape)
    y = asked(monkeypatch, recipe)(x, w)
    assert (y.shape, y.dtype) == ((*shape[:-1], 160), torch.bfloat16)
    assert_close_to_the_emulation(y, x, w.dequantize(torch.float32), recipe)


@pytest.mark.parametrize("recipe", [HARDWARE["float8_tensor"], HARDWARE["nvfp4"]], ids=["float8", "nvfp4"])
def test_the_hardware_is_given_the_scale_of_every_shard(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w, values = gathered(recipe)
    x = tokens(7, 96)
    assert_close_to_the_emulation(asked(monkeypatch, recipe)(x, w), x, values, recipe)


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (128, 4), (130, 5), (256, 8), (300, 17)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_scales_are_swizzled_as_torchao_does(shape: tuple[int, int], dtype: torch.dtype) -> None:
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.utils import to_blocked

    scale = torch.randint(1, 120, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).view(dtype)
    found = swizzle(scale)
    assert found.dtype == dtype
    assert torch.equal(raw(found), raw(to_blocked(scale.view(torch.uint8))))
    assert torch.equal(raw(unswizzled(found, *shape)), raw(scale))


@pytest.mark.parametrize("accumulation", [None, "fast"])
def test_fast_accumulation_is_asked_of_the_hardware(accumulation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def scaled_mm(*operands: Any, **options: Any) -> Tensor:
        given.append(options["use_fast_accum"])
        return torch.zeros(operands[0].shape[0], operands[1].shape[1], dtype=torch.bfloat16)

    monkeypatch.setattr(products, "scaled_mm_support", lambda *args: (True, ""))
    monkeypatch.setattr(float8, "scaled_mm", scaled_mm)
    recipe = Float8CurrentScaling(activations="dynamic", accumulation=accumulation)
    product(tokens(7, 96), quantize(weight(), recipe))
    assert given == [accumulation == "fast"]


# -- in bf16, where the hardware has no product ------------------------------------------------------------------------

EXACT = {name: recipe for name, recipe in RECIPES.items() if format_of(recipe).exact_in_bf16}


@pytest.fixture
def in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """This CPU counts as a GPU that decodes operands to bf16; nothing may be emulated."""
    monkeypatch.setattr(bf16, "KINDS", ("cpu",))
    monkeypatch.setattr(products, "emulate", None)


def test_every_format_but_three_is_exact_in_bf16() -> None:
    inexact = {type(recipe) for recipe in RECIPES.values()} - {type(recipe) for recipe in EXACT.values()}
    assert inexact == {Float8BlockScaling, Int4GroupScaling, NF4BlockScaling}


@pytest.mark.usefixtures("in_bf16")
@pytest.mark.parametrize("recipe", EXACT.values(), ids=EXACT.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(96,), (0, 96), (7, 96), (3, 50, 96)], ids=str)
def test_a_bf16_product_multiplies_what_the_emulation_does(
    recipe: Any, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    w, x = quantize(weight(), recipe), tokens(*shape, dtype=dtype)
    y = product(x, w)
    assert (y.shape, y.dtype) == ((*shape[:-1], 64), dtype)
    assert_close_to_the_emulation(y, x, w.dequantize(torch.float32), recipe)


@pytest.mark.usefixtures("in_bf16")
@pytest.mark.parametrize("recipe", EXACT.values(), ids=EXACT.keys())
def test_large_operands_take_a_bf16_product_too(recipe: Any) -> None:
    """From 2^18 elements on they are decoded by rows."""
    w, x = quantize(weight(), recipe), tokens(2**12, 96)
    with use_kernels("eager"):
        assert_close_to_the_emulation(product(x, w), x, w.dequantize(torch.float32), recipe)


@pytest.mark.usefixtures("in_bf16")
@tensor_wide_recipes
def test_a_bf16_product_applies_the_scale_of_every_shard(recipe: Any) -> None:
    w, values = gathered(recipe)
    x = tokens(7, 96)
    assert_close_to_the_emulation(product(x, w), x, values, recipe)


@pytest.mark.parametrize("recipe", EXACT.values(), ids=EXACT.keys())
def test_operands_have_the_same_values_in_bf16_and_in_fp32(recipe: Any) -> None:
    x = tokens(40, 96) * 2.0**-100
    rows = recipe.of_rows
    rest, factors = format_of(rows).without_factors(quantize_rows(x, recipe), rows)
    wide, narrow = (kernels.decode(rest, rows, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(narrow.float(), wide)
    scaled = wide if factors is None else wide * factors
    expected = decoded(quantize_rows(x, recipe), rows)
    assert torch.allclose(scaled, expected, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_every_bf16_number_is_exact_under_every_scale_of_mxfp8(element: str) -> None:
    """Also those below the least normal number; beyond the largest both are infinite."""
    recipe = MXFP8BlockScaling(element=element)
    numbers = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()  # positive ones
    numbers = numbers[numbers.isfinite()].reshape(-1, 32)
    for code in range(255):
        scale = torch.full((numbers.shape[0], 1), code, dtype=torch.uint8)
        parts = format_of(recipe).encode_with(numbers, recipe, {"scale": scale})
        wide, narrow = (kernels.decode(parts, recipe, dtype) for dtype in (torch.float32, torch.bfloat16))
        # what is larger than the largest element of this scale has another scale
        within = numbers <= fp8.ELEMENTS[element][1] * 2.0 ** (code - 127)
        assert torch.equal(narrow.float()[within], wide[within]), code


@pytest.mark.parametrize(("element", "least"), [("e4m3", -124), ("e5m2", -117)])
def test_weights_of_mxfp8_lose_less_than_2_to_the_minus_134_in_the_least_blocks(element: str, least: int) -> None:
    recipe: Any = MXFP8BlockScaling(element=element)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fp8.ELEMENTS[element][0])
    codes = torch.where(codes.float().isfinite(), codes.view(torch.uint8), 0).view(codes.dtype)
    for code in range(255):
        parts = {"payload": codes.reshape(8, 32), "scale": torch.full((8, 1), code, dtype=torch.uint8)}
        wide, narrow = (kernels.decode(parts, recipe, dtype) for dtype in (torch.float32, torch.bfloat16))
        if code - 127 >= least:
            assert torch.equal(narrow.float(), wide), code
        else:
            assert not torch.equal(narrow.float(), wide)
            assert (narrow.double() - wide.double()).abs().max() <= 2.0**-134


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_inputs_are_not_multiplied_in_bf16(dtype: torch.dtype) -> None:
    assert not bf16.holds(torch.device("cuda"), MXFP8BlockScaling(), dtype)
    assert bf16.holds(torch.device("cuda"), MXFP8BlockScaling(), torch.bfloat16)
    assert not bf16.holds(torch.device("cpu"), MXFP8BlockScaling(), torch.bfloat16)
    assert not bf16.holds(torch.device("cuda"), Float8BlockScaling(), torch.bfloat16)


# -- on the hardware ---------------------------------------------------------------------------------------------------


def on_hardware(recipe: Any, rows: int, columns: int) -> torch.device:
    device = torch.device("cuda")
    supported, reason = scaled_mm_support(device, recipe, torch.bfloat16, rows, columns)
    if not supported:
        pytest.skip(reason)
    return device


def forbid_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "emulate", None)


@pytest.mark.gpu
@hardware_recipes
def test_the_hardware_multiplies_small_integers_exactly(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements of -1, 0 and 1, rows scaled by powers of two: every sum is exact in any accumulator and in bf16.

    Float8 scales are powers of two only where that is asked for, and NVFP4's are amax / 6, so these are compared up to
    rounding.
    """
    device = on_hardware(recipe, 192, 256)
    generator = torch.Generator().manual_seed(0)

    def integers(rows: int) -> Tensor:
        x = torch.randint(-1, 2, (rows, 256), generator=generator).float()
        x[:, ::16] = 1  # an amax of 1 in every block
        return x * 2.0 ** torch.randint(-8, 8, (rows, 1), generator=generator)

    x, w = integers(77).to(device, torch.bfloat16), quantize(integers(192).to(device, torch.bfloat16), recipe)
    expected = products.emulate(quantize_rows(x, recipe), w, torch.bfloat16)
    forbid_emulation(monkeypatch)
    y = product(x, w)
    if isinstance(recipe, MXFP8BlockScaling) or getattr(recipe, "power_of_two", False):
        assert torch.equal(y, expected)
    else:
        rows, values = decoded(quantize_rows(x, recipe), recipe), w.dequantize(torch.float32)
        assert ((y.double() - expected.double()).abs() <= accumulation_bound(rows, values, y.dtype)).all()


@pytest.mark.gpu
@hardware_recipes
@pytest.mark.parametrize("shape", [(1, 512), (77, 512), (3, 50, 4096)], ids=str)
def test_the_hardware_agrees_with_the_emulation(
    recipe: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the accumulation.

    NVIDIA documents no width of the tensor cores' accumulator; measured by others on 9.x, 32 products are added to it
    at a time, aligned to the largest of them and cut off 13 bits below it. Each of the 33 addends so loses less than
    2^-13 of the largest, which is at most the sum of magnitudes; without fast accumulation a sum leaves the tensor core
    after 128 products and goes on in fp32. All of it together is below 4 * 33 * 2^-13 = 2^-5.95 of sum |x||w|.
    """
    device = on_hardware(recipe, 320, shape[-1])
    x, w = tokens(*shape).to(device), quantize(weight(320, shape[-1]).to(device), recipe)
    rows = decoded(quantize_rows(x.reshape(-1, shape[-1]), recipe), recipe)
    values = w.dequantize(torch.float32)
    expected = products.emulate(quantize_rows(x.reshape(-1, shape[-1]), recipe), w, x.dtype)
    forbid_emulation(monkeypatch)
    y = product(x, w)
    assert (y.shape, y.dtype) == ((*shape[:-1], 320), torch.bfloat16)
    error = (y.reshape(expected.shape).double() - expected.double()).abs()
    magnitude = rows.double().abs() @ values.double().abs().T
    cut_off = 4 * 33 * 2.0**-13 * magnitude
    assert (error <= cut_off + accumulation_bound(rows, values, x.dtype) + 2.0**-8 * cut_off).all()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [HARDWARE["float8_tensor"], HARDWARE["nvfp4"]], ids=["float8", "nvfp4"])
def test_the_hardware_applies_the_scale_of_every_shard(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = on_hardware(recipe, 96, 128)
    w, values = gathered(recipe, columns=128)
    parts, sharding = {name: part.to(device) for name, part in w.parts().items()}, w._sharding
    w = type(w)(parts, recipe, w.dtype, sharding=sharding)
    x = tokens(7, 128).to(device)
    forbid_emulation(monkeypatch)
    y = product(x, w)
    rows, values = decoded(quantize_rows(x, recipe), recipe).double(), values.to(device).double()
    magnitude = rows.abs() @ values.abs().T
    error = (y.double() - rows @ values.T).abs()
    assert (error <= (4 * 33 * 2.0**-13 + 2.0**-8) * magnitude).all()


@pytest.mark.gpu
@all_recipes
def test_input_bytes_on_the_gpu_are_those_of_the_cpu(recipe: Any) -> None:
    x = tokens(9, 96)
    found = quantize_rows(x.cuda(), recipe)
    for name, part in quantize_rows(x, recipe).items():
        assert torch.equal(raw(found[name].cpu()), raw(part)), name


def test_every_recipe_under_test_has_an_answer() -> None:
    """No format is forgotten: each either has a route or is said to have none."""
    routed = {type(recipe) for recipe in HARDWARE.values()}
    assert {type(recipe) for recipe in RECIPES.values()} - set(EMULATED) <= routed
