"""What ranks agree on in an optimizer step, by one all-reduce: shared scales, and whose master moved.

    [amaxes of quantized shards that share scales .., 1 or 0 for each quantized parameter .., claims of dense shards ..]

All trainable parameters that are gathered quantized take part every time, so that ranks never differ in what they
reduce. Whether a master moved is known without a look at it, but for fresh parameters (see optim.py): those are
compared where they are, without a host sync.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_hooks.scale_sync import SharesScales, cuts_of, max_over_groups
from qtensor.batches import shared_amaxes
from qtensor.tensor import QuantizedTensor

__all__ = ["Outcome", "Trained", "agree"]


class Trained(NamedTuple):
    """A trainable quantized parameter in a step; `fresh`: its master was made from the bytes."""

    param: Tensor
    shard: QuantizedTensor
    master: Tensor  # fp32, local
    stepped: bool
    fresh: bool


class Outcome(NamedTuple):
    """What was agreed on.

    Attributes:
        amaxes: of each parameter, None where no other shard shares a scale of it.
        order: the parameters' numbers, as `moved` has them.
        moved: fp32 [parameters], 1 where some shard's master moved, else 0.
    """

    amaxes: list[Tensor | None]
    order: list[int]
    moved: Tensor

    def moves(self) -> list[bool]:
        """Whether each parameter moved; a host sync."""
        found = dict(zip(self.order, self.moved.tolist(), strict=True))
        return [bool(found[number]) for number in range(len(self.order))]


def agree(trained: Sequence[Trained], dense: Sequence[tuple[Tensor, SharesScales]]) -> Outcome:
    """Over all shards; a collective. Dense shards (storage="high_precision") adopt theirs."""
    values: list[Tensor] = []
    groups: list[list[dist.ProcessGroup]] = []
    sharing: list[int] = []
    members: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for number, (one, cuts) in enumerate(zip(trained, cuts_of([one.param for one in trained]), strict=True)):
        members.setdefault(tuple(group for _, group in cuts), []).append(number)
        own = [group for dim, group in cuts if one.shard.shares_scale_along(dim)]
        if own:
            sharing.append(number)
            groups.append(own)
    values += shared_amaxes(
        [trained[number].shard for number in sharing], [trained[number].master for number in sharing]
    )
    for spread, numbers in members.items():
        values.append(_moved([trained[number] for number in numbers]))
        groups.append(list(spread))
    claiming = []
    for (_, shard), cuts in zip(dense, cuts_of([param for param, _ in dense]), strict=True):
        if own := [group for dim, group in cuts if shard.shares_scale_along(dim)]:
            claiming.append(shard)
            values.append(shard.scale_claim())
            groups.append(own)
    agreed, _ = max_over_groups(values, groups)
    amaxes: list[Tensor | None] = [None] * len(trained)
    for number, amax in zip(sharing, agreed, strict=False):
        amaxes[number] = amax
    flags = agreed[len(sharing) : len(sharing) + len(members)]
    for shard, claim in zip(claiming, agreed[len(sharing) + len(members) :], strict=True):
        shard.adopt_scale(claim)
    order = [number for numbers in members.values() for number in numbers]
    return Outcome(amaxes, order, torch.cat(flags) if flags else torch.zeros(0, dtype=torch.float32, device="cpu"))


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
            flags[number] = (one.shard.decoded(torch.float32) != one.master).any()
    return flags
