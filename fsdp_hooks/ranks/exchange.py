"""Maxima over a group of ranks, with proof that all of them mean the same values.

    first all-reduce    [number of a rank that failed + 1, digest .., -digest .., values ..]    filled up to FIRST
    second              [the values that did not fit ..]                                        only if there are any

Values are ordered by their labels, which say what they belong to (a name, a shape, a recipe), and not by the order in
which a rank happens to list them. The maxima of a digest and of its negative tell whether all ranks have the same
labels and sizes. If they do not, all ranks of the group raise, and no scale is ever made of two weights. The first
message always has the same size, so that a rank that lists more or fewer values than the others, or that failed and has
no values, takes part in the same collective.

Labels differ between groups on purpose: stages of a pipeline hold different weights.
"""

import functools
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_hooks.ranks.across_ranks import all_reduce

LOG = logging.getLogger(__name__)

Label = tuple[str, ...]  # one line for each weight that a value belongs to

FIRST = 4096  # values, 16 KiB: a message that costs no more than an empty one
PIECES = 4  # of a digest, 16 bits each, which fp32 holds exactly
HEADER = 1 + 2 * PIECES
SHOWN = 240  # bytes of a difference that an error shows


class RanksDifferError(RuntimeError):
    """Ranks of a group do not list the same values, or one of them failed; `failed` is its global number, or None."""

    def __init__(self, text: str, failed: int | None = None) -> None:
        super().__init__(text)
        self.failed = failed


@dataclass(frozen=True)
class Channel:
    """A group as this module uses it: this process's place in it, the ranks' global numbers, an in-place MAX."""

    place: int
    ranks: Sequence[int]
    reduce: Callable[[Tensor], object]


def channel_of(group: dist.ProcessGroup) -> Channel:
    """Return the channel of a group of torch.distributed."""
    reduce = functools.partial(all_reduce, op=dist.ReduceOp.MAX, group=group)
    return Channel(dist.get_rank(group), dist.get_process_group_ranks(group), reduce)


def in_order(labels: Sequence[Label], groups: Sequence[Sequence[dist.ProcessGroup]]) -> list[dist.ProcessGroup]:
    """Return the distinct groups of labelled values, in the same order on all ranks: by label, then as listed.

    So no two ranks wait for each other in different groups. A value that several mesh dims cut is also reduced over
    them in one order everywhere. This is necessary: a maximum over rows and then columns covers all ranks, a mixture of
    both orders does not.
    """
    order = sorted(range(len(labels)), key=lambda index: labels[index])
    return list(dict.fromkeys(group for index in order for group in groups[index]))


def reduce_max(
    what: str, labels: Sequence[Label], values: Sequence[Tensor], channel: Channel
) -> tuple[list[Tensor], int]:
    """Return the elementwise maxima over the ranks of a channel; a collective, and a host sync.

    Args:
        what: the operation, for errors.
        labels: what each value belongs to; ranks may have them in any order, but equal labels match by their order.
        values: fp32, 1-D, on any devices; at least one.
        channel: the ranks.

    Returns:
        The maxima in the order of `values`, each where its value is, and the number of all-reduces.

    Raises:
        RanksDifferError: on all ranks, if some of them have other labels or sizes, or called `tell_failure`.
    """
    # labels decide the order, since ranks may have built their models in another one
    order = sorted(range(len(values)), key=lambda index: labels[index])
    sizes = tuple(values[index].numel() for index in order)
    pieces = _digest(tuple(labels[index] for index in order), sizes)
    device = values[0].device
    head = torch.tensor([0.0, *pieces, *(-piece for piece in pieces)], dtype=torch.float32, device="cpu")
    message = torch.cat([head.to(device, non_blocking=True), *(values[index].to(device) for index in order)])
    first, rest = message[:FIRST], message[FIRST:]
    # always of one size: a rank that failed, and knows no sizes, takes part in the same collective
    if first.numel() < FIRST:
        first = torch.cat([first, first.new_zeros(FIRST - first.numel())])
    channel.reduce(first)
    # the one host sync: nothing may be written before ranks are known to mean the same weights
    failed, *found = first[:HEADER].tolist()
    if failed:
        rank = channel.ranks[int(failed) - 1]
        raise RanksDifferError(
            f"{what}: rank {rank} failed before the ranks could agree on scales, see its error; no quantized weight "
            "was written",
            rank,
        )
    if found[:PIECES] != [-piece for piece in found[PIECES:]]:
        lines = [line for index in order for line in labels[index]]
        raise RanksDifferError(
            f"{what}: the ranks of a group do not list the same weights, so a scale would be made of different ones: "
            f"{_difference(lines, channel, device)}. No quantized weight was written; give all ranks the same weights, "
            "recipes and placements, in the same parameter groups"
        )
    if rest.numel():
        LOG.debug("%s: %d values do not fit into the first all-reduce, so there is a second one", what, rest.numel())
        channel.reduce(rest)
    agreed = torch.cat([first[HEADER : message.numel()], rest]).split(sizes)
    places = [place for _, place in sorted(zip(order, range(len(order)), strict=True))]
    maxima = [agreed[place].to(value.device) for place, value in zip(places, values, strict=True)]
    return maxima, 1 + (rest.numel() > 0)


def tell_failure(channel: Channel, device: torch.device) -> None:
    """Take part in the others' `reduce_max` only to tell that this rank failed: all of them raise."""
    message = torch.zeros(FIRST, dtype=torch.float32, device=device)
    message[0] = channel.place + 1
    channel.reduce(message)


@functools.lru_cache(maxsize=64)
def _digest(labels: tuple[Label, ...], sizes: tuple[int, ...]) -> tuple[float, ...]:
    """Return a digest of labels and sizes: 64 bits in PIECES pieces."""
    data = hashlib.blake2b(repr((labels, sizes)).encode(), digest_size=2 * PIECES, usedforsecurity=False).digest()
    return tuple(float(int.from_bytes(data[2 * i : 2 * i + 2], "little")) for i in range(PIECES))


def _difference(lines: Sequence[str], channel: Channel, device: torch.device) -> str:
    """Return in words how the first rank that differs from the group's rank 0 differs; the same text on all ranks."""
    own = "\n".join(lines).encode()
    size = torch.tensor([len(own) * (channel.place == 0)], dtype=torch.int64, device=device)  # fp32 would round it
    channel.reduce(size)
    theirs = _gather_texts(own if channel.place == 0 else b"", (1, int(size)), 0, channel, device)[0].split("\n")
    more, less = Counter(lines) - Counter(theirs), Counter(theirs) - Counter(lines)
    text = "; ".join(
        f"only rank {channel.ranks[place]} has {next(iter(only))!r}{f' and {only.total() - 1} more' * (len(only) > 1)}"
        for place, only in ((channel.place, more), (0, less))
        if only
    )
    if not text and lines != theirs:
        text = f"rank {channel.ranks[channel.place]} has them in another order than rank {channel.ranks[0]}"
    shape = len(channel.ranks), SHOWN
    texts = _gather_texts(text.encode()[:SHOWN], shape, channel.place, channel, device)
    return next(filter(None, texts), "their shared scales have different sizes")


def _gather_texts(own: bytes, shape: tuple[int, int], row: int, channel: Channel, device: torch.device) -> list[str]:
    """Return the texts of several ranks, gathered by MAX alone: each fills its row, where all others have zeros."""
    table = torch.zeros(shape, dtype=torch.float32, device="cpu")
    table[row, : len(own)] = torch.tensor(list(own), dtype=torch.float32, device="cpu")
    table = table.to(device)
    channel.reduce(table)
    return [bytes(int(value) for value in line if value).decode(errors="ignore") for line in table.tolist()]
