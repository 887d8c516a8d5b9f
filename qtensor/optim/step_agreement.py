"""What ranks agree on in an optimizer step, by one all-reduce: shared scales, and which masters moved.

    [claims of quantized shards that share scales .., 1 or 0 for each quantized parameter .., claims of dense shards ..,
     0, which says nothing, digests of replicas .., if they are compared (replicas.py)]

What a claim is, and the rest of the story of scales, stands in qtensor/scales/__init__.py. All trainable parameters
that are gathered quantized take part every time, so that ranks never differ in what they reduce, and all groups that
cut any parameter, so that no rank waits for one that trains none of a group's. If ranks do differ, or a rank failed in
its step, all ranks raise before a quantized byte is written (see fsdp_hooks/ranks). A rank whose parameters are neither
sharded nor share scales has nobody to agree with, and exchanges nothing.

Whether a master moved is known without reading it, except for fresh parameters (see master_weights.py): these are
compared with their masters on their device, without a host sync.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.ranks.exchange import Label
from fsdp_hooks.ranks.scale_partners import check_complete, pool
from fsdp_hooks.scale_sync import MEETING, SharedScales, cuts_of, max_over_groups, meeting_of, tell_groups
from fsdp_hooks.torch_private import local_of
from qtensor.optim.batches import claims_of
from qtensor.optim.replicas import Replicas
from qtensor.scales.agreement import common_along
from qtensor.scales.cut_blocks import CutBlocks, cut_blocks_of
from qtensor.tensor.contents import decode
from qtensor.tensor.quantized_tensor import QuantizedTensor

WHAT = "MasterWeightOptimizer.step"
TRAINED = "the parameters that it trains (frozen ones are not)"


class Trained(NamedTuple):
    """A trainable quantized parameter in a step.

    Attributes:
        label: by which ranks tell parameters apart.
        param: the parameter.
        shard: its local tensor.
        master: the local tensor of its master.
        stepped: whether its master took part in the step.
        fresh: whether its master was made from the bytes.
        claim: what `claim_of` its values is, where the step itself found it.
        moved: bool [], whether a fresh one's master moved, where the step itself found it.
    """

    label: str  # must be the same on all ranks
    param: Tensor
    shard: QuantizedTensor
    master: Tensor  # fp32, local
    stepped: bool
    fresh: bool
    claim: Tensor | None = None
    moved: Tensor | None = None


class StepOutcome(NamedTuple):
    """What was agreed on.

    Attributes:
        scales: what was agreed on for the scales of each parameter (`agreement.claim_of`, over all shards); None if
            it has none in common with other shards or parameters.
        cuts: the square blocks that the shards of each parameter cut.
        order: the parameters' numbers, in the order of `moved`.
        moved: fp32 [parameters], 1 if some shard's master moved, else 0.
        together: the numbers of parameters that share one scale: if one of them moves, all are written.
    """

    scales: list[Tensor | None]
    cuts: list[CutBlocks | None]
    order: list[int]
    moved: Tensor
    together: list[list[int]]

    def moves(self) -> list[bool]:
        """Return whether each parameter moved; a host sync."""
        found = dict(zip(self.order, self.moved.tolist(), strict=True))
        for numbers in self.together:
            found |= dict.fromkeys(numbers, max(found[number] for number in numbers))
        return [bool(found[number]) for number in range(len(self.order))]


class _Terms(NamedTuple):
    """What a step exchanges, known without reading any value: the same on all ranks of a group.

    Attributes:
        sharing: the numbers of the parameters that share scales, between shards or with other parameters.
        cuts: the square blocks that the shards of each of them cut.
        groups: the groups over which each of them shares scales.
        members: groups that cut parameters -> the numbers of the parameters they cut, in the order of their labels.
        claiming: dense shards that share scales: label, scales, groups.
        meeting: the groups in which a rank takes part, whatever it has to say there.
        replicas: what is compared over replicas; None: nothing.
    """

    sharing: list[int]
    cuts: list[CutBlocks | None]
    groups: list[list[dist.ProcessGroup]]
    members: dict[tuple[dist.ProcessGroup, ...], list[int]]
    claiming: list[tuple[str, SharedScales, list[dist.ProcessGroup]]]
    meeting: list[dist.ProcessGroup]
    replicas: Replicas | None

    def label(self, trained: Sequence[Trained]) -> tuple[list[Label], list[list[dist.ProcessGroup]]]:
        """Return the labels and the groups of what is exchanged, in the order it is exchanged."""
        labels: list[Label] = [("amax", trained[number].label) for number in self.sharing]
        labels += [("moved", *(trained[number].label for number in numbers)) for numbers in self.members.values()]
        labels += [*(("claim", label) for label, _, _ in self.claiming), MEETING]
        groups = [*self.groups, *map(list, self.members), *(own for _, _, own in self.claiming), self.meeting]
        if self.replicas is not None:
            labels, groups = labels + self.replicas.labels, groups + self.replicas.groups
        return labels, groups


def _terms(
    trained: Sequence[Trained],
    dense: Sequence[tuple[str, Tensor, SharedScales]],
    labels: Mapping[Tensor, str],
    replicas: Replicas | None,
) -> _Terms:
    layouts = _layouts(labels, replicas)
    terms = _Terms([], [], [], {}, [], _meeting(labels, layouts, replicas), replicas)
    for number, one in enumerate(trained):
        cuts = layouts[one.param]
        terms.members.setdefault(tuple(group for _, group in cuts), []).append(number)
        own: list[dist.ProcessGroup] = []
        blocks: CutBlocks | None = None
        if cuts:
            recipe, ndim, blocks = one.shard.recipe, one.shard.ndim, cut_blocks_of(one.param, one.shard.recipe)
            own = [group for dim, group in cuts if common_along(recipe, blocks, dim, ndim)]
        if own or one.shard._partners is not None:
            terms.sharing.append(number)
            terms.cuts.append(blocks)
            terms.groups.append(own)
    # ranks may list parameters in another order, and flags of one group travel in one tensor
    for numbers in terms.members.values():
        numbers.sort(key=lambda number: trained[number].label)
    for label, param, scales in dense:
        own = [group for dim, group in layouts[param] if scales.shared_along(dim)]
        if own or scales.partners is not None:
            terms.claiming.append((label, scales, own))
    return terms


class Meeting(NamedTuple):
    """Where ranks agree about parameters: in these groups, and in this order, `agree` and `tell` meet others.

    Attributes:
        groups: those in which a rank takes part in each step.
        own: parameter -> those of them that agree about it.
    """

    groups: list[dist.ProcessGroup]
    own: dict[Tensor, list[dist.ProcessGroup]]


def meeting_about(labels: Mapping[Tensor, str], replicas: Replicas | None) -> Meeting:
    """Return where ranks agree about the parameters of an optimizer."""
    layouts = _layouts(labels, replicas)
    own = {param: [group for _, group in cuts] for param, cuts in layouts.items()}
    return Meeting(_meeting(labels, layouts, replicas), own)


def _layouts(
    labels: Mapping[Tensor, str], replicas: Replicas | None
) -> dict[Tensor, list[tuple[int, dist.ProcessGroup]]]:
    layouts_of = cuts_of if replicas is None else replicas.cuts_of
    return dict(zip(labels, layouts_of(list(labels)), strict=True))


def _meeting(
    labels: Mapping[Tensor, str],
    layouts: Mapping[Tensor, list[tuple[int, dist.ProcessGroup]]],
    replicas: Replicas | None,
) -> list[dist.ProcessGroup]:
    everybody = [] if replicas is None else replicas.everybody
    return list(dict.fromkeys([*meeting_of(list(labels.values()), list(layouts.values())), *everybody]))


def agree(
    trained: Sequence[Trained],
    dense: Sequence[tuple[str, Tensor, SharedScales]],
    labels: Mapping[Tensor, str],
    replicas: Replicas | None,
) -> StepOutcome:
    """Agree over all shards; a collective. Dense shards (storage="high_precision") adopt their scales here.

    Args:
        trained: the quantized parameters.
        dense: label, parameter and scales of each dense shard.
        labels: of all parameters of the optimizer, in any order.
        replicas: what is compared over replicas, looked at already; None: nothing.

    Raises:
        RuntimeError: on all ranks of a group: they do not list the same parameters, or one of them called `tell`; on
            all ranks, replicas differ.
    """
    if replicas is None and not dense and _alone(trained, labels):
        return StepOutcome(
            [None] * len(trained), [None] * len(trained), [*range(len(trained))], _find_moved(trained), []
        )
    terms = _terms(trained, dense, labels, replicas)
    sharing, members, claiming = terms.sharing, terms.members, terms.claiming
    partners = [trained[number].shard._partners for number in sharing]
    of_dense = [scales.partners for _, scales, _ in claiming]
    # an error on this rank alone must reach the others, which would wait in the all-reduce for ever
    try:
        check_complete(WHAT, partners + of_dense, TRAINED)
        values = _claims([trained[number] for number in sharing], terms.cuts)
        values += [_find_moved([trained[number] for number in numbers]) for numbers in members.values()]
        values += [scales.claim() for _, scales, _ in claiming]
        met = torch.zeros(1, dtype=torch.float32, device=_device(labels))
    except Exception:
        tell(trained, dense, labels, replicas)
        raise
    listed, over = terms.label(trained)
    digests = [] if replicas is None else replicas.values
    reduced, _ = max_over_groups(WHAT, listed, [*values, met, *digests], over)
    agreed, compared = reduced[: len(values)], reduced[len(values) + 1 :]
    if replicas is not None:
        replicas.check(compared)
    scales_agreed: list[Tensor | None] = [None] * len(trained)
    cuts: list[CutBlocks | None] = [None] * len(trained)
    own = pool([one and one.names for one in partners], [1] * len(sharing), agreed[: len(sharing)])
    for number, claim, blocks in zip(sharing, own, terms.cuts, strict=True):
        scales_agreed[number], cuts[number] = claim, blocks
    flags = agreed[len(sharing) : len(sharing) + len(members)]
    theirs = agreed[len(sharing) + len(members) :]
    theirs = pool([one and one.names for one in of_dense], [scales.pooled for _, scales, _ in claiming], theirs)
    for (_, scales, _), claim in zip(claiming, theirs, strict=True):
        scales.adopt(claim)
    order = [number for numbers in members.values() for number in numbers]
    together: dict[tuple[str, ...], list[int]] = {}
    for number, one in zip(sharing, partners, strict=True):
        if one is not None:
            together.setdefault(one.names, []).append(number)
    device = flags[0].device if flags else torch.device("cpu")
    moved = torch.cat([torch.zeros(0, dtype=torch.float32, device=device), *(own.to(device) for own in flags)])
    return StepOutcome(scales_agreed, cuts, order, moved, list(together.values()))


def tell(
    trained: Sequence[Trained],
    dense: Sequence[tuple[str, Tensor, SharedScales]],
    labels: Mapping[Tensor, str],
    replicas: Replicas | None,
) -> None:
    """Take the place of `agree` on a rank that failed: the others raise instead of waiting for it."""
    tell_groups(*_terms(trained, dense, labels, replicas).label(trained), _device(labels))


def _claims(sharing: Sequence[Trained], cuts: Sequence[CutBlocks | None]) -> list[Tensor]:
    """Return what each shard claims."""
    due = [number for number, one in enumerate(sharing) if one.claim is None]
    shards, masters = [sharing[number].shard for number in due], [sharing[number].master for number in due]
    made = iter(claims_of(shards, masters, [cuts[number] for number in due]))
    return [next(made) if one.claim is None else one.claim for one in sharing]


def _alone(trained: Sequence[Trained], labels: Mapping[Tensor, str]) -> bool:
    """Return whether this rank has nobody to agree with: no parameter is sharded or shares its scale."""
    sharded = any(isinstance(param, DTensor) for param in labels)
    return not sharded and all(one.shard._partners is None for one in trained)


def _device(labels: Mapping[Tensor, str]) -> torch.device:
    """Return where the first parameter is."""
    return next((local_of(param).device for param in labels), torch.device("cpu"))


def _find_moved(trained: Sequence[Trained]) -> Tensor:
    """Return fp32 [n]: whether the masters of this rank moved (1) or not (0)."""
    device = trained[0].master.device if trained else torch.device("cpu")
    if all(one.stepped for one in trained):
        flags = torch.ones(len(trained), dtype=torch.float32, device=device)
    else:
        stepped = [float(one.stepped) for one in trained]
        flags = torch.tensor(stepped, dtype=torch.float32, device="cpu").to(device, non_blocking=True)
    # a step with lr=0 moves no master, and so must not change a byte
    for number, one in enumerate(trained):
        if one.stepped and one.fresh:
            flags[number] = (decode(one.shard, torch.float32) != one.master).any() if one.moved is None else one.moved
    return flags
