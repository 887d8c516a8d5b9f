"""What the library does for a format that it was not written for: all that the specs of its parts say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_hooks.kernels.compiled import COMPILED_FROM
from qtensor import quantize, use_kernels
from qtensor.spec.registry import encode, format_of
from tests.qtensor.foreign import SCALES, foreign_format
from tests.qtensor.recipes_under_test import same_bytes, weight

SLOW = pytest.mark.slow


@pytest.fixture
def foreign() -> Iterator[Any]:
    with foreign_format() as recipe:
        yield recipe


def assert_as_defined(x: Tensor, recipe: Any) -> None:
    fmt = format_of(recipe)
    wanted = encode(x.float(), recipe, None)
    q = quantize(x, recipe)
    assert q.parts().keys() == wanted.keys()
    for name, part in wanted.items():
        assert same_bytes(q.parts()[name], part), name
    assert same_bytes(q.dequantize(torch.float32), fmt.decode(wanted, recipe))
    assert float((q.dequantize(torch.float32) - x.float()).abs().amax() / x.abs().amax()) < 1 / 64


@pytest.mark.parametrize(
    ("scales", "mode"), [*((scales, "eager") for scales in SCALES), pytest.param("bf16", "compiled", marks=SLOW)]
)
def test_large_tensors_take_kernels_of_any_block(scales: str, mode: str, foreign: Any) -> None:
    assert COMPILED_FROM <= 1024 * 256  # and so goes through tiles, in whatever mode
    before = use_kernels.mode
    use_kernels(mode)
    try:
        for rows, columns in ((1024, 256), (2049, 384)):
            assert_as_defined(weight(rows, columns, torch.bfloat16), foreign(scales=scales))
    finally:
        use_kernels(before)


def test_the_last_block_of_a_row_may_be_smaller(foreign: Any) -> None:
    recipe = foreign(scales="tail")
    for rows, columns in ((5, 200), (3, 100), (1031, 300)):  # the last in chunks
        assert_as_defined(weight(rows, columns, torch.bfloat16), recipe)
    x = weight(5, 200)
    q = quantize(x, recipe)
    assert q.spread.shape == (5, 2)
    for columns in (slice(0, 128), slice(128, 200)):
        assert same_bytes(q[:, columns].dequantize(), q.dequantize()[:, columns])
        assert same_bytes(q[:, columns].spread, quantize(x[:, columns], recipe).spread)
    with pytest.raises(ValueError, match="cuts along K must be multiples of 128"):
        q[:, 100:]
    with pytest.raises(ValueError, match="K=200, which is not a multiple of 128"):
        quantize(x, foreign())
