"""Runs a stage on one batch after the other: a layer by itself, what is outside of the layers through the model.

LayerReplay   calls the layer as its parent was recorded to, with the outputs of the layers before it
ModelReplay   calls the model; stand-ins in place of the layers hand on what the last layer returned

A replay may have a `reference`: one of the same stage and batches in the unquantized model, whose layers hand on what
they returned before they were quantized.
"""

from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from layerwise.inputs.recording.recorder import Recorder
from layerwise.inputs.replaying.hooks import call_without_fsdp
from layerwise.stages.stage import Stage


@dataclass(frozen=True, eq=False)
class LayerOutput:
    """All that one run of a layer hands on; a layer computes the same only if all of it is the same.

    Attributes:
        returned: what it returned.
        shared: tensors that it put into containers that later layers get, too (shared keys and values).
        written: tensors among its arguments that it wrote into, by name.
    """

    returned: Any
    shared: tuple[Tensor, ...]
    written: Mapping[str, Tensor] = field(default_factory=dict)


class LayerReplay:
    """Runs one layer without FSDP's hooks, since its weights are held.

    Args:
        recorder: has the batches; `len` of the replay is how many there are on this rank.
        stage: of the layer.
        last: no stage comes after it.
        reference: the recorder of the unquantized model, if its inputs are wanted.
    """

    def __init__(self, recorder: Recorder, stage: Stage, *, last: bool, reference: Recorder | None = None) -> None:
        self.recorder, self.stage, self.last = recorder, stage, last
        self.reference = None if reference is None else LayerReplay(reference, stage, last=last)

    def __len__(self) -> int:
        return len(self.recorder)

    def run(self, batch: int) -> LayerOutput:
        """Run the layer on one batch; return its output, and what it left for later layers elsewhere."""
        return self._run(batch)

    def run_and_compare(self, batch: int) -> LayerOutput:
        """Do as `run`; also find arguments into which the layer writes uncounted by torch, for later runs to tell."""
        return self._run(batch, compare=True)

    def keep(self, batch: int, output: LayerOutput) -> None:
        """Hand an output on, unless nothing comes after it."""
        if not self.last:
            self.recorder.put(self.stage.index, batch, output.returned, output.written)

    def _run(self, batch: int, *, compare: bool = False) -> LayerOutput:
        index, layer = self.stage.index, self.stage.module
        returned, written = self.recorder.run(
            index, batch, lambda *args, **kwargs: call_without_fsdp(layer, args, kwargs), compare=compare
        )
        if isinstance(returned, Iterator | Awaitable):
            raise NotImplementedError(
                f"layer {self.stage.name} returns a {type(returned).__name__}, which computes when the model asks it "
                "to, and not when the layer is called; let it return its values"
            )
        # The next run writes into the same containers and tensors, so what is to be compared is copied.
        shared = self.recorder.shared_tensors(index, batch)
        return LayerOutput(returned, tuple(one.clone() for one in shared) if compare else shared, written)


class ModelReplay:
    """Runs the model with its layers left out, as the last stage."""

    def __init__(self, recorder: Recorder, reference: Recorder | None = None) -> None:
        self.recorder = recorder
        self.reference = None if reference is None else ModelReplay(reference)

    def __len__(self) -> int:
        return len(self.recorder)

    def run(self, batch: int) -> Any:
        """Run the model on one batch, and return its output."""
        return self.recorder.run_tail(batch)

    def keep(self, batch: int, output: Any) -> None:
        """Do nothing: no stage comes after it."""


Replay = LayerReplay | ModelReplay
