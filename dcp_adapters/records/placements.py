"""Find placements under which a rank's local tensor is not one box of the global one: DCP would read wrong rows."""

import math
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement

from dcp_adapters.plain.described import described_problem
from fsdp_hooks.torch_private import compute_local_shape_and_global_offset, local_of


def placement_problem(value: Any) -> str | None:
    """Say why a leaf is not read or written at the place that mesh and placements tell; None if it is."""
    told = described_problem(value)
    if told is not None or not isinstance(value, Tensor) or not isinstance(value, DTensor):
        return told
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
    return unevenness(value)


def placement_kind(value: DTensor) -> object:
    """Return what `placement_problem` depends on; valid as long as the mesh is kept alive."""
    return id(value.device_mesh), value.placements, value.shape, local_of(value).shape


def unevenness(value: DTensor) -> str | None:
    """Say that the local tensor is not the one that torch cuts out: what is said of the place would be wrong."""
    mesh, placements = value.device_mesh, value.placements
    if mesh.get_coordinate() is None:
        return None
    own = tuple(local_of(value).shape)
    sizes, _ = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    # FSDP2 leaves (0, 0) of what tensor parallelism has cut to [16, 0]; there is nothing to misplace
    if tuple(sizes) == own or (0 in sizes and 0 in own):
        return None
    return (
        f"it is placed as {placements} on a mesh of {tuple(mesh.shape)}, which cuts {tuple(sizes)} of "
        f"{tuple(value.shape)} for this rank, and its local tensor has {own}: nothing says where that "
        "lies. Let it say so: DTensors of Megatron-FSDP do after preprocess_state_dict_for_uneven_dtensor(state_dict), "
        "any other shard as a dcp_adapters.PlacedShard"
    )


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
