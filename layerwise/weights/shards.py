"""What a rank keeps of a calibrated weight: its own rows, in the layout of its shard.

    full result on every rank  ->  own rows as a DTensor like the parameter  ->  the result, the checkpoint, the shard

Under given scales each element is rounded by itself, so rows can be rounded where they are: a resumed run makes the
payload of its rows from the shard and the rows of the scales, on any number of ranks, without a gather.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from fsdp_hooks.torch_private import compute_local_shape_and_global_offset, dtensor_around, dtensor_like, local_of
from fsdp_hooks.versions import count_writes
from qtensor.contents import preserve
from qtensor.formats import format_of, shared_amax, specs_of
from qtensor.recipes import Recipe
from qtensor.tensor import QuantizedTensor


def kept(full: QuantizedTensor, param: Tensor) -> QuantizedTensor | DTensor:
    """A copy of this rank's rows of a calibrated weight, on its shard's device; a DTensor if the parameter is one."""
    start, rows = _row_range(param)
    parts = {
        spec.name: _rows_of(full.parts()[spec.name], start, rows, per_row=spec.per_row).to(home_of(param))
        for spec in specs_of(full.recipe)
    }
    return _quantized_rows(param, parts, full.recipe)


def kept_quantizer(quantizer: Mapping[str, Tensor], param: Tensor) -> dict[str, Tensor]:
    """This rank's rows of the quantizer, in the layout of the parameter."""
    start, rows = _row_range(param)
    return {
        name: _placed_like(_rows_of(value, start, rows, per_row=value.ndim > 0).to(home_of(param)), value.shape, param)
        for name, value in quantizer.items()
    }


def empty_quantizer(param: Tensor, recipe: Recipe) -> dict[str, Tensor]:
    """Uninitialised tensors like those that `kept_quantizer` returns, to load into."""
    full = torch.zeros(param.shape, dtype=torch.float32, device="meta")
    quantizer = format_of(recipe).quantizer(full, recipe, shared_amax(full, recipe))
    _, rows = _row_range(param)
    return {
        name: _placed_like(
            torch.empty((rows, *value.shape[1:]) if value.ndim else (), dtype=value.dtype, device=home_of(param)),
            value.shape,
            param,
        )
        for name, value in quantizer.items()
    }


def empty_weight(param: Tensor, recipe: Recipe) -> QuantizedTensor | DTensor:
    """An uninitialised tensor like the one that `kept` returns, to load into."""
    shape = local_of(param).shape
    parts = {
        spec.name: torch.empty(spec.shape(shape), dtype=spec.dtype, device=home_of(param)) for spec in specs_of(recipe)
    }
    return _quantized_rows(param, parts, recipe)


def rounded_rows(
    dense: Tensor, quantizer: Mapping[str, Tensor], recipe: Recipe, param: Tensor
) -> QuantizedTensor | DTensor:
    """Rows `dense` rounded under the same rows of a quantizer, in the layout of the parameter."""
    own = {name: local_of(value) for name, value in quantizer.items()}
    parts = format_of(recipe).encode_with(dense.float(), recipe, own)
    return _quantized_rows(param, {name: part.contiguous() for name, part in parts.items()}, recipe)


def dense_rows(param: Tensor) -> Tensor:
    """The values that this rank's shard holds, dense, in the parameter's dtype."""
    local = local_of(param).detach()
    return local.dequantize() if isinstance(local, QuantizedTensor) else local


@torch.no_grad()
def store_rows(result: Tensor, param: Tensor) -> None:
    """Put calibrated rows into the shard: the bytes if it is quantized, their values if it is dense."""
    own: Any = local_of(result)
    shard = local_of(param)
    if isinstance(shard, QuantizedTensor):
        shard.copy_(own)
        preserve(shard, None)  # that of the weight before
    else:
        shard.copy_(own.dequantize(shard.dtype))
    count_writes([param])


def home_of(param: Tensor) -> torch.device:
    """The device of the shard's bytes; with CPU offload it is not the one that the mesh computes on."""
    local = local_of(param)
    return torch.device("cpu") if local.is_meta else local.device


def _quantized_rows(param: Tensor, parts: Mapping[str, Tensor], recipe: Recipe) -> QuantizedTensor | DTensor:
    """Rows of a quantized weight from their parts, in the layout of the parameter."""
    own = QuantizedTensor.from_parts(parts, recipe, param.dtype)
    return dtensor_like(own, param) if isinstance(param, DTensor) else own


def _row_range(param: Tensor) -> tuple[int, int]:
    """The shard's first row in the full weight, and its number of rows."""
    if not isinstance(param, DTensor):
        return 0, param.shape[0]
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return offset[0], shape[0]


def _rows_of(value: Tensor, start: int, rows: int, *, per_row: bool) -> Tensor:
    return value[start : start + rows].clone() if per_row else value.clone()


def _placed_like(local: Tensor, shape: torch.Size, param: Tensor) -> Tensor:
    """Rows as a DTensor of global `shape`, placed like the parameter; what has no rows is replicated."""
    if not isinstance(param, DTensor):
        return local
    placements: Any = param.placements if shape else (Replicate(),) * param.device_mesh.ndim
    return dtensor_around(local, param.device_mesh, placements, shape)
