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
    away = [step for step in steps if step.device.type != "cpu"]
    told = iter(torch.stack([step.reshape(()).to(away[0].device) for step in away]).tolist() if away else [])
    return [step.item() if step.device.type == "cpu" else next(told) for step in steps]


def advance_counts(steps: Sequence[Tensor]) -> None:
    """Add 1 to each, as torch's optimizers do."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for step in steps:
        by_device.setdefault(step.device, []).append(step)
    for own in by_device.values():
        foreach_add(own, torch.ones((), dtype=torch.float32, device="cpu") if own[0].is_cpu else 1)
