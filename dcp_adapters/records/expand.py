"""Quantized leaves of a state dict as the plain part tensors they consist of.

    w: DTensor(MXFP8 [N, K])  ->  w.payload: DTensor(float8 [N, K]),  w.scale: DTensor(uint8 [N, K // 32])

The parts alias the live bytes and keep the weight's mesh and placements, with one exception: a part is replicated on a
mesh dim that cuts the weight along a dim the part does not extend along (0-dim scales; `[N, 1]` scales under column
cuts). So stock DCP deduplicates, validates, reshards and writes them, and reading into them writes the weight.

    leaves_of      what each leaf of a flat state dict is, looked at once
    settled_parts  the parts of one local tensor; the planners, which know the box of every part (part_places.py), take
                   them as they are
    expand_leaf    one leaf, its parts as DTensors where it is one; exports stand on it
    expand         a state dict, leaf by leaf
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dcp_adapters.plain.described import CHUNKS, ITEMS, Place, described_problem, place_of
from dcp_adapters.plain.placed_shard import PlacedShard
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.part_places import PartPiece, part_pieces, part_placement
from fsdp_hooks.torch_private import (
    compute_local_shape_and_global_offset,
    dtensor_around,
    local_of,
    named_locals_of,
    without_torch_function,
)
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.format import PartSpec
from qtensor.spec.registry import block_multiple, specs_of, tensor_wide
from qtensor.tensor.quantized_tensor import QuantizedTensor


class Leaf(NamedTuple):
    """A leaf of a state dict, looked at once.

    value: as it stands there, of a PlacedShard the local tensor. local: its local tensor; None for what is no tensor.
    quantized: the same, if it is quantized. plain: the value, but of storage="high_precision" the dense tensor that it
    is, aliased. place: where it lies, if it says so itself; then `value` does not tell it.
    """

    value: Any
    local: Tensor | None
    quantized: QuantizedTensor | None
    plain: Any
    place: Place | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(self.value.shape) if self.place is None else self.place.shape

    def pieces(self, name: str) -> list[PartPiece]:
        """Return the pieces of the parts of a leaf that has a place, see `part_pieces`."""
        assert self.place is not None
        q = self.quantized
        parts = {"": local_of(self.plain).detach()} if q is None else settled_parts(name, q)
        return part_pieces(name, self.place, parts, q)


def leaves_of(flat: Mapping[str, Any]) -> dict[str, Leaf]:
    """The leaves of a flattened state dict. Raises ValueError as `refuse_hidden` and `place_of`."""
    leaves = {}
    with without_torch_function():  # attributes of a subclass go through it, thousands of times
        flat_values = {name: value.local if isinstance(value, PlacedShard) else value for name, value in flat.items()}
        local = named_locals_of(flat_values)
        for name, value in flat_values.items():
            own = local.get(name)
            if own is None:
                refuse_hidden(name, value)
            plain = plain_leaf(value) if isinstance(own, HighPrecisionWeight) else value
            q = own if isinstance(own, QuantizedTensor) else None
            # asked only of those that may: there are thousands
            tells = flat[name] is not value or hasattr(own, CHUNKS) or hasattr(value, "global_shape")
            place = place_of(name, flat[name]) if tells else None
            # its class has a method of one of these names, which refuses DCP's own planners
            if place is None and q is not None and not {CHUNKS, ITEMS}.isdisjoint(vars(q)):
                raise ValueError(
                    f"{name}: a quantized tensor that tells DCP of chunks of its own by {CHUNKS}, which say nothing of "
                    "its parts; put it into the state dict as a PlacedShard"
                )
            leaves[name] = Leaf(value, own, q, plain, place)
    return leaves


def entries_of(leaves: Mapping[str, Leaf]) -> dict[str, Entry]:
    """What the tensors among leaves are, see `entry_of`."""
    return {
        name: Entry(
            name,
            None if leaf.quantized is None else leaf.quantized.recipe.stored,
            leaf.shape,
            leaf.value.dtype,
        )
        for name, leaf in leaves.items()
        if leaf.local is not None
    }


def expand(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each quantized leaf F of a state dict, nested or flat, by its parts F.payload, F.scale, ...

    The parts alias the weight's bytes; they are DTensors if F was one. In a list a quantized leaf becomes a
    dict of its parts, so that DCP flattens it to the same names. Everything else is passed through as it is.

    Raises:
        ValueError: a part's name is taken already; a column cut does not fall on block boundaries; the shards of a
            gathered weight hold different tensor-wide scales; a leaf says itself where it lies (a PlacedShard, say),
            which its parts could not.

    Example:
        ```python
        >>> state = {"weight": quantize(torch.randn(64, 64), NVFP4BlockScaling()), "bias": torch.zeros(64)}
        >>> list(expand(state))
        ['weight.payload', 'weight.scale', 'weight.global_scale', 'bias']
        ```
    """
    out: dict[str, Any] = {}
    for name, value in state_dict.items():
        _refuse_described(str(name), value)
        parts = {f"{name}.{part}": tensor for part, tensor in expand_leaf(str(name), value).items()}
        merge(out, parts or {name: _expand_container(str(name), plain_leaf(value))})
    return out


def refuse_hidden(name: str, leaf: Any) -> None:
    """Raise ValueError if a leaf that DCP would pickle (a tuple, say) holds a quantized tensor, or a PlacedShard."""
    if _hides(leaf, lambda item: quantized_local(item) is not None):
        raise ValueError(
            f"{name}: a {type(leaf).__name__} holds a quantized tensor, and DCP would pickle it whole; use dicts and "
            "lists, which it flattens (with flatten_state_dict=True)"
        )
    if _hides(leaf, lambda item: isinstance(item, PlacedShard)):
        raise ValueError(
            f"{name}: a {type(leaf).__name__} holds a PlacedShard, and DCP would pickle it whole; use dicts, which it "
            "flattens (with flatten_state_dict=True; lists only if a tensor is among their items)"
        )


def expand_leaf(name: str, value: Any) -> dict[str, Tensor]:
    """Return part name -> part tensor of a quantized leaf; empty for any other value."""
    local = quantized_local(value)
    if local is None:
        return {}
    parts = settled_parts(name, local)
    if not isinstance(value, DTensor):
        return parts
    return {spec.name: _part_dtensor(name, spec, parts[spec.name], value) for spec in specs_of(local.recipe)}


def plain_leaf(value: Any) -> Any:
    """Return the dense tensor of a weight with storage="high_precision", aliased; any other leaf as it is."""
    if not isinstance(value, Tensor):
        return value
    local = local_of(value)
    if not isinstance(local, HighPrecisionWeight):
        return value
    if not isinstance(value, DTensor):
        return local.dense.detach()
    return dtensor_around(local.dense.detach(), value.device_mesh, value.placements, value.shape)


def gathered_leaf(value: Tensor) -> Tensor:
    """Quantize a weight with storage="high_precision" to what a forward gathers; leave any other as it is.

    The scales are those that `fsdp_hooks.sync_scales` has agreed on, if it has.
    """
    local = local_of(value)
    if not isinstance(local, HighPrecisionWeight):
        return value
    quantized = local.quantize()
    if not isinstance(value, DTensor):
        return quantized
    return dtensor_around(quantized, value.device_mesh, value.placements, value.shape)


def quantized_local(value: Any) -> QuantizedTensor | None:
    """Find the quantized tensor behind a leaf (itself, or the local tensor of a DTensor); None for any other value."""
    if not isinstance(value, Tensor):
        return None
    local = local_of(value)
    return local if isinstance(local, QuantizedTensor) else None


def entry_of(name: str, value: Tensor) -> Entry:
    """Describe a tensor of a state dict."""
    q = quantized_local(value)
    return Entry(name, None if q is None else q.recipe.stored, tuple(value.shape), value.dtype)


def _expand_container(name: str, value: Any) -> Any:
    """Expand a dict or list; any other value stays as it is."""
    if isinstance(value, Mapping):
        return expand(value)
    if isinstance(value, list):
        for i, item in enumerate(value):
            _refuse_described(f"{name}.{i}", item)
        return [
            expand_leaf(f"{name}.{i}", item) or _expand_container(f"{name}.{i}", plain_leaf(item))
            for i, item in enumerate(value)
        ]
    return value


def _refuse_described(name: str, value: Any) -> None:
    if (problem := described_problem(value)) is not None:
        raise ValueError(f"{name}: {problem}")


def _hides(leaf: Any, wanted: Callable[[Any], bool]) -> bool:
    """Tell whether a leaf that is no tensor has something inside."""
    items = leaf.values() if isinstance(leaf, Mapping) else leaf if isinstance(leaf, list | tuple | set) else ()
    return any(wanted(item) or _hides(item, wanted) for item in items)


def _part_dtensor(name: str, spec: PartSpec, part: Tensor, weight: DTensor) -> DTensor:
    placements = tuple(part_placement(spec, placement, weight.ndim) for placement in weight.placements)
    shape = spec.shape(weight.shape)
    # A scale has a column for each block. DTensor cuts these as the weight's shards have them only if the weight is
    # cut between blocks; DCP would read the scales of one shard into the next otherwise.
    cuts_columns = any(placement.is_shard(weight.ndim - 1) for placement in weight.placements)
    if cuts_columns and weight.device_mesh.get_coordinate() is not None:
        expected, _ = compute_local_shape_and_global_offset(shape, weight.device_mesh, placements)
        if tuple(expected) != tuple(part.shape):
            multiple = block_multiple(local_of(weight).recipe)  # type: ignore[attr-defined]
            raise ValueError(
                f"{name}: a shard of {tuple(local_of(weight).shape)} out of {tuple(weight.shape)} has a {spec.name} of "
                f"{tuple(part.shape)}, expected {tuple(expected)}: column cuts must fall on multiples of {multiple}; "
                "choose a mesh that divides K into such pieces"
            )
    # Not from_local, which would move a staged CPU part back to the mesh's device.
    return dtensor_around(part, weight.device_mesh, placements, shape)


def settled_parts(name: str, q: QuantizedTensor) -> dict[str, Tensor]:
    """Return the parts, with one value for a gathered weight's vector of tensor-wide values, which must be equal."""
    if q._lens.described is not None:
        raise ValueError(
            f"{name}: a transposed or reshaped view of a quantized weight, whose parts are those of shape "
            f"{q._lens.described}; put the weight itself into the state dict"
        )
    parts = q.parts()
    wide = None if q._sharding.shards is None else tensor_wide(q.recipe)
    if wide is None:
        return parts
    values = parts[wide]
    if not torch.equal(values, values[:1].expand_as(values)):
        raise ValueError(
            f"{name}: the shards of this gathered weight hold different values of {wide}: {values.tolist()}; call "
            "fsdp_hooks.sync_scales on the sharded model first"
        )
    return {**parts, wide: values[0]}


def merge(out: dict[str, Any], *new: Mapping[str, Any]) -> None:
    """Add entries to a state dict. Raises ValueError where it has one of that name already."""
    for name, value in chain.from_iterable(entries.items() for entries in new):
        if name in out:
            raise ValueError(
                f"the state dict holds {name!r} twice: as an entry and as a part of a quantized weight; rename the "
                "entry"
            )
        out[name] = value
