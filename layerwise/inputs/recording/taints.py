"""Ordinary tensors of the parent that a layer would have written into, and whose values nobody has at this moment.

Layers may hand hidden states over by writing into a buffer that the parent gave them. If only a stand-in was called,
such a buffer still holds what it held before. Code that computes with it would go on with wrong values, so it raises
`Escape`, as code does that looks into a placeholder.
"""

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from layerwise.inputs.values.stand_ins import Escape
from layerwise.inputs.values.stores import is_ordinary
from layerwise.inputs.values.structure import flatten

# Functions that tell what a tensor is like, not its values; "__get__" is every property.
DESCRIBES = {
    "__get__",
    "__len__",
    "data_ptr",
    "dim",
    "element_size",
    "get_device",
    "is_contiguous",
    "is_floating_point",
}
DESCRIBES |= {"ndimension", "numel", "size", "storage_offset", "stride", "untyped_storage"}


class Taints(TorchFunctionMode):
    """Sees all functions of tensors, and raises `Escape` for one that takes a tainted tensor.

    Attributes:
        paused: nothing is checked, since a stand-in computes, and not the parent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        self._held: list[tuple[Tensor, int]] = []

    def add(self, tensor: Tensor, layer: int) -> None:
        """Note that a layer would have written into this tensor."""
        self.remove(tensor)
        self._held.append((tensor, layer))

    def remove(self, tensor: Tensor) -> None:
        """Note that this very part of its memory holds what it should."""
        # Other parts of the same memory stay tainted: a buffer may have a slice for each layer.
        self._held = [one for one in self._held if _place(one[0]) != _place(tensor)]

    def origins(self, value: Any) -> frozenset[int]:
        """Return the layers that would have written into the memory of tensors in a value."""
        if not self._held:
            return frozenset()
        # By memory, not by tensor: the parent may use a view, or what the tainted one is a view of.
        memory = {_memory(leaf) for leaf in flatten(value)[0] if isinstance(leaf, Tensor) and is_ordinary(leaf)}
        return frozenset(layer for tensor, layer in self._held if _memory(tensor) in memory)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, unless it takes a tainted tensor."""
        kwargs = kwargs or {}
        if self._held and not self.paused and getattr(func, "__name__", "") not in DESCRIBES:
            found = self.origins((args, kwargs))
            if found:
                raise Escape(found)
        return func(*args, **kwargs)


def _memory(tensor: Tensor) -> Any:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _place(tensor: Tensor) -> Any:
    return *_memory(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
