"""Column factors of a stage: where they can go is probed, on all ranks; what they are, the algorithm says; then folded.

    probe -> agree over ranks -> factors of all groups, on the statistics as they are -> fold all -> verify the output

Groups whose input nothing can be divided for keep their weights and statistics.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from fsdp_hooks.alike import alike
from layerwise.algorithms.algorithm import Algorithm, Group, Inputs, Linear
from layerwise.folding.folds import Fold, fold, tolerance, transformed, verify
from layerwise.folding.places import Pair, pairs_of, places
from layerwise.inputs.structure import flatten
from layerwise.statistics.arithmetic import full_precision

if TYPE_CHECKING:
    from layerwise.stage import Method, Passes, Stage

Groups = Sequence[tuple[tuple[str, ...], Inputs | None]]


@dataclass(frozen=True, eq=False)
class Smoothed:
    """Groups with the statistics of their inputs as they are now, and what was folded.

    Attributes:
        groups: names and statistics.
        factors: name of a linear -> what its input has been divided by.
        notes: name of a linear -> what a report shows of that.
        written: names of all parameters that factors went into.
        pairs: where factors could go, by names in the stage.
    """

    groups: Groups
    factors: Mapping[str, Tensor] = field(default_factory=dict)
    notes: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    pairs: tuple[Pair, ...] = ()


def smooths(algorithm: Algorithm) -> bool:
    """Whether it is an algorithm with factors."""
    return type(algorithm).smooth is not Algorithm.smooth


def smooth(  # noqa: PLR0913 - what a stage knows by then
    stage: "Stage",
    groups: Groups,
    amaxes: Mapping[str, Tensor | None],
    method: "Method",
    passes: "Passes",
    *,
    identities: Sequence[int],
) -> Smoothed:
    """Fold what the algorithm's `smooth` finds into the stage, in place.

    Args:
        stage: held.
        groups: names of linears, and the statistics of their input.
        amaxes: by name, what decides the shared scale of the weight as it is.
        method: its algorithm finds the factors.
        passes: to probe and verify on.
        identities: of the stage's output for each of this rank's batches.

    Raises:
        RuntimeError: the outputs of the stage changed by more than rounding.
    """
    if not smooths(method.algorithm):
        return Smoothed(groups)

    def run(batch: int) -> list[Tensor]:
        return [leaf for leaf in flatten(passes.run(batch))[0] if isinstance(leaf, Tensor)]

    weights = {target.name: target.param for target in stage.targets if len(target.shape) == 2}
    foldable = {index: own for index, (own, inputs) in enumerate(groups) if inputs is not None and {*own} <= {*weights}}
    found = places(stage, foldable, method.known, run, identities=identities, group=method.group)
    folds: dict[int, Fold] = {}
    notes: dict[str, Mapping[str, float | str]] = {}
    with alike(method.group):
        for index, producer in found.items():
            names, inputs = groups[index]
            linears = tuple(Linear(name, weights[name], amaxes[name]) for name in names)
            with full_precision(linears[0].weight.device):
                smoothing = method.algorithm.smooth(Group(linears, inputs), method.recipe)
            if smoothing is not None:
                folds[index] = Fold(producer, tuple(weights[name] for name in names), smoothing.factors)
                notes |= dict.fromkeys(names, smoothing.notes)
        applied = _fold(stage, folds, partial(run, 0) if passes.batches else list)
    factors: dict[str, Tensor] = {}
    now = list(groups)
    for index, given in applied.items():
        names, inputs = groups[index]
        assert inputs is not None
        factors |= dict.fromkeys(names, given)
        now[index] = names, transformed(inputs, given)
    tensors = {id(tensor) for one in folds.values() for tensor in (*one.weights, *one.producer.tensors)}
    written = frozenset(name for name, param in stage.params().items() if id(param) in tensors)
    return Smoothed(now, factors, notes, written, pairs_of(stage, foldable, found))


def _fold(stage: "Stage", folds: Mapping[int, Fold], run: Callable[[], list[Tensor]]) -> dict[int, Tensor]:
    """Fold all, and see that the stage computes what it did. Returns the factors as applied."""
    if not folds:
        return {}
    before = [leaf.clone() for leaf in run()]
    applied = dict(zip(folds, fold(tuple(folds.values())), strict=True))
    columns = max(factors.numel() for factors in applied.values())
    dtype = next(iter(folds.values())).weights[0].dtype
    verify(before, run(), tolerance(dtype, len(folds), columns), stage.name or "the model")
    return applied
