"""A run that measures formats: through all stages like a calibration, resumable like one, and nothing is quantized."""

import warnings
from collections.abc import Callable
from typing import Any

from dcp_adapters.plain.words import short
from fsdp_hooks.ranks.across_ranks import any_of
from layerwise.formats.candidates import LinearErrors, Menu
from layerwise.inputs.replaying.replay import Replay
from layerwise.resume.checkpoints import CalibrationCheckpoint
from layerwise.resume.progress import Window
from layerwise.running.one_stage.errors import StageErrors, measure_stage
from layerwise.running.run import LayerwiseRun
from layerwise.stages.stage import Stage

KEYS = {"name", "tokens", "signal", "noise"}


class Search(LayerwiseRun[StageErrors]):
    """A run that measures; the plan's recipe is a menu."""

    errors: StageErrors

    @property
    def menu(self) -> Menu:
        """Return the recipes to choose from."""
        recipe = self.method.recipe
        assert isinstance(recipe, Menu)
        return recipe

    def work_on(self, stage: Stage, replay: Replay, tell: Callable[[str], None]) -> None:
        """Measure a stage."""
        self.errors = measure_stage(stage, replay, self.method, self.menu, tell)
        self.tell_late(stage, "metrics", {"errors": self.errors.linears})

    def keep(self, stage: Stage) -> StageErrors:
        """Return its errors."""
        return self.errors

    def check_data(self) -> None:
        """Warn if no rank has a batch."""
        if not any_of(self.group, len(self.recorder) > 0):
            warnings.warn(
                "search_formats: no rank has a batch (an iterator that is used up has none left), so the errors of the "
                "weights are compared, and not those of outputs",
                stacklevel=4,
            )

    def check_notes(self, window: Window) -> None:
        """Look at the errors that a checkpoint notes."""
        stages, notes = self.plan.stages[window.first : window.last + 1], window.extra
        if window.last >= len(self.plan.stages):
            raise ValueError(f"there are {len(self.plan.stages)} stages")
        if type(notes) is not list or len(notes) != len(stages):
            raise ValueError(f"the notes are {short(notes)}, expected a list of {len(stages)}")
        for stage, note in zip(stages, notes, strict=True):
            names = [name for target in stage.targets for name in target.linears()]
            # Digests tell that a note is the one that was written, and not that this version of the library wrote it.
            whole = type(note) is list and all(_is_record(one, len(self.menu.recipes)) for one in note)
            if not whole or [one["name"] for one in note] != names:
                raise ValueError(f"{stage.title}: its note is {short(note)}, expected the errors of its linears")

    def restore(self, checkpoint: CalibrationCheckpoint, window: Window) -> list[StageErrors]:
        """Return the errors that a window notes."""
        return [
            StageErrors(tuple(LinearErrors(**{**one, "noise": tuple(one["noise"])}) for one in note))
            for note in window.extra
        ]


def _is_record(note: Any, recipes: int) -> bool:
    return (
        type(note) is dict
        and {*note} == KEYS
        and type(note["name"]) is str
        and type(note["tokens"]) is int
        and type(note["signal"]) is float
        and type(note["noise"]) is list
        and len(note["noise"]) == recipes
        and all(one is None or type(one) is float for one in note["noise"])
    )
