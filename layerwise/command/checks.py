"""Does it all fit together? The config, the model, the files, the data, the layout: answered before a weight is read.

The model is built on the meta device; of files only names, shapes and headers are read; the export is planned
(export_check.py). What is wrong is collected from all ranks and told at once, alike on every rank.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dcp_adapters.hf.files.directory import read_directory
from dcp_adapters.hf.reading.importing import check_import
from dcp_adapters.hf.reading.schemes import is_quantized
from dcp_adapters.plain.durable import refuse_taken
from fsdp_hooks.ranks.across_ranks import on_all, on_first, ranks_of
from layerwise.command.config import PICTURES, Config
from layerwise.command.data import read_samples
from layerwise.command.export_check import check_export
from layerwise.command.model import built, longest_of, vocabulary_of
from layerwise.command.record import RunRecord
from layerwise.command.yaml_text import ConfigError
from layerwise.formats.assignment import budget_of
from layerwise.formats.candidates import Menu, Weight, least_bits
from layerwise.running.plan import Options
from layerwise.stages.attentions import find_attentions
from layerwise.stages.experts import find_blocks
from layerwise.stages.layers import find_layers
from layerwise.stages.targets import Target, find_targets
from layerwise.weights.on_disk import OnDisk

T = TypeVar("T")
NO_PICTURES = "pictures are drawn by matplotlib, which is not installed: pip install 'qtensor-fsdp[calibration]'"
# What a check may refuse by; any other exception is a defect, and must not look like a wrong config.
REFUSALS = (ValueError, TypeError, OSError, NotImplementedError, ImportError)


@dataclass(frozen=True, eq=False)
class Fitting:
    """What the checks have built.

    model: on the meta device. layers: of it. targets: the weights that will be quantized. samples: int64 [samples,
    tokens], None without data. dense: whether the model's directory is dense.
    """

    model: nn.Module
    layers: Sequence[nn.Module]
    targets: Sequence[Target]
    samples: Tensor | None
    dense: bool


def check_fit(config: Config, now: RunRecord, before: RunRecord | None) -> Fitting:
    """Check that everything about a run fits, and return what it needs. All ranks call it alike.

    Args:
        config: of the run.
        now: its record.
        before: that of an earlier run in the same checkpoint_dir.

    Raises:
        ConfigError: on all ranks, a line for each thing that does not fit.
        ImportError: transformers, or what an output needs, is not installed.
    """
    problems = _Problems()
    with problems.of("output"):
        _check_outputs(config, now, before)
        _check_state(config.calibration.checkpoint_dir)
        _check_pictures(config.output.report)
    with problems.of("model.device"):
        device_of(config.model.device)
    # Later checks need the model, so they are left out without one. The others go on, so one run names all that is
    # wrong.
    model = problems.value("model", lambda: built(config.model))
    layers: list[nn.Module] = []
    targets: list[Target] = []
    if model is not None:
        with problems.of("calibration.layers"):
            layers += layers_of(config, model)
        with problems.of("calibration"):
            _check_options(config)
            targets += find_targets(
                model, config.recipe, list(config.calibration.include), list(config.calibration.exclude)
            )
            if not targets:
                raise ValueError("no weight is left to quantize; see include and exclude")
            if config.calibration.kv_cache is not None:
                find_attentions(model)
            if config.calibration.expert_inputs == "all":
                find_blocks(model, targets)
        if targets and config.search is not None:
            with problems.of("recipe.bits_per_weight"):
                _check_budget(config, targets)
        with problems.of("model.path"):
            _check_files(config, model)
    dense = _is_dense(config.model.path)
    # Planning an export on top of other problems would only repeat them in other words.
    if targets and not problems.found:
        with problems.of("output"):
            check_export(config, model, targets, dense=dense)
    # Data is read last, and on rank 0 alone: a large file may take long to tokenize.
    problems.raise_on_all()
    assert model is not None
    return Fitting(model, layers, targets, of_first(lambda: _samples(config, model)), dense)


def of_first(step: Callable[[], T]) -> T:
    """Return on all ranks what `step` returns on rank 0. Raises ConfigError on all ranks if it does on rank 0."""

    def tried() -> tuple[Any, str | None]:
        try:
            return step(), None
        except ConfigError as error:
            return None, str(error)

    # `on_first` would make a plain ValueError of it; as a value it stays a ConfigError on all ranks.
    value, refusal = on_first(None, tried)
    if refusal is not None:
        raise ConfigError(refusal)
    return value  # type: ignore[no-any-return]


class _Problems:
    """What is wrong, in the order in which it was found."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextmanager
    def of(self, key: str) -> Iterator[None]:
        """Inside, a step runs; what it refuses is kept under this key, unless the refusal names one."""
        try:
            yield
        except ConfigError as error:
            self.found.append(str(error))
        except REFUSALS as error:
            text = str(error).removeprefix("calibrate: ").removeprefix(f"{key.rpartition('.')[2]}: ")
            self.found.append(f"{key}: {text}")

    def value(self, key: str, step: Callable[[], Any]) -> Any:
        """Return what a step returns; None if it was refused."""
        found: list[Any] = []
        with self.of(key):
            found.append(step())
        return found[0] if found else None

    def raise_on_all(self) -> None:
        """Raise ConfigError on all ranks if some rank has found something."""
        told = on_all(None, lambda: self.found)
        # Ranks mostly find the same; then the error looks as in one process.
        if all(found == told[0] for found in told):
            lines = told[0]
        else:
            lines = [f"rank {rank}: {line}" for rank, found in enumerate(told) for line in found]
        if lines:
            raise ConfigError("\n".join(lines))


def device_of(name: str) -> torch.device:
    """Return where this rank computes. Raises ValueError if there is no such device."""
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device(name if name != "auto" else there or "cpu")
    if device.type == "cpu":
        return torch.device("cpu")
    if there is None or there.type != device.type:
        raise ValueError(f"there is no {name} here; expected auto, cpu{'' if there is None else f' or {there.type}'}")
    numbered = ":" in name
    # All ranks read the same config, so they would share one GPU.
    if numbered and ranks_of(None) > 1:
        raise ValueError(f"{name} would be that of all ranks; say {device.type}, and each takes its own")
    # Under torchrun, main.py has set the current device by LOCAL_RANK.
    index = device.index if numbered else torch.accelerator.current_device_index()
    if index >= torch.accelerator.device_count():
        raise ValueError(f"there is no {name} here; there are {torch.accelerator.device_count()}, counted from 0")
    return torch.device(device.type, index)


def layers_of(config: Config, model: nn.Module) -> list[nn.Module]:
    """Return the layers that the config names; none if the whole model is calibrated at once."""
    asked: Any = config.calibration.layers
    return [] if asked == () else [layer for _, layer in find_layers(model, asked)]


def _check_outputs(config: Config, now: RunRecord, before: RunRecord | None) -> None:
    """Refuse names that are taken, unless an earlier run of this config has begun to write there."""
    ours = now.same_run(before)
    # An empty directory may be there already; a file may not.
    directories = ["output.checkpoint", *(["output.path"] if config.output.like is None else [])]
    for key, path in config.outputs().items():
        try:
            if not path.absolute().parent.is_dir():
                raise FileNotFoundError(f"{path.absolute().parent}: no such directory; create it first")
            if not ours and key in directories:
                refuse_taken(path)
            elif not ours and path.exists():
                raise FileExistsError(f"{path} exists already; choose another name, nothing is overwritten")
        except OSError as error:
            changed = None if before is None else now.changed(before)
            why = "" if changed is None else f" (an earlier run of this config has read another {changed})"
            raise ConfigError(f"{key}: {error}{why}") from None


def _check_state(directory: Path | None) -> None:
    """Refuse a checkpoint_dir that is no directory and cannot become one."""
    try:
        taken = directory is not None and directory.exists() and not directory.is_dir()
    except OSError as error:
        raise ConfigError(f"calibration.checkpoint_dir: {error}") from None
    if taken:
        raise ConfigError(f"calibration.checkpoint_dir: {directory} is a file; name a directory, or one to be created")


def _check_pictures(paths: Sequence[Path]) -> None:
    """Refuse pictures if nothing can draw them: now, and not when all is done."""
    if any(path.suffix in PICTURES for path in paths) and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"output.report: {NO_PICTURES}")


def _check_options(config: Config) -> None:
    keys = config.calibration
    # Options checks itself when it is made; `calibrate` makes it of the same arguments later.
    Options(
        recipe=config.recipe,
        algorithm=config.algorithm,
        inputs=keys.inputs,
        expert_inputs=keys.expert_inputs,
        kv_cache=keys.cache,
        layer_inputs=keys.layer_inputs,
        inputs_on=keys.inputs_on,
        save_every=keys.save_every,
    )


def _check_budget(config: Config, targets: Sequence[Target]) -> None:
    """Refuse a budget that no choice keeps."""
    assert config.search is not None
    assert isinstance(config.recipe, Menu)
    weights = [Weight(target.name, target.shape, target.dtype, target.linears()) for target in targets]
    try:
        least = least_bits(weights, config.recipe)
        budget_of(config.search.bits_per_weight, sum(one.shape.numel() for one in weights), least)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("search_formats: ")) from None


def _check_files(config: Config, model: nn.Module) -> None:
    """Refuse files that lack tensors of the model, or have others."""
    if config.model.weights_on == "disk":
        OnDisk(config.model.path, model)
    else:
        # As `load` will import it: a quantized directory is dequantized into the dense model.
        check_import(config.model.path, model, on_mismatch="convert")


def _is_dense(path: Path) -> bool:
    try:
        return not is_quantized(read_directory(path))
    except REFUSALS:  # told by _check_files
        return True


def _samples(config: Config, model: nn.Module) -> Tensor | None:
    """Return the samples; called on rank 0 alone."""
    if config.data is None:
        return None
    longest = longest_of(model)
    if longest is not None and config.data.sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length: the model takes {longest} tokens at most, got {config.data.sequence_length}"
        )
    return read_samples(config.data, config.model.path, vocabulary_of(model))
