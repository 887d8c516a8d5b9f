"""What this rank holds of the tensors of a state dict, as pieces of their parts, and which of them it counts.

Each element counts once over all ranks: where several hold it (replicas, tensor-wide scales, scales of whole rows under
column cuts), the rank at coordinate 0 of the mesh dims that do not cut the part, on the mesh that has the first rank of
the group; of a tensor without a mesh, that first rank itself.

Where a shard lies is asked once for all weights that are alike; a model repeats its layers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dcp_adapters.format.entry import PartShape
from dcp_adapters.format.expand import entry_of, quantized_local, settled_parts
from dcp_adapters.format.part_places import Box, box_of
from dcp_adapters.format.placements import placement_problem
from dcp_adapters.format.weight_sums import digested_parts
from dcp_adapters.plain.plain_memory import why_no_bytes
from fsdp_hooks.kernels.byte_sums import TensorPiece
from fsdp_hooks.ranks.across_ranks import Ranks, is_counted, is_first
from fsdp_hooks.torch_private import compute_local_shape_and_global_offset, local_of
from qtensor.spec.format import PartSpec


@dataclass(frozen=True)
class Share:
    """One part of a tensor. held: this rank's piece of it, None where this rank holds none or another counts it."""

    name: str
    part: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    held: TensorPiece | None
    device: torch.device

    @property
    def numel(self) -> int:
        """Elements of the whole part."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        """What must be the same on all ranks."""
        return f"{self.name}{self.part and '.'}{self.part}: {self.dtype} {self.shape}"


@dataclass(frozen=True)
class _Place:
    """Where one part of weights of one kind lies; box: None where this rank does not count it."""

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
        self._known: dict[object, list[_Place]] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> list[Share]:
        """A share for each part of each tensor, sorted by name and part.

        Raises:
            ValueError: this rank's local tensor is no box of the whole, or its memory is freed.
        """
        return [share for name in sorted(tensors) for share in self._of(name, tensors[name])]

    def _of(self, name: str, value: Tensor) -> list[Share]:
        q, local = quantized_local(value), local_of(value)
        parts = {"": local} if q is None else settled_parts(name, q)
        placed = (value.device_mesh, value.placements) if isinstance(value, DTensor) else None
        key = (value.shape, value.dtype, local.shape, None if q is None else q.recipe, placed)
        places = self._known.get(key)
        if places is None:
            places = self._known[key] = self._places(name, value)
        found = []
        for place in places:
            data, (dtype, shape) = parts[place.part], place.whole
            reason = why_no_bytes(data)
            if reason is not None:
                raise ValueError(f"{name}: {reason}")
            if place.box is not None and tuple(data.shape) != place.box[1]:
                raise ValueError(
                    f"{name}: this rank holds {tuple(data.shape)} of its {place.part or 'values'}, expected "
                    f"{place.box[1]} of {shape}"
                )
            held = None if place.box is None else TensorPiece(data, shape, place.box[0])
            found.append(Share(name, place.part, dtype, shape, held, data.device))
        return found

    def _places(self, name: str, value: Tensor) -> list[_Place]:
        problem = placement_problem(value)
        if problem is not None:
            raise ValueError(f"{name}: {problem}")
        entry, box = entry_of(name, value), _box(name, value)
        wholes, specs = digested_parts(entry), {spec.name: spec for spec in entry.specs()}
        places = []
        for part in sorted(wholes):
            own = None if box is None or not self._counts(specs[part], value) else box
            if own is not None and entry.recipe is not None:
                own = specs[part].box(*own)
            places.append(_Place(part, wholes[part], own))
        return places

    def _counts(self, spec: PartSpec, value: Tensor) -> bool:
        """Whether this rank is the one, among those that hold its piece of a part, that counts it."""
        if not isinstance(value, DTensor):
            return is_first(self._group)
        if not is_counted(value.device_mesh, self._group):
            return False
        ndim = value.ndim
        coordinate = value.device_mesh.get_coordinate() or ()
        cuts = (
            (dim := getattr(placement, "dim", None)) is not None and spec.extends_along(dim % ndim, ndim)
            for placement in value.placements
        )
        return not any(at and not cut for at, cut in zip(coordinate, cuts, strict=True))


def _box(name: str, value: Tensor) -> Box | None:
    """Where this rank's shard lies; None where the rank is outside of the mesh."""
    q = quantized_local(value)
    if q is not None:
        return box_of(name, value, q)
    if not isinstance(value, DTensor):
        return (0,) * value.ndim, tuple(value.shape)
    if value.device_mesh.get_coordinate() is None:
        return None
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(offsets), tuple(sizes)
