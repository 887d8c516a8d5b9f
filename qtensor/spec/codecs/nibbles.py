"""Codes of four bits, two in a byte: the low nibble is the even column."""

import sys

import torch
from torch import Tensor

from fsdp_hooks.torch_private import is_tracing

assert sys.byteorder == "little", "packing counts on it"


def packed(codes: Tensor) -> Tensor:
    """[.., 8 n] codes, one a byte -> [.., 4 n], eight at a time; the first code is the lowest byte of its word."""
    words = codes.contiguous().view(torch.int64)
    words = (words | (words >> 4)) & 0x00FF00FF00FF00FF
    words = (words | (words >> 8)) & 0x0000FFFF0000FFFF
    return (words | (words >> 16)).to(torch.int32).view(torch.uint8)


def unpacked(payload: Tensor) -> Tensor:
    """The inverse of `packed`: [.., 4 n] -> [.., 8 n]."""
    # rows are multiples of 8 bytes, but they may begin anywhere in a larger buffer (a tracer cannot ask where)
    if not is_tracing() and payload.storage_offset() % 4:
        payload = payload.clone()
    words = payload.flatten().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    words = (words | (words << 16)) & 0x0000FFFF0000FFFF
    words = (words | (words << 8)) & 0x00FF00FF00FF00FF
    codes = ((words | (words << 4)) & 0x0F0F0F0F0F0F0F0F).view(torch.uint8)
    return codes.view(*payload.shape[:-1], payload.shape[-1] * 2)
