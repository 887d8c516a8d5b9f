"""What a rank keeps of a calibrated weight: the box of it that its shard is, in the layout of the shard.

    full result on every rank  ->  own box as a DTensor like the parameter  ->  the result, the checkpoint, the shard

FSDP cuts rows, tensor parallelism rows or columns, both together boxes. Columns are cut between blocks only, so every
box is rounded by itself: under given scales each element is. A resumed run makes the payload of its box from the shard
and the same box of the scales, on any number of ranks, without a gather.

A weight that is stored transposed has its box turned: the result is [N, K], and rows of the parameter are its columns.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from dcp_adapters.records.placements import placement_problem
from fsdp_hooks.torch_private import compute_local_shape_and_global_offset, dtensor_around, dtensor_like, local_of
from fsdp_hooks.versions import count_writes
from layerwise.stages.targets import Target
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import block_multiple, format_of, shared_amax, specs_of
from qtensor.tensor.contents import preserve
from qtensor.tensor.quantized_tensor import QuantizedTensor

Box = tuple[slice, ...]  # of a weight [N, K] or [E, N, K], one slice for each dim


def check_cuts(target: Target, recipe: Recipe | None) -> None:
    """Raise ValueError if a rank's shard of a target is no box of whole blocks; recipe None: it is not known yet."""
    param: Any = target.param
    problem = placement_problem(param)
    if problem is not None:
        raise ValueError(f"{target.name}: {problem}")
    if not isinstance(param, DTensor):
        return
    columns = param.ndim - (2 if target.transposed else 1)  # the dim of the parameter that is K
    dims = [getattr(place, "dim", None) for place in param.placements]
    if target.transposed and any(_is_strided(place) for place in param.placements):
        raise ValueError(
            f"{target.name} {tuple(param.shape)} is stored transposed and placed {param.placements}: FSDP and tensor "
            "parallelism cut the same dim of it; exclude it, or let one of them cut another dim"
        )
    if columns not in dims:
        return
    block = 1 if recipe is None else block_multiple(recipe)
    sizes = [param.device_mesh.size(number) for number, dim in enumerate(dims) if dim == columns]
    pieces, rest = 1, target.shape[-1]
    for size in sizes:
        # DTensor gives each rank ceil(size / ranks) entries of a dim, mesh dim after mesh dim.
        rest = -(-rest // size)
        pieces *= size
    if pieces > 1 and rest % block:
        others = (
            "shard it with fully_shard(shard_placement_fn=...) along the other dim, exclude it"
            if (target.transposed)
            else "exclude it"
        )
        raise ValueError(
            f"{target.name} is placed {param.placements} on a mesh of {tuple(param.device_mesh.shape)}: {rest} columns "
            f"of K = {target.shape[-1]} on a rank, which cuts blocks of {block}; {others}, or take another recipe"
        )


def box_of(target: Target) -> Box:
    """Return the box of the target's linears that this rank's shard holds."""
    param = target.param
    if not isinstance(param, DTensor):
        return tuple(slice(0, size) for size in target.shape)
    sizes, starts = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    box = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return tuple([*box[:-2], box[-1], box[-2]] if target.transposed else box)


def keep_box(full: QuantizedTensor, target: Target) -> QuantizedTensor | DTensor:
    """Copy this rank's box out of a calibrated weight, to its shard's device; a DTensor if the parameter is one."""
    box, recipe = box_of(target), full.recipe
    parts = {
        spec.name: _cut(full.parts()[spec.name], box, target, recipe).to(home_of(target.param))
        for spec in specs_of(recipe)
    }
    return _quantized_box(target, parts, recipe)


def keep_quantizer(quantizer: Mapping[str, Tensor], target: Target, recipe: Recipe) -> dict[str, Tensor]:
    """This rank's box of the quantizer, in the layout of the parameter."""
    box, home = box_of(target), home_of(target.param)
    return {
        name: _place_like(_cut(value, box, target, recipe).to(home), value.shape, target)
        for name, value in quantizer.items()
    }


def empty_quantizer(target: Target, recipe: Recipe) -> dict[str, Tensor]:
    """Return uninitialised tensors like those that `keep_quantizer` returns, to load into."""
    # Shapes and dtypes are all that is wanted of it, so it takes no memory.
    full = torch.zeros(target.shape, dtype=torch.float32, device="meta")
    quantizer = format_of(recipe).quantizer(full, recipe, shared_amax(full, recipe))
    box, home = box_of(target), home_of(target.param)
    shapes = {name: _cut(value, box, target, recipe).shape for name, value in quantizer.items()}
    return {
        name: _place_like(torch.empty(shapes[name], dtype=value.dtype, device=home), value.shape, target)
        for name, value in quantizer.items()
    }


def empty_weight(target: Target, recipe: Recipe) -> QuantizedTensor | DTensor:
    """Return an uninitialised tensor like the one that `keep_box` returns, to load into."""
    shape, home = [part.stop - part.start for part in box_of(target)], home_of(target.param)
    parts = {spec.name: torch.empty(spec.shape(shape), dtype=spec.dtype, device=home) for spec in specs_of(recipe)}
    return _quantized_box(target, parts, recipe)


def round_box(
    dense: Tensor, quantizer: Mapping[str, Tensor], recipe: Recipe, target: Target
) -> QuantizedTensor | DTensor:
    """Return the box `dense` rounded under the same box of a quantizer, in the layout of the parameter."""
    own = {name: local_of(value) for name, value in quantizer.items()}
    parts = format_of(recipe).encode_with(dense.float(), recipe, own)
    return _quantized_box(target, {name: part.contiguous() for name, part in parts.items()}, recipe)


def dense_box(target: Target, values: Tensor | None = None) -> Tensor:
    """Return the box of this rank's shard, dense, in the parameter's dtype; `values`: the shard's, if known."""
    held: Tensor = local_of(target.param).detach() if values is None else values
    if isinstance(held, QuantizedTensor):
        held = held.dequantize()
    elif isinstance(held, HighPrecisionWeight):
        held = held.dense.detach()
    return held.mT.contiguous() if target.transposed else held


@torch.no_grad()
def store_box(result: Tensor, target: Target) -> None:
    """Put a calibrated box into the shard: the bytes if it is quantized, their values if it is dense."""
    own: Any = local_of(result)
    shard = local_of(target.param)
    if isinstance(shard, QuantizedTensor):
        shard.copy_(own)
        # The initial value beside the bytes is one of the weight before, and an optimizer's master would
        # begin with it.
        preserve(shard, None)
    else:
        values = own.dequantize(shard.dtype)
        shard.copy_(values.mT if target.transposed else values)
    # A write into a local tensor is not counted for the DTensor around it, so a backward that saved it would not
    # notice.
    count_writes([target.param])


def home_of(param: Tensor) -> torch.device:
    """Return the device of the shard's bytes; with CPU offload it is not the one that the mesh computes on."""
    local = local_of(param)
    return torch.device("cpu") if local.is_meta else local.device


def _is_strided(place: Any) -> bool:
    """Return whether FSDP has cut what tensor parallelism had cut along the same dim: a dim, but no plain Shard."""
    return hasattr(place, "dim") and type(place) is not Shard


def _quantized_box(target: Target, parts: Mapping[str, Tensor], recipe: Recipe) -> QuantizedTensor | DTensor:
    """Return a box of a quantized weight from its parts, in the layout of the parameter."""
    param = target.param
    own = QuantizedTensor.from_parts(parts, recipe, param.dtype)
    if not isinstance(param, DTensor):
        return own
    if target.transposed:
        return dtensor_around(own, param.device_mesh, _placements(target), target.shape)
    return dtensor_like(own, param)


def _cut(value: Tensor, box: Box, target: Target, recipe: Recipe) -> Tensor:
    """Copy a box out of a part, or an entry of a quantizer, of a whole weight; a shared scale stays whole."""
    if value.ndim != len(box):
        return value.clone()
    width, columns, k = value.shape[-1], box[-1], target.shape[-1]
    # The width of an entry tells for how many columns each of its values stands.
    block = next((size for size in (1, *_blocks(recipe)) if width == -(-k // size)), None)
    own = value[box[:-1]]
    if block is not None and (columns.start, columns.stop) != (0, k):
        own = own[..., columns.start // block : -(-columns.stop // block)]
    return own.clone(memory_format=torch.contiguous_format)


def _blocks(recipe: Recipe) -> list[int]:
    """Return how many columns an entry of a part may stand for."""
    return [spec.block for spec in specs_of(recipe) if spec.per_row and spec.block > 1]


def _placements(target: Target, *, columns: bool = True) -> list[Any]:
    """Return how the linears of a target are placed; without `columns`, what has one column for all of K."""
    param: Any = target.param
    last, turned = param.ndim - 1, {param.ndim - 1: param.ndim - 2, param.ndim - 2: param.ndim - 1}
    placed: list[Any] = []
    for place in param.placements:
        dim = getattr(place, "dim", None)
        if target.transposed and dim in turned:
            place = Shard(turned[dim])  # noqa: PLW2901
        placed.append(Replicate() if getattr(place, "dim", None) == last and not columns else place)
    return placed


def _place_like(local: Tensor, shape: torch.Size, target: Target) -> Tensor:
    """Return a box as a DTensor of global `shape`, placed like the parameter; what has no rows is replicated."""
    param = target.param
    if not isinstance(param, DTensor):
        return local
    # A scalar has no rows to cut: every rank has it whole.
    if not shape:
        return dtensor_around(local, param.device_mesh, (Replicate(),) * param.device_mesh.ndim, shape)
    return dtensor_around(local, param.device_mesh, _placements(target, columns=shape[-1] > 1), shape)
