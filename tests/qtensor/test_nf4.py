"""NF4: the bytes of bitsandbytes, on purpose where a kernel would differ: bounds, reciprocals, both ends of fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qtensor import NF4BlockScaling, QuantizedTensor, quantize
from qtensor.spec.codecs import nf4
from tests.qtensor.recipes_under_test import same_bytes, weight
from tests.recipes import QUANTILES

functional: Any = pytest.importorskip("bitsandbytes.functional")


def swapped(payload: Tensor) -> Tensor:
    """The high nibble is the even column in bitsandbytes, the low one here."""
    return payload >> 4 | payload << 4


def assert_bytes_are_theirs(x: Tensor, block: int = 64) -> QuantizedTensor:
    payload, state = functional.quantize_4bit(x, blocksize=block, quant_type="nf4")
    q = quantize(x, NF4BlockScaling(block=block))
    assert torch.equal(swapped(q.payload).flatten(), payload.flatten())
    assert same_bytes(q.scale.flatten(), state.absmax)
    values = functional.dequantize_4bit(payload, state, quant_type="nf4")
    assert torch.equal(q.dequantize(x.dtype), values)
    return q


def test_the_table_is_theirs() -> None:
    theirs = functional.get_4bit_type("nf4", device="cpu")
    assert torch.equal(torch.tensor(nf4.TABLE, dtype=torch.float32), theirs)
    assert nf4.TABLE == QUANTILES
    assert torch.equal(torch.tensor(nf4.BOUNDS, dtype=torch.float32), (theirs[1:] + theirs[:-1]) / 2)


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_and_values_are_those_of_bitsandbytes(block: int, dtype: torch.dtype) -> None:
    x = weight(256, 256, torch.float32) * torch.exp2(torch.arange(256).view(-1, 1) % 20 - 10)
    x[7], x[9, :128] = 0.0, -0.0
    assert_bytes_are_theirs(x.to(dtype), block)


@pytest.mark.parametrize("exponent", [-149, -130, -127, -126, -120, 0, 100, 124])
def test_magnitudes_at_both_ends_of_fp32_too(exponent: int) -> None:
    """Below 1e-38 bitsandbytes divides by that; reciprocals of the largest are subnormal."""
    x = torch.ldexp(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)), torch.tensor(exponent))
    assert_bytes_are_theirs(x.clamp(-3.4e38, 3.4e38))


def test_all_numbers_around_the_bounds() -> None:
    """32 fp32 numbers on either side of each bound, under scales of 512 mantissas, the first and last ones among them.

    Quotients, products with a reciprocal, and ties that go up each give other codes somewhere here.
    """
    mantissas = torch.cat([torch.arange(64), torch.arange(64, 2**23 - 64, 21845), torch.arange(2**23 - 64, 2**23)])
    scale = ((127 << 23) + mantissas.to(torch.int32)).view(torch.float32).view(-1, 1)  # 1 <= scale < 2
    bounds = torch.tensor([*nf4.BOUNDS, *nf4.BOUNDS], dtype=torch.float32)
    exact = bounds * scale  # [scales, 30]
    seen = {"quotient": 0, "up": 0}
    for ulps in range(-16, 17):
        x = torch.zeros(len(scale), 64)
        x[:, :30] = (exact.view(torch.int32) + ulps).view(torch.float32)
        x[:, 31] = -scale[:, 0]
        q = assert_bytes_are_theirs(x)
        codes = torch.stack([q.payload & 15, q.payload >> 4], -1).flatten(-2)
        limits = torch.tensor(nf4.BOUNDS, dtype=torch.float32)
        seen["quotient"] += int((torch.bucketize(x / scale, limits) != codes).sum())
        seen["up"] += int((torch.bucketize(x * (1 / scale), limits, right=True) != codes).sum())
    assert min(seen.values()) > 0


def test_every_pair_of_codes_decodes_to_its_numbers() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    parts = {"payload": codes, "scale": torch.ones(4, 2)}
    found = QuantizedTensor.from_parts(parts, NF4BlockScaling(), torch.float32).dequantize()
    table = torch.tensor(QUANTILES, dtype=torch.float32)
    expected = torch.stack([table[(codes & 15).int()], table[(codes >> 4).int()]], dim=-1).flatten(-2)
    assert torch.equal(found, expected)


def test_a_block_that_is_not_finite_is_nan_and_no_other_is() -> None:
    x = weight(4, 256, torch.float32)
    x[1, 70], x[2, 200] = float("inf"), float("nan")
    q, clean = quantize(x, NF4BlockScaling()), quantize(x.nan_to_num(0.0, 0.0, 0.0), NF4BlockScaling())
    assert q.scale.isnan().nonzero().tolist() == [[1, 1], [2, 3]]
    assert torch.equal(q.payload, clean.payload)
    kept = ~q.dequantize().isnan()
    assert torch.equal(q.dequantize()[kept], clean.dequantize()[kept])


def test_a_recipe_names_its_blocks() -> None:
    with pytest.raises(ValueError, match=r"^NF4BlockScaling: block=256 is not one of 32, 64, 128$"):
        NF4BlockScaling(block=256)
