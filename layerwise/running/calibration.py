"""The run of `calibrate`: every stage is quantized, and its result is put into the shards."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from fsdp_hooks.scale_sync import sync_scales
from fsdp_hooks.torch_private import local_of
from fsdp_hooks.wrappers import plain_parameters
from layerwise.inputs.replaying.replay import Replay
from layerwise.resume.checkpoints import CalibrationCheckpoint
from layerwise.resume.progress import Window
from layerwise.running.checkpoint_notes import check_notes
from layerwise.running.one_stage.calibrate_stage import Calibrated, calibrate_stage
from layerwise.running.outcome import StageOutcome, outcome_of, placeholders, restore_outcome
from layerwise.running.run import LayerwiseRun
from layerwise.stages.stage import Stage
from qtensor.scales.high_precision import HighPrecisionWeight


class Calibration(LayerwiseRun[StageOutcome]):
    """A run that quantizes."""

    calibrated: Calibrated
    installed: Collection[str]

    def calibrate_stages(self, data: Any, directory: str | Path | None) -> None:
        """Go through all stages; gathers that quantize dense shards then agree on the scales of their new values."""
        super().calibrate_stages(data, directory)
        named = plain_parameters(self.plan.model)
        gathered = [(name, param) for name, param in named if isinstance(local_of(param), HighPrecisionWeight)]
        if gathered:
            sync_scales(gathered)

    def work_on(self, stage: Stage, replay: Replay, tell: Callable[[str], None]) -> None:
        """Calibrate a stage."""
        self.calibrated = calibrate_stage(stage, replay, self.method, tell)
        measured = self.calibrated.measured
        # Under mixed precision the gathered weights have another dtype than the shards, which get the result's values
        # then.
        self.installed = {target.name for target in stage.targets if target.param.dtype == target.dtype}
        self.tell_late(stage, "metrics", {"records": measured.records, "snr_db": measured.output_snr})

    def keep(self, stage: Stage) -> StageOutcome:
        """Return the stage's result; the shards hold it by then."""
        outcome = outcome_of(stage, self.calibrated, writes_weights=self.method.algorithm.writes_weights)
        del self.calibrated  # full tensors
        outcome.apply(stage, self.installed)
        return outcome

    def check_notes(self, window: Window) -> None:
        """Check the notes of results."""
        check_notes(window, self.plan.stages)

    def restore(self, checkpoint: CalibrationCheckpoint, window: Window) -> list[StageOutcome]:
        """Return the results in a window."""
        recipe, algorithm = self.method.recipe, self.method.algorithm
        noted = list(zip(self.plan.stages[window.first : window.last + 1], window.extra, strict=True))
        states = [placeholders(stage, recipe, note, writes_weights=algorithm.writes_weights) for stage, note in noted]
        checkpoint.load_window(window, {name: value for state in states for name, value in state.items()})
        outcomes = []
        for (stage, note), state in zip(noted, states, strict=True):
            outcomes.append(restore_outcome(stage, recipe, note, state, self.plan.weights))
            if algorithm.smooths:
                # Later stages are probed only where the first of their kind could be folded, also if
                # that was in an earlier run.
                self.method.known.learn(stage, outcomes[-1].pairs)
        return outcomes
