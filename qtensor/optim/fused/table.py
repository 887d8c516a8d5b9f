"""The table of pointers that a fused step's kernels read: a row for each shard, copied to the device once a step.

Gradients have another address in each step, and a step's numbers other values. So a step fills these into a copy of the
rows that it has in common with the last one, and sends it by one copy from pinned memory, which torch's allocator gives
away again only behind the copy. On the device, what is kept is which row each program works for, since that is long.
"""

import struct
from array import array
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
    """A row of the table, but for what is of a step: its gradient, its numbers, its slot, where its programs begin."""

    master: int
    first: int = 0
    second: int = 0
    out: int = 0
    scale: int = 0
    wide: int = 0
    blocks: int = 0
    columns: int = 0
    length: int = 0

    def row(self, begin: int, slot: int) -> list[int]:
        """Return the row's words, with 0 for those that `filled` fills in."""
        own = (self.master, self.first, self.second, self.out, self.scale, self.wide)
        return [0, *own, self.blocks, self.columns, self.length, begin, slot, *[0] * (NUMBERS // 2)]


def packed(numbers: Sequence[float]) -> bytes:
    """Return fp32 numbers as a row holds them, filled up with zeros.

    Raises:
        OverflowError: a number is finite and fp32 has none for it.
    """
    return struct.pack(f"{NUMBERS}f", *numbers, *[0.0] * (NUMBERS - len(numbers)))


def filled(
    rows: bytes, grads: Sequence[int], numbers: Sequence[bytes], device: torch.device, *, row: int = ROW
) -> Tensor:
    """Return the table of a step on its device, int64 [rows, `row`]; the host does not wait.

    Args:
        rows: int64 of the host, what `Addresses.row` returns of each.
        grads: the address of each row's gradient.
        numbers: of each row, `packed`.
        device: of the table.
        row: words of a row.
    """
    if not rows:
        return torch.zeros(0, row, dtype=torch.int64, device=device)
    held = bytearray(rows)
    memoryview(held).cast("q")[::row] = memoryview(array("q", grads))
    for end, own in enumerate(numbers, start=1):
        held[8 * row * end - len(own) : 8 * row * end] = own
    table = torch.frombuffer(held, dtype=torch.int64).view(-1, row)
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


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
