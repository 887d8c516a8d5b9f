"""Which matrices travel together, who owns which, and what is sent to whom: pure decisions, the same on all ranks.

    bucket    matrices that travel together: as many as fit into `most` elements for each rank
    owner     the rank that orthogonalizes a matrix. Beside the others of its bucket, the costliest goes first, to whom
              has the least to do
    hop       one all-to-all along a mesh dim that cuts: parcels go to their owner's place along it

Behind the first hop each parcel is at its owner's place along the first dim, and still at its source's along the
others; behind the last one it is there. The way back is the hops from the last to the first, with both sides exchanged.

What this costs, for matrices of E elements in bf16 on n ranks: each rank sends and receives E/n elements there, and as
many back, and the orthogonalizations are shared out. If each rank gathered every matrix, it would receive all E and
compute n times as much.
"""

import itertools
from typing import NamedTuple

from qtensor.optim.matrices.pieces import Piece, number_of


class Matrix(NamedTuple):
    """A matrix [N, K], and the piece of it that each rank holds."""

    shape: tuple[int, int]
    pieces: tuple[Piece, ...]


class Parcel(NamedTuple):
    """The piece of a matrix that comes from a rank: their numbers in the bucket and in the grid."""

    matrix: int
    source: int


class Hop(NamedTuple):
    """What this rank sends to and gets from each place along a dim of the grid; both ends list parcels alike."""

    axis: int
    sends: tuple[tuple[Parcel, ...], ...]
    receives: tuple[tuple[Parcel, ...], ...]


class Bucket(NamedTuple):
    """Matrices that travel together.

    Attributes:
        first: the number of the first one.
        matrices: all of them, in order.
        owners: the rank that orthogonalizes each.
        hops: the way there.
        here: this rank.
    """

    first: int
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    hops: tuple[Hop, ...]
    here: int

    @property
    def owned(self) -> list[int]:
        """The numbers of the matrices that this rank orthogonalizes."""
        return [number for number, owner in enumerate(self.owners) if owner == self.here]


def plan(matrices: tuple[Matrix, ...], sizes: tuple[int, ...], here: tuple[int, ...], most: int) -> tuple[Bucket, ...]:
    """Return the buckets of matrices that the ranks of a grid hold between them.

    Args:
        matrices: in an order that is the same on all ranks.
        sizes: the number of places along each dim of the grid.
        here: this rank's place along each.
        most: elements for each rank in a bucket; one matrix alone may have more.
    """
    places = list(itertools.product(*map(range, sizes)))
    loads = [0] * len(places)
    buckets = []
    first = 0
    for own in _buckets(matrices, most * len(places)):
        owners = _owners(own, loads)
        hops = tuple(_hop(axis, owners, places, here) for axis in range(len(sizes)))
        buckets.append(Bucket(first, own, owners, hops, number_of(here, sizes)))
        first += len(own)
    return tuple(buckets)


def work_of(shape: tuple[int, int]) -> int:
    """Return the multiplications of one Newton-Schulz iteration: X X', (X X')^2 and its product with X."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def _buckets(matrices: tuple[Matrix, ...], most: int) -> list[tuple[Matrix, ...]]:
    found: list[list[Matrix]] = []
    elements = 0
    for matrix in matrices:
        count = matrix.shape[0] * matrix.shape[1]
        if not found or elements + count > most:
            found.append([])
            elements = 0
        found[-1].append(matrix)
        elements += count
    return [tuple(own) for own in found]


def _owners(matrices: tuple[Matrix, ...], loads: list[int]) -> tuple[int, ...]:
    """Return the owner of each, and add its work to `loads`, which all buckets have in common."""
    now = [0] * len(loads)
    owners = [0] * len(matrices)
    for number in sorted(range(len(matrices)), key=lambda number: -work_of(matrices[number].shape)):
        # ranks wait for each other in each bucket, so what is due in this one comes first
        rank = min(range(len(loads)), key=lambda rank: (now[rank], loads[rank], rank))
        owners[number] = rank
        now[rank] += work_of(matrices[number].shape)
        loads[rank] += work_of(matrices[number].shape)
    return tuple(owners)


def _hop(axis: int, owners: tuple[int, ...], places: list[tuple[int, ...]], here: tuple[int, ...]) -> Hop:
    """Return the hop along a dim; `places`: of each rank of the grid."""
    size = 1 + max(place[axis] for place in places)
    sends: list[list[Parcel]] = [[] for _ in range(size)]
    receives: list[list[Parcel]] = [[] for _ in range(size)]
    for matrix, source in itertools.product(range(len(owners)), range(len(places))):
        to, start = places[owners[matrix]], places[source]
        # on the line of ranks that this hop goes along: at its owner's place before this dim, at its source's behind
        if (*to[:axis], *start[axis + 1 :]) != (*here[:axis], *here[axis + 1 :]):
            continue
        if start[axis] == here[axis]:
            sends[to[axis]].append(Parcel(matrix, source))
        if to[axis] == here[axis]:
            receives[start[axis]].append(Parcel(matrix, source))
    return Hop(axis, tuple(map(tuple, sends)), tuple(map(tuple, receives)))
