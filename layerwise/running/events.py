"""What a run tells while it goes on: events for a callback on every rank; a progress bar and a log on rank 0.

    layer_start -> capture -> calibrate -> write -> metrics [-> checkpoint]        for each layer, in this order

"checkpoint" comes only after layers at which a checkpoint is saved (`checkpoint_dir`, `save_every`).

From layer_start to metrics the layer's weights are gathered and plain. If the algorithm writes weights, a callback may
change weights of the layer up to and including the event "calibrate"; any other change raises an error and is never
lost silently. Do not call `model.state_dict()` in these events: it shards the layer again.

The logger is `layerwise.running.events`: INFO for the plan, each stage, each checkpoint and each warning of the report;
DEBUG for the stages of the plan, and the time of each event. What a line needs is computed only if it is logged.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from dcp_adapters.plain.words import few_of
from layerwise.formats.assignment import recipe_of
from layerwise.formats.candidates import Menu, Weight, bits_of
from layerwise.running.plan import CalibrationPlan
from layerwise.stages.caller import caller
from layerwise.stages.targets import Target

LOG = logging.getLogger(__name__)


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
    """Passes events on to the callback, the bar and the log.

    Args:
        on_event: the callback.
        bar: a tqdm, or None.
        logs: whether this rank logs what all ranks would.
    """

    def __init__(self, on_event: Callable[[Event], object] | None, bar: Any, *, logs: bool) -> None:
        self.on_event, self.bar, self.logs = on_event, bar, logs
        self.began = time.perf_counter()
        self.outcome: Event | None = None  # the event that tells what became of the stage

    def begin(self) -> None:
        """Note that the next stage begins."""
        self.began, self.outcome = time.perf_counter(), None

    def tell(self, event: Event) -> None:
        """Show, log and pass on one event."""
        if self.bar is not None:
            self.bar.set_description(f"{event.layer or 'outside the layers'}: {event.kind}")
        if self.logs and LOG.isEnabledFor(logging.INFO):
            self._log(event)
        if self.on_event is not None:
            self.on_event(event)

    def done(self) -> None:
        """Note that one more stage is finished."""
        if self.bar is not None:
            self.bar.update(1)
        if self.outcome is not None:
            place, seconds = _place(self.outcome), time.perf_counter() - self.began
            LOG.info("%s: %s: %s, in %.1f s", caller(), place, _describe_outcome(self.outcome), seconds)

    def _log(self, event: Event) -> None:
        place = _place(event)
        LOG.debug("%s: %s: %s, after %.1f s", caller(), place, event.kind, time.perf_counter() - self.began)
        if event.kind in ("metrics", "resumed"):
            self.outcome = event
        if event.kind == "checkpoint":
            LOG.info("%s: %s: saved in %s", caller(), place, event.data["directory"])
        warned: dict[str, list[str]] = {}
        for record in event.data.get("records", ()):
            if record.warning is not None:
                warned.setdefault(record.warning, []).append(record.name)
        for warning, names in warned.items():
            LOG.info("%s: %s: %s", caller(), few_of(names), warning)


@contextmanager
def observing(on_event: Callable[[Event], object] | None, count: int, *, bar: bool, logs: bool) -> Iterator[Observer]:
    """Make an observer for `count` stages.

    Args:
        on_event: the callback.
        count: how many stages there are.
        bar: whether to show a bar, if there is a terminal.
        logs: whether to log.
    """
    shown = tqdm(total=count, unit="layer", file=sys.stderr) if bar and sys.stderr.isatty() else None
    began = time.perf_counter()
    try:
        yield Observer(on_event, shown, logs=logs)
    finally:
        if shown is not None:
            shown.close()
    if logs:
        LOG.info("%s: all %d stages are done, in %.1f s", caller(), count, time.perf_counter() - began)


def log_plan(plan: CalibrationPlan) -> None:
    """Log what a run is going to do. Call it on one rank."""
    if not LOG.isEnabledFor(logging.INFO):
        return
    options, targets = plan.options, [target for stage in plan.stages for target in stage.targets]
    LOG.info(
        "%s: %d layers%s, %d weights of %s; %s, %s, on outputs of %s layers, %d ranks",
        caller(),
        sum(1 for stage in plan.stages if stage.name),
        "" if plan.stages[-1].name else " and what is outside of them",
        len(targets),
        _describe_bytes(targets, plan),
        options.recipe if not isinstance(options.recipe, Menu) else f"{len(options.recipe.recipes)} recipes",
        options.algorithm,
        "quantized" if options.quantized_onward else "unquantized",
        plan.method.ranks,
    )
    for stage in plan.stages if LOG.isEnabledFor(logging.DEBUG) else ():
        held = sum(param.numel() * param.dtype.itemsize for param in stage.params().values())
        quantized = _describe_bytes(stage.targets, plan)
        LOG.debug(
            "%s: %s: parameters of %d bytes, %d weights of %s",
            *(caller(), stage.title, held, len(stage.targets), quantized),
        )


def _describe_bytes(targets: Iterable[Target], plan: CalibrationPlan) -> str:
    """Tell the bytes of some targets, before and after, as far as their recipes are known."""
    recipe = plan.options.recipe
    before = after = 0
    for target in targets:
        weight = Weight(target.name, target.shape, target.dtype, target.linears())
        before += bits_of(weight, None) // 8
        after += 0 if isinstance(recipe, Menu) else bits_of(weight, recipe_of(recipe, target.name)) // 8
    return f"{before} bytes" if isinstance(recipe, Menu) else f"{before} bytes, {after} when quantized"


def _place(event: Event) -> str:
    return f"{event.layer or 'outside the layers'} ({event.index + 1} of {event.count})"


def _describe_outcome(event: Event) -> str:
    """Tell what became of a stage."""
    if event.kind == "resumed":
        return "taken from the checkpoint"
    linears = event.data.get("records") or event.data.get("errors") or ()
    snr = event.data.get("snr_db")
    tokens = max((one.tokens for one in linears), default=0)
    return f"{len(linears)} linears, up to {tokens} tokens" + ("" if snr is None else f", output SNR {snr:.1f} dB")
