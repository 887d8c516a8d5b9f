"""A stored tensor: one record for a tensor of a state dict, of a checkpoint, or of a Hugging Face directory.

    Entry w, recipe MXFP8, [N, K], bf16   ->   parts payload [N, K] float8, scale [N, K // 32] uint8
    Entry b, no recipe,    [N],    fp32   ->   one part, named "", which is the tensor itself

A part is stored under a key, `w.payload` or `b`, in chunks; each chunk is a box of the part. A source of entries (a
live state dict, a checkpoint, a directory) reads parts or boxes of them; everything else is a function over entries.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dcp_adapters.records.recipe_names import dtype_name, recipe_label
from qtensor.spec.format import PartSpec
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import specs_of
from qtensor.tensor.quantized_tensor import QuantizedTensor

PartShape = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Entry:
    """One tensor.

    recipe: None for a dense tensor. shape: the logical, global shape. dtype: for a quantized tensor, the dtype it
    appears to have.

    Example:
        ```python
        >>> state = {"weight": quantize(torch.randn(64, 64), MXFP8BlockScaling())}
        >>> dcp.save(state, checkpoint_id="step-1000", planner=QuantizedSavePlanner())
        >>> entry = read_manifest("step-1000").tensors["weight"]
        >>> entry.recipe == MXFP8BlockScaling(), entry.dtype
        (True, torch.float32)
        ```
    """

    name: str
    recipe: Recipe | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    def specs(self) -> tuple[PartSpec, ...]:
        """Say how its parts extend along its shape, payload first."""
        return (PartSpec("", self.dtype),) if self.recipe is None else specs_of(self.recipe)

    def parts(self) -> dict[str, PartShape]:
        """Map each part -> (dtype, global shape)."""
        if self.recipe is None:
            return {"": (self.dtype, self.shape)}
        return {spec.name: (spec.dtype, spec.shape(self.shape)) for spec in specs_of(self.recipe)}

    def part_keys(self) -> list[str]:
        """List the keys under which its parts are stored, the payload's first."""
        return [self.name] if self.recipe is None else [f"{self.name}.{spec.name}" for spec in specs_of(self.recipe)]

    def stored(self) -> dict[str, PartShape]:
        """Map each key -> (dtype, global shape) of the part that is stored under it."""
        return {self.key(part): held for part, held in self.parts().items()}

    def stored_specs(self) -> dict[str, PartSpec]:
        """Key -> the spec of the part that is stored under it."""
        return {self.key(spec.name): spec for spec in self.specs()}

    def key(self, part: str) -> str:
        """Return the name under which a part is stored."""
        return f"{self.name}.{part}" if part else self.name

    def tensor(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Make the tensor of these parts, a QuantizedTensor if it is quantized."""
        return parts[""] if self.recipe is None else QuantizedTensor.from_parts(dict(parts), self.recipe, self.dtype)

    @property
    def numel(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.parts().values())

    @property
    def kind(self) -> str:
        """The label of a quantized tensor's recipe, or the name of a dense tensor's dtype."""
        return dtype_name(self.dtype) if self.recipe is None else recipe_label(self.recipe)

    @property
    def format(self) -> tuple[Recipe | None, tuple[int, ...], torch.dtype]:
        """All but the name."""
        return self.recipe, self.shape, self.dtype


def owners_of(entries: Iterable[Entry]) -> dict[str, str]:
    """Key under which a part is stored -> the name of its tensor."""
    return {key: entry.name for entry in entries for key in entry.part_keys()}


def parts_of(tensor: Tensor) -> dict[str, Tensor]:
    """Return the parts of a local tensor, quantized or dense."""
    return tensor.parts() if isinstance(tensor, QuantizedTensor) else {"": tensor}
