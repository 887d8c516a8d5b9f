"""Pieces of matrices to the ranks that own them, and back: what a bucket's plan says, by one all-to-all a hop.

Every parcel is a piece in bf16, laid out by rows. A whole matrix is memory of its own, as one process has it: kernels
may choose their way by where a matrix begins.
"""

from collections.abc import Mapping, MutableMapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_hooks.ranks.across_ranks import device_of
from qtensor.optim.matrices.plan import Bucket, Parcel

WIRE = torch.bfloat16  # what torch's Muon makes of its update first, and what the orthogonal matrix is in


def gather(bucket: Bucket, own: Sequence[Tensor], groups: Sequence[dist.ProcessGroup]) -> dict[Parcel, Tensor]:
    """Return the pieces of the matrices that this rank owns, flat; a collective for each hop.

    Args:
        bucket: what is sent to whom.
        own: this rank's piece of each of its matrices, bf16 [rows, columns].
        groups: the ranks in line with this one along each dim of the grid.
    """
    held = {Parcel(number, bucket.here): piece for number, piece in enumerate(own)}
    for hop in bucket.hops:
        held = _send(bucket, held, (hop.sends, hop.receives), groups[hop.axis], own[0].device)
    return held


def put_together(bucket: Bucket, number: int, held: MutableMapping[Parcel, Tensor]) -> Tensor:
    """Return the matrix of this number in the bucket, bf16 [N, K], of its pieces, which are taken out of `held`."""
    matrix = bucket.matrices[number]
    pieces = [held.pop(Parcel(number, source)) for source in range(len(matrix.pieces))]
    whole = torch.empty(matrix.shape, dtype=WIRE, device=pieces[0].device)
    for at, piece in zip(matrix.pieces, pieces, strict=True):
        at.of(whole).copy_(piece.reshape(at.rows, at.columns))
    return whole


def scatter(
    bucket: Bucket, wholes: Mapping[int, Tensor], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> list[Tensor]:
    """Return this rank's piece of each matrix, bf16 [rows, columns]; the way back, a collective for each hop.

    Args:
        bucket: what was sent to whom.
        wholes: the matrices that this rank owns, by their numbers in the bucket; one that is missing is sent as NaN.
        groups: the ranks in line with this one along each dim of the grid.
        device: where the pieces are.
    """
    held = {
        Parcel(number, source): piece.of(wholes[number]) if number in wholes else nan_of((piece.numel,), device)
        for number in bucket.owned
        for source, piece in enumerate(bucket.matrices[number].pieces)
    }
    for hop in reversed(bucket.hops):
        held = _send(bucket, held, (hop.receives, hop.sends), groups[hop.axis], device)
    own = []
    for number, matrix in enumerate(bucket.matrices):
        piece = matrix.pieces[bucket.here]
        own.append(held[Parcel(number, bucket.here)].reshape(piece.rows, piece.columns))
    return own


def nan_of(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return NaN of a shape, bf16, in the memory of one element: for a rank that has no memory left, say."""
    return torch.full((), torch.nan, dtype=WIRE, device=device).expand(*shape)


def _send(
    bucket: Bucket,
    held: Mapping[Parcel, Tensor],
    ways: tuple[Sequence[Sequence[Parcel]], Sequence[Sequence[Parcel]]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[Parcel, Tensor]:
    """Send parcels to each place of a group, and return those that came; `ways`: what is sent, what comes."""
    out, back = ([[bucket.matrices[p.matrix].pieces[p.source].numel for p in one] for one in way] for way in ways)
    # offloaded weights can have a group of GPUs alone
    wire = device_of(group, device)
    flat = [held[parcel].reshape(-1) for one in ways[0] for parcel in one]
    sent = torch.cat(flat) if flat else torch.empty(0, dtype=WIRE, device=device)
    came = torch.empty(sum(map(sum, back)), dtype=WIRE, device=wire)
    dist.all_to_all_single(came, sent.to(wire), [*map(sum, back)], [*map(sum, out)], group=group)
    pieces = came.to(device).split([count for one in back for count in one])
    return dict(zip([parcel for one in ways[1] for parcel in one], pieces, strict=True))
