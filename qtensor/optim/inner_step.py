"""A step of the inner optimizer on masters, chunk by chunk.

    for each chunk:   gradients -> fp32, lent to the masters -> inner.step() on these masters alone -> taken back

fp32 copies of gradients exist for one chunk of parameters at a time (CHUNK elements, or one parameter that is larger):
torch's own optimizers that treat each parameter on its own (APART) take one step for each chunk. Any other optimizer
may look at all gradients together, or count its steps, so it takes a single step, during which all copies exist. A
gradient in fp32 is not copied.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fsdp_hooks.torch_private import local_of, without_torch_function
from qtensor.optim.masters import APART, Room, in_fp32

CHUNK = {"cpu": 2**22}  # elements; the optimizer's temporaries for that many still fit into the cache
CHUNK_ELSEWHERE = 2**27  # enough to keep a GPU busy through a launch


def step_masters(
    inner: torch.optim.Optimizer, params: list[Tensor], masters: Mapping[Tensor, Tensor], groups: Mapping[Tensor, int]
) -> None:
    """inner.step(), on one chunk of parameters after the other where that makes no difference.

    Args:
        inner: the optimizer of the masters.
        params: the parameters that have gradients; the others are left as they are.
        masters: parameter -> its master; itself where it is in fp32.
        groups: parameter -> the number of its group.
    """
    apart = type(inner) in APART
    chunks = list(_chunks(params, masters)) if apart else [params]
    room = Room(max(_elements(chunk, masters) for chunk in chunks)) if apart else None  # another may keep gradients
    everything = [group["params"] for group in inner.param_groups]
    try:
        for chunk in chunks:
            try:
                lend_gradients(chunk, masters, room)
                if len(chunks) > 1:
                    for group in inner.param_groups:
                        group["params"] = []
                    for param in chunk:
                        inner.param_groups[groups[param]]["params"].append(masters[param])
                inner.step()
            finally:
                _take_gradients(chunk, masters)
    finally:
        for group, own in zip(inner.param_groups, everything, strict=True):
            group["params"] = own


def _chunks(params: Sequence[Tensor], masters: Mapping[Tensor, Tensor]) -> Iterator[list[Tensor]]:
    """The parameters in runs of some elements, or of a single one that has more."""
    chunk: list[Tensor] = []
    held = 0
    for param in params:
        count = local_of(masters[param]).numel()
        if chunk and held + count > CHUNK.get(param.device.type, CHUNK_ELSEWHERE):
            yield chunk
            chunk, held = [], 0
        chunk.append(param)
        held += count
    yield chunk  # an empty one where there are no parameters: the inner optimizer steps all the same


def _elements(params: Sequence[Tensor], masters: Mapping[Tensor, Tensor]) -> int:
    return sum(Room.of(local_of(masters[param]).numel()) for param in params)


def lend_gradients(params: Sequence[Tensor], masters: Mapping[Tensor, Tensor], room: Room | None) -> None:
    """Give the masters of these parameters their gradients in fp32."""
    if room is not None:
        room.clear()
    with without_torch_function():
        for param in params:
            master, grad = masters[param], param.grad
            if master is not param:
                assert grad is not None
                master.grad = in_fp32(grad, master, room)
        if room is not None:
            room.fill()


def _take_gradients(params: Sequence[Tensor], masters: Mapping[Tensor, Tensor]) -> None:
    for param in params:
        master = masters[param]
        if master is not param:
            master.grad = None
