"""Digests of bytes, computed where they are: they tell whether anybody wrote, without a copy to compare with.

The bytes of a tensor are words of 64 bits in blocks, filled up with zeros: blocks of 1024 words where it is large, else
of 64. Those of a group of tensors are mixed and added up twice, with wrap-around:

    block  = sum over its words w, number j                     mix(w * odd(j))
    digest = sum over the blocks of all tensors, number b       mix(block * odd(b))        + the tensors' sizes

    mix(x)   x ^= x >>> 32;  x *= odd constant;  x ^= x >>> 32                one-to-one
    odd(i)   (i * 2^64 / golden ratio) | 1                                    unrelated for every place

Every step is one-to-one in each word, so a change of one word (or one element) is always seen. So is, but for a chance
of about 2^-32, any other accidental change: of several words, of all signs in a column (the product alone keeps the
highest bits, which cancel in pairs: hence the mix, whose low halves depend on all bits), or blocks that change places,
since every place has a weight of its own. The same bytes in the same shapes have the same digest on every rank, eager
and compiled: sums of integers know no order.

Large tensors are read in place, once, in wide blocks, since a vectorised loop pays for the end of each. Small ones of
one shape and dtype are stacked, which copies them, so that a thousand of them take a dozen operations and not ten
thousand.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from fsdp_hooks.compiled import Kernel

NARROW, WIDE = 64, 1024  # words in a block
LARGE = 2**18  # bytes; what is smaller is stacked
STACK = 2**24  # bytes that are stacked at a time, so that no second copy of a large model is needed
EAGER = 2**20  # words that are mixed at a time where no compiled code does it without temporaries
# As signed numbers of 64 bits; both are odd, so that multiplying by them loses nothing. Other digests take them, too.
GOLDEN = -7046029254386353131  # 2^64 / golden ratio
MIX = -7723592293110705685  # one of splitmix64's
LOW = 2**32 - 1


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """int64 []: of the bytes of one or more tensors, in this order."""
    return digests([list(tensors)])[0]


def digests(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """int64 [groups]: the digest of each group of tensors. All are on one device; there is at least one tensor."""
    device = next(tensor.device for group in groups for tensor in group)
    autocast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    # it refuses to stack float8
    with torch.no_grad(), torch.autocast(device.type, enabled=False) if autocast else nullcontext():
        return _digests(groups, device)


def _digests(groups: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    kinds: dict[tuple[torch.dtype, torch.Size], _Kind] = {}
    sizes = []
    for number, group in enumerate(groups):
        first = size = 0
        for place, tensor in enumerate(group):
            key = tensor.dtype, tensor.shape
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = _Kind(tensor)
            kind.tensors.append(tensor)
            kind.owners.append(number)
            kind.firsts.append(first)
            first += kind.blocks
            size += (2 * place + 1) * kind.nbytes
        sizes.append(size)
    # from the host, whatever the default device; non_blocking: which need not wait for the other
    result = torch.tensor(sizes, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
    weights = _odd(torch.arange(1, WIDE + 1, dtype=torch.int64, device=device))
    for kind in kinds.values():
        if kind.nbytes:
            numbers = torch.tensor([kind.owners, kind.firsts], dtype=torch.int64, device="cpu")
            owners, firsts = numbers.to(device, non_blocking=True)
            places = torch.arange(1, kind.blocks + 1, dtype=torch.int64, device=device) + firsts[:, None]
            sums = torch.cat([sum_ for blocks in kind.read() for sum_ in _sums(blocks, weights)])
            result.index_add_(0, owners, _mixed(sums.view(-1, kind.blocks) * _odd(places)).sum(1))
    return result


class _Kind:
    """Tensors of one shape and dtype, the group of each, and the number of its first block there."""

    def __init__(self, like: Tensor) -> None:
        self.nbytes = like.nbytes
        self.words = NARROW if self.nbytes < LARGE else WIDE  # of a block
        self.blocks = -(-self.nbytes // (8 * self.words))  # of one tensor
        self.tensors: list[Tensor] = []
        self.owners: list[int] = []
        self.firsts: list[int] = []

    def read(self) -> Iterator[Tensor]:
        """The blocks of all tensors in order, int64 [n, words] and again."""
        if self.nbytes < LARGE:
            at_once = max(1, STACK // self.nbytes)
            for start in range(0, len(self.tensors), at_once):
                some = torch.stack(self.tensors[start : start + at_once])
                yield self._blocks(some.view(len(some), -1).view(torch.uint8))
            return
        whole = self.nbytes - self.nbytes % (8 * self.words)
        for tensor in self.tensors:
            data = tensor.reshape(-1).view(torch.uint8)
            aligned = data if data.storage_offset() % 8 == 0 else data.clone()
            yield aligned[:whole].view(torch.int64).view(-1, self.words)
            if whole < self.nbytes:
                yield self._blocks(data[None, whole:])

    def _blocks(self, data: Tensor) -> Tensor:
        """Uint8 [tensors, bytes], contiguous, as blocks."""
        missing = -data.shape[1] % (8 * self.words)
        if missing:
            data = torch.cat([data, data.new_zeros(len(data), missing)], dim=1)
        return data.view(torch.int64).view(-1, self.words)


def _odd(place: Tensor) -> Tensor:
    """The weight of a place, an odd number."""
    return (place * GOLDEN) | 1


def _mixed(x: Tensor) -> Tensor:
    """Another number for each, in place; the shifts are logical, or x and ~x would come out alike."""
    x.bitwise_xor_((x >> 32).bitwise_and_(LOW)).mul_(MIX)
    return x.bitwise_xor_((x >> 32).bitwise_and_(LOW))


def _sums(blocks: Tensor, weights: Tensor) -> Iterator[Tensor]:
    """The sum of each block, of a piece of them at a time."""
    words = blocks.shape[1]
    kernel = _narrow_sums if words == NARROW else _wide_sums
    for piece in [blocks] if kernel.compiles(blocks) else blocks.split(EAGER // words):
        yield kernel(piece, weights[:words])


# The width is a constant, and weights are loaded: so the compiled loops are vectorised.


def _narrow(blocks: Tensor, weights: Tensor) -> Tensor:
    assert blocks.shape[1] == 64
    return _mixed(blocks * weights).sum(1)


def _wide(blocks: Tensor, weights: Tensor) -> Tensor:
    assert blocks.shape[1] == 1024
    return _mixed(blocks * weights).sum(1)


_narrow_sums = Kernel(_narrow, "digest_narrow_blocks")
_wide_sums = Kernel(_wide, "digest_wide_blocks")
