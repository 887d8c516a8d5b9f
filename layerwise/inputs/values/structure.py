"""Values that travel between layers, taken apart into leaves and put together again.

    flatten(value)               -> leaves, a Structure that describes the rest
    unflatten(structure, leaves) -> an equal value around other leaves
    paths(structure, root)       -> the name of each leaf for messages: "kwargs['position_embeddings'][0]"

Containers are tuples, lists, dicts, their subclasses (named tuples, the model outputs of transformers) and dataclasses.
They are rebuilt without calling `__init__` or `__post_init__`, which may count, check or fill in values again.
Everything else is a leaf: tensors, numbers, and objects such as caches, which keep their identity.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Structure:
    """What is left of a value without its leaves; two are equal if they describe the same shape of value.

    Attributes:
        kind: the container's type; None for a leaf.
        items: number of the elements of a sequence, or the keys of a dict in their order.
        attributes: names of what is set on the object itself: fields, and whatever else was assigned to it.
        children: the structures of the items, then those of the attributes.
    """

    kind: type | None = None
    items: tuple[Any, ...] | int = 0
    attributes: tuple[str, ...] = ()
    children: tuple["Structure", ...] = ()


LEAF = Structure()


def is_container(value: Any) -> bool:
    """Tell whether `flatten` looks into a value."""
    # torch.Size is a tuple, but layers expect it back as one; some modules and classes are dataclasses.
    if isinstance(value, type | nn.Module | torch.Tensor | torch.Size):
        return False
    return isinstance(value, tuple | list | dict) or dataclasses.is_dataclass(value)


def is_mutable(container: Any) -> bool:
    """Tell whether those who get a container can fill it, and so change it for everybody else who holds it."""
    if isinstance(container, tuple):
        return False
    if isinstance(container, list | dict):
        return True
    return not type(container).__dataclass_params__.frozen


def flatten(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Structure]:
    """Return the leaves of a value in a fixed order, and what puts them together again.

    Args:
        value: anything.
        is_leaf: containers for which it returns True are leaves themselves. A container in itself is a leaf, too.
    """
    leaves: list[Any] = []
    return leaves, _flatten(value, is_leaf, leaves, ())


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Make the value with this structure and these leaves; containers are new objects."""
    return _unflatten(structure, iter(leaves))


def paths(structure: Structure, root: str = "") -> list[str]:
    """Return, for each leaf, how one would write it in code, beginning with `root`."""
    if structure.kind is None:
        return [root]
    items = structure.items if isinstance(structure.items, tuple) else tuple(range(structure.items))
    names = getattr(structure.kind, "_fields", None)  # of a named tuple
    steps = [f".{names[item]}" if names else f"[{item!r}]" for item in items]
    steps += [f".{name}" for name in structure.attributes]
    return [path for step, child in zip(steps, structure.children, strict=True) for path in paths(child, root + step)]


def argument_names(structure: Structure) -> list[str]:
    """Return the names of the leaves of (args, kwargs): "args[0]", "kwargs['mask']"."""
    return [f"{'args' if name.startswith('[0]') else 'kwargs'}{name[3:]}" for name in paths(structure)]


def _flatten(
    value: Any, is_leaf: Callable[[Any], bool] | None, leaves: list[Any], inside: tuple[int, ...]
) -> Structure:
    if not is_container(value) or id(value) in inside or (is_leaf is not None and is_leaf(value)):
        leaves.append(value)
        return LEAF
    attributes = _attributes(value)
    # By dict's own methods: a model output of transformers answers `keys` and `[..]` in its own way.
    items: tuple[Any, ...] | int = 0
    elements: list[Any] = []
    if isinstance(value, dict):
        items = tuple(dict.keys(value))
        elements = [dict.__getitem__(value, key) for key in items]
    elif isinstance(value, tuple | list):
        items = len(value)
        elements = list(value)
    elements += [getattr(value, name) for name in attributes]
    inside = (*inside, id(value))
    children = tuple(_flatten(element, is_leaf, leaves, inside) for element in elements)
    return Structure(type(value), items, attributes, children)


def _attributes(value: Any) -> tuple[str, ...]:
    names = dict.fromkeys(field.name for field in dataclasses.fields(value)) if dataclasses.is_dataclass(value) else {}
    if isinstance(value, defaultdict):
        names["default_factory"] = None
    names |= dict.fromkeys(getattr(value, "__dict__", ()))
    # A model output holds everything twice, as an item and as a field; unset fields do not exist.
    return tuple(name for name in names if hasattr(value, name))


def _unflatten(structure: Structure, leaves: Iterator[Any]) -> Any:
    kind = structure.kind
    if kind is None:
        return next(leaves)
    values = [_unflatten(child, leaves) for child in structure.children]
    count = len(values) - len(structure.attributes)
    value: Any
    if issubclass(kind, tuple):
        make = getattr(kind, "_make", None)  # of a named tuple; torch.return_types take one sequence, as tuple does
        value = make(values[:count]) if make else kind(values[:count])
    else:
        value = kind.__new__(kind)
        if isinstance(value, list):
            list.extend(value, values[:count])
        elif isinstance(value, dict) and isinstance(structure.items, tuple):
            for key, element in zip(structure.items, values[:count], strict=True):
                _set_item(value, key, element)
    # Past the class's own `__setattr__`: a frozen dataclass refuses, and a model output would set an item, too.
    for name, element in zip(structure.attributes, values[count:], strict=True):
        object.__setattr__(value, name, element)
    return value


def _set_item(value: dict[Any, Any], key: Any, element: Any) -> None:
    # Past an overridden `__setitem__`, which may refuse; but an OrderedDict needs its own, which keeps the order.
    base: Any = next(cls for cls in type(value).__mro__ if cls.__module__ in {"builtins", "collections"})
    base.__setitem__(value, key, element)
