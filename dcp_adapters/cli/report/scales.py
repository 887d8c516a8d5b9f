"""Histograms of scales by powers of two: how much of their range a format's scales use.

E8M0 codes are exponents; E4M3 and fp32 scales count where their exponent is, 2^e <= scale < 2^(e+1). Block scales are
counted as they are stored, not times the global scale.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dcp_adapters.cli.report.records import ScaleHistogram
from qtensor.formats import PartSpec, specs_of
from qtensor.tensor import QuantizedTensor

PIECE = 1 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_STORED_AS = {torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3", torch.float32: "fp32"}


def scale_histograms(tensor: QuantizedTensor) -> tuple[ScaleHistogram, ...]:
    """One for each part that holds scales that torch has a dtype for; histories of amaxes are none."""
    parts = tensor.parts()
    specs = [spec for spec in specs_of(tensor.recipe)[1:] if spec.length is None]
    return tuple(_histogram(spec, spec.numbers, parts[spec.name]) for spec in specs if spec.numbers is not None)


def _histogram(spec: PartSpec, numbers: torch.dtype, part: Tensor) -> ScaleHistogram:
    flat = part.reshape(-1)
    total = ScaleHistogram(spec.name, _STORED_AS.get(numbers, str(numbers).removeprefix("torch.")), {})
    for start in range(0, flat.numel(), PIECE):
        values, counted = flat[start : start + PIECE].view(_BITS[spec.dtype.itemsize]).unique(return_counts=True)
        total = _joined(total, values.view(numbers).to(torch.float64), counted)
    return total


def _joined(total: ScaleHistogram, values: Tensor, counted: Tensor) -> ScaleHistogram:
    """With so many more of each of these values."""
    finite = values.isfinite()
    usual = finite & (values > 0)
    exponents = torch.frexp(values[usual]).exponent - 1
    counts = dict(total.counts)
    for exponent, count in zip(exponents.tolist(), counted[usual].tolist(), strict=True):
        counts[exponent] = counts.get(exponent, 0) + count
    return replace(
        total,
        counts=counts,
        zero=total.zero + int(counted[values == 0].sum()),
        negative=total.negative + int(counted[finite & (values < 0)].sum()),
        not_finite=total.not_finite + int(counted[~finite].sum()),
    )
