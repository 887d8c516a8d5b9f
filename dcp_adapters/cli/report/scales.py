"""Histograms of scales by powers of two: how much of their range a format's scales use.

E8M0 codes are exponents; E4M3 and fp32 scales count where their exponent is, 2^e <= scale < 2^(e+1). Block scales are
counted as they are stored, not times the global scale.
"""

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from dcp_adapters.cli.report.records import ScaleHistogram
from dcp_adapters.records.recipe_names import dtype_name
from qtensor.spec.format import PartSpec
from qtensor.spec.registry import specs_of
from qtensor.tensor.quantized_tensor import QuantizedTensor

PIECE = 1 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_STORED_AS = {torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3", torch.bfloat16: "bf16", torch.float32: "fp32"}


def scale_histograms(tensor: QuantizedTensor) -> tuple[ScaleHistogram, ...]:
    """Return one for each part that holds scales that torch has a dtype for; amax histories are none."""
    parts = tensor.parts()
    specs = [spec for spec in specs_of(tensor.recipe)[1:] if spec.length is None]
    return tuple(_histogram(spec, spec.numbers, parts[spec.name]) for spec in specs if spec.numbers is not None)


def _histogram(spec: PartSpec, numbers: torch.dtype, part: Tensor) -> ScaleHistogram:
    flat = part.reshape(-1)
    total = ScaleHistogram(spec.name, _STORED_AS.get(numbers, dtype_name(numbers)), {})
    for start in range(0, flat.numel(), PIECE):
        # by distinct bit patterns: a tensor has millions of scales and few different ones
        values, counted = flat[start : start + PIECE].view(_BITS[spec.dtype.itemsize]).unique(return_counts=True)
        values = values.view(numbers).to(torch.float64)
        finite = values.isfinite()
        usual = finite & (values > 0)
        counts: Counter[int] = Counter()
        for exponent, count in zip(torch.frexp(values[usual]).exponent.tolist(), counted[usual].tolist(), strict=True):
            counts[exponent - 1] += count
        total += replace(
            total,
            counts=counts,
            zero=int(counted[values == 0].sum()),
            negative=int(counted[finite & (values < 0)].sum()),
            not_finite=int(counted[~finite].sum()),
        )
    return total
