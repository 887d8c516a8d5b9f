"""How many steps each shard has taken: read where that costs nothing, and otherwise once.

torch keeps the count in a tensor of its own: on the CPU, where reading it is quick, or with fused=True on the GPU,
where reading it would make the host wait in each step. There a count is remembered; it is read again if the tensor is
another one, or if torch counted a write into it that is not from here (a checkpoint that was loaded in place).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_hooks.torch_private import foreach_add


@dataclass
class _Seen:
    tensor: Tensor
    version: int
    count: float


class Counts:
    """The counts of one optimizer's shards."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def read(self, steps: Sequence[Tensor]) -> list[float]:
        """Return the counts; one host sync for all that are not known."""
        unknown = [step for step in steps if step.device.type != "cpu" and not self._knows(step)]
        if unknown:
            for step, count in zip(unknown, torch.stack([step.reshape(()) for step in unknown]).tolist(), strict=True):
                self._seen[id(step)] = _Seen(step, step._version, count)
        return [step.item() if step.device.type == "cpu" else self._seen[id(step)].count for step in steps]

    def advance(self, steps: Sequence[Tensor]) -> None:
        """Add 1 to each, as torch's optimizers do."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for step in steps:
            by_device.setdefault(step.device, []).append(step)
        for own in by_device.values():
            foreach_add(own, torch.ones((), dtype=torch.float32, device="cpu") if own[0].is_cpu else 1)
        for step in steps:
            if (seen := self._seen.get(id(step))) is not None and seen.tensor is step:
                seen.version, seen.count = step._version, seen.count + 1

    def _knows(self, step: Tensor) -> bool:
        seen = self._seen.get(id(step))
        return seen is not None and seen.tensor is step and seen.version == step._version
