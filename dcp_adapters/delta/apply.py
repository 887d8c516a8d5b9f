"""Bring tensors in memory to a later version: whole ones or shards, all of it or nothing.

    check    the digest of what is there; every frame that is needed is decoded, the new bytes of each tensor are made
             and summed, one tensor at a time; the digest of the result
             whether each tensor can be written, and holds what it should after tensors on the same memory are written
    write    the changed units alone, once all ranks have found all of this in order

A target that is the result already is left as it is. An error of the check leaves it as it is, too. An error while
memory is written (a device that fails) reaches all ranks, and says that the target is no version.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcp_adapters.delta.chain import check_chain, deltas_left
from dcp_adapters.delta.coding.changes import Changes, local_changes, unit_shape, units
from dcp_adapters.delta.make import refuse_other_layout
from dcp_adapters.delta.patches.patch import Delta
from dcp_adapters.delta.patches.state_digest import state_digest
from dcp_adapters.delta.shards import Shard, Shards, add_up, refuse_other_ranks, whole_group
from dcp_adapters.plain.logged_work import log_work
from dcp_adapters.plain.words import in_lines
from dcp_adapters.records.expand import quantized_local
from dcp_adapters.torch_private import flatten_state_dict
from fsdp_hooks.ranks.across_ranks import ALONE, raise_together
from fsdp_hooks.ranks.waiting import waited_for
from fsdp_hooks.versions import count_writes
from fsdp_hooks.wrappers import plain_name
from fsdp_hooks.writable import meeting, span_of, unwritable
from qtensor.tensor.contents import preserve

# positions in the flat units of a shard, and what they become; None if only other ranks' shards change
Written = tuple[Tensor, Tensor] | None
LOG = logging.getLogger(__name__)
LAZY = "it is a lazy negative or conjugate, whose memory holds other values; resolve it (resolve_neg(), resolve_conj())"
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def apply_deltas(
    target: Mapping[str, Any],
    deltas: Sequence[Delta],
    *,
    group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> int:
    """Bring live weights to the version that the last delta leads to.

    Args:
        target: a state dict of tensors, nested or flat: whole ones or DTensors, quantized or dense, on any device. Its
            bytes are written.
        deltas: one after the other; every rank has all of them. Those that the target is past already are skipped.
        group: the ranks that hold the shards; None: all.
        no_dist: this process alone has the target, whole, and no other rank takes part.

    Returns:
        How many deltas were applied: 0 if the target was the result already.

    Raises:
        ValueError: the deltas are no chain; the target has other names, recipes or shapes, or other bytes than the
            delta starts from; tensors or deltas differ between ranks; a delta is damaged, or does not lead
            to what it says; a tensor cannot be written in place, or shares memory with one that becomes another. The
            target is as it was.
        RuntimeError: another rank failed; its text says whether the target is as it was.

    Example:
        ```python
        >>> sent, new = {"weight": torch.zeros(64, 64)}, {"weight": torch.ones(64, 64)}
        >>> delta = HeldVersion(sent).since(new, version=1)
        >>> apply_deltas(sent, [delta])
        1
        >>> torch.equal(sent["weight"], new["weight"])
        True
        ```
    """
    group = whole_group("apply_deltas", group, no_dist=no_dist)
    with waited_for(group or ALONE, "apply_deltas"), raise_together(group):
        check_chain(deltas)
        shards = Shards.of(target, group)
        refuse_other_layout(deltas[0].layout, shards.layout, (deltas[0].where, "the target"))
        sums = shards.sums(shards.data)
    refuse_other_ranks(shards.layout, [f"{each.base} {each.result}" for each in deltas], group)
    with raise_together(group):
        digest = _digest(shards, sums, group)
        left = deltas_left(deltas, digest, "the target")
    if not left:
        return 0
    with raise_together(group):
        written, sums = _find_written(shards, left)
    with raise_together(group):
        digest = _digest(shards, sums, group)
        if digest != left[-1].result:
            raise ValueError(
                f"{left[-1].where} leads to digest {digest}, and says {left[-1].result}: it is damaged, or made by "
                "other code; the target is as it was. Get it again, or take a full version"
            )
        _refuse_unwritable(shards, written)
        _refuse_meeting(shards, written)
    leaves = {plain_name(name): value for name, value in flatten_state_dict(dict(target))[0].items()}
    with log_work(LOG, "apply_deltas: writing %d changed tensors", len(written)), raise_together(group):
        try:
            for key, change in written.items():
                if change is not None:
                    _write(shards.held[key].piece.data, *change)
            _note_written(leaves, {shards.layout.owners[key][0] for key in written})
        except Exception as error:
            raise RuntimeError(
                f"apply_deltas: writing failed ({type(error).__name__}: {error}), so the target is neither the version "
                "before nor the one after: give all ranks a full version"
            ) from error
    return len(left)


def _refuse_unwritable(shards: Shards, written: Mapping[str, Written]) -> None:
    """Raise ValueError if torch would refuse a write, or would do more than one write."""
    data = {key: shards.held[key].piece.data for key, change in written.items() if change is not None}
    found = {key: LAZY for key, each in data.items() if each.is_neg() or each.is_conj()} | unwritable(data)
    problems = [f"{key}: {why}" for key, why in found.items()]
    if problems:
        raise ValueError(f"the target cannot be written in place, and is as it was:{in_lines(problems)}")


def _refuse_meeting(shards: Shards, written: Mapping[str, Written]) -> None:
    """Raise ValueError if tensors on one memory would not all hold what they should; tied ones do.

    The writes are tried on a copy of that memory.
    """
    for keys in meeting(shards.data):
        if not any(written.get(key) for key in keys):
            continue
        data = {key: shards.held[key].piece.data for key in keys}
        # These do not change themselves, so nobody has looked at them yet; others on their memory do.
        for key, why in unwritable(data).items():
            raise ValueError(f"{key} shares memory with others that change, and {why}; the target is as it was")
        copies = _copy_together(data)
        for key in keys:
            if (change := written.get(key)) is not None:
                _write(copies[key], *change)
        for key in keys:
            wanted = data[key].to("cpu", copy=True, memory_format=torch.contiguous_format)
            if (change := written.get(key)) is not None:
                _write(wanted, *change)
            if not torch.equal(units(wanted), units(copies[key])):
                others = ", ".join(other for other in keys if other != key)
                raise ValueError(
                    f"{key} shares memory with {others}, and the deltas give them different bytes; the target is as it "
                    "was. Give each memory of its own"
                )


def _copy_together(data: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy the memory that tensors share to the CPU; return tensors that lie in it as those do in theirs."""
    begin, end = min(span_of(each)[0] for each in data.values()), max(span_of(each)[1] for each in data.values())
    memory = torch.zeros(end - begin, dtype=torch.uint8, device="cpu")
    copies = {}
    for key, each in data.items():
        first, last = (place - begin for place in span_of(each))
        if first % each.itemsize:
            raise ValueError(f"{key} shares memory with tensors of other dtypes; give it memory of its own")
        copies[key] = memory[first:last].view(each.dtype).as_strided(each.shape, each.stride())
        same = BITS.get(each.itemsize, each.dtype)  # torch does not copy all dtypes of codes
        copies[key].view(same).copy_(each.view(same))
    return copies


def _digest(shards: Shards, sums: Tensor, group: dist.ProcessGroup | None) -> str:
    totals = add_up(sums, group)
    shards.refuse_other_replicas(totals)
    return state_digest(shards.layout, shards.named(totals[0]), {})


def _find_written(shards: Shards, deltas: Sequence[Delta]) -> tuple[dict[str, Written], Tensor]:
    """Find what will be written, by key, for all that changes on any rank; and the sums of the shards afterwards.

    The sums are int64 [3, keys].
    """
    written: dict[str, Written] = {}
    sums = []
    for key, shard in shards.held.items():
        data = shard.piece.data
        own = []
        for delta in deltas:
            for found in delta.changes(key):
                written[key] = None
                own.append(_changes_of_shard(shard, delta, found))
        if any(map(len, own)):
            data = data.to("cpu", copy=True, memory_format=torch.contiguous_format)
            # Steps wrap around: int8 127 plus 1 is -128, as when they were made.
            flat = units(data)
            for local in own:
                flat[local.positions] += local.steps
            positions = torch.cat([local.positions for local in own]).unique()
            written[key] = positions, flat[positions]
        one = Shards(shards.layout, {key: shard})
        sums.append(one.sums({key: data}))
    return written, torch.cat(sums, dim=1) if sums else torch.zeros(3, 0, dtype=torch.int64, device="cpu")


def _changes_of_shard(shard: Shard, delta: Delta, changes: Changes) -> Changes:
    """Find the changes that lie in a shard, by positions in it."""
    if not shard.piece.data.numel():
        return Changes(changes.positions[:0], changes.steps[:0])
    dtype, shape = delta.layout.parts[shard.key]
    per = unit_shape(dtype, ())[0]
    offsets = (*shard.piece.offsets[:-1], shard.piece.offsets[-1] * per) if shape else (0,)
    sizes = unit_shape(dtype, shard.piece.data.shape)
    return local_changes(changes, unit_shape(dtype, shape), offsets, sizes)


def _note_written(leaves: Mapping[str, Any], names: Iterable[str]) -> None:
    """Tell torch that these have been written, here or on another rank, and drop initial values, which are stale."""
    for name in names:
        q = quantized_local(leaves[name])
        if q is not None:
            preserve(q, None)
        count_writes([leaves[name]])


def _write(data: Tensor, positions: Tensor, values: Tensor) -> None:
    positions, values = positions.to(data.device), values.to(data.device)
    if data.is_contiguous():
        units(data)[positions] = values
        return
    # Positions count elements in logical order, and the units of a strided tensor are no view.
    whole = data.contiguous()
    units(whole)[positions] = values
    data.copy_(whole)
