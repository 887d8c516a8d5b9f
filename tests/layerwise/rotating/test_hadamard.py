"""Products with blocks of Hadamard matrices, against scipy's matrices, and what they do to errors of formats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import scipy.linalg
import torch
from torch import Tensor

from layerwise.rotating import hadamard as module
from layerwise.rotating.hadamard import Rotation, hadamard, rotate_weight_, signs_of
from qtensor import MXFP4BlockScaling, NVFP4BlockScaling, quantize
from tests.layerwise.rotating.decoders import matrix

WIDTH = 192


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("block", [2, 4, 16, 32, 64])
def test_blocks_are_scipys_hadamard_matrices(block: int) -> None:
    found = hadamard(torch.eye(block, dtype=torch.float64), block)
    wanted = torch.from_numpy(scipy.linalg.hadamard(block)).double() * (1 / math.sqrt(block))
    assert torch.equal(found, wanted), "one addition of a 1 and zeros is exact, and so the signs and the factor"


@pytest.mark.parametrize("period", [64, WIDTH])
def test_columns_and_rows_are_products_with_the_matrix(period: int) -> None:
    rotation, dense = Rotation(32, signs_of(7, period)), matrix(period, WIDTH, 32, 7)
    values = _normal(5, WIDTH)
    # Sums of 32 terms in float64, in two orders: each within 32 * 2**-53 of terms that are at most 5 / sqrt(32) each.
    torch.testing.assert_close(rotation.rotate_columns(values), values @ dense, rtol=0, atol=1e-13)
    torch.testing.assert_close(rotation.rotate_rows(values.T), dense.T @ values.T, rtol=0, atol=1e-13)
    torch.testing.assert_close(rotation.rotate_rows(values[0]), dense.T @ values[0], rtol=0, atol=1e-13)


def test_signs_are_those_of_the_seed() -> None:
    assert torch.equal(signs_of(None, 4), torch.ones(4, dtype=torch.float64))
    assert set(signs_of(0, 64).tolist()) == {-1.0, 1.0}
    assert not torch.equal(signs_of(0, 64), signs_of(1, 64))
    assert torch.equal(signs_of(0, 64), signs_of(0, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_comes_out_the_same_in_pieces(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rotation, gain = Rotation(16, signs_of(1, 48)), _normal(WIDTH, seed=2)
    whole = _normal(96, WIDTH).to(dtype)
    pieces = whole.clone()
    columns = Rotation(32, signs_of(3, WIDTH))
    dense = matrix(48, 96, 16, 1).T @ (whole.double() * gain) @ matrix(WIDTH, WIDTH, 32, 3)
    rotate_weight_(whole, gain=gain, columns=columns, rows=rotation)
    monkeypatch.setattr(module, "PIECE", 20 * WIDTH)
    rotate_weight_(pieces, gain=gain, columns=columns, rows=rotation)
    assert torch.equal(whole, pieces)
    # Half a unit in the last place of the dtype, a little more where it is rounded to fp32 first, or float64 differs.
    assert bool(((whole.double() - dense).abs() <= 0.501 * torch.finfo(dtype).eps * dense.abs() + 1e-12).all())


def test_an_inverted_rotation_undoes_it() -> None:
    given = _normal(96, WIDTH)
    columns, rows = Rotation(32, signs_of(3, WIDTH)), Rotation(16, signs_of(1, 48))
    weight = given.clone()
    rotate_weight_(weight, gain=None, columns=columns, rows=rows)
    assert not torch.allclose(weight, given, rtol=0, atol=0.1)
    rotate_weight_(weight, gain=None, columns=columns.invert(), rows=rows.invert())
    torch.testing.assert_close(weight, given, rtol=0, atol=1e-13)


def test_values_out_of_range_are_refused() -> None:
    weight = torch.full((2, 32), 6e4, dtype=torch.float16)
    with pytest.raises(OverflowError, match=r"^rotated values leave the range of torch.float16 \(largest 3\.39e\+05\)"):
        rotate_weight_(weight, gain=None, columns=Rotation(32, signs_of(None, 32)), rows=None)


def _error(values: Tensor, recipe: Any) -> float:
    """Of quantizing, relative to the values."""
    off = quantize(values.float(), recipe).dequantize().double() - values
    return float(off.norm() / values.norm())


@pytest.mark.parametrize("seed", range(3))
def test_outlier_channels_cost_mxfp4_less_when_rotated_and_nvfp4_more(seed: int) -> None:
    """One channel in 37 is 16 times as large. Gaussian values, which blocks of a rotation come to, cost both 10 %."""
    values = _normal(128, 256, seed=seed)
    values[:, ::37] *= 16
    turned = Rotation(32, signs_of(0, 256)).rotate_columns(values)
    mxfp4, nvfp4 = MXFP4BlockScaling(), NVFP4BlockScaling()
    assert _error(turned, mxfp4) < 0.6 * _error(values, mxfp4), "0.105 and 0.19"
    # A block of 16 has a scale that fits its outlier closely, and every second block of 32 has none at all.
    assert _error(turned, nvfp4) > 1.1 * _error(values, nvfp4), "0.107 and 0.093"


@pytest.mark.parametrize("seed", range(3))
def test_values_without_outliers_cost_mxfp4_more_when_rotated(seed: int) -> None:
    """Evenly distributed values, which is what a dense format in a few bits leaves, become Gaussian ones."""
    even = torch.rand(128, 256, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1
    turned = Rotation(32, signs_of(0, 256)).rotate_columns(even)
    assert _error(turned, MXFP4BlockScaling()) > 1.1 * _error(even, MXFP4BlockScaling()), "0.117 and 0.099"
