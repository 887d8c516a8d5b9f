"""What a calibration tells while it runs: events for a callback on every rank, a progress bar on rank 0.

    layer_start -> capture -> calibrate -> write -> metrics [-> checkpoint]        for each layer, in this order

"checkpoint" comes only after layers at which a checkpoint is saved (`checkpoint_dir`, `save_every`).

From layer_start to metrics the layer's weights are gathered and plain. If the algorithm writes weights, a callback may
change weights of the layer up to and including the event "calibrate"; any other change raises an error and is never
lost silently. Do not call `model.state_dict()` in these events: it shards the layer again.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm


@dataclass(frozen=True)
class Event:
    """One step of a calibration.

    Attributes:
        kind: "layer_start", "capture", "calibrate", "write", "metrics", "checkpoint", or "resumed" for a layer whose
            result came from a checkpoint.
        layer: fqn of the layer; "" for what is outside of the layers.
        index: its number, from 0.
        count: how many there are.
        data: with "metrics" the layer's report, with "checkpoint" the directory, else nothing.

    Example:
        ```python
        >>> model, events = nn.Sequential(nn.Linear(64, 64)), []
        >>> calibrate(model, None, recipe=MXFP8BlockScaling(), layers=["0"], on_event=events.append)
        >>> events[0].kind, events[0].layer
        ('layer_start', '0')
        ```
    """

    kind: str
    layer: str
    index: int
    count: int
    data: Mapping[str, Any] = field(default_factory=dict)


class Observer:
    """Passes events on to the callback and the bar."""

    def __init__(self, on_event: Callable[[Event], object] | None, bar: Any) -> None:
        self.on_event, self.bar = on_event, bar

    def tell(self, event: Event) -> None:
        """Show and pass on one event."""
        if self.bar is not None:
            self.bar.set_description(f"{event.layer or 'outside the layers'}: {event.kind}")
        if self.on_event is not None:
            self.on_event(event)

    def done(self) -> None:
        """Note that one more layer is finished."""
        if self.bar is not None:
            self.bar.update(1)


@contextmanager
def observing(on_event: Callable[[Event], object] | None, count: int, *, bar: bool) -> Iterator[Observer]:
    """An observer for `count` layers; the bar appears on terminals."""
    shown = tqdm(total=count, unit="layer", file=sys.stderr) if bar and sys.stderr.isatty() else None
    try:
        yield Observer(on_event, shown)
    finally:
        if shown is not None:
            shown.close()
