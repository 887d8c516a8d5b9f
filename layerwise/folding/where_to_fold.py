"""Where column factors of a stage can go: probed on the same batches on any number of ranks, agreed on by all of them.

    identities of all outputs -> the PROBES batches of least identity -> each probed by a rank that has it
    -> least answer over ranks -> index of group -> producer

In the first stage of a kind all candidates are probed, in later ones only what was found there (`KnownPairs`). What a
stage has shown is saved with it, so that a resumed run probes what an uninterrupted one would.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_hooks.ranks.across_ranks import raise_together
from layerwise.folding.probing import Producer, choose, producers_of, propose
from layerwise.stages.stage import Method, Stage
from layerwise.stages.targets import is_stored_transposed

PROBES = 2  # batches, over all ranks


def where_to_fold(
    stage: Stage,
    groups: Mapping[int, Sequence[str]],
    method: Method,
    run: Callable[[int], list[Tensor]],
    *,
    identities: Sequence[int],
) -> dict[int, Producer]:
    """Return the producer that each group's factors can be folded into, by index of the group, the same on all ranks.

    Args:
        stage: held.
        groups: index -> names of linears that take the same input.
        method: knows what earlier stages have shown.
        run: runs the stage on one of this rank's batches, and returns everything that leaves it.
        identities: a digest of the stage's output for each of this rank's batches.
    """
    pairs, own = method.known.of(stage), stage.modules()
    producers = [
        one
        for one in producers_of(stage.module)
        if one.name in own
        and stage.prefix + one.name not in stage.shared
        and (pairs is None or (one.name, one.kind) in {pair[1:] for pair in pairs})
    ]
    names = {index: tuple(name.removeprefix(stage.prefix) for name in linears) for index, linears in groups.items()}
    if pairs is not None:
        names = {index: linears for index, linears in names.items() if linears in {pair[0] for pair in pairs}}
    batches = _choose_batches(identities, method.group)
    runs: list[Callable[[], list[Tensor]]] = [partial(run, batch) for batch in batches]
    answers = _answers(stage, list(names.values()), producers, runs or [list], method.group)
    indices = list(names)
    return {indices[position]: producer for position, producer in choose(answers, producers).items()}


def _answers(
    stage: Stage,
    names: Sequence[Sequence[str]],
    producers: Sequence[Producer],
    runs: Sequence[Callable[[], list[Tensor]]],
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Return int8 [groups, producers]: the least answer over the probes of all ranks."""
    # Embeddings are left out: they are looked up in, not multiplied with, so changing their columns would show nothing.
    looked_up = {id(one.weight) for one in stage.everything() if isinstance(one, nn.Embedding)}
    # Probe aliases: what is put back must not count as written, or fp32 shards gathered in bf16 would lose bits.
    params = stage.params()
    aliases: dict[int, Tensor] = {id(param): param.data for param in params.values()}
    turned = {
        id(param)
        for one in stage.everything()
        for attribute, param in one._parameters.items()
        if is_stored_transposed(one, attribute)
    }
    everything = {
        name.removeprefix(stage.prefix): aliases[id(param)].mT if id(param) in turned else aliases[id(param)]
        for name, param in params.items()
        if id(param) not in looked_up
    }
    probed = [
        dataclasses.replace(
            one, weight=aliases[id(one.weight)], bias=None if one.bias is None else aliases[id(one.bias)]
        )
        for one in producers
    ]
    with raise_together(group):
        # Each batch by itself, and the least answer: so it does not matter which rank has which of them.
        answers = torch.stack([propose(names, everything, probed, run) for run in runs]).amin(dim=0)
    if group is not None and answers.numel():
        shared = answers.int().to(stage.targets[0].param.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=group)
        answers = shared.to(answers)
    return answers


def _choose_batches(identities: Sequence[int], group: dist.ProcessGroup | None) -> list[int]:
    """Return which of this rank's batches to probe: over all ranks, the PROBES batches of least identity.

    Each is probed by itself, so that no answer depends on which of them are on the same rank.
    """
    # By identity, and not by number: the same batches are probed whichever ranks have them.
    own = {value: batch for batch, value in enumerate(identities)}
    everyone: list[Any] = [sorted(own)[:PROBES]]
    if group is not None:
        everyone = everyone * group.size()
        dist.all_gather_object(everyone, everyone[0], group=group)
    chosen = sorted({value for values in everyone for value in values})[:PROBES]
    return [own[value] for value in chosen if value in own]
