"""Fills the containers of a parent, in a run with stand-ins, with what its layers would put into them.

A dict, list or object that several layers get is one live object for each batch, which the layers fill when they run.
The parent makes a new one in every run, and may look into it: between layers, or behind the last one.
"""

from collections.abc import Collection
from typing import Any

from torch import Tensor

from layerwise.inputs.recording.shared_objects import SharedObject
from layerwise.inputs.values.calls import items_of, restore_container, state_of_container
from layerwise.inputs.values.contents import content_hash
from layerwise.inputs.values.stand_ins import TensorSpec
from layerwise.inputs.values.structure import flatten, unflatten


def fill(index: int, sight: SharedObject, keys: Collection[Any], *, real: bool, zeros: dict[Any, Tensor]) -> None:
    """Put into the parent's container what a layer puts there.

    Args:
        index: of the layer.
        sight: of the parent's container and the live one.
        keys: the keys, indices or attributes that layers set.
        real: the live one holds what this very layer left. Otherwise its tensors come as placeholders.
        zeros: memory of placeholders.
    """
    live, own = items_of(state_of_container(sight.live)), items_of(state_of_container(sight.value))
    if real:
        leaves, structure = flatten(list(live.values()))
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        values = dict(zip(live, unflatten(structure, copies), strict=True))
    else:
        values = {**own, **{key: _unknown(index, live[key], zeros) for key in keys if key in live}}
    restore_container(sight.value, list(values.values()) if isinstance(sight.value, list) else values)
    sight.state = state_of_container(sight.value)
    sight.filled = content_hash(sight.value)


def _unknown(index: int, example: Any, zeros: dict[Any, Tensor]) -> Any:
    """A value like this one, with placeholders for its tensors."""
    leaves, structure = flatten(example)
    specs = [TensorSpec.of(leaf) for leaf in leaves]
    made = [spec.placeholder(index, zeros) if spec else leaf for spec, leaf in zip(specs, leaves, strict=True)]
    return unflatten(structure, made)
