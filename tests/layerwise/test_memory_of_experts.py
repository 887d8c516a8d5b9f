"""A layer of many experts is calibrated beside one expert's statistics and dense values, not beside those of all."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.calibration_experts import model_of, peak
from layerwise import AWQ, GPTQ, Max

HIDDEN, WIDE = 32, 32
EACH = 2  # tokens that reach an expert, where there are as many tokens as experts


def bound(kind: str, experts: int) -> tuple[int, int, int]:
    """Bytes of the layer, of what may be there beside it for the whole layer, and for one group."""
    shapes = [
        param.shape for name, param in model_of(kind, experts=experts, hidden=HIDDEN, wide=WIDE).named_parameters()
    ]
    linears = [shape[-2:] for shape in shapes for _ in range(shape[0] if len(shape) == 3 else len(shape) == 2)]
    elements = sum(n * k for n, k in linears)
    layer = 2 * (elements + HIDDEN)
    stored = sum(n * k * 9 // 16 + n * k // 16 + 8 for n, k in linears)  # NVFP4, and its scales again as quantizers
    # Rows of its input: waiting for the Hessian, as samples, and gathered for the report; their products in fp32.
    rows = sum(EACH * (2 * k * 3 + 4 * n) for n, k in linears)
    # Amaxes and sums of columns, in fp32 and fp64, of each group and as facts.
    columns = sum(4 * 16 + (4 + 4 + 8) * k for _, k in linears)
    # What goes in and comes out, in bf16 a few times; three times in fp64 to compare it.
    through = experts * HIDDEN * (8 * 2 + 3 * 8)
    n, k = 2 * WIDE, max(HIDDEN, WIDE)
    one_group = (2 * 8 + 10 * 4) * k * k + 12 * 4 * n * k  # the Hessian, its factors, and dense values of two linears
    return layer, stored + rows + columns + through + layer // 100, one_group


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "algorithm", "experts"),
    [
        ("one parameter", Max(), 256),
        ("one parameter", GPTQ(), 256),
        ("list", GPTQ(), 64),
        ("list", AWQ(alpha_step=0.5, clip_step=0.25), 16),
    ],
    ids=lambda one: one if isinstance(one, str) else str(one).partition("(")[0],
)
def test_a_layer_of_experts_needs_one_group_beside_it(kind: str, algorithm: Any, experts: int) -> None:
    layer, beside, one_group = bound(kind, experts)
    assert beside < 1.3 * layer, "there is no room in it for a dense copy in fp32, which has 2"
    found, nbytes = peak(kind, algorithm, tokens=experts, experts=experts, hidden=HIDDEN, wide=WIDE)
    assert nbytes == layer
    assert layer < found <= layer + beside + one_group
