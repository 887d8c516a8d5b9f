"""Refuses objects that several batches share and that change: layers get the live objects when they are replayed.

A model that makes a new dict in each forward gives each batch its own. One that keeps a dict, or a buffer in it, and
fills it in every forward would have the last batch's values in it when the first batch is replayed: that is refused.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from layerwise.inputs.values.calls import is_same_state, state_of_container
from layerwise.inputs.values.contents import content_hash


@dataclass
class SharedObject:
    """An object that stand-ins were called with in this run, the live one that layers get for it, and what it held.

    Attributes:
        value: the object in this run.
        live: the object that layers are called with.
        state: what `value` held, see `state_of_container`.
        where: the layer and the name of the argument, for messages.
        content: a hash of what it held; None for caches, and for objects that stand for one of an earlier run.
        filled: a hash of what a stand-in has put into it, as its layer would; None if it has put nothing.
    """

    value: Any
    live: Any
    state: Any
    where: tuple[int, str] = (0, "")
    content: int | None = None
    filled: int | None = None

    def is_unchanged(self) -> bool:
        """Tell whether nobody has changed it since, or written into a tensor in it."""
        same = is_same_state(state_of_container(self.value), self.state)
        return same and (self.content is None or content_hash(self.value) == self.content)


class SharedObjects:
    """The objects that were met, and which of them were met in several batches.

    Args:
        fqns: of the layers, for messages.
    """

    def __init__(self, fqns: Sequence[str]) -> None:
        self._fqns = fqns
        self._met: dict[int, SharedObject] = {}
        self._shared: dict[int, SharedObject] = {}

    def meet(self, sights: Iterable[SharedObject]) -> None:
        """Add the objects that one batch's layers are called with; call it once all batches have been recorded.

        Raises:
            NotImplementedError: an object no longer holds what it held when it was recorded.
        """
        for sight in sights:
            if content_hash(sight.live) != sight.content:
                raise self._refusal(sight, "the model fills again for a later batch")
            # `_met` holds the objects, so an id stands for one object.
            if self._met.setdefault(id(sight.live), sight) is not sight:
                self._shared[id(sight.live)] = sight

    def check(self) -> None:
        """Raise NotImplementedError if layers have changed an object that several batches share."""
        for sight in self._shared.values():
            if content_hash(sight.live) != sight.content:
                raise self._refusal(sight, "is the same for several batches, and layers change it")

    def _refusal(self, sight: SharedObject, what: str) -> NotImplementedError:
        index, name = sight.where
        kind: Any = type(sight.live).__name__
        return NotImplementedError(
            f"{name} of layer {self._fqns[index]} is a {kind} that {what}; a layer is run on one batch after "
            "the other, so each forward of the model has to make its own, with tensors of its own, or pass these as "
            "arguments"
        )
