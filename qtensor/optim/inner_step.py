"""A step of the inner optimizer on masters, chunk by chunk.

    for each chunk:   gradients -> fp32, lent to the masters -> inner.step() on these masters alone -> taken back

fp32 copies of gradients exist for one chunk of parameters at a time (CHUNK elements, or one parameter that is larger):
torch's own optimizers that treat each parameter on its own (APART) take one step for each chunk. Any other optimizer
may look at all gradients together, or count its steps, so it takes a single step, during which all copies exist. A
gradient in fp32 is not copied.

A parameter in fp32 is its own master, and keeps its gradient. If it does not step (it is frozen; the fused way takes
it), the inner optimizer must not find that gradient: it is put aside until the step is done.
"""

import itertools
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.scale_sync import cuts_of
from fsdp_hooks.torch_private import dtensor_like, local_of, locals_of, without_torch_function
from qtensor.optim.masters import check_trainable, copy_many
from qtensor.states.kinds import APART, CHUNK, CHUNK_ELSEWHERE, MATRICES, takes_shards_apart


def check_inner(kind: type[torch.optim.Optimizer], named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise if an optimizer of this kind cannot step masters of these parameters; warn if it may step them wrongly.

    Raises:
        ValueError: as `check_trainable`; or Muon is to step what is no matrix.
        NotImplementedError: as `check_trainable`; or Muon is to step shards that are placed in an unknown way.
    """
    params = [param for _, param in named]
    check_trainable(kind, params)
    if kind in MATRICES:
        from qtensor.optim.matrices.pieces import check_matrices

        check_matrices(named)
    if any(cuts_of(params)) and takes_shards_apart(kind):
        warnings.warn(
            f"MasterWeightOptimizer({kind.__name__}): parameters are sharded, and code of {kind.__name__} "
            "takes shards by themselves (to_local): if it mixes elements of a matrix, it mixes those of a shard, "
            "another update on each number of ranks. Have the class say elementwise = True if it steps each element by "
            "itself, or elementwise = False if it knows what it does with shards",
            stacklevel=4,
        )


def check_split(inner: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], *, expanded: bool) -> None:
    """Do `check_arithmetic` for groups of Muon, unless torch's own steps all of it; and `check_matrices` again.

    What was given to build it may be no class but what makes one, a functools.partial say, of which nothing was known.

    Args:
        inner: the optimizer of the masters.
        groups: of its groups, those to check.
        expanded: whether it steps on states that are expanded for it.
    """
    if type(inner) not in MATRICES:
        return
    if expanded or any(isinstance(master, DTensor) for group in groups for master in group["params"]):
        from qtensor.optim.matrices.arithmetic import check_arithmetic
        from qtensor.optim.matrices.pieces import check_matrices

        for group in groups:
            check_matrices(("a parameter", master) for master in group["params"])
            check_arithmetic(group)


class Room:
    """Memory on one device for fp32 gradients, reused for one chunk of parameters after the other.

    It is allocated once a step, because fresh memory costs more than the writes into it.
    """

    def __init__(self, elements: int) -> None:
        self._elements, self._used = elements, 0
        self._memory: Tensor | None = None
        self._due: list[tuple[Tensor, Tensor]] = []

    @staticmethod
    def elements_of(tensor: Tensor) -> int:
        """Return how many elements a tensor takes up, in whole cache lines."""
        return -(-tensor.numel() // 16) * 16

    def clear(self) -> None:
        """Make all of the memory free to take again."""
        self._used = 0

    def copy(self, source: Tensor) -> Tensor:
        """Return memory that `fill` makes an fp32 copy in."""
        target = self.take(source)
        self._due.append((target, source))
        return target

    def fill(self) -> None:
        """Make all copies that were asked for."""
        copy_many(self._due)
        self._due = []

    def take(self, like: Tensor) -> Tensor:
        """Return uninitialised fp32 of the shape and on the device of `like`."""
        if self._memory is None:
            self._memory = torch.empty(self._elements, dtype=torch.float32, device=like.device)
        if like.device != self._memory.device:
            return torch.empty(like.shape, dtype=torch.float32, device=like.device)
        start, self._used = self._used, self._used + self.elements_of(like)
        shape = like.shape
        strides = list(itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1] if shape else []
        # one view at once: a slice and a view of that take several times as long
        return self._memory.as_strided(shape, strides, start)


class _ParamChunk(NamedTuple):
    """Parameters of one step, and how many elements their gradients take up in a `Room`."""

    params: list[Tensor]
    elements: int


def step_masters(
    inner: torch.optim.Optimizer, params: list[Tensor], masters: Mapping[Tensor, Tensor], groups: Mapping[Tensor, int]
) -> None:
    """Do inner.step(), on one chunk of parameters after the other if that makes no difference.

    Args:
        inner: the optimizer of the masters.
        params: the parameters that step, each with a gradient; the others are left as they are, gradients or not.
        masters: parameter -> its master; itself if it is in fp32.
        groups: parameter -> the number of its group.
    """
    apart = type(inner) in APART
    chunks = (
        list(_chunks(params, locals_of([masters[param] for param in params]))) if apart else [_ParamChunk(params, 0)]
    )
    # any other optimizer may keep gradients, which the next step would write over in a room
    room = Room(max(chunk.elements for chunk in chunks)) if apart else None
    everything = [group["params"] for group in inner.param_groups]
    aside = _put_aside(params, masters)
    try:
        for chunk, _ in chunks:
            try:
                lend_gradients(chunk, masters, room)
                # parameters in fp32 are their own masters and keep their gradients: they must not step in each chunk
                if len(chunks) > 1:
                    for group in inner.param_groups:
                        group["params"] = []
                    for param in chunk:
                        inner.param_groups[groups[param]]["params"].append(masters[param])
                inner.step()
            finally:
                _take_gradients(chunk, masters)
    # also after an error, so that the optimizer can be saved as it is
    finally:
        for group, own in zip(inner.param_groups, everything, strict=True):
            group["params"] = own
        for param, grad in aside:
            param.grad = grad


def _put_aside(params: Sequence[Tensor], masters: Mapping[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Take the gradients from those that are their own masters and none of `params`; returns whose they are."""
    stepping = {id(param) for param in params}
    aside = []
    with without_torch_function():
        for param, master in masters.items():
            if master is param and id(param) not in stepping and (grad := param.grad) is not None:
                aside.append((param, grad))
                param.grad = None
    return aside


def _chunks(params: Sequence[Tensor], masters: Sequence[Tensor]) -> Iterator[_ParamChunk]:
    """Yield the parameters in runs of some elements, or of a single one that has more; `masters`: the local ones."""
    chunk: list[Tensor] = []
    elements = 0
    for param, master in zip(params, masters, strict=True):
        count = Room.elements_of(master)
        if chunk and elements + count > CHUNK.get(master.device.type, CHUNK_ELSEWHERE):
            yield _ParamChunk(chunk, elements)
            chunk, elements = [], 0
        chunk.append(param)
        elements += count
    # An empty one if there are no parameters: the inner optimizer steps all the same.
    yield _ParamChunk(chunk, elements)


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
        # gradients belong to the parameters; on the masters they would keep memory, and step twice
        if master is not param:
            master.grad = None


def in_fp32(grad: Tensor, master: Tensor, room: Room | None) -> Tensor:
    """Return a gradient in its master's dtype: itself if it has that, else a copy (in a room, once that is filled)."""
    if grad.dtype == master.dtype:
        return grad
    if not isinstance(grad, DTensor):
        return room.copy(grad) if room and grad.layout is torch.strided else grad.to(master.dtype)
    if isinstance(master, DTensor) and (grad.device_mesh, grad.placements) == (master.device_mesh, master.placements):
        # without DTensor's dispatch, which takes longer than copying a small gradient
        local = local_of(grad)
        return dtensor_like(room.copy(local) if room else local.to(master.dtype), master)
    return grad.to(master.dtype)
