"""What scaled_grouped_mm is asked to compute, and when: no kernel runs here.

Its place is taken by a reading of what torch's kernels read, byte by byte: prepare_grouped_gemm_data in
aten/src/ATen/native/cuda/GroupMMCommon.cuh for scales of rows, the blocked layout of FBGEMM's kernels for MXFP8. It
refuses what they refuse. test_grouped_peers.py compares the layouts with those of torchao.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NF4BlockScaling,
    quantize,
)
from qtensor.formats import float8, mxfp8
from qtensor.products.grouped import multiply
from qtensor.products.grouped.choice import Case, Way, choose, has_factors
from qtensor.spec.registry import format_of
from tests.qtensor.recipes_under_test import same_bytes
from tests.qtensor.test_grouped import (
    DYNAMIC,
    EVERY,
    SIZES,
    Counted,
    K,
    N,
    ends_of,
    grouped,
    looped,
    stack,
    tokens,
    trained,
)

# sums of elements under powers of two: in which order scales are multiplied changes no bit
EXACT = {
    "float8": Float8CurrentScaling(power_of_two=True, activations="dynamic", gradients="e4m3"),
    "float8 tensor": Float8CurrentScaling(
        granularity="tensor", power_of_two=True, activations="dynamic", gradients="e4m3"
    ),
    "mxfp8": MXFP8BlockScaling(activations="dynamic", gradients="e4m3"),
    "mxfp8 square": MXFP8BlockScaling(blocks="square", activations="dynamic", gradients="e4m3"),
}
exact = pytest.mark.parametrize("recipe", EXACT.values(), ids=EXACT.keys())

# -- the kernels -------------------------------------------------------------------------------------------------------


def read_scaled_grouped_mm(  # noqa: PLR0917 - torch's
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    recipe_a: ScalingType,
    scale_b: Tensor,
    recipe_b: ScalingType,
    swizzle_a: SwizzleType | None = None,
    swizzle_b: SwizzleType | None = None,
    *,
    offs: Tensor,
    output_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> Tensor:
    """The product of each group in fp32, by what a kernel finds at the addresses it computes."""
    ends = offs.tolist()
    assert offs.dtype == torch.int32
    assert output_dtype == torch.bfloat16
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert a.stride(1) == 1
    assert a.stride(0) % 16 == a.shape[1] % 16 == 0
    assert b.stride(-2) == 1
    assert b.stride(-1) % 16 == b.shape[-2] % 16 == b.shape[-1] % 16 == 0
    assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
    blocked = recipe_a is recipe_b is ScalingType.BlockWise1x32
    assert blocked or recipe_a is recipe_b is ScalingType.RowWise
    assert (swizzle_a is swizzle_b is SwizzleType.SWIZZLE_32_4_4) if blocked else swizzle_a is swizzle_b is None
    read = _blocks if blocked else _rows
    if b.ndim == 3:
        y = torch.full((a.shape[0], b.shape[2]), torch.nan)  # whatever was in memory
        for e, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            one, other = read(a, b, (scale_a, scale_b), ends, e)
            y[start:end] = _product(a[start:end], one, b[e].t(), other)
        return y.to(output_dtype)
    dw = []
    for e, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        # "CUTLASS cannot handle delta=0", and groups begin at addresses of 16 bytes; of MX with a block
        assert end > start
        assert (end - start) % (32 if blocked else 16) == 0
        one, other = read(a, b, (scale_a, scale_b), ends, e)
        dw.append(_product(a[:, start:end], one, b[start:end].t(), other))
    return torch.stack(dw).to(output_dtype)


def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """[M, C] by [L, C] with a scale for each element."""
    return F.linear(a.float().contiguous() * a_scale, b.float().contiguous() * b_scale)


def _rows(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], ends: list[int], e: int) -> tuple[Tensor, Tensor]:
    """The scales of the rows of both operands in group e, [rows, 1]."""
    scale_a, scale_b = scales
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert scale_a.ndim == 1
    assert scale_a.is_contiguous()
    start = ends[e - 1] if e else 0
    if b.ndim == 3:
        assert scale_a.shape[0] == a.shape[0]
        assert scale_b.shape == (b.shape[0], b.shape[2])
        assert scale_b.stride(1) == 1
        return scale_a[start : ends[e], None], scale_b[e, :, None]
    high, wide = a.shape[0], b.shape[1]
    assert scale_a.shape[0] == high * len(ends)
    assert scale_b.shape[0] == wide * len(ends)
    assert scale_b.is_contiguous()
    return scale_a[e * high : (e + 1) * high, None], scale_b[e * wide : (e + 1) * wide, None]


def _blocks(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], ends: list[int], e: int) -> tuple[Tensor, Tensor]:
    """The scales of both operands in group e, one an element."""
    scale_a, scale_b = scales
    assert scale_a.dtype == scale_b.dtype == torch.float8_e8m0fnu
    sizes = [end - start for start, end in itertools.pairwise([0, *ends])]
    flat_a, flat_b = (scale.contiguous().view(torch.uint8).flatten() for scale in (scale_a, scale_b))
    if b.ndim == 3:
        blocks, rows = a.shape[1] // 32, b.shape[2]
        assert scale_a.ndim == 2
        assert scale_a.shape[0] >= a.shape[0]
        assert scale_b.shape == (b.shape[0], _up(rows, 128) * _up(blocks, 4))
        first = sum(_up(size, 128) for size in sizes[:e]) * _up(blocks, 4)
        other = e * scale_b.shape[1]
        return _elements(flat_a, first, sizes[e], blocks), _elements(flat_b, other, rows, blocks)
    before, blocks = sum(_up(size // 32, 4) for size in sizes[:e]), sizes[e] // 32
    found = []
    for flat, scale, rows in ((flat_a, scale_a, a.shape[0]), (flat_b, scale_b, b.shape[1])):
        assert scale.ndim == 2
        assert scale.shape[0] >= rows
        found.append(_elements(flat, before * _up(rows, 128), rows, blocks))
    return found[0], found[1]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _elements(flat: Tensor, first: int, rows: int, blocks: int) -> Tensor:
    """Scales [rows, 32 * blocks] that stand swizzled from a byte on: cuBLAS's "block scaling factors layout"."""
    row, block = torch.arange(rows).unsqueeze(1), torch.arange(blocks)
    tile = (row // 128) * (_up(blocks, 4) // 4) + block // 4
    at = first + tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4
    return (2.0 ** (flat[at].double() - 127)).float().repeat_interleave(32, 1)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "scaled_grouped_mm", read_scaled_grouped_mm)
    monkeypatch.setattr(mxfp8, "scaled_grouped_mm", read_scaled_grouped_mm)
    monkeypatch.setattr(multiply, "choose", lambda case: (Way.SCALED, ""))


@exact
@pytest.mark.parametrize("sizes", [*SIZES, (150, 0, 300)], ids=str)
@pytest.mark.usefixtures("on_a_gpu")
def test_the_kernels_are_given_what_the_loop_multiplies(
    recipe: Any, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, w = ends_of(sizes), stack(recipe, len(sizes))
    count = int(ends[-1]) + 3
    given = tokens(count, K), w, tokens(count, N, seed=5), ends
    found = trained(grouped, *given)
    monkeypatch.undo()
    wanted = trained(looped, *given)
    for name, one, other in zip(("y", "dx", "dw"), found, wanted, strict=True):
        assert same_bytes(one, other), name


@exact
@pytest.mark.usefixtures("on_a_gpu")
def test_as_many_operations_are_launched_for_any_number_of_experts(recipe: Any) -> None:
    """All of them, but what the stand-in for the kernel does."""
    counts = []
    for experts in (2, 9):
        w, ends = stack(recipe, experts, n=64, k=64), ends_of((16,) * experts)
        x = tokens(16 * experts, 64).requires_grad_()
        with Counted() as mode, pytest.MonkeyPatch.context() as patch:
            for module in (float8, mxfp8):
                patch.setattr(module, "scaled_grouped_mm", _allocate)
            grouped(x, w, ends).sum().backward()
        counts.append(mode.names)
    assert counts[0] == counts[1]
    assert "aten._local_scalar_dense.default" not in counts[1]  # the device is asked for no value


def _allocate(a: Tensor, b: Tensor, *args: Any, offs: Tensor, output_dtype: torch.dtype, **kwargs: Any) -> Tensor:
    shape = (a.shape[0], b.shape[2]) if b.ndim == 3 else (offs.shape[0], a.shape[0], b.shape[1])
    return torch.zeros(shape, dtype=output_dtype)


@pytest.mark.parametrize("accumulation", [None, "fast"])
def test_fast_accumulation_is_asked_for_in_forward_alone(
    accumulation: str | None, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def watch(*args: Any, use_fast_accum: bool = False, **kwargs: Any) -> Tensor:
        asked.append(use_fast_accum)
        return read_scaled_grouped_mm(*args, use_fast_accum=use_fast_accum, **kwargs)

    monkeypatch.setattr(float8, "scaled_grouped_mm", watch)
    recipe = dataclasses.replace(EXACT["float8"], accumulation=accumulation)
    trained(grouped, tokens(20, K), stack(recipe, 2), tokens(20, N, seed=5), ends_of((5, 15)))
    assert asked == [accumulation == "fast", False, False]


# -- the decision ------------------------------------------------------------------------------------------------------

FLOAT8, MX = Float8CurrentScaling(), MXFP8BlockScaling()
H200 = {"device": "cuda", "capability": (9, 0), "cuda": (12, 9)}
B200 = {"device": "cuda", "capability": (10, 0), "cuda": (13, 0)}
A100 = {"device": "cuda", "capability": (8, 0), "cuda": (12, 9)}
SIZE = {"dtype": torch.bfloat16, "experts": 8, "contraction": 128, "width": 64}
E5M2 = Float8CurrentScaling(element="e5m2")
NVFP4 = DYNAMIC["nvfp4"]
CASES: list[tuple[dict[str, Any], Way, str]] = [
    ({**H200, "a": FLOAT8, "b": FLOAT8}, Way.SCALED, ""),
    ({**H200, "a": FLOAT8, "b": EXACT["float8 tensor"]}, Way.SCALED, ""),
    ({**H200, "a": FLOAT8, "b": DYNAMIC["float8_delayed"]}, Way.SCALED, ""),
    ({**B200, "a": MX, "b": MX}, Way.SCALED, ""),
    (
        {**B200, "a": MX, "b": MX, "missing": "not built"},
        Way.BF16,
        "this build of torch has no scaled_grouped_mm for MX",
    ),
    # gradients in E5M2: no kernel multiplies them, and factors are behind the sums
    ({**H200, "a": E5M2, "b": FLOAT8}, Way.BF16_EACH, "scaled_grouped_mm multiplies e4m3 by e4m3 alone"),
    ({**B200, "a": FLOAT8, "b": FLOAT8}, Way.BF16_EACH, "on compute capability 9.0, not on 10.0"),
    ({**A100, "a": FLOAT8, "b": FLOAT8}, Way.BF16_EACH, "on compute capability 9.0, not on 8.0"),
    ({**B200, "a": NVFP4, "b": NVFP4}, Way.BF16_EACH, "scaled_grouped_mm does not know NVFP4BlockScaling"),
    ({**H200, "a": FLOAT8, "b": FLOAT8, "width": 40}, Way.BF16_EACH, "multiples of 16, not 40 and 128"),
    ({**H200, "a": FLOAT8, "b": FLOAT8, "contraction": 24}, Way.BF16_EACH, "multiples of 16, not 64 and 24"),
    ({**H200, "a": FLOAT8, "b": FLOAT8, "experts": 1024}, Way.BF16_EACH, "takes up to 1023 experts, not 1024"),
    ({**H200, "a": FLOAT8, "b": FLOAT8, "dtype": torch.float16}, Way.BF16_EACH, "not for torch.float16"),
    # nothing but values that bf16 holds
    ({**H200, "a": MX, "b": MX}, Way.BF16, "on compute capability 10.0, not on 9.0"),
    ({**B200, "a": MX, "b": MX, "width": 40}, Way.BF16, "multiples of 32, not 40 and 128"),
    ({**H200, "a": MX, "b": MX, "width": 36}, Way.BF16_EACH, ""),
    ({**H200, "a": MX, "b": MX, "dtype": torch.float16}, Way.BF16_EACH, ""),
    ({**H200, "a": MXFP4BlockScaling(), "b": MXFP4BlockScaling()}, Way.BF16, "does not know MXFP4BlockScaling"),
    ({**H200, "a": FLOAT8, "b": FLOAT8, "dtype": torch.float32}, Way.FP32_EACH, "not for torch.float32"),
    ({**H200, "a": NF4BlockScaling(), "b": NF4BlockScaling()}, Way.FP32_EACH, "does not know NF4BlockScaling"),
    ({**H200, "a": Float8BlockScaling(), "b": Float8BlockScaling()}, Way.FP32_EACH, "does not know Float8BlockScaling"),
    ({"device": "cpu", "capability": None, "cuda": None, "a": MX, "b": MX}, Way.FP32_EACH, "not on this device (cpu)"),
    ({"device": "cuda", "capability": None, "cuda": None, "a": MX, "b": MX}, Way.FP32_EACH, "used on NVIDIA GPUs"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_case_has_its_way(case: tuple[dict[str, Any], Way, str]) -> None:
    fields, way, reason = case
    found, why = choose(Case(**(SIZE | fields)))
    assert found is way
    assert reason in why
    assert bool(why) is (way is not Way.SCALED)


def test_factors_are_those_that_the_format_takes_out() -> None:
    for recipe in EVERY.values():
        if format_of(recipe).exact_in_bf16:
            parts = stack(recipe, 1).detach()[0].parts()
            _, factors = format_of(recipe).without_factors(parts, recipe)
            assert has_factors(recipe) == (factors is not None), recipe


@exact
def test_a_build_without_the_kernels_is_asked_once(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the call reaches torch's dispatcher, which knows no kernel for it, and finds no other fault."""
    monkeypatch.setattr(multiply, "_missing", {})
    cases: list[Case] = []

    def pretend(case: Case) -> tuple[Way, str]:
        cases.append(case)
        return (Way.FP32_EACH, case.missing) if case.missing else (Way.SCALED, "")

    monkeypatch.setattr(multiply, "choose", pretend)
    given = tokens(20, K), stack(recipe, 2), tokens(20, N, seed=5), ends_of((5, 15))
    found = trained(grouped, *given)
    assert [bool(case.missing) for case in cases] == [False, True, True, True]
    (said,) = multiply._missing.values()
    assert "_scaled_grouped_mm_v2" in said
    assert all(same_bytes(*both) for both in zip(found, trained(looped, *given), strict=True))


# -- on a GPU ----------------------------------------------------------------------------------------------------------

INTEGERS = EXACT | {
    "float8 e5m2": Float8CurrentScaling(power_of_two=True, activations="dynamic", gradients="e5m2"),
    "float8 plain": Float8CurrentScaling(power_of_two=True, activations="dynamic"),
    "mxfp8 plain": MXFP8BlockScaling(activations="dynamic"),
    "mxfp4 plain": MXFP4BlockScaling(activations="dynamic"),
}
# where groups begin at odd addresses, and where all are aligned
PLACES = [("cpu", (5, 0, 33, 20)), *(("cuda", sizes) for sizes in ((5, 0, 33, 20), (64, 16, 0, 48), (0, 0, 7)))]


@pytest.mark.parametrize("recipe", INTEGERS.values(), ids=INTEGERS.keys())
@pytest.mark.parametrize(
    ("device", "sizes"),
    [pytest.param(*place, id=str(place), marks=[pytest.mark.gpu] if place[0] == "cuda" else []) for place in PLACES],
)
def test_every_device_multiplies_small_integers_exactly(recipe: Any, device: str, sizes: tuple[int, ...]) -> None:
    assert_exact(recipe, device, sizes)


# what products a GPU of another kind takes, on a CPU
WAYS = [(Way.BF16_EACH, recipe) for recipe in INTEGERS.values()]
WAYS += [(Way.BF16, INTEGERS[name]) for name in ("mxfp8", "mxfp8 square", "mxfp8 plain", "mxfp4 plain")]


@pytest.mark.parametrize(("way", "recipe"), WAYS, ids=str)
def test_every_way_multiplies_small_integers_exactly(way: Way, recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiply, "choose", lambda case: (way, ""))
    monkeypatch.setattr(multiply, "_is_one_launch", lambda *_: True)
    assert_exact(recipe, "cpu", (5, 0, 33, 20))


def assert_exact(recipe: Any, device: str, sizes: tuple[int, ...]) -> None:
    """Elements of -1, 0 and 1 under powers of two: every sum is an integer below 2^8, exact in any accumulator."""
    ends, experts = ends_of(sizes).to(device), len(sizes)
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).to(device, torch.bfloat16)

    w = torch.nn.Parameter(quantize(integers(experts, N, K), recipe))
    count = sum(sizes)
    x, dy = integers(count + 2, K), integers(count + 2, N)
    y, dx, dw = trained(grouped, x, w, dy, ends)
    values = w.detach().dequantize(torch.float64)
    for e, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        own, above = x[start:end].double(), dy[start:end].double()
        assert torch.equal(y[start:end].double(), own @ values[e].T)
        assert torch.equal(dx[start:end].double(), above @ values[e])
        assert torch.equal(dw[e].double(), above.T @ own)
    assert y[count:].count_nonzero() == dx[count:].count_nonzero() == 0
