"""All 2^32 fp32 numbers through the conversions of kernels for GPUs, beside the definition (qtensor/spec/codecs).

    .venv-gpu-offline/bin/python -m tests.gpu_offline.conversions              # e4m3 and e5m2: a minute each
    .venv-gpu-offline/bin/python -m tests.gpu_offline.conversions e2m1-old     # several

`e4m3` and `e5m2` are the hardware's, as `to_float8` in interpreted.py models what PTX says of it. With `-kernel`, the
function that kernels call runs in Triton's interpreter instead; with `-old` the one of parts that have not the
instruction (fp8: below 9.0, by integers; e2m1: below 10.0, by sums, two codes at once, or one with `-one`). A sample
of all runs with the tests.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import os

    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it once

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.numerics.triton_kernels import e2m1, fp8
from qtensor.numerics.triton_kernels.pairs import byte_of, whole
from qtensor.spec.blocks import finite
from qtensor.spec.codecs import e2m1 as defined_e2m1
from qtensor.spec.codecs import fp8 as defined_fp8
from tests.gpu_offline.interpreted import begin, to_float8

NAN = float("nan")
MODELLED = ("e4m3", "e5m2")
CHUNK = 2**18  # numbers at a time, so that they stay in a core's cache
ALL = 2**32


def differing(conversion: str, first: int, numbers: int = CHUNK) -> int:
    """Return how many of the fp32 numbers whose bits are first, first + 1, .. become other bytes than as defined."""
    element, _, how = conversion.partition("-")
    bits = np.arange(first, first + numbers, dtype=np.int64).astype(np.uint32)
    x = torch.from_numpy(bits.view(np.float32))
    wanted = _defined(element, x)
    if not how:
        # an infinity becomes NaN on the way, see fp8.py, and for E5M2 a NaN the one that is ours
        codes = to_float8(torch.where(finite(x), x, NAN), defined_fp8.ELEMENTS[element][0]).view(torch.uint8)
        codes = codes if element == "e4m3" else torch.where(finite(x), codes, 0x7F)
        return int((codes != wanted).sum())
    found = torch.empty(wanted.shape, dtype=torch.uint8)
    with np.errstate(all="ignore"):
        if element == "e2m1":
            _bytes[(1,)](x, found, way=how, tile=len(found))
        else:
            _codes[(1,)](x, found, e4m3=element == "e4m3", old=how == "old", tile=len(found))
    return int((found != wanted).sum())


def _defined(element: str, x: Tensor) -> Tensor:
    if element == "e2m1":
        return defined_e2m1.encode(x, finite(x))
    return defined_fp8.encode(x, finite(x), element).view(torch.uint8)


@triton.jit
def _codes(x: tl.tensor, codes: tl.tensor, e4m3: tl.constexpr, old: tl.constexpr, tile: tl.constexpr) -> None:
    at = tl.arange(0, tile)
    number = tl.load(x + at)
    tl.store(codes + at, fp8.counted(number, 1.0, e4m3) if old else fp8.converted(number, 1.0, e4m3))


@triton.jit
def _bytes(x: tl.tensor, codes: tl.tensor, way: tl.constexpr, tile: tl.constexpr) -> None:
    at = tl.arange(0, tile)
    low, high = whole(tl.load(x + 2 * at)), whole(tl.load(x + 2 * at + 1))
    if way == "kernel":
        both = e2m1.converted(low, high)
    elif way == "old":
        both = e2m1.summed(low, high, 1.0)
    else:
        both = byte_of(e2m1.code(low, 1.0), e2m1.code(high, 1.0))
    tl.store(codes + at, both)


def main() -> None:
    begin()
    for conversion in sys.argv[1:] or MODELLED:
        found = sum(differing(conversion, first) for first in range(0, ALL, CHUNK))
        print(f"{conversion}: {found} of {ALL} differ", flush=True)


if __name__ == "__main__":
    main()
