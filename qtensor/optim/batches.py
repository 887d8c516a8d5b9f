"""Write many small weights at once: in an optimizer step on thousands of ranks every shard is small.

Quantizing one small weight takes two dozen tiny operations. Weights of one recipe and shape are stacked, [n, N, K], and
quantized as one tensor. A scale that is tensor-wide in each weight is passed in and returned as one value for each row:

    bytes of write_each(shards, values, agreed, cuts) == bytes of write(shard, value, *decided(..), step=True) for each

A large weight, and one that is more than plain (a view, or with an amax history or a preserved initial value), is
written by itself.
"""

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from fsdp_hooks.torch_private import without_torch_function
from qtensor.numerics import kernels
from qtensor.optim.masters import copy_rows
from qtensor.scales.agreement import claim_of, decide
from qtensor.scales.cut_blocks import CutBlocks
from qtensor.spec.lens import OWN
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import keeps_history, tensor_wide
from qtensor.tensor.contents import write
from qtensor.tensor.quantized_tensor import QuantizedTensor

SMALL = 2**18  # elements
STACK = 2**22  # elements that are stacked at a time


@torch.no_grad()
def write_each(
    shards: Sequence[QuantizedTensor],
    values: Sequence[Tensor],
    agreed: Sequence[Tensor | None],
    cuts: Sequence[CutBlocks | None],
) -> None:
    """Write each shard, under the scales agreed on: the maxima over all `claim_of`, None for a shard that has none."""
    for numbers in _batches(shards, values, [(one is None, cut) for one, cut in zip(agreed, cuts, strict=True)]):
        recipe, cut = shards[numbers[0]].recipe, cuts[numbers[0]]
        if len(numbers) == 1:
            (number,) = numbers
            write(shards[number], values[number], *decide(values[number], recipe, cut, agreed[number]), step=True)
            continue
        stacked = torch.stack([values[number] for number in numbers])
        # of all of them, or of none
        known = [one for number in numbers if (one := agreed[number]) is not None]
        amaxes, blocks = decide(stacked, recipe, cut, torch.stack(known)) if known else (None, None)
        if kernels.shares_amax(recipe):
            amaxes = _each_amax(stacked, recipe, amaxes)
        parts = kernels.encode(stacked, recipe, amaxes, blocks)
        for name, part in parts.items():  # [n, N, ..]; each on its own, since CUDA copies mixed dtypes one by one
            own = [getattr(shards[number], name) for number in numbers]
            copy_rows(own, part if own[0].ndim else part[:, 0, 0])


@torch.no_grad()
def claims_of(
    shards: Sequence[QuantizedTensor], values: Sequence[Tensor], cuts: Sequence[CutBlocks | None]
) -> list[Tensor]:
    """Return claim_of(value, shard.recipe, cut) for each; every shard must have scales in common with others."""
    found: dict[int, Tensor] = {}
    for numbers in _batches(shards, values, cuts):
        recipe, cut = shards[numbers[0]].recipe, cuts[numbers[0]]
        if len(numbers) == 1:
            (number,) = numbers
            found[number] = claim_of(values[number], recipe, cut)
            continue
        stacked = torch.stack([values[number] for number in numbers])
        claims = []  # [n, ..] each
        if kernels.shares_amax(recipe):
            rows = kernels.row_amaxes(stacked, recipe).flatten(1)  # [n, N]
            claims.append(rows.amax(dim=1, keepdim=True) if tensor_wide(recipe) else rows)
        if cut is not None:
            claims.append(cut.claim(stacked, recipe))
        found |= dict(zip(numbers, torch.cat(claims, dim=1).unbind(), strict=True))
    return [found[number] for number in range(len(shards))]


def _each_amax(stacked: Tensor, recipe: Recipe, agreed: Tensor | None) -> Tensor:
    """Return [n, N, 1]: the amax that decides each row's scale, `agreed` ([n, shared scales]) or the values' own."""
    n, rows, _ = stacked.shape
    if agreed is not None:
        return agreed.unsqueeze(-1).expand(n, rows, 1)
    own = kernels.row_amaxes(stacked, recipe)
    return own.amax(dim=1, keepdim=True).expand(n, rows, 1) if tensor_wide(recipe) else own


def _batches(
    shards: Sequence[QuantizedTensor], values: Sequence[Tensor], apart: Sequence[Hashable]
) -> Iterator[list[int]]:
    """Yield the numbers of each batch: small weights of one recipe, shape, dtype and device; else a single one.

    Weights of different `apart` come in different batches: under tensor parallelism one weight may be cut along its
    scales while another of the same shape is not.
    """
    # one list for each kind, so that a batch is one tensor
    kinds: dict[object, list[int]] = {}
    single = []
    # by id: one object for all that are equal, which takes longer to ask
    recipes: dict[int, Recipe] = {}
    same: dict[Recipe, Recipe] = {}
    with without_torch_function():  # which each read of an attribute would go through
        for number, (shard, value) in enumerate(zip(shards, values, strict=True)):
            # a shard without rows has no amax to be stacked
            if _is_plain(shard) and value.shape == shard.shape and 0 < value.numel() < SMALL:
                recipe = recipes.get(id(shard.recipe))
                if recipe is None:
                    recipe = recipes[id(shard.recipe)] = same.setdefault(shard.recipe, shard.recipe)
                kind = (id(recipe), value.shape, value.dtype, value.device, apart[number])
                kinds.setdefault(kind, []).append(number)
            else:
                single.append(number)
    yield from ([number] for number in single)
    for numbers in kinds.values():
        size = max(1, STACK // max(1, values[numbers[0]].numel()))
        yield from (numbers[start : start + size] for start in range(0, len(numbers), size))


def _is_plain(shard: QuantizedTensor) -> bool:
    """Return whether it is a weight [N, K] of its own, where a write only has to replace the bytes."""
    return (
        shard.ndim == 2
        and shard._lens == OWN
        and shard._sharding.shards is None
        and shard._preserved.value is None
        and not keeps_history(shard.recipe)
        and not shard.is_meta
    )
