"""What changed in live weights since their last delta, found by each rank in its own shards, of which it holds a copy.

    base = HeldVersion(model.state_dict(), version=0)      every rank keeps the bytes of its own shards, on the host
    ...                                                    training
    delta = base.since(model.state_dict(), version=1)      rank 0 has it; the others None
    base.hold(model.state_dict(), version=1)               once it has been delivered

Each rank compares its own shards, and only changes travel: how many each rank has of each tensor, and then the changes
of many tensors together. The result is the delta that one process makes from the whole tensors, byte for byte.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcp_adapters.delta.coding.changes import Changes, changes_between, global_changes, join, unit_of, unit_shape
from dcp_adapters.delta.make import refuse_empty, refuse_other_layout
from dcp_adapters.delta.patches.encoder import Encoder
from dcp_adapters.delta.patches.patch import Delta
from dcp_adapters.delta.patches.state_digest import state_digest
from dcp_adapters.delta.shards import Shard, Shards, add_up, refuse_other_ranks, whole_group
from fsdp_hooks.ranks.across_ranks import ALONE, device_of, is_first, on_first, raise_together, ranks_of
from fsdp_hooks.ranks.waiting import waited_for

BUCKET = 2**26  # bytes of changes that a rank sends at a time, unless one tensor has more


class HeldVersion:
    """The bytes of this rank's shards at one version; of replicas, one rank keeps them.

    Args:
        state_dict: tensors, nested or flat: whole ones or DTensors, quantized or dense. It is copied to the host.
        version: a number of the caller's.
        group: the ranks that hold the shards; None: all.
        no_dist: this process alone has the weights, whole, and no other rank takes part.

    Raises:
        ValueError: a leaf is no tensor, has no bytes, or is placed so that a rank's local tensor is no box; ranks have
            other tensors than each other.

    Example:
        ```python
        >>> state = {"weight": torch.zeros(64, 64)}
        >>> sent = HeldVersion(state, version=0)
        >>> state["weight"][0, 0] = 1.0
        >>> delta = sent.since(state, version=1)
        >>> sent.hold(state, version=1)
        ```
    """

    def __init__(
        self,
        state_dict: Mapping[str, Any],
        version: int = 0,
        *,
        group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> None:
        self.version, self.group = version, whole_group("HeldVersion", group, no_dist=no_dist)
        shards = self._shards(state_dict)
        self.layout = shards.layout
        self._kept = {
            key: shard.piece._replace(data=shard.piece.data.to("cpu", copy=True))
            for key, shard in shards.held.items()
            if shard.counts
        }

    def since(self, state_dict: Mapping[str, Any], version: int) -> Delta | None:
        """Make the delta since the held version, on rank 0; None elsewhere. A collective. The held version stays.

        Raises:
            ValueError: names, recipes, shapes or placements are not those of the held version.
        """
        shards = self._shards(state_dict)
        with raise_together(self.group):
            refuse_other_layout(self.layout, shards.layout, ("the held version", "the state dict"))
            refuse_empty(self.layout)
            self._refuse_other_shards(shards)
            changes = {key: self._changes(shard) for key, shard in shards.held.items()}
            kept = {key: piece.data for key, piece in self._kept.items()}
            sums = torch.stack([shards.sums(kept), shards.sums(shards.data)])
        totals = add_up(sums, self.group)  # [old and new, 3, keys]
        shards.refuse_other_replicas(totals[1])
        before, after = shards.named(totals[0, 0]), shards.named(totals[1, 0])
        digests = state_digest(self.layout, before, {}), state_digest(self.layout, after, {})
        encoder = Encoder(self.layout)

        # Changes of different ranks' shards interleave: `join` sorts them, so the delta is that of whole tensors.
        def encode(bucket: Mapping[str, list[Changes]]) -> None:
            for key, found in bucket.items():
                encoder.add(key, join(found, unit_of(self.layout.parts[key][0])))

        for bucket in _buckets(changes, self.group):
            gathered = _gather({key: changes[key] for key in bucket.keys}, bucket, self.group)
            # An error of rank 0 is raised on all ranks, which would wait in the next gather otherwise.
            on_first(self.group or ALONE, lambda gathered=gathered: encode(gathered))  # type: ignore[misc]
        made: list[Delta] = []
        versions = self.version, version
        on_first(
            self.group or ALONE, lambda: made.append(Delta.made(self.layout, digests, encoder.frames(), {}, versions))
        )
        return made[0] if made else None

    def hold(self, state_dict: Mapping[str, Any], version: int) -> None:
        """Take these shards as the held version, into the memory of the last one.

        Call it before the weights are written again: what is held must be what the receiver has, and a receiver refuses
        the next delta otherwise.

        Raises:
            ValueError: as `since`.
        """
        shards = self._shards(state_dict)
        with raise_together(self.group):
            refuse_other_layout(self.layout, shards.layout, ("the held version", "the state dict"))
            self._refuse_other_shards(shards)
        # All checks are behind us: a held version that is half new would make a delta that nobody can apply.
        for key, piece in self._kept.items():
            piece.data.copy_(shards.held[key].piece.data)
        self.version = version

    def _shards(self, state_dict: Mapping[str, Any]) -> Shards:
        with waited_for(self.group or ALONE, "HeldVersion"), raise_together(self.group):
            shards = Shards.of(state_dict, self.group)
        refuse_other_ranks(shards.layout, (), self.group)
        return shards

    def _refuse_other_shards(self, shards: Shards) -> None:
        for key, shard in shards.held.items():
            places = [
                None if piece is None else (tuple(piece.data.shape), piece.offsets)
                for piece in (shard.piece if shard.counts else None, self._kept.get(key))
            ]
            if places[0] != places[1]:
                told = ["nothing" if place is None else f"{place[0]} at {place[1]}" for place in places]
                raise ValueError(
                    f"{key}: this rank's shard is {told[0]}, that of the held version {told[1]}; hold a version "
                    "anew after weights were sharded otherwise"
                )

    def _changes(self, shard: Shard) -> Changes:
        """Find what changed in one shard, by global positions; nothing if another rank counts it."""
        dtype, shape = self.layout.parts[shard.key]
        if not shard.counts:
            return join([], unit_of(dtype))
        now = shard.piece.data.to("cpu")
        local = join(changes_between(self._kept[shard.key].data, now), unit_of(dtype))
        per = unit_shape(dtype, ())[0]
        offsets = (*shard.piece.offsets[:-1], shard.piece.offsets[-1] * per) if shape else (0,)
        return global_changes(local, unit_shape(dtype, shape), offsets, unit_shape(dtype, now.shape))


class _Bucket:
    """Tensors whose changes travel together; counts: int64 [ranks, keys]."""

    def __init__(self, keys: list[str], counts: Tensor, widths: Tensor) -> None:
        self.keys, self.counts = keys, counts
        self.nbytes = int((counts * (8 + widths)).sum(1).max())  # of the rank that has most


def _buckets(changes: Mapping[str, Changes], group: dist.ProcessGroup | None) -> list[_Bucket]:
    """Plan the buckets, the same on all ranks, in the order of the keys; tensors that no rank changed are left out."""
    keys = list(changes)
    counts = torch.tensor([len(found) for found in changes.values()], dtype=torch.int64, device="cpu").unsqueeze(0)
    widths = torch.tensor([found.steps.element_size() for found in changes.values()], dtype=torch.int64, device="cpu")
    if group is not None:
        device = device_of(group)
        gathered = [torch.empty_like(counts[0], device=device) for _ in range(ranks_of(group))]
        dist.all_gather(gathered, counts[0].to(device), group=group)
        counts = torch.stack(gathered).to("cpu")
    most = (counts * (8 + widths)).amax(0).tolist()  # bytes of each key, of the rank that has most
    found: list[list[int]] = [[]]
    held = 0
    for number, nbytes in enumerate(most):
        if not nbytes:
            continue
        if found[-1] and held + nbytes > BUCKET:
            found.append([])
            held = 0
        found[-1].append(number)
        held += nbytes
    return [_Bucket([keys[n] for n in numbers], counts[:, numbers], widths[numbers]) for numbers in found if numbers]


def _gather(
    changes: Mapping[str, Changes], bucket: _Bucket, group: dist.ProcessGroup | None
) -> dict[str, list[Changes]]:
    """Gather the changes of all ranks, by key, on rank 0; empty elsewhere. One collective."""
    if group is None:
        return {key: [found] for key, found in changes.items()}
    # Bytes, padded to the rank that has most: gather takes equal sizes and one dtype, and what is behind a rank's own
    # changes is not read, since all ranks know all counts.
    own = torch.cat([part for found in changes.values() for part in (_raw(found.positions), _raw(found.steps))])
    device = device_of(group)
    sent = torch.zeros(bucket.nbytes, dtype=torch.uint8, device=device)
    sent[: own.numel()] = own.to(device)
    first = is_first(group)
    got = [torch.empty_like(sent) for _ in range(ranks_of(group))] if first else None
    dist.gather(sent, got, dst=dist.get_global_rank(group, 0), group=group)
    out: dict[str, list[Changes]] = {key: [] for key in bucket.keys} if first else {}
    for rank, data in enumerate(got or ()):
        at, host = 0, data.to("cpu")
        for number, (key, found) in enumerate(changes.items()):
            count = int(bucket.counts[rank, number])
            positions, at = _take(host, at, count, torch.int64)
            steps, at = _take(host, at, count, found.steps.dtype)
            if count:
                out[key].append(Changes(positions, steps))
    return out


def _raw(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _take(data: Tensor, at: int, count: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Take `count` values that begin at a byte, and tell where the next begin."""
    end = at + count * dtype.itemsize
    # A view as int64 needs an aligned start, which a clone has.
    return data[at:end].clone().view(dtype), end
