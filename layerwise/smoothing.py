"""Column factors of a stage: where they can go is probed, on all ranks; what they are, the algorithm says; then folded.

    probe -> agree over ranks -> factors of all groups, on the statistics as they are -> fold all -> verify the output

Groups whose input nothing can be divided for keep their weights and statistics.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from layerwise.algorithms.algorithm import Algorithm, Group, Inputs, Linear
from layerwise.folding import Fold, choose, fold, producers_of, propose, tolerance, transformed, verify
from layerwise.structure import flatten

if TYPE_CHECKING:
    from layerwise.stage import Method, Passes, Stage

__all__ = ["Smoothed", "smooth"]

PROBES = 2  # batches that a fold is proven on

Groups = Sequence[tuple[tuple[str, ...], Inputs | None]]


@dataclass(frozen=True, eq=False)
class Smoothed:
    """Groups with the statistics of their inputs as they are now, and by name what inputs have been divided by."""

    groups: Groups
    factors: Mapping[str, Tensor] = field(default_factory=dict)


def smooth(stage: "Stage", groups: Groups, method: "Method", passes: "Passes") -> Smoothed:
    """Fold what the algorithm's `smooth` finds into the stage, in place.

    Raises:
        RuntimeError: the outputs of the stage changed by more than rounding.
    """
    if type(method.algorithm).smooth is Algorithm.smooth:
        return Smoothed(groups)  # an algorithm without factors
    weights = {target.name: target.param.detach() for target in stage.targets if len(target.shape) == 2}
    plain = [index for index, (names, inputs) in enumerate(groups) if inputs is not None and {*names} <= {*weights}]
    producers = producers_of(stage.module)

    def run() -> list[Tensor]:
        leaves = [leaf for batch in range(min(PROBES, passes.batches)) for leaf in flatten(passes.run(batch))[0]]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    relative = {name.removeprefix(f"{stage.name}."): weight for name, weight in weights.items()}
    names = [[name.removeprefix(f"{stage.name}.") for name in groups[index][0]] for index in plain]
    answers = propose(names, relative, producers, run)
    if method.group is not None and answers.numel():
        device = stage.targets[0].param.device
        shared = answers.int().to(device)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=method.group)
        answers = shared.to(answers)
    folds: dict[int, Fold] = {}
    for position, producer in choose(answers, producers).items():
        own, inputs = groups[plain[position]]
        linears = tuple(Linear(name, weights[name]) for name in own)
        factors = method.algorithm.smooth(Group(linears, inputs), method.recipe)
        if factors is not None:
            folds[plain[position]] = Fold(producer, tuple(weights[name] for name in own), factors)
    return _folded(stage, groups, folds, run)


def _folded(stage: "Stage", groups: Groups, folds: Mapping[int, Fold], run: Callable[[], list[Tensor]]) -> Smoothed:
    before = [leaf.clone() for leaf in run()] if folds else []
    applied = dict(zip(folds, fold(tuple(folds.values())), strict=True))
    if folds:
        columns = max(factors.numel() for factors in applied.values())
        dtype = next(iter(folds.values())).weights[0].dtype
        verify(before, run(), tolerance(dtype, len(folds), columns), stage.name or "the model")
    factors: dict[str, Tensor] = {}
    now = list(groups)
    for index, own in applied.items():
        names, inputs = groups[index]
        assert inputs is not None
        factors |= dict.fromkeys(names, own)
        now[index] = names, transformed(inputs, own)
    return Smoothed(now, factors)
