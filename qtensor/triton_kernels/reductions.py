"""The largest finite magnitude of all values, in one pass over them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qtensor.triton_kernels.launching import ENCODED, launch, tile_of
from qtensor.triton_kernels.pairs import bits_of, finite


def amax(x: Tensor) -> Tensor:
    """fp32 [] of bf16, fp16 or fp32 values [elements]."""
    found = torch.zeros((), dtype=torch.int32, device=x.device)
    tile = tile_of(ENCODED, 1)
    launch(_amax, -(-x.numel() // tile), *(x, found, x.numel()), TILE=tile)
    return found.view(torch.float32)


@triton.jit
def _amax(x: tl.tensor, found: tl.tensor, elements: tl.tensor, TILE: tl.constexpr) -> None:
    first, at = tl.program_id(0).to(tl.int64) * TILE, tl.arange(0, TILE)
    there = at < tl.minimum(elements - first, TILE).to(tl.int32)
    values = tl.load(x + (first + at), mask=there, other=0.0).to(tl.float32)
    # numbers without a sign are in the order of their bits, and a maximum does not depend on who comes first
    tl.atomic_max(found + 0, bits_of(tl.max(tl.abs(finite(values)), axis=0)), sem="relaxed")
