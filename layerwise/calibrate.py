"""`calibrate`: from a model and some data to quantized weights, one layer held at a time, resumable anywhere.

    plan       layers, targets, a fingerprint of the run; refused here if anything does not fit     (plan.py)
    record     one forward of the parent per batch, through stand-ins, inside the first layer's turn (replay.py)
    a layer    hold -> calibrate (stage.py) -> release -> keep own rows (outcome.py) -> shards, checkpoint
    at last    the model once more through stand-ins, for what is outside of the layers
    result     quantized weights beside the shards, and a report                                      (result.py)

Ranks go through the same stages together; what they have of data is their own affair.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from layerwise.algorithms.algorithm import Algorithm
from layerwise.algorithms.maximum import Max
from layerwise.events import Event
from layerwise.plan import Options, Plan, planned
from layerwise.result import CalibrationResult
from layerwise.run import Run
from qtensor.recipes import Recipe

__all__ = ["calibrate"]


def calibrate(  # noqa: PLR0913 - the options of a run, keyword-only
    model: nn.Module,
    data: Iterable[Any] | Callable[[nn.Module], object] | None,
    *,
    recipe: Recipe,
    algorithm: Algorithm = Max(),
    layers: Any = None,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    inputs: str = "dynamic",
    checkpoint_dir: str | Path | None = None,
    save_every: int = 1,
    on_event: Callable[[Event], object] | None = None,
    progress: bool = True,
    layer_inputs: str | None = None,
    inputs_on: str = "device",
    device: torch.device | str | None = None,
    weights: str | Path | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> CalibrationResult:
    """TODO."""
