"""The alias group of the op table: views of a quantized tensor, and the one function that cuts it.

    detach, view                                    the same bytes in a new wrapper
    slice, split, select, unbind, as_strided        `cut`, along one dim

Cuts along rows alias the parts. Cuts along K copy them, so that a shard does not keep the whole tensor's storage alive;
they must fall on block boundaries.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.all_gather import AT_REST, Sharding, ShardRows
from qtensor.ops.table import implements, refuse_resharding_to_a_smaller_mesh
from qtensor.spec.format import PartSpec
from qtensor.spec.lens import OWN, Lens, Reach
from qtensor.spec.registry import block_multiple, describe, row_multiple, specs_of, tensor_wide
from qtensor.tensor.contents import contents_of, contents_specs
from qtensor.tensor.moves import carry_note, freeze_noted
from qtensor.tensor.quantized_tensor import QuantizedTensor

aten = torch.ops.aten


def _fill_in(args: tuple[Any, ...], *defaults: Any) -> tuple[Any, ...]:
    """Return all arguments of an op, with `defaults` for the trailing ones that the caller left out."""
    return (*args, *defaults[len(args) :])


@implements(aten.detach.default, aten.alias.default)
def alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the same bytes in a new wrapper."""
    q = args[0]
    return carry_note(q, q._alias(q._lens, q.shape))


@implements(aten.view.default, aten._unsafe_view.default)
def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the same elements in the same order: rows regrouped, or else seen in another shape (for FSDP)."""
    q, own = args[0], args[0].shape
    lens = q._lens
    if tuple(args[1]) == own or (shape := _resolve(args[1], q.numel())) == own:
        return q._alias(lens, own)
    described = lens.described or tuple(own)
    if lens.transposed:
        raise NotImplementedError(
            f"a view of shape {shape} of a transposed {describe(described, q.recipe)}; transpose it back first"
        )
    if shape == described:
        return q._alias(lens.seen_as(None), torch.Size(shape))
    # only whole rows can be regrouped: their blocks and scales lie along K
    regroups = len(shape) > 1 and shape[-1] == described[-1] and lens == OWN and q._sharding == AT_REST
    if regroups and row_multiple(q.recipe) > 1 and shape[-2:] != described[-2:]:
        # no block may span two matrices, before or after
        regroups = len(described) > 1 and not any(dims[-2] % row_multiple(q.recipe) for dims in (shape, described))
    if not regroups:
        return q._alias(lens.seen_as(described), torch.Size(shape))
    own_parts = contents_of(q)
    return q._like({spec.name: own_parts[spec.name].view(spec.shape(shape)) for spec in contents_specs(q)})


def _resolve(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """Return `shape` with its -1 filled in; raise RuntimeError, as torch does, if it does not hold `numel` elements."""
    known = math.prod(size for size in shape if size != -1)
    full = tuple(numel // max(known, 1) if size == -1 else size for size in shape)
    if math.prod(full) != numel or list(shape).count(-1) > 1:
        raise RuntimeError(f"shape {list(shape)} is invalid for a quantized tensor of {numel} elements")
    return full


@implements(aten.slice.Tensor)
def slice_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return q[a:b] along any dim, step 1. Along K the cut must fall on block boundaries."""
    q, dim, start, end, step = _fill_in(args, None, 0, None, None, 1)
    dim %= q.ndim
    start, end, _ = slice(start, end).indices(q.shape[dim])
    if step != 1:
        raise NotImplementedError(f"slicing {describe(q.shape, q.recipe)} with step {step}; only step 1 is defined")
    if (start, end) == (0, q.shape[dim]) and q._lens.described is not None:
        return q._alias(q._lens, q.shape)  # all of it, which can be viewed back
    return cut(q, dim, start, max(end, start), severed=dim == q.ndim - 1)


@implements(aten.split.Tensor)
def split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cut pieces of `size` along a dim, the last may be shorter: so fully_shard and distribute_tensor cut shards."""
    q, size, dim = _fill_in(args, None, None, 0)
    refuse_resharding_to_a_smaller_mesh(q, size)
    # fully_shard moves parameters before it cuts them, and would lose that this one was frozen
    freeze_noted(q)
    total = q.shape[dim]
    return [cut(q, dim % q.ndim, start, min(start + size, total)) for start in range(0, max(total, 1), max(size, 1))]


@implements(aten.split_with_sizes.default)
def split_with_sizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cut pieces of the given sizes along a dim."""
    q, sizes, dim = _fill_in(args, None, None, 0)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [cut(q, dim % q.ndim, start, start + size) for start, size in zip(starts, sizes, strict=True)]


@implements(aten.select.int)
def select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return one matrix of a stack: q[e] for q [E, N, K] (an expert's weight)."""
    q, dim, index = args
    if dim % q.ndim != 0 or q.ndim < 2:
        raise NotImplementedError(
            f"select along dim {dim} of {describe(q.shape, q.recipe)}; only dim 0 of 2-D and up is defined"
        )
    if not -q.shape[0] <= index < q.shape[0]:
        raise IndexError(f"index {index} is out of range for {describe(q.shape, q.recipe)}")
    index %= q.shape[0]
    piece, wide = cut(q, 0, index, index + 1), tensor_wide(q.recipe)
    own = contents_of(piece)
    parts = {spec.name: own[spec.name][0] if spec.per_row else own[spec.name] for spec in contents_specs(q)}
    shards = piece._sharding.shards
    # all of a gathered stack of one
    if wide is not None and shards is not None and shards.dim == 0:
        parts[wide], shards = _cut_vector(parts[wide], shards, 0, 1)
    # a matrix whose rows come from all shards
    elif shards is not None:
        shards = dataclasses.replace(shards, dim=shards.dim - 1) if wide is not None and shards.dim else None
    # q may itself be a view, whose writes reach others, or nothing
    return q._like(parts, lens=piece._lens, sharding=Sharding(shards=shards))


@implements(aten.unbind.int)
def unbind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return all matrices of a stack, which iterating over it gives."""
    q, dim = _fill_in(args, None, 0)
    return [select(func, (q, dim, index), {}) for index in range(q.shape[dim])]


@implements(aten.as_strided.default)
def as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first rows of a gathered weight. FSDP crops its padding this way."""
    q, size, stride, offset = _fill_in(args, None, None, None, None)
    size = tuple(size)
    # contiguous, whatever the number of rows
    plain = tuple(stride) == q.stride() and not offset
    if not plain or size[1:] != tuple(q.shape[1:]) or size[0] > q.shape[0]:
        raise NotImplementedError(
            f"as_strided of {describe(q.shape, q.recipe)} to size {size}, stride {tuple(stride)}: only its first rows "
            "are defined"
        )
    cropped, wide = cut(q, 0, 0, size[0]), tensor_wide(q.recipe)
    if q._sharding.shards is None:
        return cropped
    # this removes only padding: every shard keeps its tensor-wide value, and the result is still the whole weight
    parts = cropped.parts() | ({wide: getattr(q, wide)} if wide else {})
    gathered = q._like(parts, lens=q._lens, sharding=q._sharding)
    gathered._turned = q._turned
    return gathered


@dataclasses.dataclass(frozen=True)
class _Range:
    """What is cut out: elements `start:end` along `dim` of a tensor [.., N, K] of this shape."""

    shape: torch.Size
    dim: int
    start: int
    end: int

    @property
    def whole(self) -> bool:
        """Whether it is everything."""
        return (self.start, self.end) == (0, self.shape[self.dim])

    @property
    def along_k(self) -> bool:
        """Whether it cuts columns."""
        return self.dim == len(self.shape) - 1

    @property
    def leads(self) -> bool:
        """Whether it begins with the first row, so that padding stays behind it."""
        return self.dim == 0 and self.start == 0

    def splits(self, multiple: int) -> bool:
        """Return whether it begins or ends inside a group of `multiple` elements."""
        return bool(self.start % multiple or (self.end % multiple and self.end != self.shape[self.dim]))


def cut(q: QuantizedTensor, dim: int, start: int, end: int, *, severed: bool = False) -> QuantizedTensor:
    """Return q[start:end] along `dim`, of the same class; with `severed`, a cut of some columns refuses writes.

    Raises:
        NotImplementedError: q is a reshaped view, or a single row with a single scale.
        ValueError: the cut is along K and not on block boundaries.
    """
    shape = q.shape
    piece = _Range(shape, dim, start, end)
    _check_cut(q, piece)
    own, lens, sharding = contents_of(q), q._lens, q._sharding
    parts = {spec.name: _cut_part(own[spec.name], spec, piece) for spec in contents_specs(q)}
    shards, wide = sharding.shards, tensor_wide(q.recipe)
    if shards is not None and wide is not None and dim == shards.dim and not piece.whole:
        parts[wide], shards = _cut_vector(parts[wide], shards, start, end)
    reach = _reach(piece, row_multiple(q.recipe), allocated=sharding.allocated, severed=severed)
    padded = sharding.padded_rows if piece.leads else None
    return q._like(
        parts,
        lens=Lens(max(lens.reach, reach)),
        sharding=Sharding(shards=shards, padded_rows=padded, short=padded is not None and padded > end),
        shape=torch.Size((*shape[:dim], end - start, *shape[dim + 1 :])),
    )


def _check_cut(q: QuantizedTensor, piece: _Range) -> None:
    lens = q._lens
    if lens.described is not None:
        raise NotImplementedError(
            f"cutting a {'transposed' if lens.transposed else 'reshaped'} view of "
            f"{describe(lens.described, q.recipe)}; view it back first"
        )
    one_row = len(piece.shape) == 1 and not piece.whole
    if one_row and tensor_wide(q.recipe) is None and specs_of(q.recipe)[1].block == 0:
        raise NotImplementedError(f"cutting {describe(piece.shape, q.recipe)}: its one row has one scale")
    if piece.along_k and piece.splits(multiple := block_multiple(q.recipe)):
        raise ValueError(
            f"cutting {describe(piece.shape, q.recipe)} at columns {piece.start}:{piece.end}: cuts along K must be "
            f"multiples of {multiple}. If FSDP2 asks for it: it cannot cut K of quantized weights; shard on dim 0"
        )


def _reach(piece: _Range, multiple: int, *, allocated: bool, severed: bool) -> Reach:
    """Return what a write into the piece may change; `allocated`: by FSDP, whose shard is its first rows."""
    if piece.along_k:
        return Reach.NOTHING if severed and not piece.whole else Reach.ALL
    if piece.whole or (allocated and piece.leads):
        return Reach.ALL
    # rows that end inside a square block share its scale with rows outside of the piece
    between_blocks = piece.dim != len(piece.shape) - 2 or not piece.splits(multiple)
    return Reach.ROWS if between_blocks else Reach.BROKEN_BLOCKS


def _cut_part(part: Tensor, spec: PartSpec, piece: _Range) -> Tensor:
    if not piece.along_k:
        return part.narrow(piece.dim, piece.start, piece.end - piece.start) if spec.per_row else part
    # one scale stands for all columns of its row, so each piece along K takes it whole
    if not spec.extends_along(piece.dim, len(piece.shape)):
        # a cut along K owns its parts: with a shared row scale, a write to it would change its siblings
        return part if piece.whole else part.clone()
    first, last = spec.columns(piece.start, piece.end)
    found = part.narrow(piece.dim, first, last - first)
    return found if found.is_contiguous() and found.shape == part.shape else found.contiguous()


def _cut_vector(vector: Tensor, shards: ShardRows, start: int, end: int) -> tuple[Tensor, ShardRows | None]:
    """Return the tensor-wide values of rows start:end of a gathered weight.

    One value, [], if all rows come from one shard or there are no rows; else the whole vector and the rows' places.
    """
    first, last = (start + shards.offset) // shards.rows, (max(end - 1, start) + shards.offset) // shards.rows
    if first == last:
        return vector[min(first, vector.shape[0] - 1)], None
    return vector, ShardRows(shards.rows, shards.offset + start, shards.dim)
