"""Plans of Muon on sharded matrices: every piece reaches its owner and comes back, and the work is shared out."""

from __future__ import annotations

import itertools
import math

import pytest

from qtensor.optim.matrices.pieces import Piece
from qtensor.optim.matrices.plan import Bucket, Hop, Matrix, Parcel, plan, work_of
from qtensor.scales.cut_blocks import piece_of

GRIDS = [(), (1,), (2,), (3,), (2, 2), (3, 2), (2, 2, 2)]
SHAPES = ((96, 64), (33, 7), (3, 64), (64, 96), (1, 5), (64, 96))


def matrices(sizes: tuple[int, ...]) -> tuple[Matrix, ...]:
    """Rows are cut along every dim of the grid but the second, which cuts columns."""
    found = []
    for rows, columns in SHAPES:
        pieces = []
        for place in itertools.product(*map(range, sizes)):
            cuts = list(zip(sizes, place, strict=True))
            own = piece_of(rows, [cut for axis, cut in enumerate(cuts) if axis != 1]), piece_of(columns, cuts[1:2])
            pieces.append(Piece(*own[0], *own[1]))
        found.append(Matrix((rows, columns), tuple(pieces)))
    return tuple(found)


def plans(sizes: tuple[int, ...], most: int = 2**20) -> list[tuple[Bucket, ...]]:
    return [plan(matrices(sizes), sizes, here, most) for here in itertools.product(*map(range, sizes))]


def send(held: list[set[Parcel]], hops: list[Hop], places: list[tuple[int, ...]], *, back: bool) -> list[set[Parcel]]:
    """What each rank holds behind one hop; raises if two ends do not list the same parcels."""
    came: list[set[Parcel]] = [set() for _ in places]
    for rank, hop in enumerate(hops):
        for place, parcels in enumerate(hop.receives if back else hop.sends):
            peer = places.index((*places[rank][: hop.axis], place, *places[rank][hop.axis + 1 :]))
            other = hops[peer].sends if back else hops[peer].receives
            assert other[places[rank][hop.axis]] == parcels
            assert set(parcels) <= held[rank]
            came[peer] |= set(parcels)
    return came


@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_all_pieces_reach_their_owner_and_come_back(sizes: tuple[int, ...]) -> None:
    places = list(itertools.product(*map(range, sizes)))
    for own in zip(*plans(sizes, 1500), strict=True):
        count, owners = len(own[0].matrices), own[0].owners
        assert all(bucket.owners == owners for bucket in own)
        first = held = [{Parcel(matrix, rank) for matrix in range(count)} for rank in range(len(places))]
        for axis in range(len(sizes)):
            held = send(held, [bucket.hops[axis] for bucket in own], places, back=False)
        for rank, parcels in enumerate(held):
            whole = [matrix for matrix in range(count) if owners[matrix] == rank]
            assert parcels == {Parcel(matrix, source) for matrix in whole for source in range(len(places))}
        for axis in reversed(range(len(sizes))):
            held = send(held, [bucket.hops[axis] for bucket in own], places, back=True)
        assert held == first


@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_buckets_hold_what_fits_and_each_matrix_once(sizes: tuple[int, ...]) -> None:
    ranks = math.prod(sizes)
    for most in (1, 1500, 2**20):
        (buckets, *_) = plans(sizes, most)
        assert [shape for bucket in buckets for shape, _ in bucket.matrices] == list(SHAPES)
        assert [bucket.first for bucket in buckets] == [
            sum(len(one.matrices) for one in buckets[:number]) for number in range(len(buckets))
        ]
        for bucket in buckets:
            elements = sum(math.prod(matrix.shape) for matrix in bucket.matrices)
            assert len(bucket.matrices) == 1 or elements <= most * ranks
    assert len(buckets) == 1


def test_the_work_of_layers_that_are_alike_is_shared_out() -> None:
    """32 layers of 4 square matrices, one wide and one tall on 8 ranks: no rank has 1.1 times the mean."""
    shapes = [*([(64, 64)] * 4), (256, 64), (64, 256)] * 32
    own = tuple(Matrix(shape, ()) for shape in shapes)
    for most in (2**14, 2**30):
        loads = [0] * 8
        for bucket in plan(own, (8,), (0,), most):
            for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
                loads[owner] += work_of(matrix.shape)
        assert max(loads) <= 1.1 * sum(loads) / 8
