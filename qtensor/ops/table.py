"""The one op table: what every torch operation does to a quantized tensor.

Four groups of named functions, and a rule for all other ops:

    alias        detach, view, slice, split, select, as_strided ...   same bytes, no copy (cuts across columns copy)
    copy         clone, to, pin_memory, copy_ between equal recipes   same bytes, new storage
    allocate     empty_like, new_zeros ... (same class);  zeros_like and *_like fills (PLAIN: optimizer state)
    requantize   copy_ from other values, zero_, fills and arithmetic in place   dequantize, compute, quantize in place
    anything else raises, listing the op: nothing is dequantized silently

What copies and allocates is here; aliases are in views.py, what requantizes in in_place.py, the collectives of
`full_tensor()` and `distribute_tensor()` in redistribute.py, and what optimizers do besides updates in place in
optimizer_ops.py; transposed weights and products are in products/. All of them enter the table through `implements`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.all_gather import AT_REST, Sharding
from fsdp_hooks.torch_private import note_shard_rows, shard_rows
from fsdp_hooks.versions import count_writes
from qtensor.ops.stochastic import generator_for
from qtensor.spec.codecs.rounding import armed
from qtensor.spec.lens import Lens
from qtensor.spec.registry import APPEARANCE_DTYPES, check_shape, check_values, describe, specs_of, tensor_wide
from qtensor.tensor.contents import (
    contents_of,
    contents_specs,
    decode,
    preserve,
    store,
    write,
    write_converted,
)
from qtensor.tensor.moves import requires_grad_, take_note
from qtensor.tensor.quantized_tensor import OPS, TORCH_FUNCTIONS, QuantizedTensor

aten = torch.ops.aten
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def implements(*overloads: Any) -> Callable[[Handler], Handler]:
    """Enter a handler into the table for some overloads; raise ValueError if an overload has one already."""

    def enter(handler: Handler) -> Handler:
        for overload in overloads:
            if overload in OPS:
                raise ValueError(f"{overload} has a handler already: {OPS[overload].__name__}")
            OPS[overload] = handler
        return handler

    return enter


def overloads(table: Mapping[str, tuple[str, ...]]) -> list[Any]:
    """Return the aten overloads of a table: name of the op -> names of overloads."""
    return [getattr(getattr(aten, base), name) for base, names in table.items() for name in names]


# -- copy --------------------------------------------------------------------------------------------------------------


@implements(aten.clone.default)
def clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy deeply: parts and initial value get storage of their own, which does not have FSDP's padding."""
    q = args[0]
    parts = {name: part.clone(memory_format=torch.contiguous_format) for name, part in contents_of(q).items()}
    sharding = Sharding(shards=q._sharding.shards)
    return q._like(parts, lens=q._lens.owned(), sharding=sharding, shape=q.shape)


@implements(aten._to_copy.default)
def to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy the parts, to another device if given; a dtype changes only the appearance and a preserved initial value."""
    q, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    if dtype not in APPEARANCE_DTYPES:
        raise TypeError(
            f"{describe(q.shape, q.recipe)} can appear as bfloat16, float16 or float32, not {dtype}; "
            f"call .dequantize({dtype})"
        )
    moved = {key: kwargs[key] for key in ("device", "non_blocking") if kwargs.get(key) is not None}
    own = contents_of(q)
    parts = {spec.name: own[spec.name].to(**moved, dtype=spec.dtype, copy=True) for spec in contents_specs(q, dtype)}
    return take_note(q, q._like(parts, dtype=dtype, lens=q._lens.owned(), sharding=q._sharding, shape=q.shape))


@implements(aten._pin_memory.default)
def pin_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return page-locked copies of the parts."""
    q = args[0]
    parts = {name: part.pin_memory() for name, part in contents_of(q).items()}
    return q._like(parts, lens=q._lens, sharding=q._sharding, shape=q.shape)


@implements(aten.is_pinned.default)
def is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the payload is page-locked."""
    return bool(args[0].payload.is_pinned())


@implements(aten.copy_.default)
def copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do dst.copy_(src): copy bytes if both have one recipe, else requantize; a dense dst gets dense values.

    The values of another recipe stay what they are if dst can hold them, see exact.py.
    """
    dst, src = args[0], args[1]
    if not isinstance(dst, QuantizedTensor):
        return dst.copy_(decode(src), *args[2:])
    same = isinstance(src, QuantizedTensor) and src.recipe.stored == dst.recipe.stored and src.shape == dst.shape
    if same and _alike(src._lens, dst._lens) and _scales_fit(dst, src):
        own = contents_of(dst)
        # if src has no initial value dst forgets its own, since the new bytes were not made from it
        store(dst, {name: _fit(part, own[name]) for name, part in contents_of(src).items() if name in own})
        return dst
    # a copy that quantizes is a write like any other, so stochastic rounding holds for it
    with armed(generator_for([dst])):
        if isinstance(src, QuantizedTensor):
            values, parts = decode(src, torch.float32), None
            if src.shape == dst.shape and _alike(src._lens, dst._lens) and src._sharding.shards is None:
                parts = {name: part.to(dst.device) for name, part in src.parts().items()}
            write_converted(dst, values.to(dst.device).expand(dst.shape), src.recipe, parts)
        else:
            check_values(src, f"copy_ into {describe(dst.shape, dst.recipe)}")
            write(dst, src.to(dst.device).expand(dst.shape))
    return dst


@implements(aten._foreach_copy_.default)
def copy_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Do `copy_` of each pair, which keeps the bytes of equal recipes."""
    for target, source in zip(args[0], args[1], strict=True):
        target.copy_(source, *args[2:], **kwargs)
    count_writes(args[0])


def _alike(src: Lens, dst: Lens) -> bool:
    """Return whether the parts of both describe their elements in the same order."""
    return src.described == dst.described and not src.transposed and not dst.transposed


def _scales_fit(dst: QuantizedTensor, src: QuantizedTensor) -> bool:
    """Return whether dst can store the tensor-wide values of src: one value in dst cannot stand for several in src."""
    wide = tensor_wide(dst.recipe)
    return wide is None or src._sharding.shards == dst._sharding.shards or getattr(src, wide).numel() == 1


def _fit(part: Tensor, like: Tensor) -> Tensor:
    return part.to(like.device).reshape(()).expand_as(like) if part.numel() == 1 and part.ndim < 2 else part


# -- allocate ----------------------------------------------------------------------------------------------------------


def _allocate(
    q: QuantizedTensor,
    shape: Sequence[int],
    kwargs: dict[str, Any],
    *,
    zero: bool,
    sharding: Sharding = AT_REST,
) -> QuantizedTensor:
    """Return a new tensor of the class of q, its parts in the right shapes and dtypes; draws no random numbers.

    Only codes and other one-byte parts may be uninitialised; wider parts are always zeros.
    """
    dtype = kwargs.get("dtype") or q.dtype
    if dtype not in APPEARANCE_DTYPES:
        raise TypeError(f"a {type(q).__name__} can appear as bfloat16, float16 or float32, not {dtype}")
    if q._lens.transposed:
        raise NotImplementedError(f"a new tensor like a transposed view ({describe(q.shape, q.recipe)}); clone() it")
    check_shape(shape, q.recipe, "new tensor", full=False)
    device = kwargs.get("device") or q.device
    pin = bool(kwargs.get("pin_memory")) and torch.device(device).type == "cpu"
    make = torch.zeros if zero else torch.empty
    parts = {
        spec.name: make(spec.shape(shape), dtype=torch.uint8, device=device, pin_memory=pin).view(spec.dtype)
        if spec.dtype.itemsize == 1
        else torch.zeros(spec.shape(shape), dtype=spec.dtype, device=device, pin_memory=pin)
        for spec in contents_specs(q, dtype)
    }
    return q._like(parts, dtype=dtype, sharding=sharding)


@implements(aten.empty_like.default)
def empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate the same class, uninitialised (to_empty, staging)."""
    return _allocate(args[0], args[0]._lens.described or args[0].shape, kwargs, zero=False)


@implements(aten.new_empty.default)
def new_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate the same class in another shape. FSDP asks for (0,) if a rank has no rows."""
    return _allocate(args[0], args[1], kwargs, zero=False)


@implements(aten.new_zeros.default)
def new_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate zeros of the same class. FSDP makes a padded shard so; its row count is noted as its padded rows.

    Tensor-wide parts are copied from q, so that a shard without rows, into which nothing is ever copied, agrees with
    the others from the start.
    """
    q, shape = args[0], tuple(args[1])
    check_shard_shape(q, shape)
    out = _allocate(q, shape, kwargs, zero=True, sharding=Sharding(padded_rows=shape[0], allocated=True))
    if q._sharding.shards is None and not q.is_meta:
        for spec in specs_of(q.recipe):
            if not spec.per_row:
                getattr(out, spec.name).copy_(getattr(q, spec.name))
    if shape[1:] == tuple(q.shape[1:]):
        note_shard_rows(q, shape[0])
    return out


def check_shard_shape(q: Any, shape: tuple[int, ...]) -> None:
    """Raise NotImplementedError if a shard of this shape holds something else than rows, cut along one dim.

    q: a weight that has a recipe.
    """
    own = tuple(q.shape)
    cut = [dim for dim, (size, every) in enumerate(zip(shape, own, strict=False)) if size != every]
    if len(shape) != len(own) or len(cut) > 1 or (len(own) > 1 and len(own) - 1 in cut):
        raise NotImplementedError(
            f"new_zeros({shape}) of {describe(q.shape, q.recipe)} changes more than the rows. FSDP2 asks for this if "
            "shard_placement_fn cuts K, which it cannot do with quantized weights; shard on dim 0, or stacks [E, N, K] "
            "on dim 1, too (tensor parallelism may cut K)"
        )
    # torch takes it here, and raises in the first forward, in which the ranks that have experts would wait
    if cut and cut[0] and not q.numel():
        raise NotImplementedError(
            f"sharding {describe(q.shape, q.recipe)} along its rows: FSDP2 cannot cut a stack of no matrices; share "
            "the experts out over so many ranks that each gets one, or shard them on dim 0"
        )
    if len(own) == 1:
        raise NotImplementedError(
            f"sharding {describe(q.shape, q.recipe)}: FSDP2 would cut its one row along K; keep it out by "
            "fully_shard(ignored_params=...), or leave it dense"
        )


def refuse_resharding_to_a_smaller_mesh(q: QuantizedTensor, size: int) -> None:
    """Raise if a weight that was just sharded is cut once more, into another number of rows.

    fully_shard(reshard_after_forward=<int>) does this.
    """
    rows = shard_rows(q)
    if rows is not None and size != rows:
        raise NotImplementedError(
            f"{describe(q.shape, q.recipe)} was sharded into {rows} rows a rank and is now cut into {size}: FSDP2's "
            "reshard_after_forward=<int> is not supported for quantized weights; use True or False"
        )


@implements(aten.zeros_like.default)
def zeros_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return PLAIN zeros, as optimizers want for state; with `device=` the same class, as blocking stagers want."""
    q = args[0]
    if kwargs.get("device") is not None:
        out = _allocate(q, q._lens.described or q.shape, kwargs, zero=True)
        preserve(out, None)
        return out
    return torch.zeros(q.shape, dtype=kwargs.get("dtype") or q.dtype, device=q.device)


@implements(aten.ones_like.default, aten.full_like.default, aten.rand_like.default, aten.randn_like.default)
def plain_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return PLAIN tensors of the appearance dtype."""
    q = args[0]
    return func(torch.empty(q.shape, dtype=q.dtype, device=q.device), *args[1:], **kwargs)


TORCH_FUNCTIONS[Tensor.requires_grad_] = requires_grad_
