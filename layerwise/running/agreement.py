"""Checks that all ranks of a calibration are about to do the same in the same order; else all raise, before any work.

Reductions match things by position: the third statistic of one rank is added to the third of another. So if one rank
has registered a module in another place, or lists the layers in another order, the statistics of different linears
would be mixed, and nothing later could tell.
"""

import json
from collections.abc import Mapping, Sequence

import torch.distributed as dist
import xxhash

from fsdp_hooks.across_ranks import on_all, on_first


def check_agreed(group: dist.ProcessGroup | None, told: Mapping[str, Sequence[str]]) -> None:
    """Compare what ranks are about to do. Call it on all ranks of the group; None: a single process.

    Args:
        group: the ranks.
        told: name of what is compared -> its items, in order.

    Raises:
        ValueError: on all ranks, naming the first difference and the rank that has it.
    """
    if group is None:
        return
    own = {what: xxhash.xxh3_64_intdigest(json.dumps(list(items)).encode()) for what, items in told.items()}
    everyone = on_all(group, lambda: own)
    what = next((what for what in told if len({theirs.get(what) for theirs in everyone}) > 1), None)
    if what is None:
        return
    first = on_first(group, lambda: list(told[what]))  # only now, since a model has many names
    differences = on_all(group, lambda: _first_difference(first, list(told[what])))
    rank, words = next((rank, words) for rank, words in enumerate(differences) if words)
    raise ValueError(
        f"calibrate: the ranks disagree on {what}: rank {rank} has {words} of rank 0; call it alike on all ranks, with "
        "models that were built in the same order"
    )


def _first_difference(first: Sequence[str], own: Sequence[str]) -> str:
    """The first item of `own` that differs from `first`, in words; "" where there is none."""
    for place in range(max(len(first), len(own))):
        theirs, mine = (items[place] if place < len(items) else None for items in (first, own))
        if theirs != mine:
            return f"{mine or 'nothing'} in the place of {theirs or 'nothing'}"
    return ""
