"""Column factors of a stage: probes on all ranks where they can go, asks the algorithm for them, and folds them.

    probe -> agree over ranks -> factors of all groups, from the statistics as they are -> fold all -> verify the output

The ranks share the groups, and tell each other the factors. A group whose factors can go nowhere keeps its weights and
statistics.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fsdp_hooks.ranks.across_ranks import raise_together
from layerwise.algorithms.algorithm import Group, Linear, Smoothing, upright
from layerwise.algorithms.solvers.arithmetic import full_precision
from layerwise.folding.folds import Fold, fold, scale_amaxes, tolerance, verify_outputs
from layerwise.folding.where_to_fold import where_to_fold
from layerwise.formats.assignment import recipe_of
from layerwise.inputs.replaying.replay import Replay
from layerwise.inputs.values.structure import flatten
from layerwise.stages.sharing import naming, own_statistics, rounds_of
from layerwise.stages.stage import Method, Pair, Stage
from layerwise.stages.targets import agree_on_amaxes
from layerwise.statistics.statistics import Facts, Statistics

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Smoothed:
    """The facts of the inputs of all groups after folding, and what was folded.

    Attributes:
        facts: of every group, in the order of the statistics.
        factors: name of a linear -> what its input has been divided by.
        notes: name of a linear -> what a report shows of its factors.
        written: names of all parameters that factors went into.
        pairs: where factors could go, by names within the stage.
    """

    facts: Sequence[Facts]
    factors: Mapping[str, Tensor] = field(default_factory=dict)
    notes: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    pairs: tuple[Pair, ...] = ()


def smooth(stage: Stage, statistics: Statistics, method: Method, replay: Replay, identities: Sequence[int]) -> Smoothed:
    """Fold what the algorithm's `smooth` finds into the stage, in place.

    Args:
        stage: held.
        statistics: of all groups; they stay those from before folding.
        method: its algorithm gives the factors; its `known` learns where they can go.
        replay: runs the stage, to probe and to verify.
        identities: a digest of the stage's output for each of this rank's batches.

    Raises:
        RuntimeError: the outputs of the stage changed by more than rounding.
    """
    if not method.algorithm.smooths:
        return Smoothed(statistics.facts)

    def run(batch: int) -> list[Tensor]:
        return [leaf for leaf in flatten(replay.run(batch))[0] if isinstance(leaf, Tensor)]

    weights = {target.name: target.weight for target in stage.targets if len(target.shape) == 2}
    facts = statistics.facts
    foldable = {i: one.names for i, one in enumerate(facts) if one.tokens and {*one.names} <= {*weights}}
    found = where_to_fold(stage, foldable, method, run, identities=identities)
    pairs = tuple(
        (tuple(name.removeprefix(stage.prefix) for name in foldable[index]), producer.name, producer.kind)
        for index, producer in found.items()
    )
    method.known.learn(stage, pairs)
    smoothings = _smoothings(stage, [*found], statistics, method)
    folds = {
        index: Fold(producer, tuple(weights[name] for name in facts[index].names), smoothing.factors)
        for index, producer in found.items()
        if (smoothing := smoothings[index]) is not None
    }
    if method.rank == 0:
        LOG.debug("%s: factors for %d of %d inputs can be folded", stage.title, len(folds), len(facts))
    factors: dict[str, Tensor] = {}
    notes: dict[str, Mapping[str, float | str]] = {}
    now = list(facts)
    with raise_together(method.group):
        if folds:
            # A layer may return the same buffers again, so these are clones.
            before = [leaf.clone() for leaf in run(0)] if len(replay) else []
            applied = fold(tuple(folds.values()))
            dtype = next(iter(folds.values())).weights[0].dtype
            allowed = tolerance(dtype, len(folds), max(one.numel() for one in applied))
            verify_outputs(before, run(0) if len(replay) else [], allowed, stage.title)
            for index, given in zip(folds, applied, strict=True):
                smoothing, own = smoothings[index], facts[index]
                assert smoothing is not None
                factors |= dict.fromkeys(own.names, given)
                notes |= dict.fromkeys(own.names, smoothing.notes)
                amax, column_amax = scale_amaxes(own.column_amax, given)
                now[index] = dataclasses.replace(own, amax=amax, column_amax=column_amax)
    tensors = {id(tensor) for one in folds.values() for tensor in one.producer.tensors}
    written = frozenset(name for name, param in stage.params().items() if id(param) in tensors) | factors.keys()
    return Smoothed(now, factors, notes, written, pairs)


def _smoothings(
    stage: Stage, indices: Sequence[int], statistics: Statistics, method: Method
) -> dict[int, Smoothing | None]:
    """Ask the algorithm's `smooth` about some groups: each rank asks about a share, and all get the answers."""
    weights = {target.name: target.weight for target in stage.targets}
    amaxes = agree_on_amaxes(stage.targets, method.recipe)
    groups = [
        tuple(Linear(name, weights[name], amaxes[name]) for name in statistics.facts[index].names) for index in indices
    ]
    own: dict[int, Smoothing | None] = {}
    for turn in rounds_of(
        method, [(statistics.facts[i].tokens, group) for i, group in zip(indices, groups, strict=True)]
    ):
        # They are kept, since decisions ask for the same totals later.
        inputs = own_statistics(method, turn, lambda place, owner: statistics.total(indices[place], owner, keep=True))
        with raise_together(method.group):
            for place in turn[method.rank]:
                with naming(groups[place]), full_precision(groups[place][0].weight.device):
                    recipe = recipe_of(method.recipe, groups[place][0].name)
                    linears = upright(groups[place])
                    own[indices[place]] = method.algorithm.smooth(Group(linears, inputs.pop(place)), recipe)
    if method.group is None:
        return own
    # A pickled tensor comes up on the device that it was sent from, which may be another rank's GPU.
    told = {index: one and dataclasses.replace(one, factors=one.factors.cpu()) for index, one in own.items()}
    everyone: list[Any] = [None] * method.group.size()
    dist.all_gather_object(everyone, told, group=method.group)
    device = stage.targets[0].param.device if stage.targets else None
    return {
        index: one and dataclasses.replace(one, factors=one.factors.to(device))
        for theirs in everyone
        for index, one in theirs.items()
    }
