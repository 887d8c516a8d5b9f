"""Shards that hold some rows of every matrix of a stack [E, N, K], as fully_shard with Shard(1) cuts it.

    shard        [E, n, K]            its parts as bytes, end to end: one input
    gathered     [ranks, bytes]       rank after rank, as for Shard(0)
    whole        [E, ranks * n, K]    parts in memory of their own, filled by one strided copy each

For Shard(dim > 0) FSDP2 itself puts the pieces in order: it reads every gathered input as `ranks` padded shards, with
one entry for each element of the parameter, and joins these along the dim. No scale has as many entries, and no payload
of 4 bits. An input cannot be left out either, since FSDP2 asks the first one of a group for its dtype. So from one hook
to the next the size of the padded shard reads [1, bytes] in FSDP2's record, with a 1 for each dim before the one that
is cut. What it joins then is rank after rank, and all that a gather is (one collective for a whole group, its streams,
prefetching, offloading) stays FSDP2's. A collective of our own would be one more for each parameter, on streams that
FSDP2 does not know.

Both hooks run where FSDP2 copies in and out, and what they launch is ordered with these copies.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.torch_private import SizeOfBytes, calling_fsdp_param, reshards_to_fewer, set_padded_size

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True)
class RowPieces:
    """A gather on its way.

    dim: along which the stack is cut.
    shape: of the shard.
    param: FSDP2's record of the parameter.
    """

    dim: int
    shape: torch.Size
    param: Any


def give(parts: Sequence[Tensor], shape: torch.Size, whole: torch.Size) -> tuple[Tensor, RowPieces]:
    """Return the bytes of a shard's parts, uint8 [1, bytes], and what `take` and `restore` need.

    Args:
        parts: those that are gathered.
        shape: of the shard.
        whole: the shape of what it is a shard of; they differ along one dim, not the first.

    Raises:
        NotImplementedError: FSDP2 is to reshard to a smaller mesh.
    """
    param = calling_fsdp_param()
    # FSDP2 cuts the stack for that along its experts, which is seen elsewhere only if there are enough of them
    if reshards_to_fewer(param):
        raise NotImplementedError(
            f"a quantized weight whose shards have shape {tuple(shape)}: FSDP2's reshard_after_forward=<int> is not "
            "supported for quantized weights; use True or False"
        )
    flat = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts]).unsqueeze(0)
    dim = next(dim for dim, size in enumerate(shape) if size != whole[dim])
    set_padded_size(param, SizeOfBytes(shape, dim, flat.shape[1]))
    return flat, RowPieces(dim, shape, param)


def restore(pieces: RowPieces) -> None:
    """Tell FSDP2 the size of the padded shard again."""
    set_padded_size(pieces.param, pieces.shape)


def take(gathered: Tensor, targets: Mapping[str, Tensor], shard: Mapping[str, Tensor], pieces: RowPieces) -> None:
    """Copy the gathered bytes, uint8 [ranks, bytes], into the parts of the whole tensor, in the order of its rows.

    Args:
        gathered: what FSDP2 hands back; it is freed, since nothing reads it any more.
        targets: name -> the whole part, contiguous, any shape and dtype; in the order of `give`.
        shard: name -> the shard's part; one without dims has one value a shard, in the order of ranks.
        pieces: what `give` returned.
    """
    ranks, first = gathered.shape[0], 0
    for name, target in targets.items():
        size, matrices = shard[name].nbytes, math.prod(pieces.shape[: pieces.dim]) if shard[name].ndim else 1
        word = _widest(gathered.shape[1], first, size // max(matrices, 1))
        begin, end = first // word.itemsize, (first + size) // word.itemsize
        rows = gathered.view(word)[:, begin:end].unflatten(1, (matrices, -1))  # [ranks, matrices, words]
        target.view(-1).view(torch.uint8).view(word).view(matrices, ranks, -1).copy_(rows.transpose(0, 1))
        first += size
    # FSDP2 allocates it again before the next gather, and keeps it until it reshards
    gathered.untyped_storage().resize_(0)


def _widest(*sizes: int) -> torch.dtype:
    """Return the widest integer that all these numbers of bytes are multiples of: wide words are copied faster."""
    return next(word for word in WORDS if not any(size % word.itemsize for size in sizes))
