"""What ranks agree on in an optimizer step, by one all-reduce: shared scales, and which masters moved.

    [claims of quantized shards that share scales .., 1 or 0 for each quantized parameter .., claims of dense shards ..,
     digests of replicas .., where they are compared (replicas.py)]

All trainable parameters that are gathered quantized take part every time, so that ranks never differ in what they
reduce. If they do differ, or a rank failed in its step, all ranks raise before a quantized byte is written (see
fsdp_hooks.exchange). Whether a master moved is known without reading it, except for fresh parameters (see optim.py):
these are compared with their masters on their device, without a host sync.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_hooks.exchange import Label
from fsdp_hooks.scale_sync import SharedScales, max_over_groups, tell_groups
from qtensor.agreement import common_along
from qtensor.batches import claims_of
from qtensor.contents import decoded
from qtensor.cut_blocks import CutBlocks, cut_blocks_of
from qtensor.replicas import Replicas
from qtensor.tensor import QuantizedTensor

WHAT = "MasterWeightOptimizer.step"


class Trained(NamedTuple):
    """A trainable quantized parameter in a step; `fresh`: its master was made from the bytes."""

    label: str  # must be the same on all ranks
    param: Tensor
    shard: QuantizedTensor
    master: Tensor  # fp32, local
    stepped: bool
    fresh: bool

    @property
    def cut(self) -> CutBlocks | None:
        """The square blocks that its shards cut."""
        return cut_blocks_of(self.param, self.shard.recipe)


class Outcome(NamedTuple):
    """What was agreed on.

    Attributes:
        scales: what was agreed on for the scales of each parameter (`agreement.claim_of`, over all shards); None where
            it has none in common with other shards.
        order: the parameters' numbers, in the order of `moved`.
        moved: fp32 [parameters], 1 where some shard's master moved, else 0.
    """

    scales: list[Tensor | None]
    order: list[int]
    moved: Tensor

    def moves(self) -> list[bool]:
        """Whether each parameter moved; a host sync."""
        found = dict(zip(self.order, self.moved.tolist(), strict=True))
        return [bool(found[number]) for number in range(len(self.order))]


class _Terms(NamedTuple):
    """What a step exchanges, known without reading any value: the same on all ranks of a group.

    Attributes:
        sharing: the numbers of the parameters that share scales.
        groups: the groups over which each of them shares scales.
        members: groups that cut parameters -> the numbers of the parameters they cut, in the order of their labels.
        claiming: dense shards that share scales: label, scales, groups.
        replicas: what is compared over replicas.
    """

    sharing: list[int]
    groups: list[list[dist.ProcessGroup]]
    members: dict[tuple[dist.ProcessGroup, ...], list[int]]
    claiming: list[tuple[str, SharedScales, list[dist.ProcessGroup]]]
    replicas: Replicas

    def labelled(self, trained: Sequence[Trained]) -> tuple[list[Label], list[list[dist.ProcessGroup]]]:
        """The labels and the groups of what is exchanged, in the order it is exchanged."""
        labels: list[Label] = [("amax", trained[number].label) for number in self.sharing]
        labels += [("moved", *(trained[number].label for number in numbers)) for numbers in self.members.values()]
        labels += [("claim", label) for label, _, _ in self.claiming]
        groups = [*self.groups, *map(list, self.members), *(own for _, _, own in self.claiming)]
        return labels + self.replicas.labels, groups + self.replicas.groups


def _terms(trained: Sequence[Trained], dense: Sequence[tuple[str, Tensor, SharedScales]], replicas: Replicas) -> _Terms:
    terms = _Terms([], [], {}, [], replicas)
    for number, (one, cuts) in enumerate(zip(trained, replicas.cuts_of([one.param for one in trained]), strict=True)):
        terms.members.setdefault(tuple(group for _, group in cuts), []).append(number)
        recipe, ndim, cut = one.shard.recipe, one.shard.ndim, one.cut
        if own := [group for dim, group in cuts if common_along(recipe, cut, dim, ndim)]:
            terms.sharing.append(number)
            terms.groups.append(own)
    for numbers in terms.members.values():
        numbers.sort(key=lambda number: trained[number].label)
    for (label, _, scales), cuts in zip(dense, replicas.cuts_of([param for _, param, _ in dense]), strict=True):
        if own := [group for dim, group in cuts if scales.shared_along(dim)]:
            terms.claiming.append((label, scales, own))
    return terms


def agree(trained: Sequence[Trained], dense: Sequence[tuple[str, Tensor, SharedScales]], replicas: Replicas) -> Outcome:
    """Agree over all shards; a collective. Dense shards (storage="high_precision") adopt their scales here.

    Args:
        trained: the quantized parameters.
        dense: label, parameter and scales of each dense shard.
        replicas: what is compared over replicas, looked at already.

    Raises:
        RuntimeError: on all ranks of a group: they do not list the same parameters, or one of them called `tell`; on
            all ranks, replicas differ.
    """
    terms = _terms(trained, dense, replicas)
    sharing, members, claiming = terms.sharing, terms.members, terms.claiming
    shards, masters = [trained[number].shard for number in sharing], [trained[number].master for number in sharing]
    try:
        values = claims_of(shards, masters, [trained[number].cut for number in sharing])
        values += [_moved([trained[number] for number in numbers]) for numbers in members.values()]
        values += [scales.claim() for _, scales, _ in claiming]
    except Exception:
        tell(trained, dense, replicas)
        raise
    labels, over = terms.labelled(trained)
    reduced, _ = max_over_groups(WHAT, labels, values + replicas.values, over)
    agreed, compared = reduced[: len(values)], reduced[len(values) :]
    replicas.check(compared)
    scales_agreed: list[Tensor | None] = [None] * len(trained)
    for number, claim in zip(sharing, agreed, strict=False):
        scales_agreed[number] = claim
    flags = agreed[len(sharing) : len(sharing) + len(members)]
    for (_, scales, _), claim in zip(claiming, agreed[len(sharing) + len(members) :], strict=True):
        scales.adopt(claim)
    order = [number for numbers in members.values() for number in numbers]
    if not flags:
        return Outcome(scales_agreed, order, torch.zeros(0, dtype=torch.float32, device="cpu"))
    return Outcome(scales_agreed, order, torch.cat([own.to(flags[0].device) for own in flags]))


def tell(trained: Sequence[Trained], dense: Sequence[tuple[str, Tensor, SharedScales]], replicas: Replicas) -> None:
    """Called instead of `agree` on a rank that failed: the others raise instead of waiting for it."""
    devices = [one.master.device for one in trained] + [param.device for _, param, _ in dense]
    devices += replicas.devices
    if devices:
        tell_groups(*_terms(trained, dense, replicas).labelled(trained), devices[0])


def _moved(trained: Sequence[Trained]) -> Tensor:
    """fp32 [n]: whether the masters of this rank moved (1) or not (0)."""
    device = trained[0].master.device
    if all(one.stepped for one in trained):
        flags = torch.ones(len(trained), dtype=torch.float32, device=device)
    else:
        stepped = [float(one.stepped) for one in trained]
        flags = torch.tensor(stepped, dtype=torch.float32, device="cpu").to(device, non_blocking=True)
    for number, one in enumerate(trained):
        if one.stepped and one.fresh:
            flags[number] = (decoded(one.shard, torch.float32) != one.master).any()
    return flags
