"""Column factors of a stage: where they can go is probed, on all ranks; what they are, the algorithm says; then folded.

    probe -> agree over ranks -> factors of all groups, on the statistics as they are -> fold all -> verify the output

Groups whose input nothing can be divided for keep their weights and statistics.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_hooks.digest import digest
from layerwise.algorithms.algorithm import Algorithm, Group, Inputs, Linear
from layerwise.alike import alike
from layerwise.folding.folds import Fold, Producer, choose, fold, producers_of, propose, tolerance, transformed, verify
from layerwise.inputs.structure import flatten
from layerwise.weights.hold import modules_of

if TYPE_CHECKING:
    from layerwise.stage import Method, Passes, Stage

__all__ = ["Smoothed", "identity", "smooth", "smooths"]

PROBES = 2  # batches that a fold is proven on: of all ranks' together when it is found, of each rank's when it is made

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
    prefix = f"{stage.name}." if stage.name else ""
    modules = modules_of(stage.module, stage.without)
    weights = {target.name: target.param for target in stage.targets if len(target.shape) == 2}
    plain = [index for index, (names, inputs) in enumerate(groups) if inputs is not None and {*names} <= {*weights}]
    own = {id(module) for module in modules.values()}
    producers = [one for one in producers_of(stage.module) if id(stage.module.get_submodule(one.name)) in own]
    producers = [one for one in producers if prefix + one.name not in stage.shared]

    def run(batches: Iterable[int]) -> list[Tensor]:
        leaves = [leaf for batch in batches for leaf in flatten(passes.run(batch))[0]]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    names = [[name.removeprefix(prefix) for name in groups[index][0]] for index in plain]
    runs = [partial(run, (batch,)) for batch in _probes(identities, method.group)] or [partial(run, ())]
    answers = _answers(stage, names, producers, runs, method.group)
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
        applied = _fold(stage, folds, partial(run, range(min(PROBES, passes.batches))))
    factors: dict[str, Tensor] = {}
    now = list(groups)
    for index, given in applied.items():
        own_names, inputs = groups[index]
        assert inputs is not None
        factors |= dict.fromkeys(own_names, given)
        now[index] = own_names, transformed(inputs, given)
    return Smoothed(now, factors, notes)


def _answers(
    stage: "Stage",
    names: Sequence[Sequence[str]],
    producers: Sequence[Producer],
    runs: Sequence[Callable[[], list[Tensor]]],
    group: dist.ProcessGroup | None,
) -> Tensor:
    """int8 [groups, producers]: what the probes of all ranks say together."""
    prefix = f"{stage.name}." if stage.name else ""
    # No embedding: it is looked up in, not multiplied with, so changing its columns would show nothing.
    modules = modules_of(stage.module, stage.without)
    looked_up = {id(one.weight) for one in modules.values() if isinstance(one, nn.Embedding)}
    # Probed are aliases: what is put back must not count as written, or fp32 shards gathered in bf16 would lose bits.
    aliases: dict[int, Tensor] = {id(param): param.data for param in stage.params().values()}
    params = {name.removeprefix(prefix): p for name, p in stage.params().items() if id(p) not in looked_up}
    everything = {name: aliases[id(param)] for name, param in params.items()}
    probed = [_aliased(one, aliases) for one in producers]
    with alike(group):
        answers = torch.stack([propose(names, everything, probed, run) for run in runs]).amin(dim=0)
    if group is not None and answers.numel():
        shared = answers.int().to(stage.targets[0].param.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=group)
        answers = shared.to(answers)
    return answers


def identity(output: Any) -> Tensor:
    """int64 []: a digest of all tensors in an output; the same for the same batch, whichever rank has it."""
    tensors = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
    return digest(tensors) if tensors else torch.zeros((), dtype=torch.int64)


def _probes(identities: Sequence[int], group: dist.ProcessGroup | None) -> list[int]:
    """Those of this rank's batches that are probed: PROBES of all ranks', however these are spread over them.

    One is probed at a time, so that no answer depends on which of them a rank has together.
    """
    own = {value: batch for batch, value in enumerate(identities)}
    everyone: list[Any] = [sorted(own)[:PROBES]]
    if group is not None:
        everyone = everyone * group.size()
        dist.all_gather_object(everyone, everyone[0], group=group)
    chosen = sorted({value for values in everyone for value in values})[:PROBES]
    return [own[value] for value in chosen if value in own]


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
