"""Where tensors wait between their uses: on their device, in CPU memory, or in files of a temporary directory.

    store = Store("device" | "cpu" | "disk")
    kept = store.keep(tensor)        # a copy: the tensor may be written or freed now
    kept.tensor()                    # another copy, on its device again, with the same values and strides

A tensor is freed, and its file removed, with the last reference to its `StoredTensor`. Files hold raw bytes. Tensors
that are more than their bytes (DTensors, quantized or sparse ones) stay on their device in every store. Strides come
back if the elements fill their memory; a slice with gaps comes back contiguous.
"""

import tempfile
import weakref
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dcp_adapters.plain.plain_memory import memory_of
from fsdp_hooks.lazy_bits import resolve

INPUTS_ON = ("device", "cpu", "disk")
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_ordinary(value: Any) -> bool:
    """Tell whether a value is a tensor that its dtype, shape, strides and bytes describe completely."""
    return type(value) in {Tensor, nn.Parameter, nn.Buffer} and value.layout is torch.strided


def version(tensor: Tensor) -> int:
    """Return how often a tensor was written in place, as far as torch counts that."""
    # Inference tensors have no counter: to ask for it is an error.
    return 0 if tensor.is_inference() else tensor._version


def is_dense(tensor: Tensor) -> bool:
    """Tell whether the elements fill their memory without gaps or sharing, in whatever order of dimensions."""
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return False
        expected *= size
    return True


class StoredTensor:
    """One tensor that is kept; subclasses know where."""

    def tensor(self) -> Tensor:
        """Return the tensor on its device, in memory of its own, which whoever gets it may write into.

        A tensor whose elements share memory (an expanded mask) comes back as such, and cannot be written.
        """
        # Never an inference tensor, even if the model's forward makes them: torch counts no writes into those.
        with torch.inference_mode(mode=False), torch.no_grad():
            return self._make()

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor has these very bits."""
        with torch.no_grad():
            return is_ordinary(tensor) and has_same_bits(self._make(), tensor.detach())

    def _make(self) -> Tensor:
        raise NotImplementedError


class _InMemory(StoredTensor):
    def __init__(self, tensor: Tensor, place: torch.device | str) -> None:
        self._home = tensor.device
        # An expanded mask is stored once, and not as often as it is repeated.
        base, self._shape = _undo_expand(tensor)
        self._held = base.to(place, copy=True)

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor has these very bits; if both are on one device, without a copy."""
        if tensor.device != self._home:
            return False
        with torch.no_grad():
            return is_ordinary(tensor) and has_same_bits(self._held.to(self._home).expand(self._shape), tensor.detach())

    def _make(self) -> Tensor:
        return self._held.to(self._home, copy=True).expand(self._shape)


class _Whole(StoredTensor):
    """A tensor that is more than its bytes; it stays where it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._held = tensor.clone()

    def _make(self) -> Tensor:
        return self._held.clone()


class _OnDisk(StoredTensor):
    def __init__(self, tensor: Tensor, path: Path) -> None:
        self._home, self._dtype, self._path = tensor.device, tensor.dtype, path
        base, self._shape = _undo_expand(tensor)
        # Written in the order of memory, so that the strides come back, too.
        self._order = sorted(range(base.dim()), key=lambda dim: (-base.stride()[dim], -base.shape[dim]))
        memory = resolve(base).permute(self._order).to("cpu").contiguous()
        self._stored = memory.shape
        path.write_bytes(memory_of(memory))
        # Runs at the end of the process, too, which `__del__` need not.
        weakref.finalize(self, path.unlink, missing_ok=True)

    def _make(self) -> Tensor:
        memory = torch.empty(self._stored, dtype=self._dtype, device="cpu")
        if memory.numel():
            with self._path.open("rb") as file:
                file.readinto(memory_of(memory))
        back = sorted(range(len(self._order)), key=self._order.__getitem__)
        return memory.to(self._home).permute(back).expand(self._shape)


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have the same dtype, shape, device and bits."""
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    (one, shape), (other, others) = _undo_expand(one), _undo_expand(other)
    if shape != others or one.shape != other.shape:
        return False
    # As floats, NaN would differ from itself, and 0.0 equal -0.0.
    integers = INTEGERS.get(one.element_size(), torch.uint8)
    return torch.equal(*(resolve(side).contiguous().reshape(-1).view(integers) for side in (one, other)))


def _undo_expand(tensor: Tensor) -> tuple[Tensor, torch.Size]:
    """Return the tensor without what `expand` repeated, and the shape to expand to again."""
    base = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            base = base.narrow(dim, 0, 1)
    return base, tensor.shape


class Store:
    """Keeps tensors in one of three places; `close` removes what is on disk.

    Args:
        inputs_on: "device", "cpu" or "disk".

    Raises:
        ValueError: `inputs_on` is something else.
    """

    def __init__(self, inputs_on: str) -> None:
        if inputs_on not in INPUTS_ON:
            raise ValueError(f"inputs_on must be one of {', '.join(map(repr, INPUTS_ON))}, got {inputs_on!r}")
        self._inputs_on = inputs_on
        self._names = count()
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    @property
    def directory(self) -> Path | None:
        """The directory of the files; None before the first one is written."""
        return None if self._directory is None else Path(self._directory.name)

    def keep(self, tensor: Tensor) -> StoredTensor:
        """Keep a tensor as it is now.

        It is always copied: it may be a buffer that the next batch is written into (by a data loader, through numpy, by
        a CUDA graph), and torch does not count all such writes.
        """
        tensor = tensor.detach()
        if not is_ordinary(tensor):
            return _Whole(tensor)
        if self._inputs_on != "disk":
            return _InMemory(tensor, tensor.device if self._inputs_on == "device" else "cpu")
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="layerwise-inputs-")
        return _OnDisk(tensor, Path(self._directory.name) / str(next(self._names)))

    def close(self) -> None:
        """Remove the files; what is kept on disk cannot be read any more."""
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None
