"""What a load writes into if nothing is converted: the parts of live weights, which alias them."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from dcp_adapters.plain.plain_memory import plain_among
from dcp_adapters.records.expand import Leaf, merge, settled_parts
from dcp_adapters.records.part_places import Box, PartBoxes, PartPiece
from fsdp_hooks.torch_private import local_of, without_torch_function
from fsdp_hooks.writable import unwritable
from qtensor.spec.registry import tensor_wide
from qtensor.tensor.quantized_tensor import QuantizedTensor

Pieces = dict[str, list[PartPiece]]


def local_parts(leaves: Mapping[str, Leaf]) -> tuple[dict[str, Any], dict[str, Box], Pieces]:
    """Return leaves with each quantized one replaced by its local parts, which alias it, and the boxes of these.

    The third are parts of leaves that say themselves where they lie, in several pieces; a leaf of one piece is that.

    Raises:
        ValueError: two have one name; a column cut does not fall on block boundaries; the shards of a gathered weight
            hold different tensor-wide scales.
    """
    out, found, boxes, known = dict[str, Any](), list[dict[str, Any]](), dict[str, Box](), PartBoxes()
    several: Pieces = {}
    # each attribute of a subclass would go through __torch_function__, thousands of times
    with without_torch_function():
        for name, leaf in leaves.items():
            q = leaf.quantized
            if leaf.place is not None:
                own_pieces: Pieces = {}
                for piece in leaf.pieces(name):
                    own_pieces.setdefault(name if q is None else f"{name}.{piece.spec.name}", []).append(piece)
                _refuse_shared_boxes(own_pieces)
                found.append({entry: pieces[0].data for entry, pieces in own_pieces.items()})
                boxes |= {entry: pieces[0].box for entry, pieces in own_pieces.items() if len(pieces) == 1}
                several |= {entry: pieces for entry, pieces in own_pieces.items() if len(pieces) > 1}
                continue
            if q is None:
                found.append({name: leaf.plain})
                continue
            places, parts = known.of(name, leaf.value, q), settled_parts(name, q)
            own = {f"{name}.{part}": box for part, box in places.items()}
            boxes |= own
            found.append({entry: parts[part] for entry, part in zip(own, places, strict=True)})
    merge(out, *found)
    return out, boxes, several


def _refuse_shared_boxes(pieces: Pieces) -> None:
    """Raise ValueError if two pieces of one part have the same box: DCP finds what it writes by where it begins."""
    for entry, own in pieces.items():
        if len({piece.box[0] for piece in own}) < len(own):
            raise ValueError(
                f"{entry}: two pieces of this rank's tensor begin at one place, as the scales of rows do of which "
                "the tensor has several pieces; load into a tensor for each (PlacedShard), under names of their own"
            )


def not_writable(leaves: Mapping[str, Leaf], names: Collection[str]) -> list[str]:
    """Return why some of the named leaves cannot be written in place, a sentence each.

    torch would say so when they are written, when others are loaded already. Classes of other libraries are left out.
    """
    tensors: dict[str, Tensor] = {}
    with without_torch_function():
        for name in names:
            leaf = leaves[name]
            if leaf.quantized is not None:
                tensors |= {f"{name}.{part}": tensor for part, tensor in leaf.quantized.parts().items()}
            elif leaf.local is not None:
                tensors[name] = leaf.local if leaf.plain is leaf.value else local_of(leaf.plain)
        plain = plain_among(tensors)
    return [f"{name}: {why}" for name, why in unwritable(plain).items()]


def vectors_of(quantized: Mapping[str, QuantizedTensor]) -> dict[str, Tensor]:
    """Return part name -> the vector of a gathered weight's tensor-wide values, which the one value read replaces."""
    vectors = {}
    for name, q in quantized.items():
        if q._sharding.shards is None and not q._lens.some_rows:
            continue
        wide = tensor_wide(q.recipe)
        if wide and q._lens.some_rows:
            raise ValueError(
                f"{name}: the target is some rows of a larger tensor and shares its {wide} with the others; load all "
                "of it at once"
            )
        if wide and q._sharding.shards is not None:
            vectors[f"{name}.{wide}"] = q.parts()[wide]
    return vectors
