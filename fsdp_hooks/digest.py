"""Digests of bytes, computed where they are: they tell whether anybody wrote, without a copy to compare with.

The bytes of a group of tensors are words of 64 bits in blocks of 64 words, mixed and added up twice, with wrap-around:

    block  = sum over its words w, number j     mix(w * odd(j))
    digest = sum over the blocks, number b      mix(block * odd(b))       + the sizes of the tensors

    mix(x)   x ^= x >>> 32;  x *= odd constant;  x ^= x >>> 32             one-to-one
    odd(i)   (i * 2^64 / golden ratio) | 1                                 unrelated for every place

    order of blocks    the whole blocks of each tensor from LARGE bytes on, read in place; then, packed together, what
                       is left of those and all small tensors, so that a thousand small ones are a single read

Every step is one-to-one in each word, so a change of one word (or one element) is always seen. So is, but for a chance
of about 2^-32, any other accidental change: of several words, of all signs in a column (the product alone keeps the
highest bits, which cancel in pairs: hence the mix, whose low halves depend on all bits), or blocks that change places,
since every place has a weight of its own. The same bytes in the same shapes have the same digest on every rank, eager
and compiled: sums of integers know no order.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_hooks.compiled import Kernel

__all__ = ["digest", "digests"]

WORDS = 64  # a block
BLOCK = 8 * WORDS  # bytes
LARGE = 2**18  # bytes; smaller tensors are packed together, which copies them
PACK = 2**24  # bytes that are packed at a time, so that no second copy of a large model is needed
_ODD = -7046029254386353131  # 2^64 / golden ratio, odd
_MIX = -7723592293110705685  # odd, one of splitmix64's
_LOW = 2**32 - 1


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """int64 []: of the bytes of one or more tensors, in this order."""
    return digests([list(tensors)])[0]


@torch.no_grad()
def digests(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """int64 [groups]: the digest of each group of tensors. All are on one device; there is at least one tensor."""
    device = next(tensor.device for group in groups for tensor in group)
    weights = _odd(torch.arange(1, WORDS + 1, device=device))
    runs = [run._replace(blocks=_block_sums(run.blocks, weights)) for run in _runs(groups)]
    sizes = [sum((2 * number + 1) * tensor.nbytes for number, tensor in enumerate(group)) for group in groups]
    result = torch.tensor(sizes, dtype=torch.int64).to(device, non_blocking=True)  # so that the host need not wait
    if not runs:
        return result
    # each block's group, and its number there less its number here
    facts, first, here = [], [0] * len(groups), 0
    for run in runs:
        for group, blocks in run.shares:
            facts.append((group, first[group] - here, blocks))
            first[group] += blocks
            here += blocks
    owner, shift, count = torch.tensor(facts).t().contiguous().to(device, non_blocking=True)
    entry = torch.repeat_interleave(torch.arange(len(facts), device=device), count, output_size=here)
    place = torch.arange(1, here + 1, device=device) + shift[entry]
    sums = torch.cat([run.blocks for run in runs])
    return result.index_add_(0, owner[entry], _mixed(sums * _odd(place)))


class _Run(NamedTuple):
    """Blocks that are read at once: int64 [n, WORDS], and how many of them each group has, one after the other."""

    blocks: Tensor
    shares: list[tuple[int, int]]


def _runs(groups: Sequence[Sequence[Tensor]]) -> Iterator[_Run]:
    """The blocks of all groups: large tensors where they are, the rest packed."""
    pieces: list[Tensor] = []
    shares: list[tuple[int, int]] = []
    packed = 0
    zeros: dict[int, Tensor] = {}
    for number, group in enumerate(groups):
        size = 0
        for tensor in group:
            data = tensor.reshape(-1).view(torch.uint8)
            length = data.numel()
            if length >= LARGE:
                whole = length - length % BLOCK
                blocks = data if data.storage_offset() % 8 == 0 else data.clone()
                yield _Run(blocks[:whole].view(torch.int64).view(-1, WORDS), [(number, whole // BLOCK)])
                data, length = data[whole:], length - whole
            if length:
                pieces.append(data)
                size += length
                if size % 8:  # an element lies in one word
                    pieces.append(_zeros(-size % 8, data, zeros))
                    size += -size % 8
        if size % BLOCK:
            pieces.append(_zeros(-size % BLOCK, pieces[-1], zeros))
            size += -size % BLOCK
        if size:
            shares.append((number, size // BLOCK))
            packed += size
        if packed >= PACK or (packed and number == len(groups) - 1):
            yield _Run(torch.cat(pieces).view(torch.int64).view(-1, WORDS), shares)
            pieces, shares, packed = [], [], 0


def _zeros(count: int, like: Tensor, known: dict[int, Tensor]) -> Tensor:
    if count not in known:
        known[count] = like.new_zeros(count)
    return known[count]


def _odd(place: Tensor) -> Tensor:
    """The weight of a place, an odd number."""
    return (place * _ODD) | 1


def _mixed(x: Tensor) -> Tensor:
    """Another number for each; the shifts are logical, or x and ~x would come out alike."""
    x = (x ^ ((x >> 32) & _LOW)) * _MIX
    return x ^ ((x >> 32) & _LOW)


def _sums(blocks: Tensor, weights: Tensor) -> Tensor:
    assert blocks.shape[1] == 64  # a constant size, and weights that are loaded: the loop is vectorised
    return _mixed(blocks * weights).sum(1)


_block_sums = Kernel(_sums, "digest_blocks")
