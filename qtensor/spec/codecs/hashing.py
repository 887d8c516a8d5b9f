"""Random bits of integers: a hash that tells numbers apart, and bits of elements given the keys of their rows.

    bits      [rows, K]    = mix(row key ^ column * GOLDEN)
    row key   [rows, 1]    = mix(sum_j mix(raw_j ^ j * GOLDEN))        raw: fp32 numbers as integers, none of +0

`mix` is the 32-bit hash "lowbias32" (Chris Wellons, hash-prospector; public domain). Its arithmetic is modulo 2^32 in
int32. Bits are good enough to round with; they are no random numbers for statistics or secrets.

A key that is made of a row's own content needs no count of steps, calls or places: whoever holds the row, in whatever
order, eager, compiled or computed again, draws the same; and a row that differs in one bit draws anew. Sums of integers
do not depend on their order. Numbers that are +0 have no part in a key, so neither have zeros behind a row.
"""

import torch
from torch import Tensor

GOLDEN = -1640531527  # 0x9E3779B9, odd: columns differ in all bits
_FIRST, _SECOND = 0x7FEB352D, -2073254261  # 0x7feb352d, 0x846ca68b as int32
FACTORS = (_FIRST, _SECOND)
_WORD, _SIGN = 2**32 - 1, 2**31


def mix(x: Tensor) -> Tensor:
    """Return the hash of each int32."""
    x = (x ^ shifted(x, 16)) * _FIRST
    x = (x ^ shifted(x, 15)) * _SECOND
    return x ^ shifted(x, 16)


def bits(keys: Tensor, columns: Tensor) -> Tensor:
    """Return int32: random bits of elements, given the keys of their rows and their columns (int32, broadcast)."""
    return mix(keys ^ (columns * GOLDEN))


def keys_of_content(x: Tensor) -> Tensor:
    """Return int32 [.., 1]: a key of each row of fp32 numbers [.., K], made of all of them."""
    raw = x.view(torch.int32)
    each = torch.where(raw == 0, 0, bits_along(raw))
    return mix(_lower(each.to(torch.int64).sum(dim=-1, keepdim=True)))


def bits_along(keys: Tensor, columns: int | None = None) -> Tensor:
    """Return the `bits` of columns 0, 1, .. of [.., columns or 1], given a key of each row, or of each element.

    In int64 up to where bits are combined: compilers take a product of a place and a number for an address, which they
    count up without looking whether it still fits into int32.
    """
    places = torch.arange(columns or keys.shape[-1], dtype=torch.int64, device=keys.device)
    return mix(keys ^ _lower(places * GOLDEN))


def _lower(x: Tensor) -> Tensor:
    """Return the lower halves of int64, as signed numbers in int32."""
    return (((x & _WORD) ^ _SIGN) - _SIGN).to(torch.int32)


def shifted(x: Tensor, by: int) -> Tensor:
    """Return x >> by, with zeros from the left."""
    return (x >> by) & (0x7FFFFFFF >> (by - 1))
