"""What is made of a calibration's result: a DCP checkpoint, a directory or a GGUF file, reports.

A directory or GGUF file gets its name when it is complete, so one that exists need not be written again.
"""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from dcp_adapters import AtomicFileSystemWriter, QuantizedSavePlanner, export_gguf, export_hf
from fsdp_hooks.ranks.across_ranks import on_first
from fsdp_hooks.wrappers import plain_state_dict
from layerwise.command.config import PICTURES, Config
from layerwise.formats.assignment import Assignment
from layerwise.report.report import Report
from layerwise.running.result import CalibrationResult


def write_outputs(  # noqa: PLR0913 - keyword-only
    config: Config, result: CalibrationResult, model: nn.Module, *, dense: bool, ours: bool, show: bool
) -> None:
    """Write all that the config asks for; all ranks call it alike.

    Args:
        config: of the run.
        result: of the calibration.
        model: that was calibrated.
        dense: whether the model's directory is dense, so that the rest of the model can be taken from there.
        ours: an earlier run of this config has begun to write; what is complete stays, and the rest is written again.
        show: bars on rank 0.
    """
    output = config.output
    if output.checkpoint is not None:
        # Quantized weights take the places of the dense ones, which have the same names.
        _save({**plain_state_dict(model), **result.state_dict()}, output.checkpoint)
    # An export gets its name when it is complete. Only rank 0 looks, since all ranks must take part or none.
    if output.path is not None and not (ours and on_first(None, output.path.exists)):
        _export(config, output.path, result, config.model.path if dense else model, show=show)
    on_first(None, lambda: _write_reports(result.report, output.report))


def write_assignment(config: Config, assignment: Assignment) -> None:
    """Write what a search has chosen, if the config asks for it; on one rank."""
    if config.search is not None and config.search.assignment is not None:
        assignment.save(config.search.assignment)


def _export(config: Config, path: Path, result: CalibrationResult, rest: Any, *, show: bool) -> None:
    output = config.output
    if output.like is not None:
        export_gguf(result, path, like=output.like, rest=rest, progress=show)
        return
    export_hf(
        result,
        path,
        layout=output.layout,
        config=config.model.path,
        rest=rest,
        max_shard_size=output.max_shard_size,
        progress=show,
    )


def _write_reports(report: Report, paths: Iterable[Path]) -> None:
    """Write the report to each path, in the format of its suffix."""
    for path in paths:
        if path.suffix == ".json":
            report.save(path)
        elif path.suffix in PICTURES:
            report.plot(path)
        else:
            path.write_text(report.table() + "\n", encoding="utf-8")


def _save(state: Mapping[str, Any], directory: Path) -> None:
    alone = not (dist.is_available() and dist.is_initialized())
    with warnings.catch_warnings():  # DCP warns that it works in a single process, which is the intent
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.save(
            dict(state),
            storage_writer=AtomicFileSystemWriter(directory),
            planner=QuantizedSavePlanner(),
            no_dist=alone,
        )
