"""Runs a stage on one batch after the other: a layer by itself, what is outside of the layers through the model.

LayerReplay   calls the layer as its parent was recorded to, with the outputs of the layers before it
ModelReplay   calls the model; stand-ins in place of the layers hand on what the last layer returned

A replay may have a `reference`: one of the same stage and batches in the unquantized model, whose layers hand on what
they returned before they were quantized.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerwise.inputs.hooks import call_without_fsdp
from layerwise.inputs.recorder import Recorder
from layerwise.stages.stage import Stage


@dataclass(frozen=True, eq=False)
class LayerOutput:
    """All that one run of a layer hands on: a layer still computes the same only if both stay the same.

    Attributes:
        returned: what it returned.
        shared: tensors that it put into containers which later layers get, too (shared keys and values).
    """

    returned: Any
    shared: tuple[Tensor, ...]


class LayerReplay:
    """Runs one layer without FSDP's hooks, since its weights are held.

    Args:
        recorder: has the batches; `len` of the replay is how many there are on this rank.
        stage: of the layer.
        last: no stage comes after it.
        cast: floating inputs come in this dtype.
        reference: the recorder of the unquantized model, if its inputs are wanted.
    """

    def __init__(
        self,
        recorder: Recorder,
        stage: Stage,
        *,
        last: bool,
        cast: torch.dtype | None,
        reference: Recorder | None = None,
    ) -> None:
        self.recorder, self.stage, self.last, self.cast = recorder, stage, last, cast
        self.reference = None if reference is None else LayerReplay(reference, stage, last=last, cast=cast)

    def __len__(self) -> int:
        return len(self.recorder)

    def run(self, batch: int) -> LayerOutput:
        """The layer's output for one batch, and what it left for later layers elsewhere."""
        args, kwargs = self.recorder.inputs(self.stage.index, batch, cast=self.cast)
        returned = call_without_fsdp(self.stage.module, args, kwargs)
        return LayerOutput(returned, self.recorder.shared(self.stage.index, batch))

    def keep(self, batch: int, output: LayerOutput) -> None:
        """Hand an output on, unless nothing comes after it."""
        if not self.last:
            self.recorder.put(self.stage.index, batch, output.returned)


class ModelReplay:
    """Runs the model with its layers left out, as the last stage."""

    def __init__(self, recorder: Recorder, reference: Recorder | None = None) -> None:
        self.recorder = recorder
        self.reference = None if reference is None else ModelReplay(reference)

    def __len__(self) -> int:
        return len(self.recorder)

    def run(self, batch: int) -> Any:
        """The model's output for one batch."""
        return self.recorder.run_tail(batch)

    def keep(self, batch: int, output: Any) -> None:
        """Do nothing: no stage comes after it."""


Replay = LayerReplay | ModelReplay
