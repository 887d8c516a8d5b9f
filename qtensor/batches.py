"""Write many small weights at once: in an optimizer step on thousands of ranks every shard is small.

Quantizing one small weight takes two dozen tiny operations. Weights of one recipe and shape are stacked, [n, N, K], and
quantized as one tensor. A scale that is tensor-wide in each weight is passed in and returned as one value for each row:

    bytes of write_each(shards, values, amaxes) == bytes of write(shard, value, amax, step=True) for each

A large weight, and one that is more than plain (a view, or with an amax history or a preserved initial value), is
written by itself.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fsdp_hooks.torch_private import foreach_copy
from qtensor import kernels
from qtensor.agreement import flat_amax
from qtensor.contents import initial_value, write
from qtensor.formats import keeps_history, tensor_wide
from qtensor.lens import OWN
from qtensor.recipes import Recipe
from qtensor.tensor import QuantizedTensor

SMALL = 2**18  # elements
STACK = 2**22  # elements that are stacked at a time


@torch.no_grad()
def write_each(shards: Sequence[QuantizedTensor], values: Sequence[Tensor], amaxes: Sequence[Tensor | None]) -> None:
    """write(shard, value, amax, step=True) for each; `amaxes` as `write` takes them."""
    for numbers in _batches(shards, values, [amax is None for amax in amaxes]):
        if len(numbers) == 1:
            (number,) = numbers
            write(shards[number], values[number], amaxes[number], step=True)
            continue
        recipe, stacked = shards[numbers[0]].recipe, torch.stack([values[number] for number in numbers])
        agreed = [amaxes[number] for number in numbers]
        parts = kernels.encode(stacked, recipe, _each_amax(stacked, recipe, agreed))
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for name, part in parts.items():  # [n, N, ..]
            own = [getattr(shards[number], name) for number in numbers]
            targets += own
            sources += part.unbind() if own[0].ndim else part[:, 0, 0].unbind()
        foreach_copy(targets, sources)


@torch.no_grad()
def shared_amaxes(shards: Sequence[QuantizedTensor], values: Sequence[Tensor]) -> list[Tensor]:
    """flat_amax(value, shard.recipe) for each; every shard must be one that shares scales."""
    found: dict[int, Tensor] = {}
    for numbers in _batches(shards, values, [False] * len(shards)):
        if len(numbers) == 1:
            (number,) = numbers
            amax = flat_amax(values[number], shards[number].recipe)
            assert amax is not None
            found[number] = amax
            continue
        stacked = torch.stack([values[number] for number in numbers])
        rows = kernels.row_amaxes(stacked).flatten(1)  # [n, N]
        if tensor_wide(shards[numbers[0]].recipe):
            rows = rows.amax(dim=1, keepdim=True)
        found |= dict(zip(numbers, rows.unbind(), strict=True))
    return [found[number] for number in range(len(shards))]


def _each_amax(stacked: Tensor, recipe: Recipe, agreed: Sequence[Tensor | None]) -> Tensor | None:
    """[n, N, 1]: the amax that decides each row's scale; None where blocks have scales of their own."""
    if not kernels.shares_amax(recipe):
        return None
    n, rows, _ = stacked.shape
    if any(amax is None for amax in agreed):  # then all are, see _batches
        own = kernels.row_amaxes(stacked)
        return own.amax(dim=1, keepdim=True).expand(n, rows, 1) if tensor_wide(recipe) else own
    return torch.stack([amax.reshape(-1, 1).expand(rows, 1) for amax in agreed if amax is not None])


def _batches(shards: Sequence[QuantizedTensor], values: Sequence[Tensor], alone: Sequence[bool]) -> Iterator[list[int]]:
    """The numbers of the weights in each batch: small ones of one recipe, shape, dtype and device; else a single one.

    Weights that share no scale (`alone`) have batches of their own: under tensor parallelism one weight may be cut
    along its scales while another of the same shape is not.
    """
    kinds: dict[object, list[int]] = {}
    for number, (shard, value) in enumerate(zip(shards, values, strict=True)):
        # a shard without rows has no amax to be stacked
        if _is_plain(shard) and value.shape == shard.shape and 0 < value.numel() < SMALL:
            kind = (shard.recipe, tuple(value.shape), value.dtype, value.device, alone[number])
            kinds.setdefault(kind, []).append(number)
        else:
            yield [number]
    for numbers in kinds.values():
        size = max(1, STACK // max(1, values[numbers[0]].numel()))
        yield from (numbers[start : start + size] for start in range(0, len(numbers), size))


def _is_plain(shard: QuantizedTensor) -> bool:
    """Whether it is a weight [N, K] of its own, where a write only has to replace the bytes."""
    return (
        shard.ndim == 2
        and shard._lens == OWN
        and shard._sharding.shards is None
        and initial_value(shard) is None
        and not keeps_history(shard.recipe)
        and not shard.is_meta
    )
