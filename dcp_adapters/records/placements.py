"""Find placements under which a rank's local tensor is not one box of the global one: DCP would read wrong rows."""

import math
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement


def placement_problem(value: Any) -> str | None:
    """Say why a leaf can be neither saved nor loaded as it is placed; None if it can."""
    if not isinstance(value, Tensor) or not isinstance(value, DTensor):
        return None
    mesh, placements = value.device_mesh, value.placements
    if any(isinstance(placement, Partial) for placement in placements):
        return (
            f"it is placed as {placements}: each rank holds a term of a sum, and what is read would be added up; "
            "redistribute it to Replicate() or Shard() first"
        )
    for number in range(len(placements)):
        if _scatters(mesh, placements, number):
            return (
                f"it is placed as {placements} on a mesh of {tuple(mesh.shape)}: a rank's rows are several runs, of "
                "which DCP knows the first; redistribute it to Shard() first"
            )
    return None


def _scatters(mesh: DeviceMesh, placements: tuple[Placement, ...], number: int) -> bool:
    """Tell whether a strided placement leaves several runs of rows.

    `split_factor` is the number of pieces into which later mesh dims have already cut the tensor dim, as with FSDP over
    TP. If later mesh dims do not make that many pieces, a rank keeps a run of rows of each.
    """
    factor = getattr(placements[number], "split_factor", 1)
    if factor == 1 or mesh.size(number) == 1:
        return False
    dim = getattr(placements[number], "dim", None)
    later = range(number + 1, len(placements))
    taken = math.prod(mesh.size(other) for other in later if getattr(placements[other], "dim", None) == dim)
    return bool(factor != taken)
