"""All ranks of a calibration are about to do the same, in the same order; else all raise before anything runs.

What ranks reduce is matched by its place: the third statistic of one rank is added to the third of another. So a module
that one rank has registered in another place, or a list of layers in another order, would mix the statistics of
different linears, and nothing later could tell.
"""

import json
from collections.abc import Mapping, Sequence

import torch.distributed as dist
import xxhash

from fsdp_hooks.across_ranks import on_all, on_first


def check_agreed(group: dist.ProcessGroup | None, told: Mapping[str, Sequence[str]]) -> None:
    """Compare what ranks are about to do. Call it on all ranks of the group; None: there is one.

    Args:
        group: the ranks.
        told: what is compared -> its items, in their order.

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
    first = on_first(group, lambda: list(told[what]))  # only now, for the names of a model are many
    differences = on_all(group, lambda: _difference(first, list(told[what])))
    rank, words = next((rank, words) for rank, words in enumerate(differences) if words)
    raise ValueError(
        f"calibrate: the ranks disagree on {what}: rank {rank} has {words} of rank 0; call it alike on all ranks, with "
        "models that were built in the same order"
    )


def _difference(first: Sequence[str], own: Sequence[str]) -> str:
    """The first item of `own` that is not that of `first`, in words; "" where there is none."""
    for place in range(max(len(first), len(own))):
        theirs, mine = (items[place] if place < len(items) else None for items in (first, own))
        if theirs != mine:
            return f"{mine or 'nothing'} in the place of {theirs or 'nothing'}"
    return ""
