"""The sums of whole parts from the ranks' shares, with proof that all ranks mean the same tensors.

    first all-reduce    [ranks that failed, their numbers + 1, elements counted,
                         digest of the labels .., its squares .., sums ..]          int64, filled up to FIRST
    second              [the sums that did not fit ..]                              only if there are any

Integers add up modulo 2^64. The digest of the labels (names, parts, dtypes, shapes) travels as pieces d and their
squares: n ranks hold the same d exactly if n * sum(d^2) == sum(d)^2. The first message always has the same size, so
that a rank that lists different tensors, or failed, takes part in the same collective, and all ranks raise.
"""

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from dcp_adapters.digests.shares import PartShare
from fsdp_hooks.kernels.byte_sums import byte_sums
from fsdp_hooks.ranks.across_ranks import Alone, Ranks, device_of, rank_of, ranks_of

FIRST = 4096  # values, 32 KiB: a message that costs no more than an empty one
PIECES = 4  # of the digest of the labels, 16 bits each, so that no sum of squares is too large for 63 bits
HEADER = 3 + 2 * PIECES


def sum_over_ranks(caller: str, shares: Sequence[PartShare], group: Ranks) -> list[int]:
    """The byte sum of each part, modulo 2^64, from the shares of all ranks of a group; a collective.

    Errors name the caller.

    Raises:
        RuntimeError: on all ranks: they list different tensors, or one of them failed (`tell_failure`).
        ValueError: on all ranks: they hold more or less than the whole tensors.
    """
    try:
        counted, sums = sum(share.held.data.numel() for share in shares if share.held is not None), _own_sums(shares)
    # One rank alone may fail here (memory, a broken device); the others are about to enter the all-reduce.
    except Exception:
        tell_failure(group)
        raise
    if not isinstance(group, Alone) and ranks_of(group) > 1:
        counted, sums = _reduced(caller, [str(share) for share in shares], counted, sums, group)
    expected = sum(share.numel for share in shares)
    if counted != expected:
        raise ValueError(
            f"{caller}: the ranks hold {counted} elements of weights that have {expected}: pass the group of all ranks "
            "that hold the model, and of none else"
        )
    return [total % 2**64 for total in sums.tolist()]


def tell_failure(group: Ranks) -> None:
    """Tell the other ranks that this one failed, in place of `sum_over_ranks`: they raise, and do not wait for it."""
    if not isinstance(group, Alone) and ranks_of(group) > 1:
        message = torch.zeros(FIRST, dtype=torch.int64, device="cpu")
        message[0], message[1] = 1, rank_of(group) + 1
        dist.all_reduce(message.to(device_of(group)), group=group)


def _own_sums(shares: Sequence[PartShare]) -> Tensor:
    """Return this rank's sums, int64 [shares] on the CPU, 0 for what it does not count."""
    sums = torch.zeros(len(shares), dtype=torch.int64, device="cpu")
    by_device: dict[torch.device, list[int]] = {}
    for number, share in enumerate(shares):
        if share.held is not None:
            by_device.setdefault(share.device, []).append(number)
    # One read for each device: the CPU waits for it each time.
    for numbers in by_device.values():
        sums[numbers] = byte_sums([held for number in numbers if (held := shares[number].held) is not None]).cpu()
    return sums


def _reduced(
    caller: str, labels: Sequence[str], counted: int, sums: Tensor, group: dist.ProcessGroup | None
) -> tuple[int, Tensor]:
    """Elements counted and sums over all ranks."""
    data = hashlib.blake2b("\n".join(labels).encode(), digest_size=2 * PIECES, usedforsecurity=False).digest()
    pieces = [int.from_bytes(data[2 * i : 2 * i + 2], "little") for i in range(PIECES)]
    head = [0, 0, counted, *pieces, *(piece**2 for piece in pieces)]
    # One message for all that must be known, and for the sums of most models: a collective costs more than its bytes.
    message = torch.cat([torch.tensor(head, dtype=torch.int64, device="cpu"), sums]).to(device_of(group))
    first, rest = message[:FIRST], message[FIRST:].clone()
    if first.numel() < FIRST:
        first = torch.cat([first, first.new_zeros(FIRST - first.numel())])
    dist.all_reduce(first, group=group)
    values = first.cpu()
    failed, number, counted, *found = values[:HEADER].tolist()
    if failed:
        who = f"rank {number - 1}" if failed == 1 else f"{failed} ranks"
        raise RuntimeError(f"{caller}: {who} failed before the sums could be added up, see the error there")
    ranks = ranks_of(group)
    if any(ranks * square != piece**2 for piece, square in zip(found[:PIECES], found[PIECES:], strict=True)):
        raise RuntimeError(
            f"{caller}: the ranks do not hold the same tensors: {_find_difference(labels, group)}. Digest the state "
            "dict of one model on all ranks of the group; for stages of a pipeline pass each stage's group"
        )
    # All ranks have the same labels, and so all of them come here, with messages of one size.
    if rest.numel():
        dist.all_reduce(rest, group=group)
    return counted, torch.cat([values[HEADER : message.numel()], rest.cpu()])


def _find_difference(labels: Sequence[str], group: dist.ProcessGroup | None) -> str:
    """Say how the first rank that differs from rank 0 differs from it; the same text on all ranks."""
    everywhere: list[list[str]] = [[] for _ in range(ranks_of(group))]
    dist.all_gather_object(everywhere, list(labels), group=group)
    for rank, theirs in enumerate(everywhere):
        for ours, other in zip_longest(everywhere[0], theirs, fillvalue="nothing"):
            if ours != other:
                return f"rank 0 has {ours!r} where rank {rank} has {other!r}"
    raise AssertionError("the digests of equal labels differ")
