"""Column factors of a stage: probes on all ranks where they can go, asks the algorithm for them, and folds them.

    probe -> agree over ranks -> factors of all groups, from the statistics as they are -> fold all -> verify the output

A group whose factors can go nowhere keeps its weights and statistics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fsdp_hooks.across_ranks import raise_together
from layerwise.algorithms.algorithm import Algorithm, Group, Linear
from layerwise.algorithms.arithmetic import full_precision
from layerwise.folding.folds import Fold, fold, tolerance, transformed, verify_outputs
from layerwise.folding.where_to_fold import where_to_fold
from layerwise.inputs.replay import Replay
from layerwise.inputs.structure import flatten
from layerwise.stages.stage import Method, Pair, Stage
from layerwise.stages.targets import agreed_amaxes
from layerwise.statistics.collector import Groups


@dataclass(frozen=True, eq=False)
class Smoothed:
    """The groups with the statistics of their inputs after folding, and what was folded.

    Attributes:
        groups: names and statistics.
        factors: name of a linear -> what its input has been divided by.
        notes: name of a linear -> what a report shows of its factors.
        written: names of all parameters that factors went into.
        pairs: where factors could go, by names within the stage.
    """

    groups: Groups
    factors: Mapping[str, Tensor] = field(default_factory=dict)
    notes: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    pairs: tuple[Pair, ...] = ()


def smooths(algorithm: Algorithm) -> bool:
    """Whether the algorithm has column factors."""
    return type(algorithm).smooth is not Algorithm.smooth


def smooth(stage: Stage, groups: Groups, method: Method, replay: Replay, identities: Sequence[int]) -> Smoothed:
    """Fold what the algorithm's `smooth` finds into the stage, in place.

    Args:
        stage: held.
        groups: names of linears, and the statistics of their input.
        method: its algorithm gives the factors; its `known` learns where they can go.
        replay: runs the stage, to probe and to verify.
        identities: a digest of the stage's output for each of this rank's batches.

    Raises:
        RuntimeError: the outputs of the stage changed by more than rounding.
    """
    if not smooths(method.algorithm):
        return Smoothed(groups)

    def run(batch: int) -> list[Tensor]:
        return [leaf for leaf in flatten(replay.run(batch))[0] if isinstance(leaf, Tensor)]

    weights = {target.name: target.param for target in stage.targets if len(target.shape) == 2}
    amaxes = agreed_amaxes(stage.targets, method.recipe)
    foldable = {index: own for index, (own, inputs) in enumerate(groups) if inputs is not None and {*own} <= {*weights}}
    found = where_to_fold(stage, foldable, method, run, identities=identities)
    pairs = tuple(
        (tuple(name.removeprefix(stage.prefix) for name in foldable[index]), producer.name, producer.kind)
        for index, producer in found.items()
    )
    method.known.learn(stage, pairs)
    folds: dict[int, Fold] = {}
    notes: dict[str, Mapping[str, float | str]] = {}
    factors: dict[str, Tensor] = {}
    now = list(groups)
    with raise_together(method.group):
        for index, producer in found.items():
            names, inputs = groups[index]
            linears = tuple(Linear(name, weights[name], amaxes[name]) for name in names)
            with full_precision(linears[0].weight.device):
                smoothing = method.algorithm.smooth(Group(linears, inputs), method.recipe)
            if smoothing is not None:
                folds[index] = Fold(producer, tuple(weights[name] for name in names), smoothing.factors)
                notes |= dict.fromkeys(names, smoothing.notes)
        if folds:
            before = [leaf.clone() for leaf in run(0)] if len(replay) else []
            applied = fold(tuple(folds.values()))
            dtype = next(iter(folds.values())).weights[0].dtype
            allowed = tolerance(dtype, len(folds), max(one.numel() for one in applied))
            verify_outputs(before, run(0) if len(replay) else [], allowed, stage.title)
            for index, given in zip(folds, applied, strict=True):
                names, inputs = groups[index]
                assert inputs is not None
                factors |= dict.fromkeys(names, given)
                now[index] = names, transformed(inputs, given)
    tensors = {id(tensor) for one in folds.values() for tensor in (*one.weights, *one.producer.tensors)}
    written = frozenset(name for name, param in stage.params().items() if id(param) in tensors)
    return Smoothed(now, factors, notes, written, pairs)
