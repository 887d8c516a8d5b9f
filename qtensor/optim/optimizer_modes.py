"""Inner optimizers with modes, and methods of an inner optimizer that MasterWeightOptimizer does not have.

A schedule-free optimizer keeps its weights at y, where gradients are taken, and moves them to x, the average that is to
be evaluated and saved, when it is told so:

    optimizer.eval()     y -> x in place      optimizer.train()    x -> y in place

Its weights are the masters here, so quantized weights have to follow. Nothing but the masters' bytes can tell which of
them moved: an optimizer may write through `.data`, which version counters miss.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from qtensor.optim.masters import digests_of

MODES = ("train", "eval")


@torch.no_grad()
def switch(inner: torch.optim.Optimizer, mode: str, masters: Mapping[Tensor, Tensor]) -> list[Tensor]:
    """Call inner.train() or inner.eval(); returns the parameters whose masters moved on this rank. A host sync."""
    every = [master for master in masters.values() if master.numel()]
    if not every:
        getattr(inner, mode)()
        return []
    before = digests_of(every)
    getattr(inner, mode)()
    same = (before == digests_of(every)).all(dim=1).tolist()
    moved = {id(master) for master, kept in zip(every, same, strict=True) if not kept}
    return [param for param, master in masters.items() if id(master) in moved]


def missing_attribute(inner: object, name: str) -> AttributeError:
    """Return the error for a name that MasterWeightOptimizer does not have."""
    own = f"'MasterWeightOptimizer' object has no attribute {name!r}"
    if inner is None or name.startswith("_") or not hasattr(inner, name):
        return AttributeError(own)
    return AttributeError(
        f"{own}, though its inner {type(inner).__name__} has. What moves masters outside of step(), train() and eval() "
        "would leave the quantized weights behind, and gradients are the inner optimizer's during step() alone; use an "
        "optimizer that does its work in step()"
    )
