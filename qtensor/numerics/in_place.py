"""Parts that are there already, for a kernel that writes them in place of new ones, which would be copied into them.

A kernel writes while it reads, and torch does not see it. So it may do so only where the copies could not have failed
nor changed anything else: into plain contiguous parts of the shapes that it makes, that lie apart from each other and
from the values. `contents.store` counts the writes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fsdp_hooks.writable import meeting
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import specs_of

ALIGNED = 16  # bytes: code for other addresses is slower, and would be compiled for them alone


def writable_parts(
    parts: Mapping[str, Tensor] | None, x: Tensor, values: Tensor, recipe: Recipe
) -> Mapping[str, Tensor] | None:
    """Return the parts if a kernel may write all of them, else None.

    Args:
        parts: of a tensor of x's shape.
        x: what is quantized, [.., N, K].
        values: the same as the kernel reads it.
        recipe: of the parts.
    """
    if parts is None or parts.keys() != {spec.name for spec in specs_of(recipe)}:
        return None
    alike = all(
        parts[spec.name].dtype == spec.dtype and parts[spec.name].shape == spec.shape(x.shape)
        for spec in specs_of(recipe)
    )
    if not alike or not all(_takes_a_kernel(part, values.device) for part in parts.values()):
        return None
    return parts if next(meeting({**parts, "": values}), None) is None else None


def are_written(found: Mapping[str, Tensor], parts: Mapping[str, Tensor] | None) -> bool:
    """Return whether what a kernel returned lies in these parts."""
    return parts is not None and all(part.data_ptr() == parts[name].data_ptr() for name, part in found.items())


def _takes_a_kernel(part: Tensor, device: torch.device) -> bool:
    # torch refuses writes into those made in inference mode, outside of it
    refused = part.is_inference() and not torch.is_inference_mode_enabled()
    return (
        type(part) is Tensor
        and part.device == device
        and part.is_contiguous()
        and part.data_ptr() % ALIGNED == 0
        and not refused
    )
