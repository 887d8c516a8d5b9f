"""Rows whose last block holds fewer elements, cut so that compiled code sees whole blocks only.

    [rows, K]  ->  [rows, K - K % block], an alias, and the rest filled up with zeros to [rows, block], a small copy

Blocks do not know of each other, and zeros change neither an amax nor what is finite. So the parts of both pieces, put
side by side, are those of the rows, and the values likewise.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from qtensor.spec.format import PartSpec

Parts = dict[str, Tensor]


def encode_ragged(
    x: Tensor,
    block: int,
    specs: tuple[PartSpec, ...],
    whole: Callable[[Tensor], Parts],
    rest: Callable[[Tensor], Parts],
) -> Parts:
    """Return the parts of x [rows, K]: `whole` makes those of whole blocks, `rest` those of the filled one."""
    behind = x.shape[1] - x.shape[1] % block
    # zeros are in no amax, so the block has the scale that its own values ask for
    last = rest(torch.nn.functional.pad(x[:, behind:], (0, block - x.shape[1] % block)))
    first = (
        whole(x[:, :behind]) if behind else {name: part[:, :0] if part.ndim else part for name, part in last.items()}
    )
    joined = {}
    for spec in specs:
        if not (spec.per_row and spec.block):
            joined[spec.name] = last[spec.name]
            continue
        start, end = spec.columns(0, behind)[1], spec.columns(0, x.shape[1])[1]
        part = first[spec.name].new_empty((x.shape[0], end))
        part[:, :start].copy_(first[spec.name])
        part[:, start:].copy_(last[spec.name][:, : end - start])
        joined[spec.name] = part
    return joined


def split_ragged(
    parts: Mapping[str, Tensor], columns: int, block: int, specs: tuple[PartSpec, ...]
) -> tuple[Parts, Parts]:
    """Split parts [rows, ..] of rows of so many columns into those of whole blocks and those of the filled one."""
    behind = columns - columns % block
    first, last = dict(parts), dict(parts)
    for spec in specs:
        if spec.per_row and spec.block:
            part, start = parts[spec.name], spec.columns(0, behind)[1]
            first[spec.name] = part[:, :start]
            last[spec.name] = _fill(part[:, start:], spec.columns(0, block)[1] - (part.shape[1] - start))
    return first, last


def _fill(part: Tensor, columns: int) -> Tensor:
    """Return `part` with more columns of zero bytes; as bytes, since padding does not support float8."""
    bytes_ = part.contiguous().view(torch.uint8)
    return torch.nn.functional.pad(bytes_, (0, columns * part.itemsize)).view(part.dtype)
