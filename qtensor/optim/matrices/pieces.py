"""Which piece of a matrix [N, K] each rank holds, for every mesh and placement."""

import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_hooks.torch_private import local_of
from qtensor.scales.cut_blocks import cuts_along, piece_of


class Piece(NamedTuple):
    """Rows and columns of a matrix: the first, and how many."""

    row: int
    rows: int
    column: int
    columns: int

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.rows * self.columns

    def of(self, matrix: Tensor) -> Tensor:
        """Return this piece of a whole matrix, a view."""
        return matrix[self.row : self.row + self.rows, self.column : self.column + self.columns]


class Grid(NamedTuple):
    """The ranks that hold a matrix between them: a place along each mesh dim that cuts it.

    Ranks are numbered by their places, the last dim first. Without such a dim this rank has all of it.
    """

    mesh: DeviceMesh | None
    axes: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of places along each dim."""
        return tuple(self.mesh.size(axis) for axis in self.axes) if self.mesh is not None else ()

    @property
    def here(self) -> tuple[int, ...]:
        """This rank's place along each dim."""
        return tuple(self.mesh.get_local_rank(axis) for axis in self.axes) if self.mesh is not None else ()

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The ranks in line with this one along each dim."""
        return [self.mesh.get_group(axis) for axis in self.axes] if self.mesh is not None else []


WHOLE = Grid(None, ())


def is_here(param: Tensor) -> bool:
    """Return whether this rank holds any piece of a parameter, be it empty: one outside of its mesh does not."""
    return not isinstance(param, DTensor) or param.device_mesh.get_coordinate() is not None


def grid_of(param: Tensor) -> Grid:
    """Return which ranks hold a parameter between them; replicas of a piece are in grids of their own."""
    if not isinstance(param, DTensor) or not is_here(param):
        return WHOLE
    mesh = param.device_mesh
    # FSDP over TP on the same dim is a strided placement, which answers False to is_shard()
    cut = [axis for axis, place in enumerate(param.placements) if hasattr(place, "dim") and mesh.size(axis) > 1]
    return Grid(mesh, tuple(cut)) if cut else WHOLE


class Cut(NamedTuple):
    """How a matrix is cut: its shape, the mesh's, the placements, and the mesh dims that cut it."""

    shape: tuple[int, int]
    mesh: tuple[int, ...]
    placements: tuple[object, ...]
    axes: tuple[int, ...]


def cut_of(param: DTensor, grid: Grid) -> Cut:
    """Return how a parameter is cut over its grid."""
    rows, columns = param.shape
    return Cut((rows, columns), tuple(param.device_mesh.shape), param.placements, grid.axes)


@functools.lru_cache(maxsize=4096)
def pieces_of(cut: Cut) -> tuple[Piece, ...]:
    """Return what each rank of a grid holds of a matrix, by their numbers.

    Raises:
        NotImplementedError: it is several runs of rows.
    """
    found = []
    along = [cuts_along(dim, 2, cut.mesh, cut.placements) for dim in range(2)]
    for places in itertools.product(*(range(cut.mesh[axis]) for axis in cut.axes)):
        at = dict(zip(cut.axes, places, strict=True))
        own = [piece_of(cut.shape[dim], [(cut.mesh[axis], at[axis]) for axis in along[dim]]) for dim in range(2)]
        found.append(Piece(*own[0], *own[1]))
    return tuple(found)


def number_of(places: Iterable[int], sizes: Iterable[int]) -> int:
    """Return a rank's number in its grid."""
    number = 0
    for place, size in zip(places, sizes, strict=True):
        number = number * size + place
    return number


def check_matrices(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if a parameter is no matrix whose pieces are known.

    Raises:
        ValueError: it is no matrix.
        NotImplementedError: its shards are not single rectangles, as torch.chunk cuts them.
    """
    for name, param in named:
        shape = tuple(param.shape)
        if param.ndim != 2:
            kind = "a stack of matrices (experts, say)" if param.ndim > 2 else "no matrix"
            raise ValueError(
                f"MasterWeightOptimizer(Muon): {name} has shape {shape}, {kind}; Muon takes matrices [N, K] alone. "
                "Give it to another optimizer, such as MasterWeightOptimizer(torch.optim.AdamW, ..), beside this one"
            )
        if not isinstance(param, DTensor) or not is_here(param):
            continue
        try:
            grid = grid_of(param)
            own = pieces_of(cut_of(param, grid))[number_of(grid.here, grid.sizes)]
            held = tuple(local_of(param).shape)
            why = None if held == (own.rows, own.columns) else f"this rank holds {held}, and not {own}"
        except NotImplementedError:
            why = "this rank's rows are several runs"
        if why is not None or any(place.is_partial() for place in param.placements):
            raise NotImplementedError(
                f"MasterWeightOptimizer(Muon): {name} of shape {shape} is placed as {tuple(param.placements)} on a "
                f"mesh of {tuple(param.device_mesh.shape)}, {why or 'sums that are not complete'}; shard it by "
                "fully_shard or parallelize_module, or redistribute it to Shard() first"
            )
