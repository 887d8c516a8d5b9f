"""Whether replicas hold the same bytes: a flipped bit in one of them, found by the next step and named.

Under HSDP (and DDP) several ranks hold the same shard, update it alike and never compare it. A bit that flips in the
memory of one stays there: its products go into the gradients of all. So the digests of the parameters travel with what
a step exchanges anyway:

    for each kind of parameters    fp32 [shards, 2 * PIECES]: a rank fills the row of its shard with the pieces of a
                                   digest and their negatives, others with -inf; replicas agree if max == -max(-digest)

A kind is all parameters that are cut alike; one digest for all of them. The rows are reduced over all ranks, and so are
claims on scales whose mesh has no other dims than the one that cuts and those that replicate (HSDP): their maxima over
all replicas are those of each. So there is one all-reduce, as without the comparison. What is compared is the memory as
the step begins, before anything is written. Names are looked up only if the digests differ.
"""

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.kernels.digest import digests
from fsdp_hooks.ranks.across_ranks import ranks_of
from fsdp_hooks.ranks.exchange import Label
from fsdp_hooks.scale_sync import cuts_of, label_of
from fsdp_hooks.torch_private import local_of
from qtensor.optim.masters import bytes_of

PIECES = 4  # of a digest, 16 bits each, which fp32 holds exactly


class _AlikeCut(NamedTuple):
    """Parameters that are cut alike, by label; this rank holds shard `own` of `shards`."""

    shards: int
    own: int
    params: list[tuple[str, Tensor]]


class Replicas:
    """The parameters of one step, and what is sent of them; nothing is kept for the next step.

    Args:
        named: names and parameters, the same on all ranks of the default group.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        # all ranks take part if anything is compared, also one that holds no replica of what another holds
        self.everybody = [_everybody()] if named and ranks_of(None) > 1 else []
        found: dict[tuple[object, int, int], list[tuple[str, Tensor]]] = {}
        for name, param in named:
            placed = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
            found.setdefault((placed, *_shard_of(param)), []).append((label_of(name, param), param))
        self._kinds = [
            _AlikeCut(shards, own, sorted(params, key=lambda pair: pair[0]))
            for (_, shards, own), params in found.items()
            if shards < ranks_of(None)  # else each rank has a shard of its own
        ]
        self.values: list[Tensor] = []
        # digests of the parameters, kind by kind
        self._found = torch.zeros(0, dtype=torch.int64, device="cpu")

    def warn_of_none(self) -> None:
        """Warn if several ranks were to be compared, and each holds a shard of its own."""
        if self.everybody and not self._kinds:
            warnings.warn(
                "MasterWeightOptimizer(check_replicas=True): no two ranks hold the same shard, so there are no "
                "replicas to compare; a flipped bit is not found. Shard over a mesh with replicas (HSDP), or leave it "
                "out",
                stacklevel=3,
            )

    @property
    def labels(self) -> list[Label]:
        """What each value belongs to."""
        return [("replicas", *(label for label, _ in kind.params)) for kind in self._kinds]

    @property
    def groups(self) -> list[list[dist.ProcessGroup]]:
        """The group that each value is reduced over."""
        return [[_everybody()] for _ in self._kinds]

    def look(self) -> None:
        """Digest what the parameters hold now."""
        if not self._kinds:
            return
        params = [param for kind in self._kinds for _, param in kind.params]
        self._found = digests([bytes_of(local_of(param)) for param in params])
        found = digests([[own] for own in self._found.split([len(kind.params) for kind in self._kinds])])
        shifts = torch.arange(0, 16 * PIECES, 16, dtype=torch.int64, device="cpu").to(found.device, non_blocking=True)
        pieces = ((found[:, None] >> shifts) & 0xFFFF).to(torch.float32)  # [kinds, PIECES]
        self.values = []
        for kind, row in zip(self._kinds, torch.cat([pieces, -pieces], dim=1), strict=True):
            # -inf leaves each row to the replicas of that shard
            table = row.new_full((kind.shards, 2 * PIECES), -torch.inf)
            table[kind.own] = row
            self.values.append(table.view(-1))

    def check(self, reduced: Sequence[Tensor]) -> None:
        """Compare, given the maxima of the values over all ranks.

        Raises:
            RuntimeError: on all ranks, replicas differ; it names the first parameter and the ranks.
        """
        tables = [value.view(-1, 2, PIECES) for value in reduced]
        # one host sync for all kinds; names are looked up only if something differs
        if tables and not torch.stack([(table[:, 0] == -table[:, 1]).all() for table in tables]).all():
            raise RuntimeError(self._describe_difference())

    def cuts_of(self, params: Sequence[Tensor]) -> list[list[tuple[int, dist.ProcessGroup]]]:
        """Return `scale_sync.cuts_of`, over all ranks if that gives the same maxima."""
        return [
            [(dim, _everybody() if self._kinds and _cut_once(param) else group) for dim, group in cuts]
            for param, cuts in zip(params, cuts_of(params), strict=True)
        ]

    def _describe_difference(self) -> str:
        """Return what differs, found by comparing the digests of all parameters; a collective."""
        named = [(label, kind.own) for kind in self._kinds for label, _ in kind.params]
        own = [(label, shard, value) for (label, shard), value in zip(named, self._found.tolist(), strict=True)]
        everywhere: list[list[tuple[str, int, int]]] = [[] for _ in range(ranks_of(None))]
        dist.all_gather_object(everywhere, own)
        held: dict[tuple[str, int], dict[int, int]] = {}
        for rank, records in enumerate(everywhere):
            for label, shard, value in records:
                held.setdefault((label, shard), {})[rank] = value
        apart = {key: by_rank for key, by_rank in held.items() if len(set(by_rank.values())) > 1}
        (label, _), by_rank = next(iter(apart.items()))
        also = f" (and {len(apart) - 1} more)" if len(apart) > 1 else ""
        return (
            f"MasterWeightOptimizer.step: replicas hold different bytes of {label}{also}: {_name_ranks(by_rank)}. No "
            "quantized parameter has been written; take that rank's device out of the job and load a checkpoint"
        )


def _name_ranks(by_rank: dict[int, int]) -> str:
    """Return which ranks hold what few others hold; all of them if no value is held by most."""
    (value, most), *_ = Counter(by_rank.values()).most_common()
    odd = [rank for rank, held in by_rank.items() if held != value]
    if 2 * most > len(by_rank):
        others = ", ".join(str(rank) for rank in by_rank if rank not in odd)
        return f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))}, other than ranks {others}"
    return f"ranks {', '.join(map(str, by_rank))} do not agree"


def _everybody() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _shard_of(param: Tensor) -> tuple[int, int]:
    """Return into how many shards a parameter is cut, and which one this rank holds."""
    if not isinstance(param, DTensor):
        return 1, 0
    mesh, shards, own = param.device_mesh, 1, 0
    for number, (placement, at) in enumerate(zip(param.placements, mesh.get_coordinate() or (), strict=False)):
        if not placement.is_replicate():
            shards, own = shards * mesh.size(number), own * mesh.size(number) + at
    return shards, own


def _cut_once(param: Tensor) -> bool:
    """Return whether all ranks hold a shard or a replica of one that is cut along one mesh dim only."""
    if not isinstance(param, DTensor) or param.device_mesh.size() != ranks_of(None):
        return False
    sizes = [
        param.device_mesh.size(number)
        for number, placement in enumerate(param.placements)
        if not placement.is_replicate()
    ]
    return sum(size > 1 for size in sizes) == 1 and math.prod(sizes) < ranks_of(None)
