"""One calibration on its way: stage after stage, from the plan to the outcomes; finished ones come from a checkpoint.

    batches -> fingerprint -> [resume] -> outside and layer 0 held: record -> layers -> what is outside of them

A stage that a checkpoint has is not calibrated again. Its batches are run once more, for they make the inputs of the
next: under the weights from before, or under its result, whichever the next stage is calibrated on.
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fsdp_hooks.alike import alike, any_of
from layerwise.events import Event, Observer
from layerwise.folding.smoothing import smooths
from layerwise.inputs.passes import Batches
from layerwise.outcome import Outcome, outcome_of, placeholders, restored
from layerwise.plan import Plan
from layerwise.resume.checkpoints import CalibrationCheckpoint
from layerwise.resume.fingerprint import Fingerprint, data_digest
from layerwise.resume.weight_sums import weights_digest
from layerwise.stage import Passes, Stage, calibrate_stage
from layerwise.weights.hold import Sharded, working
from layerwise.weights.on_disk import OnDisk
from layerwise.weights.shards import dense_rows


class Run:
    """A plan in progress.

    Attributes:
        outcomes: of the stages finished so far, in their order.
        resumed: how many of them a checkpoint had.
    """

    def __init__(self, plan: Plan, observer: Observer, batches: Batches) -> None:
        self.plan, self.observer, self.batches = plan, observer, batches
        self.outcomes: list[Outcome] = []
        self.resumed = 0
        self.finished = False  # a checkpoint says so
        self.outside = ExitStack()  # holds what is outside of the layers, as long as it is needed
        self.held = False

    def finish(self, directory: str | Path | None, save_every: int, options: Mapping[str, Any]) -> None:
        """Go through all stages, from the first that `directory` does not have."""
        weights = {} if directory is None else self._digest()
        with self.outside:
            if any_of(self.plan.method.group, self.batches.needs_model):  # a rank without data may give none
                self._hold_outside()
            with alike(self.plan.method.group):
                self.batches.take()
            self._check_data()
            checkpoint = None
            if directory is not None:
                checkpoint = CalibrationCheckpoint(directory, self.plan.method.group)
                self._resume(checkpoint, weights, options)
            saver = _Saver(self, checkpoint, save_every)
            for stage in self.plan.stages if self.resumed < len(self.plan.stages) else ():
                if stage.index < self.resumed:
                    self._replay(stage)
                else:
                    self._calibrate(stage)
                    saver.save(stage)
                self.observer.done()
        if checkpoint is not None and not self.finished:
            checkpoint.finish(self._digest())

    def _check_data(self) -> None:
        """Refuse or tell that no rank has a batch, where the outcome depends on batches."""
        plan = self.plan
        if any_of(plan.method.group, len(self.batches.recorder) > 0):
            return
        if plan.static:
            raise ValueError(
                'calibrate: inputs="static" takes scales from inputs, and no rank has a batch (an iterator that is '
                'used up has none left); give data, or use inputs="dynamic"'
            )
        name = type(plan.method.algorithm).__name__
        if plan.method.algorithm.needs:
            warnings.warn(
                f"calibrate: {name} fits weights to data, and no rank has a batch (an iterator that is used up "
                "has none left); they are rounded from the weights alone",
                stacklevel=4,
            )

    # -- a stage's turn ------------------------------------------------------------------------------------------------

    def _calibrate(self, stage: Stage) -> None:
        with ExitStack() as turn:
            passes = self._begin(stage, turn)
            calibrated = calibrate_stage(stage, passes, self.plan.method, lambda kind: self.tell(stage, kind))
            measured = calibrated.measured
            installed = {target.name for target in stage.targets if target.param.dtype == target.dtype}
            self.tell_late(stage, "metrics", {"records": measured.records, "snr_db": measured.output_snr})
        self._end(stage)
        writes = self.plan.method.algorithm.writes_weights
        self.outcomes.append(outcome_of(stage, calibrated, writes_weights=writes))
        self.outcomes[-1].apply(stage, installed)

    def _replay(self, stage: Stage) -> None:
        """Take a finished stage's turn: its outputs, and its result into the model."""
        outcome, first = self.outcomes[stage.index], self.plan.method.quantized_onward
        if first:
            outcome.apply(stage)
        with ExitStack() as turn:
            passes = self._begin(stage, turn)
            if first and isinstance(self.plan.weights, OnDisk):
                outcome.install(stage)
            with alike(self.plan.method.group):
                for batch in range(passes.batches):
                    passes.keep(batch, passes.run(batch))
        self._end(stage)
        if not first:
            outcome.apply(stage)
        self.tell_late(stage, "resumed")

    def _begin(self, stage: Stage, turn: ExitStack) -> Passes:
        """Record the stage's inputs where they are not known, then gather its weights. Returns its passes."""
        if self.plan.whole:
            self._hold_outside()
        if any_of(self.plan.method.group, self.batches.needs_parent(stage)):
            self._hold_outside()
            with alike(self.plan.method.group):
                self.batches.recorder.prepare(stage.index)
        elif not self.plan.whole and self.plan.stages[-1].name:
            self._release_outside()
        at_rest = {name: param.dtype for name, param in stage.params().items()}
        if stage.name:
            self._enter(turn, stage.module)
        else:
            self._hold_outside()
        turn.enter_context(working(stage.targets))
        gathered = {param.dtype for name, param in stage.params().items() if param.dtype != at_rest[name]}
        return self.batches.passes(stage, next(iter(gathered), None))

    def _end(self, stage: Stage) -> None:
        """Free what the stage needed; afterwards its parameters are the shards, which results are kept in rows of."""
        self.batches.done(stage)
        if not stage.name or self.plan.whole:
            self._release_outside()

    def _hold_outside(self) -> None:
        if not self.held:
            self.held = True
            self._enter(self.outside, self.plan.model, self.plan.layers)

    def _enter(self, held: ExitStack, module: nn.Module, without: Sequence[nn.Module] = ()) -> None:
        """Hold a part of the model; what is no gather may fail on some ranks (a file, memory)."""
        with alike(None if isinstance(self.plan.weights, Sharded) else self.plan.method.group):
            held.enter_context(self.plan.weights.hold(module, without))

    def _release_outside(self) -> None:
        self.held = False
        self.outside.close()

    def tell(self, stage: Stage, kind: str, data: Mapping[str, Any] | None = None) -> None:
        """One event of a stage; what a callback raises on one rank, all of them raise."""
        with alike(self.plan.method.group):
            self.observer.tell(Event(kind, stage.name, stage.index, len(self.plan.stages), data or {}))

    def tell_late(self, stage: Stage, kind: str, data: Mapping[str, Any] | None = None) -> None:
        """One event of a stage whose result stands, so that no change of its weights would be in it."""
        before = stage.guard(watched=self.plan.method.watched)
        self.tell(stage, kind, data)
        with alike(self.plan.method.group):
            before.check_finished(kind)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _resume(
        self, checkpoint: CalibrationCheckpoint, weights: Mapping[str, int], options: Mapping[str, Any]
    ) -> None:
        """Load the outcomes that a checkpoint has."""
        method = self.plan.method
        with alike(method.group):
            hashes = self.batches.recorder.batch_hashes()
        digest, count = data_digest(hashes, method.group)
        fingerprint = Fingerprint(
            weights=weights,
            data=digest,
            batches=count,
            recipe=method.recipe.to_json(),
            algorithm=method.algorithm.to_json(),
            options=options,
        )
        found = checkpoint.open(fingerprint)
        if found is None:
            return
        self._release_outside()  # what is loaded goes beside the shards
        self.resumed, self.finished = found.next_layer, found.finished
        writes = method.algorithm.writes_weights
        for window in found.windows:
            stages = self.plan.stages[window.first : window.last + 1]
            wanted = [
                placeholders(stage, method.recipe, note, writes_weights=writes)
                for stage, note in zip(stages, window.extra, strict=True)
            ]
            checkpoint.load_window(window, {name: value for own in wanted for name, value in own.items()})
            for stage, note, state in zip(stages, window.extra, wanted, strict=True):
                values = {} if writes else {target.name: self._rows(target) for target in stage.targets}
                self.outcomes.append(restored(stage, method.recipe, note, state, values))
                if smooths(method.algorithm):
                    method.known.learn(stage, self.outcomes[-1].pairs)
        if self.resumed == len(self.plan.stages):
            for stage, outcome in zip(self.plan.stages, self.outcomes, strict=True):
                outcome.apply(stage)
                self.tell_late(stage, "resumed")
                self.observer.done()

    def _rows(self, target: Any) -> Tensor:
        weights = self.plan.weights
        return weights.read(target.param) if isinstance(weights, OnDisk) else dense_rows(target.param)

    def _digest(self) -> dict[str, int]:
        """The digests of the model's weights; call it while everything is sharded."""
        return weights_digest(self.plan.named_weights(), self.plan.method.group)


class _Saver:
    """Commits outcomes to the checkpoint, `save_every` of them at a time."""

    def __init__(self, run: Run, checkpoint: CalibrationCheckpoint | None, save_every: int) -> None:
        self.run, self.checkpoint, self.save_every = run, checkpoint, save_every
        self.pending: list[Stage] = []

    def save(self, stage: Stage) -> None:
        """Called when a stage is finished and sharded."""
        self.pending.append(stage)
        stages = self.run.plan.stages
        if len(self.pending) < self.save_every and stage is not stages[-1]:
            return
        outcomes = self.run.outcomes
        chosen = [outcomes[one.index] for one in self.pending]
        if self.checkpoint is not None:
            state = {name: value for outcome in chosen for name, value in outcome.saved().items()}
            window = self.checkpoint.save_window(
                self.pending[0].index,
                stage.index,
                state,
                [outcome.to_json() for outcome in chosen],
                names=[one.name for one in self.pending],
            )
            self.run.tell_late(stage, "checkpoint", {"directory": window.directory})
        for one in self.pending:
            outcomes[one.index] = dataclasses.replace(outcomes[one.index], quantizers={})
        self.pending = []
