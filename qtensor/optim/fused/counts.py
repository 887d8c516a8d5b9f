"""How many steps each shard has taken.

torch keeps the count in a tensor of its own: on the CPU, or on the GPU where a checkpoint of fused=True was loaded.
There all are read at once, in each step: nothing tells when one was written, since version counters miss collectives
and writes through aliases.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_hooks.torch_private import foreach_add


def read_counts(steps: Sequence[Tensor]) -> list[float]:
    """Return the counts; one host sync if some are on a GPU."""
    away = [step for step in steps if not step.is_cpu]
    told = iter(torch.stack([step.reshape(()).to(away[0].device) for step in away]).tolist() if away else [])
    return [step.item() if step.is_cpu else next(told) for step in steps]


def advance_counts(steps: Sequence[Tensor]) -> None:
    """Add 1 to each, as torch's optimizers do."""
    one = torch.ones((), dtype=torch.float32, device="cpu")
    away: dict[torch.device, list[Tensor]] = {}
    for step in steps:
        if step.is_cpu:
            step.add_(one)  # torch's function for lists takes twice as long there
        else:
            away.setdefault(step.device, []).append(step)
    for own in away.values():
        foreach_add(own, 1)
