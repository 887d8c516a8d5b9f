"""A step on compressed states holds what one chunk was expanded to, not also that of the chunk before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.allocations import OfAllocator
from qtensor import MasterWeightOptimizer, MXFP8BlockScaling, quantize, use_kernels
from qtensor.numerics import tiles
from qtensor.optim.compressed import stacks
from qtensor.optim.inner_step import CHUNK

SIDE = 256
ELEMENTS = SIDE * SIDE


def peak_of(weights: int, *, quantized: bool) -> int:
    """Bytes that a step takes beyond what is there between steps."""
    params = []
    for _ in range(weights):
        dense = torch.randn(SIDE, SIDE, dtype=torch.bfloat16)
        params.append(nn.Parameter(quantize(dense, MXFP8BlockScaling()) if quantized else dense))
        params[-1].grad = torch.ones(SIDE, SIDE, dtype=torch.bfloat16)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, params, masters="remainder", moments="float8")
    for _ in range(2):
        optimizer.step()
    with OfAllocator() as meter:
        optimizer.step()
        meter.mark("step")
    return meter.peak["step"]


@pytest.mark.parametrize("quantized", [True, False])
def test_a_chunk_is_let_go_before_the_next_one_is_expanded(quantized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK, "cpu", ELEMENTS)
    monkeypatch.setitem(tiles.CHUNK, "cpu", ELEMENTS // 16)  # else what eager conversions take is most of it
    with use_kernels("eager"):
        one, three = (peak_of(weights, quantized=quantized) for weights in (1, 3))
    assert three < one + 4 * ELEMENTS  # a master alone has that many


@pytest.mark.parametrize("quantized", [True, False])
def test_a_large_weight_is_expanded_in_pieces(quantized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "SMALL", ELEMENTS)
    monkeypatch.setitem(tiles.CHUNK, "cpu", ELEMENTS // 16)
    peaks = []
    for elements in (ELEMENTS, ELEMENTS // 8):
        monkeypatch.setitem(stacks.PIECE, "cpu", elements)
        with use_kernels("eager"):
            peaks.append(peak_of(1, quantized=quantized))
    assert peaks[1] < peaks[0] / 2
