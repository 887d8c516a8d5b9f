"""Decides about all groups of a stage, each on one rank, and hands the quantized weights to all ranks.

    for each round    the statistics of its groups are reduced, each to its owner
                      each rank decides about its own groups and rounds them; statistics and dense values are freed
                      each owner's parts and quantizers go to all ranks

So beside what it has collected, a rank holds the statistics of one round and quantized weights, but no dense copy of
the stage. The number of collectives follows from the groups, their shapes and the algorithm.
"""

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fsdp_hooks.ranks.across_ranks import raise_together
from layerwise.algorithms.algorithm import CROSS, Group, Inputs, Linear, upright
from layerwise.algorithms.solvers.arithmetic import full_precision
from layerwise.folding.folds import transform_inputs
from layerwise.folding.smoothing import Smoothed
from layerwise.formats.assignment import recipe_of
from layerwise.inputs.replaying.replay import Replay
from layerwise.running.one_stage.exchange import Entries, Exchange, entries_of
from layerwise.stages.sharing import naming, own_statistics, rounds_of
from layerwise.stages.stage import Method, Stage
from layerwise.stages.targets import agree_on_amaxes
from layerwise.statistics.collector import Collector
from layerwise.statistics.statistics import Statistics
from layerwise.statistics.unquantized_inputs import UnquantizedInputs
from qtensor.tensor.quantized_tensor import QuantizedTensor

LOG = logging.getLogger(__name__)

Notes = dict[str, Mapping[str, float | str]]


def decide(
    stage: Stage, replay: Replay, statistics: Statistics, smoothed: Smoothed, method: Method
) -> tuple[dict[str, QuantizedTensor], dict[str, dict[str, Tensor]], Notes]:
    """Return the quantized weight and quantizer of every target, and the notes of every linear, the same on all ranks.

    Raises:
        Exception: of the algorithm, on all ranks; a note tells the linears.
    """
    weights = {name: weight for target in stage.targets for name, weight in target.matrices()}
    amaxes = agree_on_amaxes(stage.targets, method.recipe)
    groups = [tuple(Linear(name, weights[name], amaxes[name]) for name in facts.names) for facts in statistics.facts]
    exchange = Exchange(stage.targets, method.recipe, method.group)
    notes: Notes = {}

    def total(index: int, owner: int) -> Inputs | None:
        facts = statistics.facts[index]
        if facts.tokens and method.algorithm.one_at_a_time:
            return collect_again(stage, replay, method, facts.names, owner)
        found, factors = statistics.total(index, owner), smoothed.factors.get(facts.names[0])
        return found if found is None or factors is None else transform_inputs(found, factors)

    for turn in rounds_of(method, [(facts.tokens, groups[i]) for i, facts in enumerate(statistics.facts)]):
        inputs = own_statistics(method, turn, total)
        rounded: dict[str, Entries] = {}
        with raise_together(method.group):
            for index in turn[method.rank]:
                with naming(groups[index]):
                    # Popped, so that a Hessian is freed before the next decision.
                    rounded |= _decide(Group(groups[index], inputs.pop(index)), method, notes)
        for owner, indices in enumerate(turn):
            exchange.take([linear.name for index in indices for linear in groups[index]], rounded, owner)
    if method.group is not None:
        everyone: list[Any] = [None] * method.group.size()
        dist.all_gather_object(everyone, notes, group=method.group)
        # Every rank makes the whole report.
        notes = {name: found for theirs in everyone for name, found in theirs.items()}
    return *exchange.assemble(), notes


def collect_again(stage: Stage, replay: Replay, method: Method, names: tuple[str, ...], owner: int) -> Inputs | None:
    """Return the statistics of one group's input, from all batches once more, with its Hessian."""
    collector = Collector(
        {target.name: target.weight for target in stage.targets},
        needed_statistics(stage, method),
        only=names,
        apart=stage.kinds(),
        blocks=stage.blocks,
    )
    partners = collector.partners()
    if method.rank == 0:
        LOG.debug("%s: its batches run once more, for the Hessian of %s", stage.title, names[0])
    with raise_together(method.group):
        for batch in range(len(replay)):
            if partners is not None and replay.reference is not None:
                with partners.batch():
                    replay.reference.run(batch)  # what it hands on was made before factors were folded
            with collector.batch(partners):
                replay.run(batch)
    statistics = collector.agree(method.group)
    index = next(index for index, facts in enumerate(statistics.facts) if names[0] in facts.names)
    return statistics.total(index, owner)


def needed_statistics(stage: Stage, method: Method) -> frozenset[str]:
    """Return the statistics of a stage's inputs; in the first stage those of the unquantized model are the same."""
    return method.algorithm.needs - (set() if stage.index else {CROSS})


def run_reference(replay: Replay, batch: int, partners: UnquantizedInputs | None = None) -> None:
    """Run a batch in the unquantized model, if that is asked for, and hand its output on.

    Args:
        replay: has the reference.
        batch: its number.
        partners: keep the inputs of linears.
    """
    if replay.reference is not None:
        with nullcontext() if partners is None else partners.batch():
            output = replay.reference.run(batch)
        replay.reference.keep(batch, output)


def _decide(group: Group, method: Method, notes: Notes) -> dict[str, Entries]:
    """Map the name of each linear to its rounded weight; `notes` gets what its decision notes."""
    algorithm, names, live = method.algorithm, [linear.name for linear in group.linears], group.linears
    # A weight that is stored transposed is a view; sums over its strides may have other last bits.
    group = replace(group, linears=upright(live))
    recipe = recipe_of(method.recipe, names[0])  # statistics keep linears of different recipes apart
    with full_precision(group.linears[0].weight.device):  # only the layer itself runs in the precision the user chose
        decisions = list(algorithm.decide(group, recipe))
    if len(decisions) != len(names):
        raise ValueError(
            f"{type(algorithm).__name__}.decide returned {len(decisions)} decisions for the {len(names)} linears "
            f"{', '.join(names)}; expected one for each"
        )
    rounded = {}
    for linear, held in zip(group.linears, live, strict=True):
        if method.watched and linear.weight is not held.weight:
            held.weight.copy_(linear.weight)  # if the algorithm wrote into the copy, that counts
        # Popped, so that its dense values are freed once they are rounded.
        decision = decisions.pop(0)
        rounded[linear.name] = entries_of(linear.name, linear.weight, decision.weight, decision.quantizer, recipe)
        notes[linear.name] = decision.notes
    return rounded
