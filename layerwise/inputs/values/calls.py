"""How a layer is called for one batch: recorded as where each argument comes from, not as values.

Each leaf of a call's arguments has a source:
    EarlierOutput   what an earlier layer returned, recognised as the object that its stand-in returned; or what it
                    wrote into one of its arguments, recognised as that argument
    StoredTensor    any other tensor: masks, rotary embeddings, position ids; one that several calls share is kept once
    Fixed           everything else, the object itself: numbers, None, caches, and the containers that layers may fill

Layers may talk to each other through a list, dict or dataclass that several of them get (shared keys and values). So a
mutable container is a leaf, and kept live, unless it holds an output. An object that the parent passes to several
layers in one run stays one object for all of them, however many runs it takes to record them.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.inputs.values.ambient import Ambient
from layerwise.inputs.values.caches import CacheState
from layerwise.inputs.values.stand_ins import Escape, TensorSpec
from layerwise.inputs.values.stores import Store, StoredTensor, is_ordinary, version
from layerwise.inputs.values.structure import Structure, flatten, unflatten


@dataclass(frozen=True)
class EarlierOutput:
    """Leaf number `leaf` of what layer number `layer` returns."""

    layer: int
    leaf: int


@dataclass(frozen=True, eq=False)
class Fixed:
    """The object itself, and what to set it back to before each call if it is a cache."""

    value: Any
    cache: CacheState | None = None


@dataclass(eq=False)
class Call:
    """One call of a layer: the structure of (args, kwargs), where each leaf comes from, and what to call it.

    `ambient` is what the parent had switched on when it called the layer.
    """

    structure: Structure
    sources: list[EarlierOutput | StoredTensor | Fixed]
    names: list[str]
    ambient: Ambient
    before: list[tuple[Any, Any]] | None = field(default=None)  # live containers as they were at the first use
    changed: list[Tensor] = field(default_factory=list)  # tensors in these that the last run wrote into

    def stored_tensors(self) -> dict[str, StoredTensor]:
        """Return the tensors among its leaves that are not outputs of layers, by name."""
        return {
            name: source
            for name, source in zip(self.names, self.sources, strict=True)
            if isinstance(source, StoredTensor)
        }

    def links(self) -> set[int]:
        """Return the layers whose outputs it takes."""
        return {source.layer for source in self.sources if isinstance(source, EarlierOutput)}

    def arguments(self, output: Callable[[int], "Returned"]) -> tuple[Any, Any]:
        """Copy tensors, set caches and live containers back, and return the args and kwargs to call the layer with."""
        args, kwargs = unflatten(self.structure, self._leaves(output))
        return args, kwargs

    def run(
        self, output: Callable[[int], "Returned"], function: Callable[..., Any], *, compare: bool | Collection[str] = ()
    ) -> tuple[Any, dict[str, Tensor]]:
        """Call a function as the layer was called; return its result, and the arguments that it wrote into, by name.

        Args:
            output: gives the outputs of earlier layers.
            function: the layer.
            compare: names of the arguments whose values are compared, too, since torch does not count writes through
                `.data` or numpy; True: all.
        """
        leaves = self._leaves(output)
        counts = [version(leaf) if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        args, kwargs = unflatten(self.structure, leaves)
        # Layers may also write into tensors that wait in a shared container, so those are counted, too.
        held = {id(one): (one, version(one)) for _, state in self.before or () for one in _tensors_in(state)}
        with self.ambient.set():
            returned = function(*args, **kwargs)
        self.changed = [one for one, count in held.values() if version(one) != count]
        written = {}
        for name, leaf, count, source in zip(self.names, leaves, counts, self.sources, strict=True):
            # What is written into fixed objects is seen by `find_touched` and `find_new_tensors`.
            if not isinstance(leaf, Tensor) or isinstance(source, Fixed):
                continue
            compared = compare is True or (compare is not False and name in compare)
            kept = output(source.layer).leaves[source.leaf] if isinstance(source, EarlierOutput) else source
            if version(leaf) != count or (compared and not kept.holds(leaf)):
                written[name] = leaf
        return returned, written

    def _leaves(self, output: Callable[[int], "Returned"]) -> list[Any]:
        # Arguments that were one object when the call was recorded are one object again: what a layer writes into one
        # of them, it reads from the other.
        taken: dict[Any, Any] = {}
        for source in self.sources:
            key = source if isinstance(source, EarlierOutput) else id(source)
            if key in taken:
                continue
            if isinstance(source, Fixed):
                if source.cache is not None:
                    source.cache.restore()
                taken[key] = source.value
                continue
            kept = output(source.layer).leaves[source.leaf] if isinstance(source, EarlierOutput) else source
            taken[key] = kept.tensor() if isinstance(kept, StoredTensor) else kept
        # Taken at the first use, not when recorded: by then the layers before have filled the live containers.
        if self.before is None:
            self.before = self.containers()
        for container, state in self.before:
            if not is_same_state(state_of_container(container), state):
                restore_container(container, state)
        return [taken[source if isinstance(source, EarlierOutput) else id(source)] for source in self.sources]

    def containers(self) -> list[tuple[Any, Any]]:
        """Return the live containers among the arguments, each with what it holds at this moment."""
        fixed = (source for source in self.sources if isinstance(source, Fixed))
        values = [source.value for source in fixed if source.cache is None and not is_value(source.value)]
        states = [(value, state_of_container(value)) for value in values]
        return [(value, state) for value, state in states if state is not None]

    def find_touched(self) -> dict[str, list[Any]]:
        """Return, by name of a live container, the keys or attributes that the call, which has just run, set in it."""
        before = {id(container): state for container, state in self.before or ()}
        found: dict[str, list[Any]] = {}
        for name, source in zip(self.names, self.sources, strict=True):
            was = before.get(id(source.value)) if isinstance(source, Fixed) else None
            if isinstance(source, Fixed) and was is not None:
                now = items_of(state_of_container(source.value))
                keys = [key for key in now if key not in items_of(was) or items_of(was)[key] is not now[key]]
                if keys:
                    found[name] = keys
        return found

    def find_new_tensors(self) -> Iterator[Tensor]:
        """Yield tensors in the live containers that were not there before the last run, or that it wrote into."""
        before = {id(leaf) for _, state in self.before or () for leaf in flatten(state)[0]}
        for _, state in self.containers():
            yield from (leaf for leaf in _tensors_in(state) if id(leaf) not in before)
        yield from self.changed


def _tensors_in(state: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(state)[0] if isinstance(leaf, Tensor)]


def state_of_container(value: Any) -> Any:
    """Copy, without its elements, what a container or an object with attributes holds; None for everything else."""
    if isinstance(value, MutableMapping):
        return dict(value)
    if isinstance(value, list):
        return list(value)
    if isinstance(value, type | nn.Module | Tensor | FunctionType | ModuleType):
        return None
    return dict(vars(value)) if hasattr(value, "__dict__") else None


def items_of(state: Any) -> dict[Any, Any]:
    """Return the state of a container by key or index."""
    return state if isinstance(state, dict) else dict(enumerate(state))


def restore_container(container: Any, state: Any) -> None:
    """Set a live container back to the state that `state_of_container` returned."""
    if isinstance(container, list):
        container[:] = state
        return
    # In place: layers that run later hold this very object.
    target = container if isinstance(container, MutableMapping) else vars(container)
    target.clear()
    target.update(state)


@dataclass(eq=False)
class Returned:
    """What a layer returned for one batch, and behind it the arguments that it wrote into."""

    shape: "Shape"
    leaves: list[Any]  # a StoredTensor for every tensor

    @classmethod
    def of(cls, value: Any, store: Store, written: Mapping[str, Tensor] = MappingProxyType({})) -> "Returned":
        """Keep what a layer returned, and what it wrote."""
        leaves, structure = flatten(value)
        count = len(leaves)
        leaves += written.values()
        kept: dict[int, StoredTensor] = {}
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in kept:
                kept[id(leaf)] = store.keep(leaf)
        specs = tuple(TensorSpec.of(leaf) or (leaf if is_value(leaf) else type(leaf)) for leaf in leaves[:count])
        return cls(Shape(structure, specs, tuple(written)), [kept.get(id(leaf), leaf) for leaf in leaves])

    def values(self) -> list[Any]:
        """Return the leaves of what was returned, tensors in memory of their own."""
        leaves = self.leaves[: len(self.shape.specs)]
        taken = {id(leaf): leaf.tensor() for leaf in leaves if isinstance(leaf, StoredTensor)}
        return [taken.get(id(leaf), leaf) for leaf in leaves]


@dataclass(frozen=True)
class Shape:
    """What is known of an output without its tensors; a stand-in can replace a layer whose outputs have an equal one.

    Attributes:
        structure: of the output.
        specs: for each leaf, a TensorSpec if it is a tensor, its type if it is another object, else its value.
        written: names of the arguments that the layer wrote into; they follow the leaves that it returned.
    """

    structure: Structure
    specs: tuple[Any, ...]
    written: tuple[str, ...] = ()

    def placeholders(self, origin: int, zeros: dict[Any, Tensor]) -> list[Any]:
        """Make leaves for a stand-in to return; all but mere values are new objects, so that each can be recognised."""
        return [
            spec.placeholder(origin, zeros)
            if isinstance(spec, TensorSpec)
            else (_Object(origin) if isinstance(spec, type) else spec)
            for spec in self.specs
        ]


class _Object:
    """Stands for an object that a layer returns; the parent may pass it on, but not look into it."""

    def __init__(self, origin: int) -> None:
        self._origin = origin

    def __getattr__(self, name: str) -> Any:
        raise Escape(frozenset({self._origin}))

    def _look(self, *_: Any) -> Any:
        raise Escape(frozenset({self._origin}))

    # Python looks special methods up on the class, past `__getattr__`.
    __iter__ = __next__ = __len__ = __getitem__ = __contains__ = __bool__ = __call__ = __enter__ = _look


def is_value(leaf: Any) -> bool:
    """Tell whether a leaf is a mere value, whose identity does not matter."""
    return isinstance(leaf, bool | int | float | complex | str | bytes | torch.dtype | torch.device | torch.Size | None)


class Statics:
    """Tensors that are not outputs of layers, each kept once however many calls it is passed to.

    A tensor's memory only tells where to look. Its bits tell whether it is kept already, since a model may fill the
    same memory with other values.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        # Weak: a tensor is freed, and its file removed, with the last call that takes it.
        self._known: dict[Any, weakref.ref[StoredTensor]] = {}

    def note(self, tensor: Tensor, kept: StoredTensor) -> None:
        """Note that this tensor is kept already."""
        if is_ordinary(tensor):
            self._known[_place(tensor)] = weakref.ref(kept)

    def keep(self, tensor: Tensor) -> StoredTensor:
        """Keep a tensor, or return what was kept of it before."""
        found = self._known.get(_place(tensor)) if is_ordinary(tensor) else None
        kept = None if found is None else found()
        if kept is None or not kept.holds(tensor):
            kept = self._store.keep(tensor)
            self.note(tensor, kept)
        return kept

    def forget(self) -> None:
        """Forget tensors that nobody keeps any more."""
        for key in [key for key, kept in self._known.items() if kept() is None]:
            del self._known[key]


def _place(tensor: Tensor) -> Any:
    seen = tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), *seen


def is_same_state(one: Any, other: Any) -> bool:
    """Tell whether two states of a container hold the same objects, or equal mere values."""
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_is_same_value(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same_value, one, other))
    return one is other


def _is_same_value(one: Any, other: Any) -> bool:
    return one is other or (is_value(one) and type(one) is type(other) and bool(one == other))
