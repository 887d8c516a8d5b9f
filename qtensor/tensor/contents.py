"""What a quantized tensor consists of, and how it is read and written: for the op table, the hooks and the adapters.

    parts            what its recipe says: gathered, stored, sent to other processes
    initial value    in high precision, if it is preserved: a part of its own that is neither gathered nor stored
    lens, sharding   how the tensor looks at its parts, and what FSDP2 made of it

An operation on the whole contents (a copy, a cut, a move, a broadcast) iterates over `contents_of`, and so takes a
preserved initial value along.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp_hooks.torch_private import without_torch_function
from fsdp_hooks.versions import count_writes
from qtensor.numerics import exact, kernels
from qtensor.spec.blocks import BlockFacts
from qtensor.spec.format import PartSpec
from qtensor.spec.lens import Reach
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import describe, keeps_history, specs_of, tensor_wide

if TYPE_CHECKING:
    from qtensor.tensor.quantized_tensor import QuantizedTensor

INITIAL_VALUE = "_init_value"  # its name among the parts


class Preserved:
    """Holds a preserved initial value. Aliases share it: a value forgotten through one is forgotten by all."""

    value: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Preserved":
        # DCP stages attributes by deepcopy, and a checkpoint has no use for it
        return Preserved()


def initial_value(q: "QuantizedTensor") -> Tensor | None:
    """Return the high-precision value that q was initialised with; None if it is not preserved."""
    return q._preserved.value


def preserve(q: "QuantizedTensor", value: Tensor | None) -> None:
    """Keep an initial value beside q, aliased; None forgets it."""
    q._preserved.value = value


def forget_initial_values(tensors: Iterable["QuantizedTensor"]) -> None:
    """Keep no initial value beside any of them."""
    for q in tensors:
        preserve(q, None)


def contents_of(q: "QuantizedTensor") -> dict[str, Tensor]:
    """Return all that q consists of: its parts, and its initial value if that is preserved; aliases."""
    return {spec.name: getattr(q, spec.name) for spec in contents_specs(q)}


def contents_specs(q: "QuantizedTensor", dtype: torch.dtype | None = None) -> tuple[PartSpec, ...]:
    """Return the specs of what q consists of, as if its appearance dtype were `dtype` (None: its own)."""
    specs = specs_of(q.recipe)
    return specs if initial_value(q) is None else (*specs, _initial_value_spec(dtype or q.dtype))


@functools.cache
def _initial_value_spec(dtype: torch.dtype) -> PartSpec:
    return PartSpec(INITIAL_VALUE, dtype, gathered=False)


def bytes_of(q: "QuantizedTensor") -> list[Tensor]:
    """Return what q consists of, as bytes that alias it."""
    return [(tensor if tensor.ndim else tensor.reshape(1)).view(torch.uint8) for tensor in contents_of(q).values()]


def shared_scale(q: "QuantizedTensor") -> Tensor:
    """Return the scale that pieces of a cut tensor can share, fp32: [] if it is tensor-wide, else [.., N, 1]."""
    part: Tensor = getattr(q, tensor_wide(q.recipe) or "scale")
    return part


def parts_per_row(q: "QuantizedTensor") -> dict[str, Tensor]:
    """Return the parts; the vector of a gathered weight's tensor-wide part is spread over the rows ([.., N, 1, ..])."""
    parts, shards = q.parts(), q._sharding.shards
    # shards that do not agree yet keep their own scales in a gather: each row takes that of its shard
    if shards is not None and (wide := tensor_wide(q.recipe)) is not None:
        if parts[wide].shape[0] == 1:
            parts[wide] = parts[wide].reshape(())
            return parts
        rows, behind = parts["payload"].shape[shards.dim], parts["payload"].ndim - 1 - shards.dim
        # entry (row + offset) // rows of a shard
        spread = parts[wide].unsqueeze(1).expand(-1, shards.rows).reshape(-1)
        own = spread[shards.offset : shards.offset + rows]
        parts[wide] = own.reshape(*[1] * shards.dim, rows, *[1] * behind)
    return parts


def decode(q: "QuantizedTensor", dtype: torch.dtype | None = None) -> Tensor:
    """Return `q.dequantize(dtype)` outside of autograd."""
    # a read of our own attributes would go through __torch_function__
    with without_torch_function():
        if not torch.is_grad_enabled():
            return _decode(q, dtype)
        with torch.no_grad():
            return _decode(q, dtype)


def _decode(q: "QuantizedTensor", dtype: torch.dtype | None) -> Tensor:
    values = kernels.decode(parts_per_row(q), q.recipe, dtype or q.dtype)
    if q._lens.transposed:
        return values.transpose(-2, -1)
    return values if values.shape == q.shape else values.view(q.shape)


def values_of(q: "QuantizedTensor", dtype: torch.dtype | None = None) -> Tensor:
    """Return its preserved initial value, aliased, or else its decoded values."""
    value = initial_value(q)
    return decode(q, dtype) if value is None else value


@torch.no_grad()
def write(
    q: "QuantizedTensor",
    dense: Tensor,
    amax: Tensor | None = None,
    blocks: BlockFacts | None = None,
    *,
    step: bool = False,
) -> None:
    """Requantize in place from dense values of the same shape.

    `amax` is what the shards agreed on, one value for each shared scale; without it the amax of the values is taken.
    `blocks` is the same for square blocks that shards cut.
    `step` says that the values continue from the previous ones, as an optimizer's do: a recipe with a history then
    continues it, and begins it anew otherwise.
    """
    x = _to_write(q, dense)
    amax = None if amax is None else amax.view_as(shared_scale(q))
    # the scale comes from the amaxes of earlier steps, and this one's own enters the history behind it
    if step and keeps_history(q.recipe):
        amax = kernels.shared_amax(x, q.recipe) if amax is None else amax
        assert amax is not None
        before = q.parts()
        parts = kernels.encode_step(x, q.recipe, amax, before["scale"], before["amax_history"])
    else:
        # not where `store` will have something to refuse
        own = None if q._lens.severed or (q._lens.some_rows and tensor_wide(q.recipe)) else q.parts()
        parts = kernels.encode(x, q.recipe, amax, blocks, out=own)
    store(q, {**parts, INITIAL_VALUE: x})


@torch.no_grad()
def write_converted(q: "QuantizedTensor", values: Tensor, recipe: Recipe, parts: Mapping[str, Tensor] | None) -> None:
    """Write the fp32 values of a tensor of another recipe, exactly where q's recipe can hold them (see exact.py).

    `parts` decode to the values; None if they are not at hand in q's order.
    """
    x = _to_write(q, values)
    store(q, {**exact.convert_parts(x, q.recipe, parts, recipe), INITIAL_VALUE: x})


def _to_write(q: "QuantizedTensor", dense: Tensor) -> Tensor:
    """Return `dense` in the shape of the parts. Raises if q is a view that cannot be written to."""
    lens = q._lens
    if lens.transposed:
        raise NotImplementedError(
            f"writing into a transposed view of {describe(lens.described or (), q.recipe)}; write the weight itself"
        )
    if lens.reach is Reach.BROKEN_BLOCKS:
        raise RuntimeError(
            f"writing values into rows that split square blocks of {describe(q.shape, q.recipe)}: "
            "the other rows of those blocks share their scales; write whole blocks, or the whole tensor"
        )
    return dense.detach().reshape(lens.described or q.shape)


def store(q: "QuantizedTensor", parts: Mapping[str, Tensor]) -> None:
    """Copy new bytes into everything q consists of; an initial value that `parts` lack is forgotten.

    A part of q's own among `parts` has them already, written by a kernel, which torch did not see.

    A view of some rows refuses to change the tensor-wide scale of all rows.
    """
    lens, wide = q._lens, tensor_wide(q.recipe)
    if lens.severed:
        raise RuntimeError(
            f"writing into some columns of {describe(q.shape, q.recipe)}: a slice of columns is a copy, so "
            "the write would be lost; write the whole tensor, or clone() the slice to own it"
        )
    # writing some rows under another scale would change the values of all the others
    if wide and lens.some_rows and not bool((getattr(q, wide) == parts[wide]).all()):
        raise RuntimeError(
            f"writing into some rows of {describe(q.shape, q.recipe)} would change its {wide}, which the "
            "other rows share; write the whole tensor, or use a recipe whose scales belong to rows"
        )
    # in place: FSDP's shard, the optimizer and state dicts all hold aliases of these tensors
    for name, part in contents_of(q).items():
        if name not in parts:
            preserve(q, None)
        elif parts[name] is part:
            count_writes([part])
        else:
            part.copy_(parts[name])
