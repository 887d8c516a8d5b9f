"""Codes of elements are those of the definition, by the hardware's conversion and without it, for a sample of numbers.

All 2^32 fp32 numbers went through conversions.py, which says how.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from qtensor import MXFP8BlockScaling
from tests.gpu_offline.interpreted import Interpreter, to_float8
from tests.gpu_offline.recipes import RECIPES

NUMBERS = 2**14
# Bits where something changes: denormals, halves of the least element, binades, ties, the largest element, what is not
# finite; conversions.py takes all.
PLACES = (
    *(0x00000000, 0x007FE000, 0x37000000, 0x3A7FE000, 0x3AFFE000, 0x3C7FE000, 0x3E7FE000, 0x3F3FE000, 0x3F7FE000),
    *(0x3F9FE000, 0x3FDFE000, 0x3FFFE000, 0x401FE000, 0x405FE000, 0x409FE000, 0x40BFE000, 0x43DFE000, 0x43E7E000),
    *(0x475FE000, 0x476FE000, 0x7F7FE000, 0x7FBFE000),
)
CONVERSIONS = (
    "e4m3",
    "e5m2",
    "e4m3-kernel",
    "e5m2-kernel",
    "e2m1-kernel",
    "e4m3-old",
    "e5m2-old",
    "e2m1-old",
    "e2m1-one",
)
FP8, E5M2 = "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e5m2x2.f32"
FP4 = "cvt.rn.satfinite.e2m1x2.f32"


@pytest.fixture(scope="module")
def interpreter(_gpu_that_is_not_there: None) -> Iterator[Interpreter]:
    process = Interpreter()
    yield process
    process.close()


def differing(conversion: str, first: int) -> int:
    """In the interpreter's process, where Triton may be imported."""
    from tests.gpu_offline import conversions

    return conversions.differing(conversion, first, NUMBERS)


def differing_if_ties_went_up(conversion: str, first: int) -> int:
    from tests.gpu_offline import conversions

    given = conversions._defined
    conversions._defined = lambda element, x: given(element, torch.nextafter(x, x * 2))
    try:
        return conversions.differing(conversion, first, NUMBERS)
    finally:
        conversions._defined = given


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_sample_of_numbers_gets_the_codes_of_the_definition(interpreter: Interpreter, conversion: str) -> None:
    for place in PLACES:
        for sign in (0, 2**31):
            assert interpreter.on_gpu(differing, conversion, place + sign) == 0, hex(place + sign)


@pytest.mark.parametrize(
    ("conversion", "tie"),
    [("e4m3", 0x3F880000), ("e5m2-kernel", 0x3F900000), ("e2m1-kernel", 0x3FA00000), ("e2m1-old", 0x3FA00000)],
)
def test_a_tie_that_goes_the_wrong_way_is_found(interpreter: Interpreter, conversion: str, tie: int) -> None:
    assert interpreter.on_gpu(differing, conversion, tie) == 0
    assert interpreter.on_gpu(differing_if_ties_went_up, conversion, tie) == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_model_of_the_conversion_saturates_and_keeps_signs(dtype: torch.dtype) -> None:
    inf, largest = float("inf"), torch.finfo(dtype).max
    found = to_float8(torch.tensor([inf, -inf, 1e30, -0.0], dtype=torch.float32), dtype).float()
    assert found.tolist() == [largest, -largest, largest, 0.0]
    assert found[3].signbit()
    assert to_float8(torch.tensor([float("nan")], dtype=torch.float32), dtype).float().isnan()


def compiled(name: str, capability: int) -> Any:
    """What Triton makes of the kernel that encodes."""
    from tests.gpu_offline.assembled import compiled_by_hand
    from tests.gpu_offline.measured import Meter

    recipe = MXFP8BlockScaling(element="e5m2") if name == "e5m2" else RECIPES[name]
    launch = Meter().calls(recipe)["quantize"].launches[-1]
    return compiled_by_hand(*launch.assembled.__wrapped__.args, capability)


@pytest.mark.parametrize("name", ["mxfp8_row", "float8_row", "float8_tensor", "nvfp4_row", "mxfp4_up", "e5m2"])
def test_the_hardware_converts_where_it_can(name: str) -> None:
    """By instructions that saturate, two fp32 numbers at a time. For 8.9 Triton would round to fp16 on the way."""
    for capability in (80, 89, 90, 100, 120):
        ptx = compiled(name, capability).asm["ptx"]
        assert (FP8 in ptx or E5M2 in ptx) == (capability >= 90 and name != "mxfp4_up"), capability
        assert not re.search(r"cvt\S+e[45]m[32]x2\.f16x2", ptx), capability
        assert (FP4 in ptx) == (capability >= 100 and name in ("nvfp4_row", "mxfp4_up")), capability


def on_blackwell(name: str) -> bool:
    """In the interpreter's process: whether parts are those of the definition, for a part of capability 10.0."""
    from unittest import mock

    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from qtensor.numerics import kernels
    from qtensor.numerics.triton_kernels import e2m1
    from qtensor.spec.registry import encode, shared_amax

    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    x[3, 5], x[7, 2], x[9, 3], x[10] = float("inf"), float("nan"), -float("inf"), -0.0
    wanted = encode(x, RECIPES[name], shared_amax(x, RECIPES[name]))
    target = mock.patch.object(driver.active, "get_current_target", return_value=GPUTarget("cuda", 100, 32))
    with target, mock.patch.object(e2m1, "converted", mock.Mock(wraps=e2m1.converted)) as converted:
        found = kernels.encode(x, RECIPES[name])
    assert converted.called
    return all(
        torch.equal(found[part].reshape(-1).view(torch.uint8), own.reshape(-1).view(torch.uint8))
        for part, own in wanted.items()
    )


@pytest.mark.parametrize("name", ["nvfp4_row", "nvfp4_square", "mxfp4_up"])
def test_kernels_of_blackwell_give_the_bytes_of_the_definition(interpreter: Interpreter, name: str) -> None:
    assert interpreter.on_gpu(on_blackwell, name)
