"""Column factors of a stage: where they can go is probed, on all ranks; what they are, the algorithm says; then folded.

    probe -> agree over ranks -> factors of all groups, on the statistics as they are -> fold all -> verify the output

Groups whose input nothing can be divided for keep their weights and statistics.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from layerwise.algorithms.algorithm import Algorithm, Group, Inputs, Linear
from layerwise.alike import alike
from layerwise.folding.folds import Fold, Producer, choose, fold, producers_of, propose, tolerance, transformed, verify
from layerwise.inputs.structure import flatten
from layerwise.weights.hold import modules_of

if TYPE_CHECKING:
    from layerwise.stage import Method, Passes, Stage

__all__ = ["Smoothed", "smooth"]

PROBES = 2  # batches that a fold is proven on

Groups = Sequence[tuple[tuple[str, ...], Inputs | None]]


@dataclass(frozen=True, eq=False)
class Smoothed:
    """Groups with the statistics of their inputs as they are now, and what was folded.

    Attributes:
        groups: names and statistics.
        factors: name of a linear -> what its input has been divided by.
        notes: name of a linear -> what a report shows of that.
    """

    groups: Groups
    factors: Mapping[str, Tensor] = field(default_factory=dict)
    notes: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)


def smooth(
    stage: "Stage", groups: Groups, amaxes: Mapping[str, Tensor | None], method: "Method", passes: "Passes"
) -> Smoothed:
    """Fold what the algorithm's `smooth` finds into the stage, in place.

    Args:
        stage: held.
        groups: names of linears, and the statistics of their input.
        amaxes: by name, what decides the shared scale of the weight as it is.
        method: its algorithm finds the factors.
        passes: to probe and verify on.

    Raises:
        RuntimeError: the outputs of the stage changed by more than rounding.
    """
    if type(method.algorithm).smooth is Algorithm.smooth:
        return Smoothed(groups)  # an algorithm without factors
    prefix = f"{stage.name}." if stage.name else ""
    # No embedding: it is looked up in, not multiplied with, so changing its columns would show nothing.
    modules = modules_of(stage.module, stage.without)
    looked_up = {id(one.weight) for one in modules.values() if isinstance(one, nn.Embedding)}
    # Probed are aliases: what is put back must not count as written, or fp32 shards gathered in bf16 would lose bits.
    aliases: dict[int, Tensor] = {id(param): param.data for param in stage.params().values()}
    params = {name.removeprefix(prefix): p for name, p in stage.params().items() if id(p) not in looked_up}
    everything = {name: aliases[id(param)] for name, param in params.items()}
    weights = {target.name: target.param for target in stage.targets if len(target.shape) == 2}
    plain = [index for index, (names, inputs) in enumerate(groups) if inputs is not None and {*names} <= {*weights}]
    own = {id(module) for module in modules.values()}
    producers = [one for one in producers_of(stage.module) if id(stage.module.get_submodule(one.name)) in own]
    producers = [one for one in producers if prefix + one.name not in stage.shared]

    def run() -> list[Tensor]:
        leaves = [leaf for batch in range(min(PROBES, passes.batches)) for leaf in flatten(passes.run(batch))[0]]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    names = [[name.removeprefix(prefix) for name in groups[index][0]] for index in plain]
    with alike(method.group):
        answers = propose(names, everything, [_aliased(one, aliases) for one in producers], run)
    if method.group is not None and answers.numel():
        device = stage.targets[0].param.device
        shared = answers.int().to(device)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=method.group)
        answers = shared.to(answers)
    folds: dict[int, Fold] = {}
    notes: dict[str, Mapping[str, float | str]] = {}
    for position, producer in choose(answers, producers).items():
        own_names, inputs = groups[plain[position]]
        linears = tuple(Linear(name, weights[name], amaxes[name]) for name in own_names)
        smoothing = method.algorithm.smooth(Group(linears, inputs), method.recipe)
        if smoothing is not None:
            held = tuple(weights[name] for name in own_names)
            folds[plain[position]] = Fold(producer, held, smoothing.factors)
            notes |= dict.fromkeys(own_names, smoothing.notes)
    with alike(method.group):
        applied = _fold(stage, folds, run)
    factors: dict[str, Tensor] = {}
    now = list(groups)
    for index, given in applied.items():
        own_names, inputs = groups[index]
        assert inputs is not None
        factors |= dict.fromkeys(own_names, given)
        now[index] = own_names, transformed(inputs, given)
    return Smoothed(now, factors, notes)


def _aliased(producer: Producer, aliases: Mapping[int, Tensor]) -> Producer:
    bias = None if producer.bias is None else aliases[id(producer.bias)]
    return dataclasses.replace(producer, weight=aliases[id(producer.weight)], bias=bias)


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
