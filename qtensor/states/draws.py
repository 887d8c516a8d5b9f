"""Random bits by a counter: of (seed, stream, step) and an element's global position, whoever holds the element.

    row key   [rows, 1]    = mix(mix(row ^ key[0]) + key[1])              row: of the whole tensor, seen as [rows, K]
    bits      [rows, K]    = mix(row key ^ column * GOLDEN)

`mix` and `bits` are those of qtensor/spec/codecs/hashing.py.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qtensor.spec.codecs.hashing import FACTORS, GOLDEN, bits, mix

__all__ = ["FACTORS", "GOLDEN", "HALF", "Positions", "bits", "key_of", "mix", "row_keys"]

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


def row_keys(key: Sequence[int] | Sequence[Tensor], rows: Tensor) -> Tensor:
    """Return int32 [rows, 1]: the key of each row, given its number in the whole tensor (int64 [rows]).

    The two words of `key` may be int32 [rows] each, of rows that belong to different weights.
    """
    low, high = (rows % _ROWS).to(torch.int32), (rows // _ROWS).to(torch.int32)
    return mix(mix(low ^ key[0]) + (high ^ key[1])).unsqueeze(-1)
