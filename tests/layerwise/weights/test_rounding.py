"""Weights are rounded and decoded a few rows at a time, to the bytes of the whole."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from layerwise.weights import rounding
from layerwise.weights.rounding import put_values, round_weight
from qtensor import QuantizedTensor
from qtensor.numerics import tiles
from qtensor.spec.registry import format_of, shared_amax
from tests.recipes import TABLE

N, K = 320, 256
ALL = {each.name: each.recipe for each in TABLE if not each.history}


def weight(*shape: int) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[..., 131, 7], values[..., 5, 200] = math.nan, math.inf
    return values


def quantizer_of(x: Tensor, recipe: Any) -> Any:
    return format_of(recipe).quantizer(x.float(), recipe, shared_amax(x.float(), recipe))


def same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("rows", [1, 100, 256, N])
def test_pieces_are_those_of_the_whole(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = ALL[name]
    x = weight(N, K)
    quantizer = quantizer_of(x, recipe)
    expected = format_of(recipe).encode_with(x.float(), recipe, quantizer)
    monkeypatch.setitem(tiles.CHUNK, "cpu", rows * K)
    monkeypatch.setitem(rounding.PIECE, "cpu", rows * K)
    parts = round_weight(x, recipe, quantizer)
    assert parts.keys() == expected.keys()
    for key, part in parts.items():
        assert part.is_contiguous()
        assert same(part.reshape(-1), expected[key].reshape(-1)), key
    whole = QuantizedTensor.from_parts(parts, recipe, torch.bfloat16)
    into = torch.empty(N, K, dtype=torch.bfloat16)
    put_values(whole, into)
    assert same(into, whole.dequantize())


@pytest.mark.parametrize("name", ALL)
def test_experts_one_by_one_are_those_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rounded by itself, and put back some at a time."""
    recipe = ALL[name]
    x = weight(3, N, K)
    quantizer = quantizer_of(x, recipe)
    parts = format_of(recipe).encode_with(x.float(), recipe, quantizer)
    for expert in range(3):
        own = {key: value[expert] if value.ndim else value for key, value in quantizer.items()}
        for key, part in round_weight(x[expert], recipe, own).items():
            assert same(part.reshape(-1), (parts[key][expert] if parts[key].ndim else parts[key]).reshape(-1)), key
    whole = QuantizedTensor.from_parts({key: part.contiguous() for key, part in parts.items()}, recipe, torch.bfloat16)
    monkeypatch.setitem(rounding.PIECE, "cpu", 2 * N * K)
    into = torch.empty(3, N, K, dtype=torch.float32)
    put_values(whole, into)
    assert same(into, whole.dequantize().float())


def test_a_weight_without_rows() -> None:
    for recipe in ALL.values():
        x = torch.empty(0, K, dtype=torch.bfloat16)
        parts = round_weight(x, recipe, quantizer_of(x, recipe))
        assert parts["payload"].shape[0] == 0
