"""The command line, `python -m layerwise CONFIG.yaml`.

    read        rank 0 reads the config, all ranks parse the same text
    finished?   if checkpoint_dir says so, the command tells that and does nothing else
    check       everything that can be refused is refused (checks.py)
    load        each rank its shards
    search      if there are several recipes: one for each weight, measured layer by layer
    calibrate   layer by layer, from the checkpoint_dir on
    write       reports, checkpoint, directory (outputs.py)

Exit status: 0, it is done, now or by an earlier run; 1, it failed while it ran, and with a checkpoint_dir the same
command goes on where it stopped; 2, the config, or what it names, is refused, and nothing was changed.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_hooks.ranks.across_ranks import is_first, on_first, rank_of, ranks_of
from layerwise.calibrate import calibrate
from layerwise.command.checks import Fitting, check_fit, device_of, of_first
from layerwise.command.config import Config
from layerwise.command.data import batches_of
from layerwise.command.model import load
from layerwise.command.outputs import write_assignment, write_outputs
from layerwise.command.parsing import Algorithms, parse
from layerwise.command.record import FINISHED, WRITING, RunRecord, read_record, record_of, write_record
from layerwise.command.reference import example
from layerwise.command.yaml_text import ConfigError
from layerwise.formats.assignment import Assignment
from layerwise.formats.candidates import Menu
from layerwise.running.result import CalibrationResult
from layerwise.search_formats import search_formats
from qtensor.spec.recipes import Recipe

PROGRAM = "python -m layerwise"
DONE, FAILED, REFUSED = 0, 1, 2
# What a run may fail by; any other exception is a defect of the program, so it keeps its traceback.
RUN_ERRORS = (OSError, ValueError, TypeError, RuntimeError, ImportError, EOFError, CheckpointException)
TELL_BEFORE_LEAVING = timedelta(seconds=10)
CONNECT_BEFORE_LEAVING = timedelta(minutes=5)
ABOUT = """\
Calibrate a model by a config: from a Hugging Face directory to quantized weights in one that engines load, in one
command, on one process or several (torchrun). Everything is checked before the first weight is read. With a
checkpoint_dir a run that was stopped goes on where it was, on any number of ranks, to the same bytes."""
EXAMPLES = """\
examples:
  %(prog)s --example > config.yaml              every key, with comments
  %(prog)s config.yaml --check                  does it all fit together?
  %(prog)s config.yaml
  torchrun --nproc-per-node 8 -m layerwise config.yaml

exit status: 0 done; 1 it failed while it ran; 2 the config, or what it names, is refused (torchrun has its own)"""


class _CommandParser(argparse.ArgumentParser):
    """Reports bad usage as any other refusal: a message of two lines."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}\n(see {self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = _CommandParser(
        prog=PROGRAM,
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    found.add_argument("config", metavar="CONFIG", nargs="?", help="the config, a YAML file")
    found.add_argument("--check", action="store_true", help="only check that everything fits; read no weight")
    found.add_argument("--example", action="store_true", help="print a config with every key and comments")
    found.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar on a terminal")
    return found


def main(argv: Sequence[str] | None = None, *, algorithms: Algorithms) -> int:
    """Run the command and return the exit status.

    Args:
        argv: the arguments, without the program's name; None: those of the process.
        algorithms: those that a config may name.
    """
    try:
        arguments = parser().parse_args(argv)
        if arguments.example == (arguments.config is not None):
            raise ConfigError(f"expected a config, or --example without one\n(see {PROGRAM} --help)")
    except ConfigError as error:
        _tell(f"error: {error}", everywhere=True)
        return REFUSED
    if arguments.example:
        sys.stdout.write(example(algorithms))
        return DONE
    with _process_group(), _tell_warnings():
        status = _status(lambda: _run(arguments, algorithms), arguments.config)
        # A rank that failed waits for a short time only: the others may be in collectives that it never joins.
        _meet(TELL_BEFORE_LEAVING if status != DONE else CONNECT_BEFORE_LEAVING)
        return status


def _status(run: Callable[[], None], config: str) -> int:
    """Run the command, tell an error on rank 0, and return the exit status."""
    try:
        run()
    except ConfigError as error:
        lines = str(error).splitlines()
        _tell(f"error: {config}: {lines[0]}" if len(lines) == 1 else f"error: {config}:\n  " + "\n  ".join(lines))
        return REFUSED
    except RUN_ERRORS as error:
        _tell(f"error: {error}")
        return FAILED
    except KeyboardInterrupt:
        _tell("interrupted; with a checkpoint_dir the same command goes on behind the last saved layer")
        return FAILED
    return DONE


def _run(arguments: argparse.Namespace, algorithms: Algorithms) -> None:
    config = parse(of_first(lambda: _text_of(Path(arguments.config))), algorithms)
    directory = config.calibration.checkpoint_dir
    # Only rank 0 looks: a file system may show different ranks different states, and all must go the same way.
    now, before, finished = of_first(lambda: _look_up(config))
    if finished:
        _tell(f"finished already, by an earlier run of this config: {_outputs_in_words(config)}")
        return
    fitting = check_fit(config, now, before)
    _tell(f"{arguments.config}: {_plan_in_words(config, fitting)}")
    if arguments.check:
        return
    show = arguments.progress
    device = device_of(config.model.device)
    load(fitting.model, fitting.layers, config.model, device, show=show)
    recipe = _choose_recipe(config, fitting, device, show=show)
    result = _calibrate(config, fitting, recipe, device, show=show)
    ours = now.same_run(before)
    # The record comes before the outputs: a run that stops between them finds outputs that exist and knows whose they
    # are.
    if directory is not None and not ours:
        on_first(None, lambda: write_record(directory, now, WRITING))
    write_outputs(config, result, fitting.model, dense=fitting.dense, ours=ours, show=show)
    if isinstance(recipe, Assignment):
        on_first(None, lambda: write_assignment(config, recipe))
    # Only when all outputs are there: the next start believes it, and does nothing.
    if directory is not None:
        on_first(None, lambda: write_record(directory, now, FINISHED))
    if is_first(None):
        if isinstance(recipe, Assignment):
            print(recipe.table(), end="\n\n")
        print(result.report.table(worst=5))
        sys.stdout.flush()
    _tell(f"done: {_outputs_in_words(config)}")


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no file can have this name, or it is no UTF-8
        raise ConfigError(f"it cannot be read: {error}") from None


def _look_up(config: Config) -> tuple[RunRecord, RunRecord | None, bool]:
    """Return the record of this run, that of an earlier one, and whether all outputs of that are written and there.

    Earlier means: of this config, with these files.
    """
    try:
        now, before = record_of(config), read_record(config.calibration.checkpoint_dir)
        same = before is not None and before.state == FINISHED and now.same_run(before)
        return now, before, same and all(path.exists() for path in config.outputs().values())
    except OSError as error:  # a name that is too long, a directory that may not be read
        raise ConfigError(f"what it names cannot be looked at: {error}") from None


def _choose_recipe(config: Config, fitting: Fitting, device: torch.device, *, show: bool) -> Recipe | Assignment:
    """Return the recipe of all weights, or what a search has chosen for each."""
    if isinstance(config.recipe, Recipe):
        return config.recipe
    assert config.search is not None
    keys = config.calibration
    _tell("the search for formats, the first of two runs through the layers")
    with _refusing("search_formats"):
        found = search_formats(
            fitting.model,
            _data(config, fitting, device),
            recipes=config.recipe.recipes,
            bits_per_weight=config.search.bits_per_weight,
            compare=config.search.compare,
            layers=keys.layers,
            include=keys.include,
            exclude=keys.exclude,
            expert_inputs=keys.expert_inputs,
            checkpoint_dir=config.search_dir,
            save_every=keys.save_every,
            progress=show,
            inputs_on=keys.inputs_on,
            **_places(config, device),
        )
    _tell(f"chosen, {found.bits_per_weight:.3f} bits per weight: {found}")
    return found


def _calibrate(
    config: Config, fitting: Fitting, recipe: Recipe | Assignment, device: torch.device, *, show: bool
) -> CalibrationResult:
    """Calibrate and return the result; what `calibrate` refuses before it begins is a config that does not fit."""
    keys = config.calibration
    with _refusing("calibrate"):
        return calibrate(
            fitting.model,
            _data(config, fitting, device),
            recipe=recipe,
            algorithm=config.algorithm,
            layers=keys.layers,
            include=keys.include,
            exclude=keys.exclude,
            inputs=keys.inputs,
            expert_inputs=keys.expert_inputs,
            kv_cache=keys.cache,
            layer_inputs=keys.layer_inputs,
            inputs_on=keys.inputs_on,
            checkpoint_dir=keys.checkpoint_dir,
            save_every=keys.save_every,
            progress=show,
            **_places(config, device),
        )


def _data(config: Config, fitting: Fitting, device: torch.device) -> list[dict[str, Any]] | None:
    """Return the batches of this rank."""
    if config.data is None or fitting.samples is None:
        return None
    return batches_of(fitting.samples, config.data.batch_size, rank_of(None), ranks_of(None), device)


def _places(config: Config, device: torch.device) -> dict[str, Any]:
    """Return where a run through the layers computes, and where it finds their weights."""
    unsharded, on_disk = not (dist.is_available() and dist.is_initialized()), config.model.weights_on == "disk"
    return {
        # The mesh of a sharded model says where it computes; weights on disk have no mesh.
        "device": device if unsharded or on_disk else None,
        "weights": config.model.path if on_disk else None,
    }


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Inside, what a function of this name refuses is raised as ConfigError: the config does not fit."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error).removeprefix(f"{name}: ")) from error


# -- words -------------------------------------------------------------------------------------------------------------


def _plan_in_words(config: Config, fitting: Fitting) -> str:
    samples = fitting.samples
    data = "no data" if samples is None else f"{samples.shape[0]} samples of {samples.shape[1]} tokens"
    ranks = f"{ranks_of(None)} rank{'s' if ranks_of(None) > 1 else ''}"
    to = str(config.recipe)
    if isinstance(config.recipe, Menu) and config.search is not None:
        names = ["dense" if one is None else str(one) for one in config.recipe.recipes]
        to = f"{config.search.bits_per_weight:g} bits each of {', '.join(names)}"
    what = f"{len(fitting.targets)} weights in {len(fitting.layers)} layers to {to}"
    return f"{what} by {config.algorithm}, on {data}, {ranks}; {_outputs_in_words(config)}"


def _outputs_in_words(config: Config) -> str:
    words = [f"{path}" for path in config.outputs().values()]
    return ", ".join(words)


def _tell(text: str, *, everywhere: bool = False) -> None:
    """Print a line on stderr, on rank 0."""
    if everywhere or is_first(None):
        print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


@contextmanager
def _tell_warnings() -> Iterator[None]:
    """Inside, warnings are lines like other messages, each text once, on rank 0."""
    seen: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        text = str(message).removeprefix("calibrate: ").removeprefix("search_formats: ")
        if text not in seen:
            seen.add(text)
            _tell(f"warning: {text}")

    # Python would print file and line of each, once for every rank.
    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


# -- ranks -------------------------------------------------------------------------------------------------------------


@contextmanager
def _process_group() -> Iterator[None]:
    """Under torchrun, make its process group, and destroy it at the end; a group that is there already stays."""
    # A caller in the same process may have made the group; then it is not ours to destroy.
    if dist.is_initialized() or "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        yield
        return
    # Gathers of shards run on the accelerator; objects and checkpoints travel on the CPU, so gloo is there in any case.
    backend = "gloo"
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())
        assert kind is not None
        backend = f"cpu:gloo,{kind.type}:{dist.get_default_backend_for_device(kind)}"
    dist.init_process_group(backend)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _meet(patience: timedelta) -> None:
    """Wait for the others before this process leaves their group and ends; give up if they do not come.

    torchrun stops all processes when the first one has failed, also the one that tells the error. And a rank that only
    hears what rank 0 has found may still connect to it when rank 0 has nothing left to do: its connection would be
    closed.
    """
    if ranks_of(None) > 1:
        # A rank may have ended already. What this process has to tell is told by now, so nothing may hide it.
        with suppress(Exception):
            work = dist.barrier(async_op=True)
            if work is not None:
                work.wait(patience)
