"""A digest of bytes, computed where they are: tells whether anybody wrote, without a copy to compare with."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["digest"]

_ODD = -7046029254386353131  # 2^64 / golden ratio, odd: distinct positions get unrelated weights


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """int64 []: the 64-bit words of all tensors, each times a weight of its position, summed with wrap-around."""
    total: Tensor | None = None
    for number, tensor in enumerate(tensors):
        data = tensor.detach().reshape(-1).view(torch.uint8)
        if data.storage_offset() % 8:
            data = data.clone()
        whole = data.numel() // 8 * 8
        words = torch.cat([data[:whole].view(torch.int64), data[whole:].to(torch.int64)])
        weights = torch.arange(1, words.numel() + 1, device=words.device).mul_(_ODD).bitwise_or_(1)
        value = weights.mul_(words).sum() * (2 * number + 1)
        total = value if total is None else total + value
    assert total is not None
    return total
