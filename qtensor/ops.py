"""The one op table: what every torch operation does to a quantized tensor.

Five behaviours, a group of named functions each:

    alias        detach, view, slice, split, select, as_strided ...   same bytes, no copy (cuts across columns copy)
    copy         clone, to, pin_memory, copy_ between equal recipes   same bytes, new storage
    allocate     empty_like, new_zeros ... (same class);  zeros_like and *_like fills (PLAIN: optimizer state)
    requantize   copy_ from other values, zero_, fills and arithmetic in place   dequantize, compute, quantize in place
    anything else raises, listing the op: nothing is dequantized silently

Row cuts alias the parts; cuts along K copy them, so that a shard does not keep the whole tensor's storage alive.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.all_gather import Arrangement, ShardRows
from qtensor.formats import APPEARANCE_DTYPES, block_multiple, check_shape, describe, registered
from qtensor.tensor import OPS, TORCH_FUNCTIONS, QuantizedTensor, dense

aten = torch.ops.aten
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def implements(*overloads: Any) -> Callable[[Handler], Handler]:
    """Enter a handler into the table for some overloads; a second entry for one raises."""

    def enter(handler: Handler) -> Handler:
        for overload in overloads:
            if overload in OPS:
                raise ValueError(f"{overload} has a handler already: {OPS[overload].__name__}")
            OPS[overload] = handler
        return handler

    return enter


def _map_parts(
    q: QuantizedTensor, fn: Callable[[Tensor], Tensor], arrangement: Arrangement, dtype: torch.dtype | None = None
) -> Any:
    """A tensor like q around fn of each part (and of the preserved initial value)."""
    init = None if q.init_value is None else fn(q.init_value)
    return q.with_parts(
        {name: fn(part) for name, part in q.parts().items()}, dtype=dtype, arrangement=arrangement, init_value=init
    )


# -- alias --------------------------------------------------------------------------------------------------------------------


@implements(aten.detach.default, aten.alias.default)
def alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same bytes in a new wrapper."""
    q = args[0]
    out = _map_parts(q, torch.Tensor.detach, q.arrangement)
    out.preserved = q.preserved
    return out


@implements(aten.view.default, aten._unsafe_view.default)
def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any view of the same elements in the same order: rows regrouped where rows stay rows, else a `flat` one (FSDP's view(-1))."""
    q, shape = args[0], _resolve(args[1], args[0].numel())
    described = q.arrangement.flat or tuple(q.shape)
    if shape == described:
        return _map_parts(q, torch.Tensor.detach, q.arrangement.but(flat=None))
    regroups = len(shape) > 1 and shape[-1] == described[-1] and q.arrangement == Arrangement()
    if not regroups:
        kept = q.arrangement.but(flat=described)
        return type(q)(q.parts(), q.recipe, q.dtype, arrangement=kept, shape=torch.Size(shape))
    parts = {spec.name: part.view(spec.shape(shape)) for spec, part in zip(q.specs(), q.parts().values(), strict=True)}
    init = None if q.init_value is None else q.init_value.view(shape)
    return q.with_parts(parts, arrangement=Arrangement(), init_value=init)


def _resolve(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """`shape` with its -1 filled in."""
    if -1 not in shape:
        return tuple(shape)
    known = -math.prod(shape)
    return tuple(numel // max(known, 1) if size == -1 else size for size in shape)


@implements(aten.slice.Tensor)
def slice_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """q[a:b] along any dim, step 1. Along K the cut must fall on block boundaries."""
    q, dim, start, end, step = (*args, *(0, None, None, 1)[len(args) - 1 :])
    dim %= q.ndim
    size = q.shape[dim]
    start, end, _ = slice(start, end).indices(size)
    if step != 1:
        raise NotImplementedError(f"slicing {describe(q.shape, q.recipe)} with step {step}; only step 1 is defined")
    return cut(q, dim, start, max(end, start))


@implements(aten.split.Tensor)
def split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pieces of `size` along a dim, the last one shorter: how fully_shard and distribute_tensor cut shards."""
    q, size, dim = (*args, *(0,)[len(args) - 2 :])
    refuse_resharding_to_a_smaller_mesh(q, size)
    total = q.shape[dim]
    return [cut(q, dim % q.ndim, start, min(start + size, total)) for start in range(0, max(total, 1), max(size, 1))]


@implements(aten.split_with_sizes.default)
def split_with_sizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pieces of the given sizes along a dim."""
    q, sizes, dim = (*args, *(0,)[len(args) - 2 :])
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
    index %= q.shape[0]
    piece = cut(q, 0, index, index + 1)
    parts = {
        spec.name: getattr(piece, spec.name)[0] if spec.per_row else getattr(piece, spec.name) for spec in q.specs()
    }
    return q.with_parts(parts, arrangement=Arrangement(partial=q.shape[0] > 1))


@implements(aten.unbind.int)
def unbind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All matrices of a stack: what iterating over it gives."""
    q, dim = (*args, *(0,)[len(args) - 1 :])
    return [select(func, (q, dim, index), {}) for index in range(q.shape[dim])]


@implements(aten.as_strided.default)
def as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first rows of a gathered weight: how FSDP crops its padding."""
    q, size, stride, offset = (*args, *(None,)[len(args) - 3 :])
    size = tuple(size)
    plain = torch.empty(size, device="meta").stride() == tuple(stride) and not offset
    if not plain or size[1:] != tuple(q.shape[1:]) or size[0] > q.shape[0]:
        raise NotImplementedError(
            f"as_strided of {describe(q.shape, q.recipe)} to size {size}, stride {tuple(stride)}: only its first rows are defined. "
            "FSDP2 asks for this with Shard(dim > 0) placements, which quantized weights do not support; shard on dim 0"
        )
    cropped, wide = cut(q, 0, 0, size[0]), q.tensor_wide()
    if q.arrangement.shards is None:
        return cropped
    # only padding goes: every shard keeps its tensor-wide value, and this is still the whole weight
    return q.with_parts(cropped.parts() | ({wide: getattr(q, wide)} if wide else {}), arrangement=q.arrangement)


def cut(q: QuantizedTensor, dim: int, start: int, end: int) -> QuantizedTensor:
    """q[start:end] along `dim`, as a tensor of the same class."""
    if q.arrangement.flat is not None:
        raise NotImplementedError(
            f"cutting a reshaped view of {describe(q.arrangement.flat, q.recipe)}; view it back first"
        )
    if q.ndim == 1 and (start, end) != (0, q.shape[0]) and q.tensor_wide() is None and q.specs()[1].block == 0:
        raise NotImplementedError(f"cutting {describe(q.shape, q.recipe)}: its one row has one scale")
    along_k = dim == q.ndim - 1
    multiple = block_multiple(q.recipe)
    if along_k and (start % multiple or (end % multiple and end != q.shape[dim])):
        raise ValueError(
            f"cutting {describe(q.shape, q.recipe)} at columns {start}:{end}: cuts along K must be multiples of {multiple}. "
            "If FSDP2 asks for it: it does not support quantized weights with Shard(dim > 0) placements; shard on dim 0"
        )
    parts = {spec.name: _cut_part(getattr(q, spec.name), spec, q, dim, start, end) for spec in q.specs()}
    wide, shards = q.tensor_wide(), q.arrangement.shards
    whole = start == 0 and end == q.shape[dim]
    if wide and shards is not None and dim == 0 and not whole:
        parts[wide], shards = _cut_vector(parts[wide], shards, start, end)
    keeps_padding = dim == 0 and start == 0
    init = None if q.init_value is None else q.init_value.narrow(dim, start, end - start)
    arrangement = Arrangement(
        shards=shards,
        padded_rows=q.arrangement.padded_rows if keeps_padding else None,
        partial=q.arrangement.partial
        or not (whole or along_k or (keeps_padding and q.arrangement.padded_rows is not None)),
    )
    return q.with_parts(parts, arrangement=arrangement, init_value=init)


def _cut_part(part: Tensor, spec: Any, q: QuantizedTensor, dim: int, start: int, end: int) -> Tensor:
    if not spec.extends_along(dim, q.ndim):
        # a cut along K stands on its own: sharing the scale of its rows would let a write to it reach its siblings
        return part.detach() if dim != q.ndim - 1 or (start, end) == (0, q.shape[dim]) else part.clone()
    if dim != q.ndim - 1:
        return part.narrow(dim, start, end - start)
    piece = part.narrow(dim, start // spec.block, end // spec.block - start // spec.block)
    return piece if piece.is_contiguous() and piece.shape == part.shape else piece.contiguous()


def _cut_vector(vector: Tensor, shards: ShardRows, start: int, end: int) -> tuple[Tensor, ShardRows | None]:
    """The tensor-wide values of rows start:end of a gathered weight; one value where they all come from one shard (or are none)."""
    first, last = (start + shards.offset) // shards.rows, (max(end - 1, start) + shards.offset) // shards.rows
    if first == last:
        return vector[min(first, vector.shape[0] - 1)], None
    return vector, ShardRows(shards.rows, shards.offset + start)


# -- copy -----------------------------------------------------------------------------------------------------------------------


@implements(aten.clone.default)
def clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A deep copy: every part gets storage of its own."""
    q = args[0]
    return _map_parts(
        q,
        lambda part: part.clone(memory_format=torch.contiguous_format),
        q.arrangement.but(padded_rows=None, partial=False),
    )


@implements(aten._to_copy.default)
def to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Moves the parts to a device; a dtype changes the appearance only."""
    q, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    if dtype not in APPEARANCE_DTYPES:
        raise TypeError(
            f"{describe(q.shape, q.recipe)} can appear as bfloat16, float16 or float32, not {dtype}; call .dequantize({dtype})"
        )
    moved = {key: kwargs[key] for key in ("device", "non_blocking") if kwargs.get(key) is not None}
    out = _map_parts(q, lambda part: part.to(**moved, copy=True), q.arrangement.but(partial=False), dtype)
    if out.init_value is not None:
        out.init_value = out.init_value.to(dtype)
    return out


@implements(aten._pin_memory.default)
def pin_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Page-locked copies of the parts."""
    return _map_parts(args[0], torch.Tensor.pin_memory, args[0].arrangement)


@implements(aten.is_pinned.default)
def is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the payload is page-locked."""
    return bool(args[0].payload.is_pinned())


@implements(aten.copy_.default)
def copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """dst.copy_(src): bytes where both have the same recipe; requantized into a quantized dst; dequantized into a dense one."""
    dst, src = args[0], args[1]
    if not isinstance(dst, QuantizedTensor):
        return dst.copy_(src.dequantize(), *args[2:])
    same = isinstance(src, QuantizedTensor) and src.recipe == dst.recipe and src.shape == dst.shape
    if same and src.arrangement.flat == dst.arrangement.flat and _scales_fit(dst, src):
        dst.store({name: _fit(part, getattr(dst, name)) for name, part in src.parts().items()})
        if dst.init_value is not None:
            dst.init_value.copy_(src.init_value if src.init_value is not None else src.dequantize())
        return dst
    values = src.dequantize(torch.float32) if isinstance(src, QuantizedTensor) else src
    dst.write(values.to(dst.device).expand(dst.shape))
    return dst


def _scales_fit(dst: QuantizedTensor, src: QuantizedTensor) -> bool:
    """Whether the tensor-wide values of src can be stored in dst: not those of several shards in a tensor that has one."""
    wide = dst.tensor_wide()
    return wide is None or src.arrangement.shards == dst.arrangement.shards or getattr(src, wide).numel() == 1


def _fit(part: Tensor, like: Tensor) -> Tensor:
    return part.to(like.device).reshape(()).expand_as(like) if part.numel() == 1 and part.ndim < 2 else part


# -- allocate -------------------------------------------------------------------------------------------------------------------


def _allocate(q: QuantizedTensor, shape: Sequence[int], kwargs: dict[str, Any], *, zero: bool) -> QuantizedTensor:
    """A new tensor of the class of q, its parts in the right shapes and dtypes. Consumes no random numbers."""
    dtype = kwargs.get("dtype") or q.dtype
    if dtype not in APPEARANCE_DTYPES:
        raise TypeError(f"a {type(q).__name__} can appear as bfloat16, float16 or float32, not {dtype}")
    check_shape(shape, q.recipe, "new tensor", full=False)
    device = kwargs.get("device") or q.device
    pin = bool(kwargs.get("pin_memory")) and torch.device(device).type == "cpu"
    make = torch.zeros if zero else torch.empty
    parts = {
        spec.name: make(spec.shape(shape), dtype=torch.uint8, device=device, pin_memory=pin).view(spec.dtype)
        if spec.dtype.itemsize == 1
        else torch.zeros(spec.shape(shape), dtype=spec.dtype, device=device, pin_memory=pin)
        for spec in q.specs()
    }
    init = None if q.init_value is None else make(tuple(shape), dtype=dtype, device=device)
    return registered(q.recipe).tensor_class(parts, q.recipe, dtype, init_value=init)  # type: ignore[no-any-return]


@implements(aten.empty_like.default)
def empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Same class, uninitialised bytes (to_empty, staging)."""
    return _allocate(args[0], args[0].arrangement.flat or args[0].shape, kwargs, zero=False)


@implements(aten.new_empty.default)
def new_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Same class, another shape. FSDP asks for (0,) where a rank has no rows."""
    return _allocate(args[0], args[1], kwargs, zero=False)


@implements(aten.new_zeros.default)
def new_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Same class, zeros: how FSDP allocates a padded shard, so the row count is remembered as its padded rows.

    The tensor-wide scale is that of q: a shard without rows, into which nothing is copied, agrees with the others from
    the start.
    """
    q, shape = args[0], tuple(args[1])
    if shape[1:] != tuple(q.shape[1:]):
        raise NotImplementedError(
            f"new_zeros({shape}) of {describe(q.shape, q.recipe)} changes more than the rows. FSDP2 asks for this with Shard(dim > 0) "
            "placements, which quantized weights do not support; shard on dim 0 (tensor parallelism may use dim 1)"
        )
    out = _allocate(q, shape, kwargs, zero=True)
    out.arrangement = Arrangement(padded_rows=shape[0])
    wide = q.tensor_wide()
    if wide and q.arrangement.shards is None and not q.is_meta:
        getattr(out, wide).copy_(getattr(q, wide))
    q.__dict__["_fsdp_shard_rows"] = shape[0]
    return out


def refuse_resharding_to_a_smaller_mesh(q: QuantizedTensor, size: int) -> None:
    """fully_shard(reshard_after_forward=int) cuts a weight a second time, to another number of rows, right after sharding it."""
    rows = q.__dict__.get("_fsdp_shard_rows")
    if rows is not None and size != rows:
        raise NotImplementedError(
            f"{describe(q.shape, q.recipe)} was sharded into {rows} rows a rank and is now cut into {size}: FSDP2's "
            "reshard_after_forward=<int> is not supported for quantized weights; use True or False"
        )


@implements(aten.zeros_like.default)
def zeros_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PLAIN zeros: what optimizers allocate for their state. With `device=` the same class: what blocking stagers allocate."""
    q = args[0]
    if kwargs.get("device") is not None:
        out = _allocate(q, q.arrangement.flat or q.shape, kwargs, zero=True)
        out.init_value = None
        return out
    return torch.zeros(q.shape, dtype=kwargs.get("dtype") or q.dtype, device=q.device)


@implements(aten.ones_like.default, aten.full_like.default, aten.rand_like.default, aten.randn_like.default)
def plain_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PLAIN tensors of the appearance dtype."""
    q = args[0]
    return func(torch.empty(q.shape, dtype=q.dtype, device=q.device), *args[1:], **kwargs)


# -- requantize -------------------------------------------------------------------------------------------------------------------


@implements(aten.zero_.default)
def zero_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every value becomes exactly 0."""
    q = args[0]
    q.write(torch.zeros(q.shape, dtype=q.dtype, device=q.device))
    return q


_IN_PLACE = [
    "fill_.Scalar",
    "fill_.Tensor",
    "uniform_",
    "normal_",
    "add_.Tensor",
    "add_.Scalar",
    "sub_.Tensor",
    "sub_.Scalar",
    "mul_.Tensor",
    "mul_.Scalar",
    "div_.Tensor",
    "div_.Scalar",
    "addcmul_",
    "addcdiv_",
    "lerp_.Scalar",
    "lerp_.Tensor",
    "clamp_",
    "erfinv_",
    "neg_",
]
_FOREACH = [
    "add_.Scalar",
    "add_.List",
    "add_.Tensor",
    "sub_.Scalar",
    "sub_.List",
    "mul_.Scalar",
    "mul_.List",
    "mul_.Tensor",
    "mul_.ScalarList",
    "div_.Scalar",
    "div_.List",
    "div_.ScalarList",
    "addcmul_.Scalar",
    "addcmul_.ScalarList",
    "addcmul_.Tensor",
    "addcdiv_.Scalar",
    "addcdiv_.ScalarList",
    "addcdiv_.Tensor",
    "lerp_.Scalar",
    "lerp_.List",
    "zero_",
    "copy_",
]


def _overload(namespace: str, name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, namespace + base), overload or "default")


@implements(*(_overload("", name) for name in _IN_PLACE))
def requantize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """q.op_(...): on the dequantized values in the appearance dtype (so random fills draw what a plain tensor would), then quantize."""
    q = args[0]
    if not isinstance(q, QuantizedTensor):
        return func(q, *dense(args[1:]), **dense(kwargs))
    values = q.dequantize()
    func(values, *dense(args[1:]), **dense(kwargs))
    q.write(values)
    return q


@implements(*(_overload("_foreach_", name) for name in _FOREACH))
def requantize_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The _foreach_ twins: quantized members requantize, plain ones are updated as usual."""
    values = dense(list(args[0]))
    func(values, *dense(args[1:]), **dense(kwargs))
    for q, value in zip(args[0], values, strict=True):
        if isinstance(q, QuantizedTensor):
            q.write(value)


def refuse_data(q: Tensor, value: Tensor) -> None:
    """`q.data = value` would exchange an outside without bytes and leave the parts as they are: the write would be lost."""
    what = (
        describe(q.shape, q.recipe)
        if isinstance(q, QuantizedTensor)
        else "a plain tensor's .data to a quantized weight"
    )
    raise NotImplementedError(
        f"assigning .data of {what} is not defined; call .copy_(value) on it under torch.no_grad() (it requantizes in place, and copies "
        "the bytes where the recipes agree), or assign a new nn.Parameter to the module"
    )


TORCH_FUNCTIONS[Tensor.data.__set__] = refuse_data  # type: ignore[attr-defined]
