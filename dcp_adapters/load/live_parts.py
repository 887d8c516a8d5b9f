"""What a load writes into where nothing is converted: the parts of live weights, which alias them."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from dcp_adapters.format.expand import expand_flat, merge, plain_leaf, quantized_local, settled_parts
from dcp_adapters.format.part_places import Box, PartBoxes
from dcp_adapters.plain.plain_memory import is_plain
from fsdp_hooks.torch_private import local_of, without_torch_function
from fsdp_hooks.writable import unwritable
from qtensor.spec.registry import tensor_wide
from qtensor.tensor.quantized_tensor import QuantizedTensor


def local_parts(leaves: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Box]]:
    """Leaves with each quantized one replaced by its local parts, which alias it, and the boxes of these parts.

    Raises:
        ValueError: as `expand_flat`; a column cut does not fall on block boundaries.
    """
    out, boxes, known = dict[str, Any](), dict[str, Box](), PartBoxes()
    with without_torch_function():  # attributes of a subclass go through it, thousands of times
        for name, value in leaves.items():
            q = quantized_local(value)
            if q is None:
                merge(out, expand_flat({name: value}))
                continue
            places, parts = known.of(name, value, q), settled_parts(name, q)
            own = {f"{name}.{part}": box for part, box in places.items()}
            boxes |= own
            merge(out, {entry: parts[part] for entry, part in zip(own, places, strict=True)})
    return out, boxes


def not_writable(leaves: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Why some of the named leaves cannot be written in place, a sentence each; other libraries' classes are left out.

    torch says so when they are written, and others are loaded by then.
    """
    plain: dict[str, Tensor] = {}
    with without_torch_function():
        for name in names:
            value = leaves[name]
            if not isinstance(value, Tensor):
                continue
            q = quantized_local(value)
            parts = {"": local_of(plain_leaf(value))} if q is None else q.parts()
            plain |= {f"{name}.{part}".rstrip("."): tensor for part, tensor in parts.items() if is_plain(tensor)}
    return [f"{name}: {why}" for name, why in unwritable(plain).items()]


def is_wrapped(value: Any) -> bool:
    """Whether a leaf holds its bytes in tensors inside it."""
    return quantized_local(value) is not None or plain_leaf(value) is not value


def vectors_of(quantized: Mapping[str, QuantizedTensor]) -> dict[str, Tensor]:
    """Part name -> the vector of a gathered weight's tensor-wide values, which the checkpoint's one value replaces."""
    vectors = {}
    for name, q in quantized.items():
        if q._sharding.shards is None and not q._lens.some_rows:
            continue
        wide = tensor_wide(q.recipe)
        if wide and q._lens.some_rows:
            raise ValueError(
                f"{name}: the target is some rows of a larger tensor and shares its {wide} with the others; load all "
                "of it at once"
            )
        if wide and q._sharding.shards is not None:
            vectors[f"{name}.{wide}"] = q.parts()[wide]
    return vectors
