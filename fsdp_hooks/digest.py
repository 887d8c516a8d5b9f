"""A digest of bytes, computed where they are: tells whether anybody wrote, without a copy to compare with."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["digest"]

_ODD = -7046029254386353131  # 2^64 / golden ratio, odd: distinct positions get unrelated weights
_MIX = -7723592293110705685  # odd, one of splitmix64's
_CHUNK = 2**20  # words at a time, so that no second copy of a large tensor is needed


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """int64 []: the 64-bit words of all tensors, each mixed with its position, summed with wrap-around."""
    total: Tensor | None = None
    for number, tensor in enumerate(tensors):
        data = tensor.detach().reshape(-1).view(torch.uint8)
        if data.storage_offset() % 8:
            data = data.clone()
        whole = data.numel() // 8 * 8
        value = _mixed(data[whole:].to(torch.int64), whole // 8)
        for start, words in enumerate(data[:whole].view(torch.int64).split(_CHUNK)):
            value = value + _mixed(words, start * _CHUNK)
        value = value * (2 * number + 1)
        total = value if total is None else total + value
    assert total is not None
    return total


def _mixed(words: Tensor, start: int) -> Tensor:
    """The sum of words, each mixed with its position, which is `start` for the first.

    Not a mere weight times the word: in a sum of those the highest bits (signs) of an even number of words cancel.
    """
    x = torch.arange(start + 1, start + words.numel() + 1, device=words.device).mul_(_ODD).bitwise_or_(1).mul_(words)
    x.bitwise_xor_(x >> 32).mul_(_MIX)
    return x.bitwise_xor_(x >> 32).sum()
