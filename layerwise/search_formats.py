"""`search_formats`: which format each weight should have, so that all together take so many bits and err least.

plan       as of a calibration, with a menu in place of a recipe
run        each stage: the error that each recipe would make of each linear, on all batches of all ranks
choose     one recipe for each group of weights, within the budget
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_hooks.devices import this_device
from fsdp_hooks.ranks.across_ranks import ALONE, is_first, raise_together
from fsdp_hooks.ranks.waiting import IN_GROUP, waited_for
from fsdp_hooks.wrappers import without_replication
from layerwise.algorithms.algorithm import Algorithm
from layerwise.algorithms.maximum import Max
from layerwise.calibrate import is_own
from layerwise.formats.assignment import Assignment, assign, budget_of
from layerwise.formats.candidates import COMPARE, Menu, Weight, candidates_of, least_bits
from layerwise.running.events import Event, log_plan, observing
from layerwise.running.one_stage.agreement import check_agreed
from layerwise.running.one_stage.errors import Measuring
from layerwise.running.plan import Options, make_plan
from layerwise.running.search import Search
from layerwise.stages.caller import calling
from qtensor.spec.recipes import Recipe

LOG = logging.getLogger(__name__)

MAX = Max()


def search_formats(  # noqa: PLR0913 - the options of a run, keyword-only
    model: nn.Module,
    data: Iterable[Any] | Callable[[nn.Module], object] | None,
    *,
    recipes: Sequence[Recipe | None],
    bits_per_weight: float,
    algorithm: Algorithm = MAX,
    compare: str = "relative",
    layers: Any = None,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    expert_inputs: str = "routed",
    checkpoint_dir: str | Path | None = None,
    save_every: int = 1,
    on_event: Callable[[Event], object] | None = None,
    progress: bool = True,
    inputs_on: str = "device",
    device: torch.device | str | None = None,
    weights: str | Path | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Assignment:
    """Choose a recipe for each weight: the least error of all linears together, within a number of bits per weight.

    Call it on all ranks of the group. Layers are gathered one at a time, and the ranks share the work, as in
    `calibrate`, whose recipe the result can be. The model stays as it is. Weights that engines run as one (q, k and v;
    gate and up; all experts of a module) get the same recipe. All ranks get the same assignment, and so does any other
    number of ranks with the same batches.

    Args:
        model: as of `calibrate`, in dense storage.
        data: as of `calibrate`; without any, the errors of the weights alone are compared.
        recipes: what to choose from; None: the weight stays as it is.
        bits_per_weight: how many bits all weights may take on average, scales included. It is a mean over all weights
            that `include` and `exclude` choose, those that stay as they are among them.
        algorithm: how weights are rounded when errors are measured. None of its factors are folded in.
        compare: "relative": each linear's error in parts of its output; "absolute": the energies of the errors.
        layers: as of `calibrate`.
        include: as of `calibrate`.
        exclude: as of `calibrate`.
        expert_inputs: as of `calibrate`.
        checkpoint_dir: where to keep what was measured, a directory that all ranks share, which is no calibration's.
            A later search with the same recipes and data continues after it, or chooses anew for another budget.
        save_every: after how many layers to save.
        on_event: called with every `Event`, on every rank; "metrics" brings the errors of the layer's linears.
        progress: show a bar on rank 0, if it has a terminal.
        inputs_on: where inputs of layers wait: "device", "cpu" or "disk".
        device: where a model without FSDP computes; None: where its weights are.
        weights: safetensors of a model on the meta device: a file, or a directory.
        process_group: the ranks; None: all of them, or this process alone if there is no process group.

    Returns:
        The assignment; `Assignment.at` gives others from the same measurements.

    Raises:
        ValueError, TypeError: options, patterns, shapes, a checkpoint, or a budget that do not fit, or differ between
            ranks.
        NotImplementedError: a model whose layers depend on each other in a way that cannot be replayed, by name.
        RuntimeError: inputs that are not finite; weights that somebody wrote into.

    Example:
        ```python
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        >>> menu = [NVFP4BlockScaling(), MXFP8BlockScaling()]
        >>> assignment = search_formats(model, [torch.randn(8, 64)], recipes=menu, bits_per_weight=7, layers=["0", "1"])
        >>> assignment.bits_per_weight <= 7
        True
        ```
    """
    model = without_replication(model)
    group = process_group or (dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)
    with calling("search_formats"), waited_for(group or ALONE, "search_formats", IN_GROUP), raise_together(group):
        if compare not in COMPARE:
            raise ValueError(f"search_formats: compare={compare!r} is not one of {', '.join(map(repr, COMPARE))}")
        menu = _menu(recipes)
        if not isinstance(algorithm, Algorithm):
            raise TypeError(f"search_formats: algorithm is {algorithm!r}; expected an instance, such as Max() or Mse()")
        options = Options(
            recipe=menu,
            algorithm=Measuring(algorithm=algorithm, recipes=len(menu.recipes)),
            layer_inputs="unquantized",
            expert_inputs=expert_inputs,
            inputs_on=inputs_on,
            save_every=save_every,
            device=None if device is None else this_device(device),
            weights=weights,
        )
        watched = on_event is not None or not is_own(algorithm)
        plan = make_plan(model, options, layers=layers, include=include, exclude=exclude, group=group, watched=watched)
        targets = [target for stage in plan.stages for target in stage.targets]
        chosen = [Weight(target.name, target.shape, target.dtype, target.linears()) for target in targets]
        if not chosen:
            raise ValueError("search_formats: no weight is left to choose a format for; see include and exclude")
        # Refused now, and not after hours of measuring.
        budget_of(bits_per_weight, sum(one.shape.numel() for one in chosen), least_bits(chosen, menu))
    first = is_first(group)
    observed = observing(on_event, len(plan.stages), bar=progress and first, logs=first)
    with calling("search_formats"), observed as observer:
        if first:
            log_plan(plan)
        told = plan.told(checkpoint=checkpoint_dir is not None)
        check_agreed(group, {**told, "the budget": [f"bits_per_weight={bits_per_weight}, compare={compare}"]})
        run = Search(plan, observer)
        run.calibrate_stages(() if data is None else data, checkpoint_dir)
    measured = {linear.name: linear for outcome in run.outcomes for linear in outcome.linears}
    assignment = assign(candidates_of(chosen, menu, measured, compare), bits_per_weight)
    if first and LOG.isEnabledFor(logging.INFO):
        LOG.info("search_formats: %.3f bits per weight: %s", assignment.bits_per_weight, assignment)
    return assignment


def _menu(recipes: Sequence[Recipe | None]) -> Menu:
    if isinstance(recipes, Recipe | str) or not isinstance(recipes, Iterable):
        raise TypeError(f"search_formats: recipes is {recipes!r}; expected a list, such as [NVFP4BlockScaling(), None]")
    return Menu(tuple(recipes))
