"""What this rank holds of the tensors of a state dict, as pieces of their parts, and which of them it counts.

Each element counts once over all ranks. If several hold it (replicas, tensor-wide scales, scales of whole rows under
column cuts), the rank at coordinate 0 of the mesh dims that do not cut the part counts it, on the mesh that has the
first rank of the group; of a tensor without a mesh, that first rank itself.

Where a shard lies is computed once for all weights that are alike; a model repeats its layers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dcp_adapters.plain.plain_memory import why_no_bytes
from dcp_adapters.records.entry import PartShape
from dcp_adapters.records.expand import entry_of, quantized_local, settled_parts
from dcp_adapters.records.part_places import Box, box_of
from dcp_adapters.records.placements import placement_problem
from dcp_adapters.records.weight_sums import digested_parts
from fsdp_hooks.kernels.byte_sums import TensorPiece
from fsdp_hooks.ranks.across_ranks import Ranks, is_counted, is_first
from fsdp_hooks.torch_private import compute_local_shape_and_global_offset, local_of
from qtensor.spec.format import PartSpec


@dataclass(frozen=True)
class PartShare:
    """One part of a tensor.

    Attributes:
        name: of the tensor.
        part: its name; "" for a dense tensor.
        dtype, shape: of the whole part.
        held: this rank's piece of it; None if this rank holds none, or another one counts it.
        device: of what this rank holds.
    """

    name: str
    part: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    held: TensorPiece | None
    device: torch.device

    @property
    def numel(self) -> int:
        """The number of elements of the whole part."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        """Return what must be the same on all ranks."""
        return f"{self.name}{self.part and '.'}{self.part}: {self.dtype} {self.shape}"


@dataclass(frozen=True)
class _PartPlace:
    """Where one part of weights of one kind lies; box: None if this rank does not count it."""

    part: str
    whole: PartShape
    box: Box | None


class Shares:
    """The shares of one state dict's tensors.

    Args:
        group: the ranks that hold it; None: all.
    """

    def __init__(self, group: Ranks) -> None:
        self._group = group
        self._known: dict[object, list[_PartPlace]] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> list[PartShare]:
        """Return a share for each part of each tensor, sorted by name and part.

        Raises:
            ValueError: this rank's local tensor is no box of the whole, or its memory is freed.
        """
        return [share for name in sorted(tensors) for share in self._make_shares(name, tensors[name])]

    def _make_shares(self, name: str, value: Tensor) -> list[PartShare]:
        q, local = quantized_local(value), local_of(value)
        parts = {"": local} if q is None else settled_parts(name, q)
        placed = (value.device_mesh, value.placements) if isinstance(value, DTensor) else None
        # All that a place depends on, but for the name.
        key = (value.shape, value.dtype, local.shape, None if q is None else q.recipe, placed)
        places = self._known.get(key)
        if places is None:
            places = self._known[key] = self._find_places(name, value)
        found = []
        for place in places:
            data, (dtype, shape) = parts[place.part], place.whole
            # A tensor whose memory FSDP has freed would be summed as if it held values.
            reason = why_no_bytes(data)
            if reason is not None:
                raise ValueError(f"{name}: {reason}")
            # A local tensor that is no box of the whole would give sums that no other sharding has.
            if place.box is not None and tuple(data.shape) != place.box[1]:
                raise ValueError(
                    f"{name}: this rank holds {tuple(data.shape)} of its {place.part or 'values'}, expected "
                    f"{place.box[1]} of {shape}"
                )
            held = None if place.box is None else TensorPiece(data, shape, place.box[0])
            found.append(PartShare(name, place.part, dtype, shape, held, data.device))
        return found

    def _find_places(self, name: str, value: Tensor) -> list[_PartPlace]:
        problem = placement_problem(value)
        if problem is not None:
            raise ValueError(f"{name}: {problem}")
        entry, box = entry_of(name, value), _box(name, value)
        wholes, specs = digested_parts(entry), {spec.name: spec for spec in entry.specs()}
        places = []
        for part in sorted(wholes):
            # Scales have a box of their own, smaller than the weight's by the size of their blocks.
            own = None if box is None or not self._is_counted(specs[part], value) else box
            if own is not None and entry.recipe is not None:
                own = specs[part].box(*own)
            places.append(_PartPlace(part, wholes[part], own))
        return places

    def _is_counted(self, spec: PartSpec, value: Tensor) -> bool:
        """Tell whether this rank, among those that hold its piece of a part, is the one that counts it."""
        if not isinstance(value, DTensor):
            return is_first(self._group)
        if not is_counted(value.device_mesh, self._group):
            return False
        ndim = value.ndim
        coordinate = value.device_mesh.get_coordinate() or ()
        # A mesh dim that cuts the weight need not cut the part: a shard of columns has the scales of whole rows.
        cuts = (
            (dim := getattr(placement, "dim", None)) is not None and spec.extends_along(dim % ndim, ndim)
            for placement in value.placements
        )
        return not any(at and not cut for at, cut in zip(coordinate, cuts, strict=True))


def _box(name: str, value: Tensor) -> Box | None:
    """Return where this rank's shard lies; None if the rank is outside of the mesh."""
    q = quantized_local(value)
    if q is not None:
        return box_of(name, value, q)
    if not isinstance(value, DTensor):
        return (0,) * value.ndim, tuple(value.shape)
    if value.device_mesh.get_coordinate() is None:
        return None
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(offsets), tuple(sizes)
