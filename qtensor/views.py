"""The alias group of the op table: views of a quantized tensor, and the one function that cuts it.

    detach, view                                    the same bytes in a new wrapper
    slice, split, select, unbind, as_strided        `cut`, along one dim

Cuts along rows alias the parts. Cuts along K copy them, so that a shard does not keep the whole tensor's storage alive;
they must fall on block boundaries.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.all_gather import Arrangement, ShardRows
from qtensor.formats import PartSpec, block_multiple, describe, row_multiple
from qtensor.ops import implements, refuse_resharding_to_a_smaller_mesh
from qtensor.tensor import QuantizedTensor

aten = torch.ops.aten
OWN = Arrangement()  # that of a tensor of its own


def _filled(args: tuple[Any, ...], *defaults: Any) -> tuple[Any, ...]:
    """All arguments of an op, whose trailing ones are left out where they have their default."""
    return (*args, *defaults[len(args) :])


@implements(aten.detach.default, aten.alias.default)
def alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same bytes in a new wrapper."""
    q = args[0]
    return q.alias(q.arrangement, q.shape)


@implements(aten.view.default, aten._unsafe_view.default)
def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same elements in the same order: regrouped where rows stay rows, else `flat`, as FSDP asks for."""
    q, own = args[0], args[0].shape
    if tuple(args[1]) == own or (shape := _resolve(args[1], q.numel())) == own:
        return q.alias(q.arrangement, own)
    described = q.arrangement.flat or tuple(own)
    if q.arrangement.transposed:
        raise NotImplementedError(
            f"a view of shape {shape} of a transposed {describe(described, q.recipe)}; transpose it back first"
        )
    if shape == described:
        return q.alias(q.arrangement.but(flat=None), torch.Size(shape))
    regroups = len(shape) > 1 and shape[-1] == described[-1] and q.arrangement == OWN
    if getattr(q.recipe, "blocks", "row") == "square":
        regroups = regroups and shape[-2] % block_multiple(q.recipe) == 0  # else blocks would span two matrices
    if not regroups:
        return q.alias(q.arrangement.but(flat=described), torch.Size(shape))
    parts = {spec.name: part.view(spec.shape(shape)) for spec, part in zip(q.specs(), q.parts().values(), strict=True)}
    init = None if q.init_value is None else q.init_value.view(shape)
    return q.with_parts(parts, arrangement=OWN, init_value=init)


def _resolve(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """`shape` with its -1 filled in. Raises RuntimeError, as torch does, where it does not hold `numel` elements."""
    known = math.prod(size for size in shape if size != -1)
    full = tuple(numel // max(known, 1) if size == -1 else size for size in shape)
    if math.prod(full) != numel or list(shape).count(-1) > 1:
        raise RuntimeError(f"shape {list(shape)} is invalid for a quantized tensor of {numel} elements")
    return full


@implements(aten.slice.Tensor)
def slice_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """q[a:b] along any dim, step 1. Along K the cut must fall on block boundaries."""
    q, dim, start, end, step = _filled(args, None, 0, None, None, 1)
    dim %= q.ndim
    start, end, _ = slice(start, end).indices(q.shape[dim])
    if step != 1:
        raise NotImplementedError(f"slicing {describe(q.shape, q.recipe)} with step {step}; only step 1 is defined")
    if (start, end) == (0, q.shape[dim]) and q.arrangement.flat is not None:
        return q.alias(q.arrangement, q.shape)  # all of it, which can be viewed back
    piece = cut(q, dim, start, max(end, start))
    if dim == q.ndim - 1 and piece.shape != q.shape:
        piece.arrangement = piece.arrangement.but(severed=True)
    return piece


@implements(aten.split.Tensor)
def split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pieces of `size` along a dim, the last one shorter: how fully_shard and distribute_tensor cut shards."""
    q, size, dim = _filled(args, None, None, 0)
    refuse_resharding_to_a_smaller_mesh(q, size)
    total = q.shape[dim]
    return [cut(q, dim % q.ndim, start, min(start + size, total)) for start in range(0, max(total, 1), max(size, 1))]


@implements(aten.split_with_sizes.default)
def split_with_sizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pieces of the given sizes along a dim."""
    q, sizes, dim = _filled(args, None, None, 0)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [cut(q, dim % q.ndim, start, start + size) for start, size in zip(starts, sizes, strict=True)]


@implements(aten.select.int)
def select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One matrix of a stack: q[e] for q [E, N, K] (an expert's weight)."""
    q, dim, index = args
    if dim % q.ndim != 0 or q.ndim < 2:
        raise NotImplementedError(
            f"select along dim {dim} of {describe(q.shape, q.recipe)}; only dim 0 of 2-D and up is defined"
        )
    if not -q.shape[0] <= index < q.shape[0]:
        raise IndexError(f"index {index} is out of range for {describe(q.shape, q.recipe)}")
    index %= q.shape[0]
    piece = cut(q, 0, index, index + 1)
    parts = {
        spec.name: getattr(piece, spec.name)[0] if spec.per_row else getattr(piece, spec.name) for spec in q.specs()
    }
    init = None if piece.init_value is None else piece.init_value[0]
    return q.with_parts(parts, arrangement=Arrangement(partial=q.shape[0] > 1), init_value=init)


@implements(aten.unbind.int)
def unbind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All matrices of a stack: what iterating over it gives."""
    q, dim = _filled(args, None, 0)
    return [select(func, (q, dim, index), {}) for index in range(q.shape[dim])]


@implements(aten.as_strided.default)
def as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first rows of a gathered weight: how FSDP crops its padding."""
    q, size, stride, offset = _filled(args, None, None, None, None)
    size = tuple(size)
    plain = tuple(stride) == q.stride() and not offset  # contiguous, whatever the number of rows
    if not plain or size[1:] != tuple(q.shape[1:]) or size[0] > q.shape[0]:
        raise NotImplementedError(
            f"as_strided of {describe(q.shape, q.recipe)} to size {size}, stride {tuple(stride)}: only its first rows "
            "are defined. FSDP2 asks for this with Shard(dim > 0) placements, which quantized weights do not support; "
            "shard on dim 0"
        )
    cropped, wide = cut(q, 0, 0, size[0]), q.tensor_wide()
    if q.arrangement.shards is None:
        return cropped
    # only padding goes: every shard keeps its tensor-wide value, and this is still the whole weight
    return q.with_parts(cropped.parts() | ({wide: getattr(q, wide)} if wide else {}), arrangement=q.arrangement)


def cut(q: QuantizedTensor, dim: int, start: int, end: int) -> QuantizedTensor:
    """q[start:end] along `dim`, as a tensor of the same class.

    Raises:
        NotImplementedError: q is a reshaped view, or a single row with a single scale.
        ValueError: the cut is along K and not on block boundaries.
    """
    if q.arrangement.flat is not None:
        raise NotImplementedError(
            f"cutting a {'transposed' if q.arrangement.transposed else 'reshaped'} view of "
            f"{describe(q.arrangement.flat, q.recipe)}; view it back first"
        )
    specs, shape, arrangement = q.specs(), q.shape, q.arrangement
    size, last = shape[dim], len(shape) - 1
    whole, along_k = start == 0 and end == size, dim == last
    if last == 0 and not whole and q.tensor_wide() is None and specs[1].block == 0:
        raise NotImplementedError(f"cutting {describe(shape, q.recipe)}: its one row has one scale")
    if along_k and (start % (multiple := block_multiple(q.recipe)) or (end % multiple and end != size)):
        raise ValueError(
            f"cutting {describe(shape, q.recipe)} at columns {start}:{end}: cuts along K must be multiples of "
            f"{multiple}. If FSDP2 asks for it: it does not support quantized weights with Shard(dim > 0) placements; "
            "shard on dim 0"
        )
    parts = {spec.name: _cut_part(q, spec, dim, start, end) for spec in specs}
    shards = arrangement.shards
    if shards is not None and dim == 0 and not whole and (wide := q.tensor_wide()):
        parts[wide], shards = _cut_vector(parts[wide], shards, start, end)
    keeps_padding = dim == 0 and start == 0
    becomes_shard = keeps_padding and arrangement.allocated
    partial = not (whole or along_k or becomes_shard)
    rows = row_multiple(q.recipe) if dim == last - 1 else 1
    kept = arrangement.but(
        shards=shards,
        padded_rows=arrangement.padded_rows if keeps_padding else None,
        allocated=False,
        partial=arrangement.partial or partial,
        splits_blocks=arrangement.splits_blocks or (partial and bool(start % rows or (end % rows and end != size))),
    )
    init = None if q.init_value is None else q.init_value.narrow(dim, start, end - start)
    cut_shape = torch.Size((*shape[:dim], end - start, *shape[dim + 1 :]))
    return q.with_parts(parts, arrangement=kept, shape=cut_shape, init_value=init)


def _cut_part(q: QuantizedTensor, spec: PartSpec, dim: int, start: int, end: int) -> Tensor:
    part: Tensor = getattr(q, spec.name)
    ndim = q.ndim
    if dim != ndim - 1:
        return part.narrow(dim, start, end - start) if spec.per_row else part
    if not spec.extends_along(dim, ndim):
        # a cut along K stands on its own: sharing the scale of its rows would let a write to it reach its siblings
        return part if (start, end) == (0, q.shape[dim]) else part.clone()
    first, last = spec.columns(start, end)
    piece = part.narrow(dim, first, last - first)
    return piece if piece.is_contiguous() and piece.shape == part.shape else piece.contiguous()


def _cut_vector(vector: Tensor, shards: ShardRows, start: int, end: int) -> tuple[Tensor, ShardRows | None]:
    """The tensor-wide values of rows start:end of a gathered weight.

    One value, [], where all rows come from one shard or there are none; else the whole vector, and where they stand.
    """
    first, last = (start + shards.offset) // shards.rows, (max(end - 1, start) + shards.offset) // shards.rows
    if first == last:
        return vector[min(first, vector.shape[0] - 1)], None
    return vector, ShardRows(shards.rows, shards.offset + start)
