"""The bytes that `merge_` would write for one weight, as a forward computes them.

    parts of W, factors           ->  merged_parts   ->  parts of M = requantize(dequantize(W) + s b a)
    those of W and its partners   ->  together       ->  the amax under which M is quantized, if it shares its scale

In a compiled graph each of these is one operation: a compiler might fuse a product with its sum, which rounds once
less, and so give other bytes.

Partners (`share_scales`) get the scale that the largest magnitude among all merged values asks for. So the amaxes of
the others are computed from their factors in each forward: under FSDP2 a gather refills tensors without a trace, so
nobody can tell whether an amax that was kept is still theirs.
"""

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.torch_private import constant_in_graphs, is_tracing, without_torch_function
from qtensor.merging.low_rank import LowRankUpdate, UpdateSum
from qtensor.numerics import kernels
from qtensor.scales.agreement import scale_of
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import specs_of, tensor_wide
from qtensor.tensor.contents import parts_per_row
from qtensor.tensor.quantized_tensor import QuantizedTensor

DENSE = ""  # in the place of a recipe


@torch.no_grad()
def merged_weight(
    weight: Tensor,
    factors: Sequence[Tensor],
    scalings: Sequence[float],
    *,
    shared: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """Return the weight that `merge_` would write, of the kind that `weight` is; a weight that nothing moves stays.

    Args:
        weight: [N, K], not sharded.
        factors: a and b of each update, one after the other.
        scalings: of each update.
        shared: of `together`, if the weight shares its scale with others.
        after: what a compiled graph must have before it merges, see the docstring of through_merge.py.
    """
    with without_torch_function():
        if not isinstance(weight, QuantizedTensor):
            (values,) = _merge([weight.detach()], factors, scalings, None, _listed(shared), after)
            return values
        new = _merge(_held(weight), factors, scalings, weight.recipe.stored, _listed(shared), after)
        named = {spec.name: part for spec, part in zip(specs_of(weight.recipe.stored), new, strict=True)}
        return type(weight)(named, weight.recipe, weight.dtype)


def seen_of(weight: Tensor, factors: Sequence[Tensor], scalings: Sequence[float]) -> Tensor:
    """Return fp32 [2]: the largest finite magnitude of W + update, and 1 if any element moves, for `together`."""
    # dynamo sees one call: it could not look into a quantized weight
    if torch.compiler.is_dynamo_compiling():
        _let_into_graphs()
    return _seen_of(weight, factors, scalings)


@constant_in_graphs  # so it is called while dynamo traces, and an import of this module does not import dynamo
def _let_into_graphs() -> None:
    torch.compiler.allow_in_graph(_seen_of)


@torch.no_grad()
def _seen_of(weight: Tensor, factors: Sequence[Tensor], scalings: Sequence[float]) -> Tensor:
    with without_torch_function():
        assert isinstance(weight, QuantizedTensor)
        recipe, held, plain = weight.recipe.stored, _held(weight), [factor.detach() for factor in factors]
        if not is_tracing():
            return merged_amax(held, plain, scalings, recipe)
        return torch.ops.qtensor.merged_amax(held, plain, list(scalings), _text(recipe))  # type: ignore[no-any-return]


def together(seen: Iterable[Tensor]) -> Tensor:
    """Return fp32 [2] of all partners, from `seen_of` each: their amax, and 1 if any element of any of them moves."""
    return torch.stack(list(seen)).amax(dim=0)


def _held(weight: QuantizedTensor) -> list[Tensor]:
    parts = parts_per_row(weight)
    return [parts[spec.name] for spec in specs_of(weight.recipe.stored)]


def _listed(one: Tensor | None) -> list[Tensor]:
    return [] if one is None else [one]


def _merge(  # noqa: PLR0913, PLR0917 - what an operation of a graph can take
    held: Sequence[Tensor],
    factors: Sequence[Tensor],
    scalings: Sequence[float],
    recipe: Recipe | None,
    shared: Sequence[Tensor],
    after: Tensor | None,
) -> Sequence[Tensor]:
    if not is_tracing():
        return merged_parts(held, factors, scalings, recipe, shared)
    plain = [factor.detach() for factor in factors]
    return torch.ops.qtensor.merged_parts(  # type: ignore[no-any-return]
        list(held), plain, list(scalings), _text(recipe), list(shared), _listed(after)
    )


def merged_parts(
    held: Sequence[Tensor],
    factors: Sequence[Tensor],
    scalings: Sequence[float],
    recipe: Recipe | None,
    shared: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Return new parts of a weight, in the order of the format, or the dense one [N, K] if it has no recipe."""
    if recipe is None:
        change = _change(factors, scalings)
        values = held[0].to(torch.float32).add_(change) if held[0].dtype != torch.float32 else held[0] + change
        return [torch.where((change != 0).any(), values.to(held[0].dtype), held[0])]
    values, moves = _merged_values(held, factors, scalings, recipe)
    names = [spec.name for spec in specs_of(recipe)]
    if shared:
        amax, any_moves = shared[0][0], shared[0][1] > 0
        # one that stays itself follows its partners, as in WeightMerge, if their scale is not the one it has
        wide = held[names.index(tensor_wide(recipe) or "")]  # [] or, of a gathered weight, [N, 1]
        moves = any_moves & (moves | (wide != scale_of(amax, recipe)))
        new = kernels.encode(values, recipe, amax)
    else:
        new = kernels.encode(values, recipe)
    return [
        _chosen(moves if spec.length is None else moves.any(), new[spec.name], part)
        for spec, part in zip(specs_of(recipe), held, strict=True)
    ]


def merged_amax(held: Sequence[Tensor], factors: Sequence[Tensor], scalings: Sequence[float], recipe: Recipe) -> Tensor:
    """Return what `seen_of` does, from the parts of a weight."""
    values, moves = _merged_values(held, factors, scalings, recipe)
    amax = kernels.shared_amax(values, recipe)
    assert amax is not None
    return torch.stack([amax.reshape(()), moves.to(torch.float32)])


def _merged_values(
    held: Sequence[Tensor], factors: Sequence[Tensor], scalings: Sequence[float], recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """Return W + update, fp32 [N, K], and whether any element moves, bool []."""
    values = kernels.decode(
        dict(zip((spec.name for spec in specs_of(recipe)), held, strict=True)), recipe, torch.float32
    )
    if not factors:
        return values, torch.zeros((), dtype=torch.bool, device=values.device)
    change = _change(factors, scalings)
    # else writing its own values could choose other codes; told on the device, where nobody waits for it
    return values.add_(change), (change != 0).any()


def _change(factors: Sequence[Tensor], scalings: Sequence[float]) -> Tensor:
    """Return the sum of the updates, fp32 [N, K]."""
    each = [
        LowRankUpdate(a=a, b=b, scaling=scaling)
        for a, b, scaling in zip(factors[::2], factors[1::2], scalings, strict=True)
    ]
    rows, columns = each[0].shape
    return UpdateSum(tuple(each))((slice(0, rows), slice(0, columns)))


def _chosen(moves: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return `new` if the update moves any element, else `old`, in the shape of `old`; a tensor of its own."""
    dtype = old.dtype
    # as bytes, since torch.where does not support float8
    if dtype.itemsize == 1:
        new, old = new.view(torch.uint8), old.view(torch.uint8)
    return torch.where(moves, new, old).view(dtype)


@constant_in_graphs
@functools.cache
def _text(recipe: Recipe | None) -> str:
    """Return a text that another process understands, too: it may find this graph, compiled, in a cache on disk."""
    return DENSE if recipe is None else json.dumps(recipe.to_json())


@functools.cache
def _recipe(text: str) -> Recipe | None:
    return None if text == DENSE else Recipe.from_json(json.loads(text))


@torch.library.custom_op("qtensor::merged_parts", mutates_args=())
def _merged_parts(  # noqa: PLR0913, PLR0917 - what an operation of a graph can take
    held: list[Tensor],
    factors: list[Tensor],
    scalings: list[float],
    recipe: str,
    shared: list[Tensor],
    after: list[Tensor],
) -> list[Tensor]:
    """Compute `merged_parts`."""
    return merged_parts(held, factors, scalings, _recipe(recipe), shared)


@_merged_parts.register_fake
def _(held: list[Tensor], *others: Any) -> list[Tensor]:
    return [torch.empty_like(part, memory_format=torch.contiguous_format) for part in held]


@torch.library.custom_op("qtensor::merged_amax", mutates_args=())
def _merged_amax(held: list[Tensor], factors: list[Tensor], scalings: list[float], recipe: str) -> Tensor:
    """Compute `merged_amax`."""
    known = _recipe(recipe)
    assert known is not None
    return merged_amax(held, factors, scalings, known)


@_merged_amax.register_fake
def _(held: list[Tensor], *others: Any) -> Tensor:
    return held[0].new_empty(2, dtype=torch.float32)
