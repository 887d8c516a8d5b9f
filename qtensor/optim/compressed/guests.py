"""Weights in a chunk, expanded, and the inner optimizer's groups with these alone in them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.torch_private import local_of
from qtensor.states.kinds import CHUNK


@dataclass
class Guest:
    """A weight in a chunk.

    Attributes:
        param: whose master and state it is.
        master: fp32, the shard's.
        state: of the inner optimizer, expanded.
        before: the master as it was, if somebody asks whether it moved.
    """

    param: Tensor
    master: Tensor
    state: dict[str, Any]
    before: Tensor | None = None


@contextmanager
def as_groups(
    inner: torch.optim.Optimizer, guests: Sequence[Guest], grads: Sequence[Tensor], groups: Mapping[Tensor, int]
) -> Iterator[None]:
    """Inside, the groups of an optimizer hold the masters of these alone, with their gradients and states."""
    everything = [group["params"] for group in inner.param_groups]
    fused = [group.get("fused") for group in inner.param_groups]
    steps = [guest.master.detach() for guest in guests]
    try:
        for group in inner.param_groups:
            group["params"] = []
            # torch's fused step rounds what is left of a vector otherwise: bytes would depend on who stands where
            if group.get("fused"):
                group["fused"] = None
        for guest, master, grad in zip(guests, steps, grads, strict=True):
            master.grad = grad
            inner.param_groups[groups[guest.param]]["params"].append(master)
            if guest.state:
                inner.state[master] = guest.state
        yield
        for guest, master in zip(guests, steps, strict=True):
            guest.state = inner.state.get(master) or {}
    finally:
        for group, own, asked in zip(inner.param_groups, everything, fused, strict=True):
            group["params"] = own
            if asked:
                group["fused"] = asked
        for master in steps:
            inner.state.pop(master, None)


def chunks_of(params: Sequence[Tensor], elsewhere: int) -> Iterator[list[Tensor]]:
    """Yield the parameters in runs of some elements, or of a single one that has more; `elsewhere`: than on a CPU."""
    chunk: list[Tensor] = []
    elements = 0
    for param in params:
        local = local_of(param)
        most = CHUNK.get(local.device.type, elsewhere)
        if chunk and elements + local.numel() > most:
            yield chunk
            chunk, elements = [], 0
        chunk.append(param)
        elements += local.numel()
    if chunk:
        yield chunk


def copy_of_number(value: Any) -> Any:
    """Return a copy of an entry of the state that is one number, anything else as it is."""
    return value.clone() if isinstance(value, Tensor) and not value.ndim else value
