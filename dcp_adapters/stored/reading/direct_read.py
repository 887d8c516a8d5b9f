"""Read elements of a stored tensor straight from the file into the target: no archive unpacked, no chunk read whole.

torch.save stores a tensor's elements as one uncompressed record, so rows of a contiguous chunk are a range of the file:

    file    [ .. | zip headers | data.pkl | padding | elements of the chunk ............ | zip directory | .. ]
                                                        ^ first row wanted   ^ last row wanted
    target  rows of a contiguous CPU tensor of that dtype: the file is read into its memory
            anything else: read into memory of its own, then copied

Stock's reader loads the whole chunk into memory of its own, whatever part of it is wanted, and copies from there.
Chunks whose elements are not contiguous in the record are left to it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

import torch
from torch import Tensor

from dcp_adapters.plain.plain_memory import is_plain, memory_of
from dcp_adapters.stored.reading.tensor_archive import Header


@dataclass(frozen=True)
class Elements:
    """The elements of a contiguous chunk: dtype and shape, and the byte of an open file where they begin."""

    stream: IO[bytes]
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(stream: IO[bytes], offset: int, header: Header) -> "Elements":
        """Find the elements of the chunk at `offset`; its archive's header must say that they are contiguous."""
        assert header.first is not None
        return Elements(stream, offset + header.record_start + header.first, header.dtype, header.shape)

    def read(self, offsets: Sequence[int], sizes: Sequence[int], target: Tensor) -> None:
        """Fill `target` (of shape `sizes`) with a box of the chunk.

        Raises:
            EOFError: the file ends before it.
        """
        if not math.prod(sizes):
            return
        first, rows = (offsets[0], sizes[0]) if sizes else (0, 1)
        begin = self.begin + first * math.prod(self.shape[1:]) * self.dtype.itemsize
        whole_rows = tuple(sizes[1:]) == self.shape[1:]
        if whole_rows and target.dtype == self.dtype and _has_room(target):
            _read_into(self.stream, begin, target)
            return
        held = torch.empty((rows, *self.shape[1:]) if sizes else (), dtype=self.dtype, device="cpu")
        _read_into(self.stream, begin, held)
        for dim in range(1, len(sizes)):
            held = held.narrow(dim, offsets[dim], sizes[dim])
        target.copy_(held)


def _has_room(target: Tensor) -> bool:
    """Tell whether elements can be read into the target's memory; tensors of other libraries' classes have none."""
    # The memory of a conjugate or negative view holds other values than the view.
    straight = target.is_cpu and is_plain(target) and target.is_contiguous()
    return straight and not target.is_conj() and not target.is_neg()


def _read_into(stream: IO[bytes], begin: int, tensor: Tensor) -> None:
    """Read into the memory of a contiguous CPU tensor."""
    memory = memoryview(memory_of(tensor)).cast("B")
    stream.seek(begin)
    done = 0
    # The file is opened without a buffer, and one read() of Linux gives at most 2 GiB.
    while done < len(memory):
        count = stream.readinto(memory[done:])  # type: ignore[attr-defined]
        if not count:
            raise EOFError(f"the file ends {len(memory) - done} bytes before the end of a tensor")
        done += count
