"""Where column factors of a stage can go: probed on the same batches whoever has them, agreed on by all ranks.

    identities of all outputs -> PROBES batches, those of the least identity -> each probed by a rank that has it
    -> least answer over ranks -> index of group -> producer

In the first stage of a kind all candidates are probed, in later ones only what was found there (`Known`). What is known
is saved with the stage that has shown it, so that a resumed run asks what an uninterrupted one would.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_hooks.alike import alike
from fsdp_hooks.digest import digest
from layerwise.folding.probing import Producer, choose, producers_of, propose
from layerwise.inputs.structure import flatten
from layerwise.weights.hold import modules_of

if TYPE_CHECKING:
    from layerwise.stage import Stage

PROBES = 2  # batches, of all ranks' together

Pair = tuple[tuple[str, ...], str, str]  # linears, and the name and kind of what produces their input


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


def places(  # noqa: PLR0913 - what a stage knows by then
    stage: "Stage",
    groups: Mapping[int, Sequence[str]],
    known: Known,
    run: Callable[[int], list[Tensor]],
    *,
    identities: Sequence[int],
    group: dist.ProcessGroup | None,
) -> dict[int, Producer]:
    """What factors can be folded into, by index of group, the same on all ranks.

    Args:
        stage: held.
        groups: index -> names of linears that take the same input.
        known: what earlier stages have shown; learns from this one.
        run: runs the stage on one of this rank's batches; everything that leaves it.
        identities: of the stage's output for each of this rank's batches.
        group: the ranks.
    """
    prefix = f"{stage.name}." if stage.name else ""
    modules = modules_of(stage.module, stage.without)
    pairs, own = known.of(stage), {id(module) for module in modules.values()}
    producers = [
        one
        for one in producers_of(stage.module)
        if id(stage.module.get_submodule(one.name)) in own
        and prefix + one.name not in stage.shared
        and (pairs is None or (one.name, one.kind) in {pair[1:] for pair in pairs})
    ]
    names = {index: tuple(name.removeprefix(prefix) for name in own_names) for index, own_names in groups.items()}
    if pairs is not None:
        names = {index: own_names for index, own_names in names.items() if own_names in {pair[0] for pair in pairs}}
    batches = _probes(identities, group)
    answers = _answers(stage, list(names.values()), producers, [partial(run, b) for b in batches] or [list], group)
    indices = list(names)
    found = {indices[position]: producer for position, producer in choose(answers, producers).items()}
    known.learn(stage, pairs_of(stage, groups, found))
    return found


def pairs_of(stage: "Stage", groups: Mapping[int, Sequence[str]], found: Mapping[int, Producer]) -> tuple[Pair, ...]:
    """What `places` found, by names in the stage."""
    prefix = f"{stage.name}." if stage.name else ""
    return tuple(
        (tuple(name.removeprefix(prefix) for name in groups[index]), producer.name, producer.kind)
        for index, producer in found.items()
    )


def identity(output: Any) -> Tensor:
    """int64 []: a digest of all tensors in an output; the same for the same batch, whichever rank has it."""
    tensors = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
    return digest(tensors) if tensors else torch.zeros((), dtype=torch.int64, device="cpu")


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
