"""Where the values of an entry come from: its chunks, which slice of which tensor each chunk is, and how it is read."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcp_adapters.hf.files.directory import FileTensor
from dcp_adapters.hf.layouts.layout import StoredAs
from fsdp_hooks.kernels import byte_sums
from qtensor.spec.format import PartSpec


@dataclass(frozen=True)
class Slice:
    """Where a chunk's values come from.

    read: what the file holds -> the part, in its dtype. per_row: slices of the chunk are slices of the tensor, which
    lacks the chunk's first `lead` dims and perhaps its last; otherwise the whole tensor gives the whole chunk. columns,
    rows: how many columns, or rows, of the chunk one of the tensor's stands for. turned: the chunk's last two dims are
    the tensor's in the other order.
    """

    tensor: FileTensor
    read: Callable[[Tensor], Tensor]
    per_row: bool = True
    lead: int = 0
    columns: int = 1
    rows: int = 1
    turned: bool = False

    def take(self, piece: Any, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Read a box of the chunk from safetensors' `piece` of the tensor."""
        box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        if self.turned:
            return self.read(piece[box[-1], box[-2]]).transpose(0, 1).reshape(tuple(sizes))
        if self.per_row:
            held = box[self.lead :][: len(self.tensor.shape)]
            # Shards need not begin at a block of the file: the rows around them are read, spread and cut.
            if self.rows > 1:
                return self._spread(piece, held).reshape(tuple(sizes))
            if self.columns > 1:
                return self._split(piece, held).reshape(tuple(sizes))
            return self.read(piece[held or ...]).reshape(tuple(sizes))
        # A scale of the whole tensor: no slice of the chunk is a slice of what the file holds.
        return self.read(piece[...])[box or ...]

    def _split(self, piece: Any, held: Sequence[slice]) -> Tensor:
        """Read the columns of a slice of the chunk, which may begin and end inside of one column of the tensor."""
        first, last = held[-1].start // self.columns, -(-held[-1].stop // self.columns)
        part = self.read(piece[(*held[:-1], slice(first, last))])
        return part[..., held[-1].start - first * self.columns : held[-1].stop - first * self.columns]

    def _spread(self, piece: Any, held: Sequence[slice]) -> Tensor:
        """Read the rows of a slice of the chunk, which may begin and end inside of one row of the tensor."""
        first, last = held[0].start // self.rows, -(-held[0].stop // self.rows)
        spread = self.read(piece[(slice(first, last), *held[1:])]).repeat_interleave(self.rows, dim=0)
        return spread[held[0].start - first * self.rows : held[0].stop - first * self.rows]


@dataclass(frozen=True)
class Chunk:
    """One box of an entry, and where it comes from."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    held: Slice


@dataclass(frozen=True)
class Placed:
    """What is stored under one key: a part of a quantized tensor, or a dense one, and where its chunks are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @staticmethod
    def whole(dtype: torch.dtype, shape: Sequence[int], held: Slice) -> "Placed":
        """Place all of it in one chunk."""
        return Placed(dtype, tuple(shape), (Chunk((0,) * len(shape), tuple(shape), held),))

    def piece(self, chunk: Chunk, held: Callable[[FileTensor], Any]) -> byte_sums.TensorPiece:
        """Read one of its chunks; `held` gives safetensors' piece of a tensor, or the tensor itself."""
        whole = chunk.held.take(held(chunk.held.tensor), (0,) * len(chunk.sizes), chunk.sizes)
        return byte_sums.TensorPiece(whole, self.shape, chunk.offsets)


def as_is(held: Tensor) -> Tensor:
    """Read what is in the file."""
    return held


def source_of_part(tensor: FileTensor, stored: StoredAs, spec: PartSpec, *, lead: int = 0) -> Slice:
    """Return how a part is read from the tensor that holds it."""
    return Slice(tensor, _reader_of(stored, spec), spec.per_row, lead, stored.form.columns, stored.form.rows)


@functools.cache
def _reader_of(stored: StoredAs, spec: PartSpec) -> Callable[[Tensor], Tensor]:
    """Return the function that makes a part of what the file holds."""

    def read(held: Tensor) -> Tensor:
        # Files of others may hold an fp32 scale in fewer bits, which fp32 holds exactly.
        part = stored.form.read(held.float() if spec.dtype == torch.float32 else held)
        return part if spec.per_row else part.reshape(())

    return read
