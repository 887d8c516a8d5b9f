"""Place the parts of a shard: this follows from where the weight's shard lies and which dims a part extends along.

    payload, scale [N, K // block]    cut with the weight; columns divided by the part's block
    scale [N, 1]                      cut with the rows, whole if columns are cut
    global_scale []                   whole everywhere

Saving and loading use boxes, DTensors use placements.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from dcp_adapters.plain.described import Place
from fsdp_hooks.torch_private import compute_local_shape_and_global_offset
from qtensor.spec.format import PartSpec
from qtensor.spec.registry import block_multiple, specs_of
from qtensor.tensor.quantized_tensor import QuantizedTensor

Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offsets, sizes) in the global tensor


class PartPiece(NamedTuple):
    """A piece of one part: its box in the whole part, and its bytes, which alias the local tensor."""

    spec: PartSpec
    box: Box
    data: Tensor


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
    refuse_split_blocks(name, q, value.shape, (offsets, sizes), q.shape)
    return tuple(offsets), tuple(sizes)


def refuse_split_blocks(
    name: str, q: QuantizedTensor, shape: Sequence[int], box: Box, held: Sequence[int] | None = None
) -> None:
    """Raise ValueError if a box of a tensor of this shape splits a block, or `held`, what a rank has, is another."""
    offsets, sizes = box
    # A block that two ranks share would have two scales; what ends the tensor may be less than a block.
    multiple, end = block_multiple(q.recipe), offsets[-1] + sizes[-1]
    splits = offsets[-1] % multiple or (end % multiple and end != shape[-1])
    if splits or (held is not None and tuple(sizes) != tuple(held)):
        raise ValueError(
            f"{name}: a shard of {tuple(held or sizes)} at {tuple(offsets)} out of {tuple(shape)}, expected "
            f"{tuple(sizes)}: column cuts must fall on multiples of {multiple}; choose a mesh that divides K into such "
            "pieces"
        )


def part_pieces(name: str, place: Place, parts: dict[str, Tensor], q: QuantizedTensor | None) -> list[PartPiece]:
    """Return the pieces of all parts of a leaf, the payload's first.

    Args:
        name: of the leaf.
        place: of the leaf.
        parts: its local parts; those of a dense leaf are {"": the tensor}.
        q: the local quantized tensor, None for a dense one.

    Raises:
        ValueError: a piece of a quantized tensor begins or ends inside of a block.
    """
    if q is not None:
        for piece in place.pieces:
            refuse_split_blocks(name, q, place.shape, (piece.offsets, piece.sizes))
            if piece.local[-1] % block_multiple(q.recipe) and piece.sizes[-1]:
                raise ValueError(
                    f"{name}: a piece of {piece.sizes} begins at {piece.local} of the local tensor, expected a "
                    f"multiple of {block_multiple(q.recipe)} columns, where a block of {q.recipe} begins"
                )
    found: list[PartPiece] = []
    for spec in (PartSpec("", parts[""].dtype),) if q is None else specs_of(q.recipe):
        for offsets, sizes, local in place.pieces:
            # a dense tensor may have no dims, of which no spec knows
            box, own = ((at, sizes) if q is None else spec.box(at, sizes) for at in (offsets, local))
            found.append(PartPiece(spec, box, _cut(parts[spec.name], own)))
            # one value for all rows: each piece has the same
            if not spec.per_row:
                break
    return found


def _cut(part: Tensor, box: Box) -> Tensor:
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        if part.shape[dim] != size:
            part = part.narrow(dim, start, size)
    return part


def part_placement(spec: PartSpec, placement: Placement, ndim: int) -> Placement:
    """Return how a part is placed on a mesh dim on which the weight has `placement`."""
    dim = getattr(placement, "dim", None)
    if dim is None or (spec.extends_along(dim % ndim, ndim)):
        return placement
    return Replicate()
