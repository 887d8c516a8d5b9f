"""Where a leaf of a state dict lies that says so itself.

    PlacedShard                     one box, ours
    a tensor with four attributes   global_shape, global_offsets, local_offsets, local_sizes: torch's protocol
                                    CheckpointableTensor (from torch 2.15 on; told by the attributes on any torch).
                                    Several boxes of one local tensor, which may have elements besides them
    a DTensor                       whose local tensor has `__create_chunk_list__`, as those of Megatron-FSDP have: its
                                    shards are uneven, and the place that follows from mesh and placements is another

What stock's planners do with the second and the third for dense tensors, ours do for quantized ones, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from dcp_adapters.plain.placed_shard import PlacedShard
from dcp_adapters.plain.tiling import is_inside
from fsdp_hooks.torch_private import local_of

FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
CHUNKS, ITEMS = "__create_chunk_list__", "__create_write_items__"  # of torch's protocol _Checkpointable


class Piece(NamedTuple):
    """A box of the global tensor, and where it begins in the local one."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """What a leaf says of itself. shape: of the global tensor."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def place_of(name: str, value: Any) -> Place | None:
    """Return where a leaf of a state dict lies, if it says so itself; None for any other.

    Raises:
        ValueError: what it says is not the place of a tensor like this.
    """
    if isinstance(value, PlacedShard):
        return Place(tuple(value.global_shape), (_piece(value.global_shape, value.offsets, value.local.shape),))
    if not isinstance(value, Tensor):
        return None
    if isinstance(value, DTensor):
        chunks = getattr(local_of(value), CHUNKS, None)
        return None if chunks is None else _of_chunks(name, value, chunks())
    if all(hasattr(value, field) for field in FIELDS):
        return _of_protocol(name, value)
    return None


def described_problem(value: Any) -> str | None:
    """Say why code that knows places by mesh and placements alone cannot take a leaf; None if it can."""
    told = (
        isinstance(value, PlacedShard)
        or (isinstance(value, DTensor) and hasattr(local_of(value), CHUNKS))
        or (isinstance(value, Tensor) and not isinstance(value, DTensor) and all(hasattr(value, f) for f in FIELDS))
    )
    if not told:
        return None
    return (
        "it says itself where it lies (a PlacedShard, a CheckpointableTensor, an uneven DTensor), which "
        "QuantizedSavePlanner and QuantizedLoadPlanner alone understand; save it with these and go on from the "
        "checkpoint, or make it a DTensor"
    )


def with_place(local: Tensor, place: Place) -> PlacedShard | Tensor:
    """Return a tensor of this place, as `place_of` tells it; pickled, only what is one piece keeps its place."""
    if len(place.pieces) == 1 and place.pieces[0].sizes == tuple(local.shape):
        return PlacedShard(local, place.shape, place.pieces[0].offsets)
    told = local.detach()  # an object of its own, since two leaves may share one tensor
    offsets, sizes, at = zip(*place.pieces, strict=True) if place.pieces else ((), (), ())
    for field, value in zip(FIELDS, (place.shape, offsets, at, sizes), strict=True):
        setattr(told, field, value)
    return told


def _of_chunks(name: str, value: DTensor, chunks: Sequence[Any]) -> Place:
    """Return the place of a DTensor whose local tensor tells its chunks."""
    shape, own = tuple(value.shape), tuple(local_of(value).shape)
    if len(chunks) != 1 or tuple(chunks[0].sizes) != own:
        told = [f"{tuple(chunk.sizes)} at {tuple(chunk.offsets)}" for chunk in chunks]
        raise ValueError(
            f"{name}: its local tensor of {own} tells chunks of another shape, {', '.join(told) or 'none'}; expected "
            "one chunk, the local tensor. It was replaced after it had been described: describe it again, for "
            "Megatron-FSDP by preprocess_state_dict_for_uneven_dtensor(state_dict)"
        )
    return _checked(name, shape, [_piece(shape, tuple(chunks[0].offsets), own)], own)


def _of_protocol(name: str, value: Any) -> Place:
    """Return the place of a tensor with the attributes of torch's CheckpointableTensor."""
    own = tuple(value.shape)
    shape = tuple(map(int, value.global_shape))
    counts = [len(getattr(value, field)) for field in FIELDS[1:]]
    if len(set(counts)) != 1:
        told = ", ".join(f"{count} {field}" for count, field in zip(counts, FIELDS[1:], strict=True))
        raise ValueError(f"{name}: it describes its pieces by {told}, expected as many of each")
    pieces = [
        _piece(shape, tuple(map(int, offsets)), tuple(map(int, sizes)), tuple(map(int, local)))
        for offsets, local, sizes in zip(value.global_offsets, value.local_offsets, value.local_sizes, strict=True)
    ]
    return _checked(name, shape, pieces, own)


def _piece(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], local: Sequence[int] | None = None
) -> Piece:
    # as torch places empty shards: at the end, where they cover nothing and meet no piece of another rank
    if len(shape) == len(offsets) == len(sizes):
        offsets = [full if not own else at for at, own, full in zip(offsets, sizes, shape, strict=True)]
    return Piece(tuple(offsets), tuple(sizes), tuple(local or (0,) * len(tuple(sizes))))


def _checked(name: str, shape: tuple[int, ...], pieces: Sequence[Piece], own: tuple[int, ...]) -> Place:
    for piece in pieces:
        if not is_inside(shape, (piece.offsets, piece.sizes)) or not is_inside(own, (piece.local, piece.sizes)):
            raise ValueError(
                f"{name}: it describes a piece of {piece.sizes} at {piece.local} of its local tensor, {own}, and at "
                f"{piece.offsets} of {shape}; expected one inside of both, as many dims of each"
            )
    for one, other in _meeting(pieces):
        raise ValueError(
            f"{name}: two pieces have the same elements of the local tensor, {one.sizes} at {one.local} and "
            f"{other.sizes} at {other.local}; expected elements of its own for each"
        )
    return Place(shape, tuple(pieces))


def _meeting(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Piece]]:
    """Yield pairs of pieces that have elements of the local tensor in common."""
    ordered = sorted((piece for piece in pieces if 0 not in piece.sizes), key=lambda piece: piece.local)
    for number, one in enumerate(ordered):
        for other in ordered[number + 1 :]:
            # sorted by where they begin: whatever follows begins behind this one's rows, too
            if one.local and other.local[0] >= one.local[0] + one.sizes[0]:
                break
            if all(
                max(a, b) < min(a + m, b + n)
                for a, m, b, n in zip(one.local, one.sizes, other.local, other.sizes, strict=True)
            ):
                yield one, other
