"""bf16 as scales of blocks: fp32 numbers with the upper 16 bits alone; 0x7FC0 is NaN and marks a block.

Rounding is done on the bits. A compiler may drop a conversion to bf16 and back, and vector code has NaNs of its own.
"""

import torch
from torch import Tensor

NAN_BITS = 0x7FC0


def rounded(x: Tensor) -> Tensor:
    """Finite fp32 numbers >= 0, far below the largest, rounded to bf16, ties to even; still fp32."""
    bits = x.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)


def marked(scale: Tensor, broken: Tensor) -> Tensor:
    """bf16 scales, finite, with NaN where a block is `broken` (fp32, not 0)."""
    bits = scale.float().view(torch.int32) >> 16
    return torch.where(broken > 0, NAN_BITS, bits).to(torch.int16).view(torch.bfloat16)
