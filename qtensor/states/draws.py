"""Random bits by a counter: of (seed, stream, step) and an element's global position, whoever holds the element.

    row key   [rows, 1]    = mix(mix(row ^ key[0]) + key[1])              row: of the whole tensor, seen as [rows, K]
    bits      [rows, K]    = mix(row key ^ column * GOLDEN)

`mix` is the 32-bit hash "lowbias32" (Chris Wellons, hash-prospector; public domain). Its arithmetic is modulo 2^32 in
int32. Bits are good enough to round with; they are no random numbers for statistics or secrets.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GOLDEN = -1640531527  # 0x9E3779B9, odd: columns differ in all bits
_FIRST, _SECOND = 0x7FEB352D, -2073254261  # 0x7feb352d, 0x846ca68b as int32
FACTORS = (_FIRST, _SECOND)
HALF = -(2**31)  # bits that round to the nearest
_ROWS = 2**31  # rows that one word counts


class Positions(NamedTuple):
    """Where the rows of a shard are in the whole tensor, and what their draws begin with.

    Attributes:
        keys: int32 [rows, 1], see `row_keys`; `first` itself: nothing is drawn, round to the nearest.
        first: int32 [1], the first column.
    """

    keys: Tensor
    first: Tensor

    @property
    def drawn(self) -> bool:
        """Whether rounding is stochastic."""
        return self.keys is not self.first

    def of(self, piece: slice) -> "Positions":
        """Return those of some rows."""
        return Positions(self.keys[piece], self.first) if self.drawn else self


def key_of(seed: int, *stream: int | str) -> tuple[int, int]:
    """Return two words, int32, that tell streams apart: hash of a seed, a weight's name, a step, a purpose."""
    digest = hashlib.blake2b(repr((seed, *stream)).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)


def mix(x: Tensor) -> Tensor:
    """Return the hash of each int32."""
    x = (x ^ _shifted(x, 16)) * _FIRST
    x = (x ^ _shifted(x, 15)) * _SECOND
    return x ^ _shifted(x, 16)


def row_keys(key: Sequence[int] | Sequence[Tensor], rows: Tensor) -> Tensor:
    """Return int32 [rows, 1]: the key of each row, given its number in the whole tensor (int64 [rows]).

    The two words of `key` may be int32 [rows] each, of rows that belong to different weights.
    """
    low, high = (rows % _ROWS).to(torch.int32), (rows // _ROWS).to(torch.int32)
    return mix(mix(low ^ key[0]) + (high ^ key[1])).unsqueeze(-1)


def bits(keys: Tensor, columns: Tensor) -> Tensor:
    """Return int32: random bits of elements, given the keys of their rows and their columns (int32, broadcast)."""
    return mix(keys ^ (columns * GOLDEN))


def _shifted(x: Tensor, by: int) -> Tensor:
    """Return x >> by, with zeros from the left."""
    return (x >> by) & (0x7FFFFFFF >> (by - 1))
