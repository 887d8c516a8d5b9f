"""Place the parts of a shard: this follows from where the weight's shard lies and which dims a part extends along.

    payload, scale [N, K // block]    cut with the weight; columns divided by the part's block
    scale [N, 1]                      cut with the rows, whole if columns are cut
    global_scale []                   whole everywhere

Saving and loading use boxes, DTensors use placements.
"""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from fsdp_hooks.torch_private import compute_local_shape_and_global_offset
from qtensor.spec.format import PartSpec
from qtensor.spec.registry import block_multiple, specs_of
from qtensor.tensor.quantized_tensor import QuantizedTensor

Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offsets, sizes) in the global tensor


class PartBoxes:
    """The boxes of the parts of one state dict's weights; weights alike in shape, placement and recipe share theirs."""

    def __init__(self) -> None:
        self._known: dict[object, dict[str, Box]] = {}

    def of(self, name: str, value: Tensor, q: QuantizedTensor) -> dict[str, Box]:
        """Return part -> its box, in the order of the parts; none if this rank is outside of the weight's mesh.

        Raises:
            ValueError: a column cut does not fall on block boundaries.
        """
        key = placement_key(value, q)
        found = self._known.get(key)
        if found is None:
            box = box_of(name, value, q)
            found = {} if box is None else {spec.name: spec.box(*box) for spec in specs_of(q.recipe)}
            self._known[key] = found
        return found


def placement_key(value: Tensor, q: QuantizedTensor) -> object:
    """Return what decides where the parts of a weight lie; valid as long as the weight's mesh is kept alive."""
    placed = (id(value.device_mesh), value.placements) if isinstance(value, DTensor) else None
    return value.shape, q.shape, q.recipe, placed


def box_of(name: str, value: Tensor, q: QuantizedTensor) -> Box | None:
    """Return where this rank's shard of a quantized weight lies; None if the rank is outside of its mesh."""
    if not isinstance(value, DTensor):
        return (0,) * value.ndim, tuple(value.shape)
    if value.device_mesh.get_coordinate() is None:
        return None
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    # A block that two ranks share would have two scales; what ends the tensor may be less than a block.
    multiple, end = block_multiple(q.recipe), offsets[-1] + sizes[-1]
    splits = offsets[-1] % multiple or (end % multiple and end != value.shape[-1])
    if tuple(sizes) != tuple(q.shape) or splits:
        raise ValueError(
            f"{name}: a shard of {tuple(q.shape)} at {tuple(offsets)} out of {tuple(value.shape)}, expected "
            f"{tuple(sizes)}: column cuts must fall on multiples of {multiple}; choose a mesh that divides K into such "
            "pieces"
        )
    return tuple(offsets), tuple(sizes)


def part_placement(spec: PartSpec, placement: Placement, ndim: int) -> Placement:
    """Return how a part is placed on a mesh dim on which the weight has `placement`."""
    dim = getattr(placement, "dim", None)
    if dim is None or (spec.extends_along(dim % ndim, ndim)):
        return placement
    return Replicate()
