"""What all runs of the parent together have shown of one batch: how layers are called, and what they gave."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from layerwise.inputs.recording.shared_objects import SharedObject
from layerwise.inputs.values.batches import Batch
from layerwise.inputs.values.calls import Call, Returned, Shape
from layerwise.inputs.values.stores import StoredTensor


@dataclass(eq=False)
class BatchProgress:
    """What is known of one batch; the calls of its layers and their outputs fill it, and `forget` empties it.

    Attributes:
        batch: what the model is called with.
        calls: of the layers from the first on, as far as they are recorded; None for layers that are done.
        outputs: of the layers that were run, as long as they may be needed.
        shapes: of all outputs so far, freed ones too.
        assumed: what stand-ins returned when later layers were recorded.
        last_use: layer -> the last layer known to take its output.
        live: objects that layers are called with, by the place where they were first met.
        met: tensors that the last recorded layer was called with, by name, if the parent runs again for the next one.
        left: containers that layers share, and what was in them after the call whose output was put last.
        touched: names of containers, and what the last layer that changed them set in them.
        sights: objects that were met since the last `prepare`.
        cautious: the parent writes into what it passed to a layer, so each run records only one layer.
    """

    batch: Batch
    calls: list[Call | None] = field(default_factory=list)
    outputs: dict[int, Returned] = field(default_factory=dict)
    shapes: dict[int, Shape] = field(default_factory=dict)
    assumed: dict[int, Shape] = field(default_factory=dict)
    last_use: dict[int, int] = field(default_factory=dict)
    live: dict[tuple[int, str], Any] = field(default_factory=dict)
    met: dict[str, StoredTensor] = field(default_factory=dict)
    left: list[tuple[Any, Any]] = field(default_factory=list)
    touched: dict[str, list[Any]] = field(default_factory=dict)
    sights: list[SharedObject] = field(default_factory=list)
    cautious: bool = False

    def copy(self) -> "BatchProgress":
        """Make another one, for a run that is to leave no trace; call it before any layer has run."""
        known = {"calls": [*self.calls], "live": {**self.live}, "last_use": {**self.last_use}}
        return BatchProgress(self.batch, **known, cautious=self.cautious)  # type: ignore[arg-type]

    def add(self, first: int, calls: Sequence[Call]) -> None:
        """Add the calls of the layers from number `first` on, which are the next ones."""
        for index, call in enumerate(calls, start=first):
            for source in call.links():
                self.last_use[source] = max(index, self.last_use.get(source, -1))
        self.calls += calls

    def shape_of(self, index: int, kinds: Sequence[type]) -> Shape | None:
        """Return the shape of a layer's output; while unknown, that of the last layer of its class, or of any.

        Args:
            index: of the layer.
            kinds: the classes of all layers.
        """
        same_class = [other for other in self.shapes if kinds[other] is kinds[index]]
        return self.shapes.get(index) or (self.shapes[max(same_class or self.shapes)] if self.shapes else None)

    def forget(self, index: int, layers: int) -> None:
        """Forget the inputs of a layer that is done, and outputs that no later one of the `layers` takes."""
        call = self.calls[index]
        # The parent runs again for the next layer, and may pass it a tensor that it passed to this one.
        again = len(self.calls) == index + 1 < layers
        self.met = call.stored_tensors() if call is not None and again else {}
        self.calls[index] = None
        for source in [source for source in self.outputs if source < index]:
            if self.last_use.get(source, -1) <= index:
                del self.outputs[source]
