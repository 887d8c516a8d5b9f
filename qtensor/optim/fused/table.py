"""The table of pointers that a fused step's kernels read: a row for each shard, copied to the device once a step.

Gradients have another address in each step, and a step's numbers other values. So all rows are filled anew and sent by
one copy from pinned memory; nothing that a pointer leads to can be of another step. torch's allocator for pinned memory
gives it away again only behind the copy. What is kept is which row each program works for, since that is long.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# what a row holds, in words of 8 bytes: addresses and counts
WORDS = (
    *("grad", "master", "first", "second", "out", "scale", "wide"),
    *("blocks", "columns", "length", "begin", "slot"),
)
NUMBERS = 10  # fp32, behind the words: what a rule reads
ROW = len(WORDS) + NUMBERS // 2
ALIGNED = 16  # bytes that divide each address but a gradient's: a thread moves so many at once

KEPT = 16  # of the lists that tell programs' rows


@dataclass(frozen=True)
class Addresses:
    """A row of the table, but for its numbers and where its programs begin."""

    grad: int
    master: int
    first: int = 0
    second: int = 0
    out: int = 0
    scale: int = 0
    wide: int = 0
    blocks: int = 0
    columns: int = 0
    length: int = 0
    slot: int = 0

    def row(self, begin: int, numbers: Sequence[int]) -> list[int]:
        """Return the row's words."""
        own = (self.grad, self.master, self.first, self.second, self.out, self.scale, self.wide)
        return [*own, self.blocks, self.columns, self.length, begin, self.slot, *numbers]


def words_of(numbers: Sequence[float]) -> list[int]:
    """Return fp32 numbers as words, filled up with zeros.

    Raises:
        OverflowError: a number is finite and fp32 has none for it.
    """
    packed = struct.pack(f"{NUMBERS}f", *numbers, *[0.0] * (NUMBERS - len(numbers)))
    return list(struct.unpack(f"{NUMBERS // 2}q", packed))


def sent(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return rows as a table on the device, int64 [rows, ROW]; the host does not wait."""
    if device.type == "cpu":
        return torch.tensor(rows, dtype=torch.int64, device="cpu")
    return torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=True).to(device, non_blocking=True)


class Owners:
    """The row that each program works for, int32 [programs], kept for as long as programs are shared out alike."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.device, int, tuple[int, ...]], Tensor] = {}

    def of(self, first: int, programs: tuple[int, ...], device: torch.device) -> Tensor:
        """Return it for rows from `first` on, which have so many programs each."""
        key = (device, first, programs)
        found = self._known.pop(key, None)
        if found is None:
            rows = torch.arange(first, first + len(programs), dtype=torch.int32, device="cpu")
            each = torch.tensor(programs, dtype=torch.int64, device="cpu")
            found = rows.repeat_interleave(each).to(device)
        self._known[key] = found  # the latest last
        while len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return found
