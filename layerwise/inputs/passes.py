"""The batches of this rank, and how they get through a stage: a layer called by itself, the rest by the model.

LayerPasses   what the layer was called with when the parent was recorded, and the outputs of the layers before it
ModelPasses   the model itself: stand-ins in place of the layers hand on what the last layer returned
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.inputs.hooks import called
from layerwise.inputs.replay import Recorder
from layerwise.inputs.structure import flatten, rebuild
from layerwise.plan import Options, Plan
from layerwise.stage import Passes, Stage


@dataclass(frozen=True, eq=False)
class Ran:
    """All that one run of a layer is seen by: who changes a layer so that it stays the same function looks at both.

    Attributes:
        output: what it returned.
        shared: tensors that it put into containers which later layers get, too (shared keys and values).
    """

    output: Any
    shared: tuple[Tensor, ...]


class LayerPasses:
    """Runs one layer, past the hooks of FSDP: its weights are held, and stay."""

    def __init__(self, recorder: Recorder, stage: Stage, *, last: bool, cast: torch.dtype | None) -> None:
        self.recorder, self.stage, self.last, self.cast = recorder, stage, last, cast

    @property
    def batches(self) -> int:
        """How many this rank has."""
        return len(self.recorder)

    def run(self, batch: int) -> "Ran":
        """The layer's output for one batch, and what it left for later layers elsewhere."""
        args, kwargs = self.recorder.inputs(self.stage.index, batch, cast=self.cast)
        output = called(self.stage.module, args, kwargs)
        return Ran(output, self.recorder.shared(self.stage.index, batch))

    def keep(self, batch: int, output: "Ran") -> None:
        """Hand an output on, unless nothing comes after it."""
        if not self.last:
            self.recorder.put(self.stage.index, batch, output.output)


class ModelPasses:
    """Runs the model with its layers left out."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    @property
    def batches(self) -> int:
        """How many this rank has."""
        return len(self.recorder)

    def run(self, batch: int) -> Any:
        """The model's output for one batch."""
        return self.recorder.run_tail(batch)

    def keep(self, batch: int, output: Any) -> None:
        """Nothing comes after it."""


class Batches:
    """The data of a run, recorded: a context manager, since inputs may wait in files."""

    def __init__(self, plan: Plan, data: Iterable[Any] | Callable[[nn.Module], object], options: Options) -> None:
        self.plan, self.data, self.options = plan, data, options
        self._recorder: Recorder | None = None

    def __enter__(self) -> "Batches":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recorder is not None:
            self._recorder.close()

    @property
    def needs_model(self) -> bool:
        """Whether the model is called to learn what the data are."""
        return callable(self.data)

    def take(self) -> None:
        """Take all data in."""
        layers = [(stage.name, stage.module) for stage in self.plan.stages if stage.name]
        data: Any = self.data
        if not callable(data) and self.options.device is not None:
            data = _moved(data, self.options.device)
        self._recorder = Recorder(self.plan.model, layers, data, inputs_on=self.options.inputs_on)

    @property
    def recorder(self) -> Recorder:
        """The data, once taken."""
        assert self._recorder is not None
        return self._recorder

    def needs_parent(self, stage: Stage) -> bool:
        """Whether the parent has to run before this stage, on this rank."""
        return bool(stage.name) and self.recorder.needs_parent(stage.index)

    def passes(self, stage: Stage, cast: torch.dtype | None) -> Passes:
        """A stage's batches; floating inputs of a layer come in the dtype `cast`."""
        if not stage.name:
            return ModelPasses(self.recorder)
        return LayerPasses(self.recorder, stage, last=stage is self.plan.stages[-1], cast=cast)

    def done(self, stage: Stage) -> None:
        """Free what only this stage needed."""
        if stage.name:
            self.recorder.done(stage.index)


def _moved(data: Iterable[Any], device: torch.device) -> Iterator[Any]:
    for batch in data:
        leaves, structure = flatten(batch)
        yield rebuild(structure, [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
