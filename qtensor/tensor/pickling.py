"""How a quantized tensor travels through pickle: its parts as bytes, its recipe, and plain values.

Not every supported torch can pickle float8 tensors, so a part is packed as (uint8 [bytes], name of its dtype, shape).
Everything else but the recipe is packed as plain values, which torch's weights_only loader knows.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.all_gather import Sharding, ShardRows
from fsdp_hooks.ranks.scale_partners import Partners
from qtensor.spec.lens import Lens
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import registered

PackedPart = tuple[Tensor, str, tuple[int, ...]]


def reduce(q: Any) -> tuple[Any, ...]:
    """Return what `QuantizedTensor.__reduce_ex__` answers: `rebuild` and its arguments."""
    packed: dict[str, PackedPart] = {
        name: (
            _own_storage(part).reshape(-1).view(torch.uint8),
            str(part.dtype).removeprefix("torch."),
            tuple(part.shape),
        )
        for name, part in q.detach().parts().items()
    }
    shards, lens = q._sharding.shards, q._lens
    state = {
        "shape": tuple(q.shape),
        "flat": lens.described,
        "transposed": lens.transposed,
        "shards": None if shards is None else (shards.rows, shards.offset, shards.dim),
        "requires_grad": q.requires_grad,
        "parameter": isinstance(q, torch.nn.Parameter),
    }
    if q._partners is not None:
        state["partners"] = q._partners.own, q._partners.names
    return rebuild, (packed, q.recipe, q.dtype, state)


def rebuild(packed: dict[str, PackedPart], recipe: Recipe, dtype: torch.dtype, state: dict[str, Any]) -> Any:
    """Undo `reduce`. It stands at module level, since torch's weights_only loader can allow only such functions."""
    parts = {name: data.view(getattr(torch, kind)).reshape(shape) for name, (data, kind, shape) in packed.items()}
    lens = Lens(described=state["flat"], transposed=state["transposed"])
    sharding = Sharding(shards=ShardRows(*state["shards"]) if state["shards"] else None)
    shape = torch.Size(state["shape"])
    q = registered(recipe).tensor_class(parts, recipe, dtype, lens=lens, sharding=sharding, shape=shape)
    if "partners" in state:
        q._partners = Partners(*state["partners"])
    if state["parameter"]:
        return torch.nn.Parameter(q, requires_grad=state["requires_grad"])
    return q.requires_grad_(state["requires_grad"])


def _own_storage(part: Tensor) -> Tensor:
    """Return `part`, or a copy of it if it is a view of something larger, which pickling would drag along."""
    whole = part.untyped_storage().nbytes() == math.prod(part.shape) * part.itemsize
    return part if whole and part.is_contiguous() else part.clone(memory_format=torch.contiguous_format)
