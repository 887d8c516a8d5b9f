"""Sums over the bytes of a tensor that add up over its pieces: the sum of a whole tensor, from shards that hold parts.

The last dim of a tensor is read as bytes, and these as little-endian words of 32 bits, filled up with zeros:

    sum = sum over rows r and words c of    row(r) * column(c) * word(r, c)    modulo 2^64

    row(r)      output 2 r + 1 of splitmix64 (seed 0), with its lowest bit set    r: row-major number of the row
    column(c)   output 2 c + 2 of it, with its lowest bit set                     c: number of the word in the row

The sum is linear in the bytes. A piece of a tensor, cut along any dims, even inside of a word, sums its bytes at the
places where they lie in the whole tensor, and the sums of pieces that cover the tensor once add up to its sum. So one
all-reduce of 8 bytes a tensor gives all ranks the sums of all whole tensors, for every way of cutting them, and the
same value on every device, since integers do not depend on the order in which they are added.

What it detects: a change of bytes within one word, always, because the weights are odd. Several changed words, words,
rows, columns or blocks that changed places, and bytes moved between pieces are missed with a chance of about 2^-32. The
worst case known is four words at the corners of a rectangle in which the same highest bit flips: about 2^-27. It is no
cryptographic hash: who knows the weights can build other bytes with the same sum.

Bytes of one tensor are told apart by their places alone, so what compares sums must also compare dtypes and shapes.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fsdp_hooks.kernels.compiled import Kernel
from fsdp_hooks.kernels.digest import GOLDEN, MIX, MIX_FIRST
from fsdp_hooks.lazy_bits import resolve

WORD = 4  # bytes
SMALL = 2**18  # bytes; smaller pieces of one kind are stacked, so that a thousand take a dozen operations
STACK = 2**24  # bytes that are stacked at a time
AT_ONCE_CPU = 2**16  # words read at a time: widened to 64 bits, half a megabyte stays in the cache
AT_ONCE = 2**22  # words elsewhere; bounds what has to be filled up, and the products


class TensorPiece(NamedTuple):
    """A box of a tensor: a plain tensor with a storage, the shape of the whole, and where the box begins in it."""

    data: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @staticmethod
    def whole(data: Tensor) -> "TensorPiece":
        """Return all of a tensor."""
        return TensorPiece(data, tuple(data.shape), (0,) * data.ndim)


def byte_sums(pieces: Sequence[TensorPiece]) -> Tensor:
    """Return int64 [pieces]: the share of each piece in the sum of its tensor.

    Args:
        pieces: on one device, at least one.

    Raises:
        NotImplementedError: this machine stores the highest byte of a word first.
    """
    # sums are kept in files, and words are bytes in the order of this machine
    if sys.byteorder != "little":
        raise NotImplementedError(
            "sums over the bytes of weights: this machine stores the highest byte of a word first, and the sums would "
            "differ from those of other machines; use a little-endian machine"
        )
    device = pieces[0].data.device
    kinds: dict[object, list[int]] = {}
    for number, (data, shape, offsets) in enumerate(pieces):
        kinds.setdefault((data.dtype, data.shape, shape, offsets), []).append(number)
    order: list[int] = []
    sums: list[Tensor] = []
    with torch.no_grad():
        for numbers in kinds.values():
            kind = _AlikePieces(pieces[numbers[0]])
            order += numbers
            sums += kind.sums([pieces[number].data for number in numbers])
        flat = torch.cat(sums)
        places = torch.tensor(order, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
        return torch.empty_like(flat).index_copy_(0, places, flat)


class _AlikePieces:
    """Pieces of one dtype and shape at one place: they share the weights of rows and columns."""

    def __init__(self, like: TensorPiece) -> None:
        data, shape, offsets = like
        columns, first = (data.shape[-1], offsets[-1]) if data.ndim else (1, 0)
        self.device, self.nbytes = data.device, data.nbytes
        self.rows, self.row_bytes = math.prod(data.shape[:-1]), columns * data.itemsize
        # bytes of the first word that other pieces hold
        self.front = first * data.itemsize % WORD
        self.first = first * data.itemsize // WORD  # number of the first word
        self.words = -(-(self.front + self.row_bytes) // WORD)  # of a row
        self.box = offsets[:-1], tuple(data.shape[:-1]), shape[:-1]

    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return int64, together one value for each tensor."""
        if not self.nbytes:
            return [torch.zeros(len(tensors), dtype=torch.int64, device=self.device)]
        # rows have odd numbers, and columns even ones: no weight of the one is a weight of the other
        weights = _weights(2 * _rows_of(*self.box, self.device) + 1)
        return [(sums.view(-1, self.rows) * weights).sum(1) for sums in self._row_sums(tensors)]

    def _row_sums(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield int64 [some tensors * rows] for tensors that are read together."""
        at_once = max(1, STACK // self.nbytes) if self.nbytes < SMALL else 1
        for start in range(0, len(tensors), at_once):
            some = [_as_bytes(tensor).view(self.rows, self.row_bytes) for tensor in tensors[start : start + at_once]]
            data = torch.cat(some) if len(some) > 1 else some[0]
            yield self._sums_of_rows(data)

    def _sums_of_rows(self, data: Tensor) -> Tensor:
        """Return int64 [n] of bytes uint8 [n, row_bytes]."""
        sums_of, most = (_row_dots_cpu, AT_ONCE_CPU) if data.is_cpu else (_row_sums, AT_ONCE)
        width = min(self.words, most)
        height = max(1, most // width)
        total = None
        for left in range(0, self.words, width):  # once, but for enormous rows
            right = min(left + width, self.words)
            places = torch.arange(self.first + left, self.first + right, dtype=torch.int64, device=self.device)
            weights = _weights(2 * places + 2)
            pieces = [
                sums_of(self._words(data[top : top + height], left, right), weights)
                for top in range(0, len(data), height)
            ]
            sums = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
            total = sums if total is None else total + sums
        assert total is not None
        return total

    def _words(self, data: Tensor, left: int, right: int) -> Tensor:
        """Return the words left:right of rows of bytes uint8 [n, row_bytes], int32 [n, right - left]."""
        start, end = left * WORD - self.front, right * WORD - self.front
        inside = data[:, max(start, 0) : min(end, self.row_bytes)]
        missing = max(-start, 0), max(end - self.row_bytes, 0)
        # a piece may begin within a word: what others hold of it counts as zeros here
        if any(missing):
            inside = pad(inside, missing)
        elif inside.storage_offset() % WORD or inside.stride(0) % WORD:
            inside = inside.clone(memory_format=torch.contiguous_format)
        return inside.view(torch.int32)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return uint8 [bytes] of a plain tensor in logical order, an alias if it is contiguous."""
    return resolve(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)


def _rows_of(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int], device: torch.device) -> Tensor:
    """Return int64 [rows]: the row-major numbers, in the whole, of a box's rows; arguments lack the last dim."""
    numbers = torch.zeros(1, dtype=torch.int64, device=device)
    for offset, size, extent in zip(offsets, sizes, shape, strict=True):
        along = torch.arange(offset, offset + size, dtype=torch.int64, device=device)
        numbers = (numbers[:, None] * extent + along).view(-1)
    return numbers


def _weights(numbers: Tensor) -> Tensor:
    """Return int64: the outputs of splitmix64 of these numbers (1: the first), made odd."""
    x = numbers * GOLDEN
    x = (x ^ _shift(x, 30)) * MIX_FIRST
    x = (x ^ _shift(x, 27)) * MIX
    return (x ^ _shift(x, 31)).bitwise_or(1)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift to the right, logically."""
    return (x >> bits).bitwise_and(2 ** (64 - bits) - 1)


def _row_dots(words: Tensor, weights: Tensor) -> Tensor:
    """Return int64 [n] of words int32 [n, words] and weights int64 [words]; the sign of a word is its highest bit."""
    return (words * weights).sum(1)


def _row_dots_cpu(words: Tensor, weights: Tensor) -> Tensor:
    """Return the same without a product of each word in memory; compiled code is slower: AVX2 lacks the product."""
    return torch.mv(words.long(), weights)


_row_sums = Kernel(_row_dots, "byte_sums_of_rows")
