"""Checks that all ranks of a calibration do the same to the same; else all raise.

Reductions match things by position: the third statistic of one rank is added to the third of another. So if one rank
has registered a module in another place, or lists the layers in another order, the statistics of different linears
would be mixed, and nothing later could tell. This is asked before any work.

Nor could anything tell that ranks hold models of other values: statistics of both would be added up, and what one rank
decides about its weight would stand in place of another one. This is asked of each stage, before its first decision.
"""

import json
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from fsdp_hooks.kernels.digest import digests
from fsdp_hooks.ranks.across_ranks import on_all, on_first
from layerwise.stages.caller import caller
from layerwise.stages.stage import Stage
from qtensor.tensor.quantized_tensor import QuantizedTensor


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
    # Digests first: a model has many names, and ranks nearly always agree.
    own = {what: xxhash.xxh3_64_intdigest(json.dumps(list(items)).encode()) for what, items in told.items()}
    everyone = on_all(group, lambda: own)
    what = next((what for what in told if len({theirs.get(what) for theirs in everyone}) > 1), None)
    if what is None:
        return
    first = on_first(group, lambda: list(told[what]))  # only now, since a model has many names
    differences = on_all(group, lambda: _first_difference(first, list(told[what])))
    rank, words = next((rank, words) for rank, words in enumerate(differences) if words)
    raise ValueError(
        f"{caller()}: the ranks disagree on {what}: rank {rank} has {words} of rank 0; call it alike on all ranks, "
        "with models that were built in the same order"
    )


def _first_difference(first: Sequence[str], own: Sequence[str]) -> str:
    """Return the first item of `own` that differs from `first`, in words; "" if there is none."""
    for place in range(max(len(first), len(own))):
        theirs, mine = (items[place] if place < len(items) else None for items in (first, own))
        if theirs != mine:
            return f"{mine or 'nothing'} in the place of {theirs or 'nothing'}"
    return ""


def check_alike(stage: Stage, group: dist.ProcessGroup | None) -> None:
    """Compare all parameters of a stage that is held. Call it on all ranks of the group; None: a single process.

    Raises:
        RuntimeError: on all ranks, naming the first parameter that differs from rank 0's, and a rank that has it.
    """
    if group is None:
        return
    held = {name: _bytes_of(param) for name, param in stage.params().items()}
    held = {name: tensors for name, tensors in held.items() if tensors}
    # One transfer to the host for all parameters.
    values = digests([*held.values()]).tolist() if held else []
    own = dict(zip(held, values, strict=True))
    total = xxhash.xxh3_64_intdigest(json.dumps(own).encode())
    if len({*on_all(group, lambda: total)}) == 1:
        return
    everyone = on_all(group, lambda: own)  # only now, since a layer may have many
    name, rank = next(
        (name, rank)
        for rank, theirs in enumerate(everyone)
        for name in {**everyone[0], **theirs}
        if theirs.get(name) != everyone[0].get(name)
    )
    raise RuntimeError(
        f"{caller()}: the weights of {stage.title} differ between ranks: {name} of rank {rank} is not that of rank 0. "
        "So what one rank decides about them would not fit those of another. Nothing of it was stored; begin with the "
        "same weights on all ranks, and let callbacks change them alike. Parameters of which each rank has a part are "
        "DTensors, which say so"
    )


def _bytes_of(param: Tensor) -> tuple[Tensor, ...]:
    """Return the plain tensors that a parameter is made of; () for a class of tensor that is not known here."""
    value = param.detach()
    if isinstance(value, QuantizedTensor):
        return tuple(value.parts().values())
    return (value,) if type(value) is torch.Tensor else ()
