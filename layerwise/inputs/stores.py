"""Where tensors wait between their uses: on their device, in CPU memory, or in files of a temporary directory.

    store = Store("device" | "cpu" | "disk")
    kept = store.keep(tensor)        # the tensor may be freed now, if it is not kept on its device
    kept.tensor(fresh=True)          # on its device again, with the same values and strides

What is kept goes when the last reference to its `Kept` goes, files too. Files hold raw bytes. Tensors that are more
than their bytes (DTensors, quantized or sparse ones) stay as they are in every store.
"""

import tempfile
import weakref
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dcp_adapters.plain_memory import memory_of

__all__ = ["INPUTS_ON", "Kept", "Store", "is_plain", "version"]

INPUTS_ON = ("device", "cpu", "disk")


def is_plain(value: Any) -> bool:
    """Whether it is a tensor that is nothing but its bytes."""
    return type(value) in {Tensor, nn.Parameter, nn.Buffer} and value.layout is torch.strided


def version(tensor: Tensor) -> int:
    """How often it was written in place, as far as it counts that."""
    return 0 if tensor.is_inference() else tensor._version


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill its memory without gaps and without sharing, in whatever order of dimensions."""
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return False
        expected *= size
    return True


class Kept:
    """One tensor that is kept; subclasses know where."""

    def tensor(self, *, fresh: bool) -> Tensor:
        """The tensor on its device.

        Args:
            fresh: in memory of its own, to be written by whoever gets it. A tensor whose elements share memory (an
                expanded mask) cannot be written anyway and is not copied.

        Raises:
            RuntimeError: somebody wrote into it, in place, since it was kept.
        """
        raise NotImplementedError


class _OnDevice(Kept):
    def __init__(self, tensor: Tensor) -> None:
        self._held, self._version = tensor, version(tensor)

    def tensor(self, *, fresh: bool) -> Tensor:
        if version(self._held) != self._version:
            raise RuntimeError(
                f"a tensor of shape {list(self._held.shape)} was written in place after it was recorded; the model "
                "reuses its memory, keep recorded inputs in other memory (inputs_on='cpu')"
            )
        return self._held.clone() if fresh and is_plain(self._held) and is_dense(self._held) else self._held


class _OnCpu(Kept):
    def __init__(self, tensor: Tensor) -> None:
        self._home = tensor.device
        base, self._shape = _unexpanded(tensor)
        self._held = base.to("cpu", copy=True)

    def tensor(self, *, fresh: bool) -> Tensor:
        here = self._held.to(self._home)
        if fresh and here is self._held and here.shape == self._shape:
            here = here.clone()
        return here.expand(self._shape)


class _OnDisk(Kept):
    def __init__(self, tensor: Tensor, path: Path) -> None:
        self._home, self._dtype, self._path = tensor.device, tensor.dtype, path
        base, self._shape = _unexpanded(tensor)
        # Written in the order of memory, so that the strides come back too.
        self._order = sorted(range(base.dim()), key=lambda dim: (-base.stride()[dim], -base.shape[dim]))
        memory = base.resolve_conj().resolve_neg().permute(self._order).to("cpu").contiguous()
        self._stored = memory.shape
        path.write_bytes(memory_of(memory))
        weakref.finalize(self, path.unlink, missing_ok=True)

    def tensor(self, *, fresh: bool) -> Tensor:
        memory = torch.empty(self._stored, dtype=self._dtype, device="cpu")
        if memory.numel():
            with self._path.open("rb") as file:
                file.readinto(memory_of(memory))
        back = sorted(range(len(self._order)), key=self._order.__getitem__)
        return memory.to(self._home).permute(back).expand(self._shape)


def _unexpanded(tensor: Tensor) -> tuple[Tensor, torch.Size]:
    """The tensor without what `expand` repeated, and the shape to expand to again."""
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
        """Where the files are, once there was one to write."""
        return None if self._directory is None else Path(self._directory.name)

    def keep(self, tensor: Tensor, *, borrowed: bool = False) -> Kept:
        """Keep a tensor.

        Args:
            tensor: any tensor; it is not to be written until its last use.
            borrowed: its memory belongs to somebody who may free it (a sharded parameter), so it is copied anyway.
        """
        tensor = tensor.detach()
        if not is_plain(tensor) or self._inputs_on == "device":
            return _OnDevice(tensor.clone() if borrowed else tensor)
        if self._inputs_on == "cpu":
            return _OnCpu(tensor)
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="layerwise-inputs-")
        return _OnDisk(tensor, Path(self._directory.name) / str(next(self._names)))

    def close(self) -> None:
        """Remove the files; what is kept on disk cannot be read any more."""
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None
