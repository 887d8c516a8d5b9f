"""Objects that layers are called with are kept live, one for each batch: what is shared by batches must not change.

A model that makes a new dict in each forward gives each batch its own. One that keeps a dict, or a buffer in it, and
fills that in every forward has the last batch's in it when the first one is replayed. Then it is refused.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from layerwise.inputs.calls import same_state, state_of_container
from layerwise.inputs.contents import content_hash


@dataclass
class Sight:
    """An object that stand-ins were called with in this run: what layers get instead, and what it held then.

    content: a hash of it; None where it is not looked at, since it was met in an earlier run.
    """

    value: Any
    live: Any
    state: Any
    where: tuple[int, str] = (0, "")
    content: int | None = None

    def holds(self) -> bool:
        """Whether nobody changed it since, nor filled a tensor in it."""
        same = same_state(state_of_container(self.value), self.state)
        return same and (self.content is None or content_hash(self.value) == self.content)


class SharedObjects:
    """Objects that were met, and those of them that were met in several batches.

    Args:
        fqns: of the layers, for messages.
    """

    def __init__(self, fqns: Sequence[str]) -> None:
        self._fqns = fqns
        self._met: dict[int, Sight] = {}
        self._shared: dict[int, Sight] = {}

    def meet(self, sights: Iterable[Sight]) -> None:
        """What one batch's layers are called with, when all batches have been recorded.

        Raises:
            NotImplementedError: it is no longer what it was when it was recorded.
        """
        for sight in sights:
            if content_hash(sight.live) != sight.content:
                raise self._refusal(sight, "the model fills again for a later batch")
            if self._met.setdefault(id(sight.live), sight) is not sight:
                self._shared[id(sight.live)] = sight

    def check(self) -> None:
        """Raise NotImplementedError where layers have changed what is the same object in several batches."""
        for sight in self._shared.values():
            if content_hash(sight.live) != sight.content:
                raise self._refusal(sight, "is the same for several batches, and layers change it")

    def _refusal(self, sight: Sight, what: str) -> NotImplementedError:
        index, name = sight.where
        kind: Any = type(sight.live).__name__
        return NotImplementedError(
            f"{name} of layer {self._fqns[index]} is a {kind} that {what}; a layer is run on one batch after "
            "the other, so each forward of the model has to make its own, with tensors of its own, or pass these as "
            "arguments"
        )
