"""Fills the containers of a parent, in a run with stand-ins, with what its layers would put into them.

A dict, list or object that several layers get is one live object for each batch, which the layers fill when they run.
The parent makes a new one in every run, and may look into it: between layers, or behind the last one.
"""

from collections.abc import Collection
from typing import Any

from torch import Tensor

from layerwise.inputs.recording.shared_objects import SharedObject
from layerwise.inputs.values.calls import is_value, items_of, restore_container, state_of_container
from layerwise.inputs.values.contents import content_hash
from layerwise.inputs.values.stand_ins import Placeholder, TensorSpec
from layerwise.inputs.values.structure import flatten, unflatten


def fill(index: int, sight: SharedObject, keys: Collection[Any], *, real: bool, zeros: dict[Any, Tensor]) -> None:
    """Put into the parent's container what a layer puts into the live one.

    Args:
        index: of the layer.
        sight: of the parent's container and the live one.
        keys: the keys, indices or attributes that layers set.
        real: the live one holds what this very layer left. Otherwise its tensors come as placeholders.
        zeros: memory of placeholders.
    """
    live, own = items_of(state_of_container(sight.live)), items_of(state_of_container(sight.value))
    if real:
        # Copies: the parent may write into its tensors, and later layers read those of the live container.
        leaves, structure = flatten(list(live.values()))
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        values = dict(zip(live, unflatten(structure, copies), strict=True))
    else:
        values = {**own, **{key: _make_unknown(index, live[key], zeros) for key in keys if key in live}}
    restore_container(sight.value, list(values.values()) if isinstance(sight.value, list) else values)
    # From now on the parent's container counts as unchanged in this state.
    sight.state = state_of_container(sight.value)
    sight.filled = content_hash(sight.value)


def holds_placeholder(value: Any) -> bool:
    """Tell whether an object that is passed as it is has a placeholder among its values."""
    state = None if is_value(value) else state_of_container(value)
    held = state.values() if isinstance(state, dict) else state or ()
    return any(isinstance(one, Placeholder) for one in held)


def _make_unknown(index: int, example: Any, zeros: dict[Any, Tensor]) -> Any:
    """Make a value like this one, with placeholders for its tensors."""
    leaves, structure = flatten(example)
    specs = [TensorSpec.of(leaf) for leaf in leaves]
    made = [spec.placeholder(index, zeros) if spec else leaf for spec, leaf in zip(specs, leaves, strict=True)]
    return unflatten(structure, made)
