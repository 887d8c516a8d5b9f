"""Forms: how a part of a quantized weight looks in a file, as it is, as one value, as its reciprocal, in words, ..."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtensor.formats.float8_blocks import BLOCK


@dataclass(frozen=True)
class Form:
    """How a part looks in the file.

    shape: the part's shape -> the file's. write, read: the part -> what the file holds, and back. columns: how many
    columns of the part one of the file's stands for. rows: how many rows of the part, all equal, one row of the file
    stands for; `read` gives one row for them. dtype: the file's; None: the part's. inverts: the file has 1 / the part,
    which must be finite both ways.
    """

    shape: Callable[[Sequence[int]], tuple[int, ...]]
    write: Callable[[Tensor], Tensor]
    read: Callable[[Tensor], Tensor]
    columns: int = 1
    rows: int = 1
    dtype: torch.dtype | None = None
    inverts: bool = False


def reciprocal(value: Tensor) -> Tensor:
    """Return the fp32 number whose reciprocal is `value`, if there is one; else the one nearest to 1 / value.

    So reading gives back what was written. Global scales are such reciprocals (of 2688 / amax); a value between two
    reciprocals comes back as the nearer one, and does not change again.
    """
    nearest = torch.reciprocal(value.float())
    # Division rounds: if any number has this reciprocal, it is the nearest one or a neighbour of it.
    for step in (0, 1, -1):
        candidate = (nearest.view(torch.int32) + step).view(torch.float32)
        if torch.equal(torch.reciprocal(candidate), value.float()):
            return candidate
    return nearest


def _little_endian() -> None:
    """Refuse a machine on which the bytes of a word are not in the order in which files have them."""
    if sys.byteorder != "little":
        raise NotImplementedError(
            "codes in words of 32 bits (pack-quantized): this machine stores the highest byte of a word first, and the "
            "codes would be out of order; use a little-endian machine"
        )


def _as_words(part: Tensor) -> Tensor:
    _little_endian()
    return part.contiguous().view(torch.int32)


def _as_bytes(stored: Tensor) -> Tensor:
    _little_endian()
    return stored.contiguous().view(torch.uint8)


SAME = Form(shape=tuple, write=lambda part: part, read=lambda stored: stored)
ONE = Form(shape=lambda shape: (1,), write=lambda part: part.reshape(1), read=lambda stored: stored.reshape(()))
FLAT = Form(
    shape=lambda shape: tuple(shape[:-1]),
    write=lambda part: part.squeeze(-1),
    read=lambda stored: stored.unsqueeze(-1),
)
ONE_A_BLOCK = Form(  # of scales [N, blocks along K] of square blocks
    shape=lambda shape: (-(-shape[0] // BLOCK), *shape[1:]),
    write=lambda part: part[::BLOCK],
    read=lambda stored: stored,
    rows=BLOCK,
)
ONE_OVER = Form(
    shape=lambda shape: (1,),
    write=lambda part: reciprocal(part).reshape(1),
    read=lambda stored: torch.reciprocal(stored.float()).reshape(()),
    inverts=True,
)
# Four bytes a word, the first one lowest: eight codes of 4 bits, the first code lowest.
WORDS = Form(
    shape=lambda shape: (*shape[:-1], shape[-1] // 4), write=_as_words, read=_as_bytes, columns=4, dtype=torch.int32
)
# The bytes of each 32-block of 4-bit codes in a dim of their own.
BLOCKS = Form(
    shape=lambda shape: (*shape[:-1], shape[-1] // 16, 16),
    write=lambda part: part.unflatten(-1, (-1, 16)),
    read=lambda stored: stored.flatten(-2),
    columns=16,
)


def _of_heads(part: Tensor) -> Tensor:
    """Write scales [heads] as the file has them. Raises ValueError for one that engines cannot divide by."""
    if not bool((part.isfinite() & (part > 0)).all()):
        raise ValueError(
            f"scales of the KV cache {part.tolist()}, which engines divide by; calibrate them again, or leave them out"
        )
    return part.reshape(-1, 1, 1)


# Scales [heads] of the KV cache, beside whose dim those of tokens and of columns are 1.
HEADS = Form(shape=lambda shape: (*shape, 1, 1), write=_of_heads, read=lambda stored: stored.reshape(-1))
