"""Column factors of a stage: where they can go is probed, on all ranks; what they are, the algorithm says; then folded.

    probe -> agree over ranks -> factors of all groups, on the statistics as they are -> fold all -> verify the output

Groups whose input nothing can be divided for keep their weights and statistics.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from layerwise.algorithms.algorithm import Algorithm, Group, Inputs, Linear
from layerwise.alike import alike
from layerwise.folding.folds import Fold, Producer, choose, fold, producers_of, propose, tolerance, transformed, verify
from layerwise.inputs.structure import flatten
from layerwise.weights.hold import modules_of

if TYPE_CHECKING:
    from layerwise.stage import Method, Passes, Stage

__all__ = ["Known", "Pair", "Smoothed", "smooth"]

PROBES = 1  # batches that a fold is proven on

Groups = Sequence[tuple[tuple[str, ...], Inputs | None]]
Pair = tuple[tuple[str, ...], str, str]  # linears, and the name and kind of what produces their input


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


class Known:
    """Where factors can go in layers of one kind, from the first of them; the others are only asked about that.

    Every pair is still proven in every layer: what is known saves the questions that had the answer no.
    """

    def __init__(self) -> None:
        self._pairs: dict[Any, tuple[Pair, ...]] = {}

    def of(self, stage: "Stage") -> tuple[Pair, ...] | None:
        """What is known for a stage like this one."""
        return self._pairs.get(_kind(stage))

    def learn(self, stage: "Stage", pairs: Iterable[Pair]) -> None:
        """Remember what the first stage of its kind has shown."""
        self._pairs.setdefault(_kind(stage), tuple(pairs))


def _kind(stage: "Stage") -> Any:
    prefix = f"{stage.name}." if stage.name else ""
    shapes = tuple((name.removeprefix(prefix), tuple(param.shape)) for name, param in stage.params().items())
    return type(stage.module), shapes


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

    def run() -> list[Tensor]:
        leaves = [leaf for batch in range(min(PROBES, passes.batches)) for leaf in flatten(passes.run(batch))[0]]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    weights = {target.name: target.param for target in stage.targets if len(target.shape) == 2}
    found = _places(stage, groups, set(weights), method, run)
    folds: dict[int, Fold] = {}
    notes: dict[str, Mapping[str, float | str]] = {}
    for index, producer in found.items():
        names, inputs = groups[index]
        linears = tuple(Linear(name, weights[name], amaxes[name]) for name in names)
        smoothing = method.algorithm.smooth(Group(linears, inputs), method.recipe)
        if smoothing is not None:
            folds[index] = Fold(producer, tuple(weights[name] for name in names), smoothing.factors)
            notes |= dict.fromkeys(names, smoothing.notes)
    with alike(method.group):
        applied = _fold(stage, folds, run)
    factors: dict[str, Tensor] = {}
    now = list(groups)
    for index, given in applied.items():
        names, inputs = groups[index]
        assert inputs is not None
        factors |= dict.fromkeys(names, given)
        now[index] = names, transformed(inputs, given)
    tensors = {id(tensor) for one in folds.values() for tensor in (*one.weights, *one.producer.tensors)}
    written = frozenset(name for name, param in stage.params().items() if id(param) in tensors)
    pairs = tuple((groups[index][0], producer.name, producer.kind) for index, producer in found.items())
    return Smoothed(now, factors, notes, written, _relative(stage, pairs))


def _places(
    stage: "Stage", groups: Groups, weights: Collection[str], method: "Method", run: Callable[[], list[Tensor]]
) -> dict[int, Producer]:
    """Index of group -> what its factors can be folded into, the same on all ranks."""
    prefix = f"{stage.name}." if stage.name else ""
    known = method.known.of(stage)
    modules = modules_of(stage.module, stage.without)
    own = {id(module) for module in modules.values()}
    producers = [
        one
        for one in producers_of(stage.module)
        if id(stage.module.get_submodule(one.name)) in own
        and prefix + one.name not in stage.shared
        and (known is None or (one.name, one.kind) in {(name, kind) for _, name, kind in known})
    ]
    names = {
        index: [name.removeprefix(prefix) for name in names]
        for index, (names, inputs) in enumerate(groups)
        if inputs is not None and {*names} <= {*weights}
    }
    if known is not None:
        names = {index: own_names for index, own_names in names.items() if tuple(own_names) in {n for n, _, _ in known}}
    # Probed are aliases: what is put back must not count as written, or fp32 shards gathered in bf16 would lose bits.
    aliases: dict[int, Tensor] = {id(param): param.data for param in stage.params().values()}
    # No embedding: it is looked up in, not multiplied with, so changing its columns would show nothing.
    looked_up = {id(one.weight) for one in modules.values() if isinstance(one, nn.Embedding)}
    params = {name.removeprefix(prefix): p for name, p in stage.params().items() if id(p) not in looked_up}
    everything = {name: aliases[id(param)] for name, param in params.items()}
    with alike(method.group):
        answers = propose(list(names.values()), everything, [_aliased(one, aliases) for one in producers], run)
    if method.group is not None and answers.numel():
        shared = answers.int().to(stage.targets[0].param.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=method.group)
        answers = shared.to(answers)
    chosen = choose(answers, producers)
    indices = list(names)
    found = {indices[position]: producer for position, producer in chosen.items()}
    method.known.learn(stage, _relative(stage, [(groups[i][0], p.name, p.kind) for i, p in found.items()]))
    return found


def _relative(stage: "Stage", pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    prefix = f"{stage.name}." if stage.name else ""
    return tuple((tuple(n.removeprefix(prefix) for n in names), name, kind) for names, name, kind in pairs)


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
