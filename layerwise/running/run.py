"""Runs a model stage by stage, from the plan to what is kept; finished stages come from a checkpoint.

    batches -> fingerprint -> [resume] -> outside held: record -> each layer held: finish -> what is outside of them

A stage that a checkpoint has is not finished again. Its batches only run once more, to make the inputs of the next
stage: with the weights from before, or with its result, whichever the next stage is calibrated on; with both if
inputs of the unquantized model are wanted, too. If the checkpoint has all stages, no batch runs.
"""

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from torch import Tensor

from fsdp_hooks.ranks.across_ranks import any_of, raise_together
from layerwise.inputs.recording.recorder import Recorder
from layerwise.inputs.replaying.collectives import check_kind, check_own_batch, find_other_kinds
from layerwise.inputs.replaying.evaluating import set_eval_mode
from layerwise.inputs.replaying.rehearsal import check_all, check_alone
from layerwise.inputs.replaying.replay import LayerReplay, ModelReplay, Replay
from layerwise.inputs.values.batches import batches_on
from layerwise.resume.checkpoints import CalibrationCheckpoint
from layerwise.resume.fingerprint import Fingerprint, data_digest
from layerwise.resume.progress import Window
from layerwise.resume.weight_sums import weights_digest
from layerwise.running.events import Event, Observer
from layerwise.running.one_stage.decide import run_reference
from layerwise.running.plan import CalibrationPlan
from layerwise.stages.caller import caller
from layerwise.stages.stage import Stage
from layerwise.stages.tensor_parallel import peers, shares, without_hooks
from layerwise.weights.hold import Sharded, working
from layerwise.weights.on_disk import OnDisk
from layerwise.weights.snapshot import Snapshot

LOG = logging.getLogger(__name__)


class Resumable(Protocol):
    """What a run keeps of a finished stage."""

    def saved(self) -> Mapping[str, Tensor]:
        """Return the tensors that a checkpoint holds of it."""

    def to_json(self) -> Any:
        """Return what a checkpoint notes beside them."""

    def drop_saved(self) -> Self:
        """Return what is still needed of it when a checkpoint has it."""

    def apply(self, stage: Stage, /) -> None:
        """Put it into the model; the stage is sharded."""

    def install(self, stage: Stage, /) -> None:
        """Put it into a stage that is held and not sharded."""


K = TypeVar("K", bound=Resumable)


class LayerwiseRun(ABC, Generic[K]):
    """A plan in progress; subclasses say what becomes of a stage.

    Attributes:
        outcomes: of the stages finished so far, in their order.
        resumed: how many of the stages a checkpoint had.
    """

    def __init__(self, plan: CalibrationPlan, observer: Observer) -> None:
        self.plan, self.observer, self.method, self.group = plan, observer, plan.method, plan.method.group
        self.outcomes: list[K] = []
        self.resumed = 0
        self.finished = False  # the checkpoint says that nothing is left to do
        self.outside = ExitStack()  # holds what is outside of the layers, as long as it is needed
        self.held = False
        self.unsaved: list[Stage] = []
        self.recorder: Recorder
        self.reference: Recorder | None = None  # of the unquantized model, if its inputs are wanted
        self.checkpoint: CalibrationCheckpoint | None = None

    @abstractmethod
    def work_on(self, stage: Stage, replay: Replay, tell: Callable[[str], None]) -> None:
        """Do a stage's work while it is held; `tell` tells events."""

    @abstractmethod
    def keep(self, stage: Stage) -> K:
        """Return what is kept of the stage that was finished last, which is sharded again."""

    @abstractmethod
    def check_notes(self, window: Window) -> None:
        """Raise ValueError if what a checkpoint notes of some stages is not theirs."""

    @abstractmethod
    def restore(self, checkpoint: CalibrationCheckpoint, window: Window) -> list[K]:
        """Return what a checkpoint has of some stages."""

    def calibrate_stages(self, data: Any, directory: str | Path | None) -> None:
        """Go through all stages, from the first that `directory` does not have."""
        with set_eval_mode(self.plan.model), without_hooks(self.plan.model), ExitStack() as inputs:
            # Before the first callback or gather: it has to be of the weights that the run was given.
            weights = {} if directory is None else self._digest()
            own = peers(self.plan.model) if self.plan.tensor_parallel else ()  # of weights at rest
            with self.outside:
                # A function calls the model with what is outside of layers. A rank without data may give none.
                if any_of(self.group, callable(data)):
                    self._hold_outside()
                with raise_together(self.group):
                    self.recorder = inputs.enter_context(self._record_data(data))
                if self.plan.tensor_parallel:
                    self.recorder.keep_only(shares(own, self.recorder.hashes(), self.group))
                LOG.debug("%s: this rank has %d batches", caller(), len(self.recorder))
                if self.plan.options.paired and len(self.plan.stages) > 1:
                    with raise_together(self.group):
                        self.reference = inputs.enter_context(self.recorder.twin())
                self.check_data()
                if directory is not None:
                    self.checkpoint = CalibrationCheckpoint(directory, self.group)
                    self._resume(self.checkpoint, weights)
                for stage in self.plan.stages if self.resumed < len(self.plan.stages) else ():
                    self.observer.begin()
                    if stage.index < self.resumed:
                        self._take_finished(stage)
                    else:
                        self._calibrate(stage)
                        self._save(stage)
                    self.observer.done()
            if self.checkpoint is not None and not self.finished:
                self.checkpoint.mark_finished(self._digest())

    def _record_data(self, data: Any) -> Recorder:
        """Return a recorder that has taken in all data of this rank."""
        options = self.plan.options
        if not callable(data) and options.device is not None:
            data = batches_on(options.device, data)
        layers = [(stage.name, stage.module) for stage in self.plan.stages if stage.name]
        return Recorder(self.plan.model, layers, data, inputs_on=options.inputs_on)

    def check_data(self) -> None:
        """Raise or warn if the outcome depends on batches and no rank has one."""
        if any_of(self.group, len(self.recorder) > 0):
            return
        if self.plan.options.inputs == "static":
            raise ValueError(
                f'{caller()}: inputs="static" takes scales from inputs, and no rank has a batch (an iterator that is '
                'used up has none left); give data, or use inputs="dynamic"'
            )
        if self.plan.options.expert_inputs == "all":
            raise ValueError(
                f'{caller()}: expert_inputs="all" sends the tokens of all batches to each expert, and no rank has a '
                "batch (an iterator that is used up has none left); give data, or leave expert_inputs out"
            )
        if self.plan.options.kv_cache is not None:
            raise ValueError(
                f"{caller()}: kv_cache takes scales from keys and values, and no rank has a batch (an iterator that is "
                "used up has none left); give data, or leave kv_cache out"
            )
        if self.method.algorithm.needs:
            warnings.warn(
                f"{caller()}: {type(self.method.algorithm).__name__} fits weights to data, and no rank has a batch (an "
                "iterator that is used up has none left); they are rounded from the weights alone",
                stacklevel=4,
            )

    # -- a stage's turn ------------------------------------------------------------------------------------------------

    def _calibrate(self, stage: Stage) -> None:
        with ExitStack() as turn:
            replay = self._begin(stage, turn)
            self.work_on(stage, replay, lambda kind: self._tell(stage, kind))
        self._end(stage)
        self.outcomes.append(self.keep(stage))

    def _take_finished(self, stage: Stage) -> None:
        """Take a finished stage's turn: make its outputs, and put its result into the model."""
        # Quantized outputs for the next stage are made with the result in the model, others before it is put there.
        outcome, first = self.outcomes[stage.index], self.method.quantized_onward
        if self.reference is not None:
            self._run_unquantized(stage)
        if first:
            outcome.apply(stage)
        with ExitStack() as turn:
            replay = self._begin(stage, turn)
            if first and isinstance(self.plan.weights, OnDisk):
                outcome.install(stage)
            with raise_together(self.group):
                for batch in range(len(replay)):
                    replay.keep(batch, replay.run(batch))
        self._end(stage)
        if not first:
            outcome.apply(stage)
        self.tell_late(stage, "resumed")

    def _run_unquantized(self, stage: Stage) -> None:
        """Make a finished stage's outputs in the unquantized model, before its result is put there."""
        with ExitStack() as turn:
            replay = self._begin(stage, turn)
            with raise_together(self.group):
                for batch in range(len(replay)):
                    run_reference(replay, batch)
        if self.plan.whole:
            self._release_outside()

    def _begin(self, stage: Stage, turn: ExitStack) -> Replay:
        """Record the stage's inputs if they are not known, gather its weights, and return what runs it."""
        if self.plan.whole or not stage.name:
            self._hold_outside()
        # It depends on each rank's batches, and holding the outside is a collective: one rank takes all with it.
        recorded = any_of(
            self.group, bool(stage.name) and any(one.needs_parent(stage.index) for one in self._recorders())
        )
        if recorded:
            if self.observer.logs:
                LOG.debug("%s: the model runs up to %s, to record its inputs", caller(), stage.name)
            self._hold_outside()
            with raise_together(self.group):
                for recorder in self._recorders():
                    recorder.prepare(stage.index)
            if self.plan.expert_parallel and stage.index == 0:
                self._check_other_kinds()
        elif not self.plan.whole and self.plan.stages[-1].name:
            self._release_outside()
        if stage.name:
            self._hold(stage, turn)
        turn.enter_context(working(stage.targets))
        replay = self._replay(stage)
        with raise_together(self.group):
            if self.plan.expert_parallel:
                check_own_batch(replay, stage)
            if recorded and isinstance(replay, LayerReplay):  # then what is outside of layers is held
                check_alone(replay)
                if stage.index == 0:
                    check_all(replay, behind=not self.plan.stages[-1].name)
        return replay

    def _replay(self, stage: Stage) -> Replay:
        if not stage.name:
            return ModelReplay(self.recorder, self.reference)
        return LayerReplay(self.recorder, stage, last=stage is self.plan.stages[-1], reference=self.reference)

    def _check_other_kinds(self) -> None:
        """Check the layers behind the first one before anything is changed; one layer of each kind is enough."""
        for stage in find_other_kinds(self.plan.stages):
            with ExitStack() as turn:
                self._hold(stage, turn)
                turn.enter_context(working(stage.targets))
                with raise_together(self.group):
                    check_kind(self.recorder, stage)

    def _recorders(self) -> list[Recorder]:
        """Return the recorders of both models, or of the one."""
        return [self.recorder] if self.reference is None else [self.recorder, self.reference]

    def _end(self, stage: Stage) -> None:
        """Free what the stage needed; afterwards its parameters are the shards again."""
        for recorder in self._recorders() if stage.name else ():
            recorder.free(stage.index)
        if not stage.name or self.plan.whole:
            self._release_outside()

    def _hold_outside(self) -> None:
        if not self.held:
            self.held = True
            self._hold(self.plan.outside, self.outside)

    def _hold(self, stage: Stage, held: ExitStack) -> None:
        """Hold a part of the model; without FSDP this may fail on some ranks only (a file, memory)."""
        with raise_together(None if isinstance(self.plan.weights, Sharded) else self.group):
            held.enter_context(self.plan.weights.hold(stage))

    def _release_outside(self) -> None:
        self.held = False
        self.outside.close()

    def _tell(self, stage: Stage, kind: str, data: Mapping[str, Any] | None = None) -> None:
        """Tell one event of a stage; if a callback raises on one rank, all ranks raise."""
        with raise_together(self.group):
            self.observer.tell(Event(kind, stage.name, stage.index, len(self.plan.stages), data or {}))

    def tell_late(self, stage: Stage, kind: str, data: Mapping[str, Any] | None = None) -> None:
        """Tell one event of a stage whose result is final; raises if a callback changes its weights."""
        # What a callback writes now would be in the model and not in the result.
        before = Snapshot(stage, watched=self.method.watched)
        self._tell(stage, kind, data)
        with raise_together(self.group):
            before.check_finished(kind)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _resume(self, checkpoint: CalibrationCheckpoint, weights: Mapping[str, int]) -> None:
        """Load the outcomes that a checkpoint has."""
        with raise_together(self.group):
            hashes = self.recorder.batch_hashes()
        digest, count = data_digest(hashes, self.group)
        found = checkpoint.open(
            Fingerprint(
                weights=weights,
                data=digest,
                batches=count,
                recipe=self.method.recipe.to_json(),
                algorithm=self.method.algorithm.to_json(),
                options=self.plan.decides(),
            ),
            check=self.check_notes,
        )
        if self.observer.logs:
            done, count = 0 if found is None else found.next_layer, len(self.plan.stages)
            LOG.info("%s: %s has %d of %d stages", caller(), checkpoint.directory, done, count)
        if found is None:
            return
        self._release_outside()  # loaded tensors are laid out like the shards
        self.resumed, self.finished = found.next_layer, found.finished
        for window in found.windows:
            self.outcomes += self.restore(checkpoint, window)
        if self.resumed == len(self.plan.stages):
            for stage, outcome in zip(self.plan.stages, self.outcomes, strict=True):
                self.observer.begin()
                outcome.apply(stage)
                self.tell_late(stage, "resumed")
                self.observer.done()

    def _save(self, stage: Stage) -> None:
        """Commit outcomes to the checkpoint, `save_every` of them at a time; the stage is finished and sharded."""
        self.unsaved.append(stage)
        if len(self.unsaved) < self.plan.options.save_every and stage is not self.plan.stages[-1]:
            return
        first = self.unsaved[0].index
        chosen = self.outcomes[first:]
        if self.checkpoint is not None:
            window = self.checkpoint.save_window(
                first,
                stage.index,
                {name: value for outcome in chosen for name, value in outcome.saved().items()},
                [outcome.to_json() for outcome in chosen],
                names=[one.name for one in self.unsaved],
            )
            self.tell_late(stage, "checkpoint", {"directory": window.directory})
        # The checkpoint has them; kept, they would pile up over all layers.
        self.outcomes[first:] = [outcome.drop_saved() for outcome in chosen]
        self.unsaved = []

    def _digest(self) -> dict[str, int]:
        """Return the digests of the model's weights; call it while no stage is held."""
        weights = self.plan.weights
        read = weights.read if isinstance(weights, OnDisk) else None
        return weights_digest(self.plan.named_weights(), self.group, read)
