"""Weights that live in safetensors files: a stage of a model on the meta device is filled from them, and emptied again.

The model itself stays on the meta device from beginning to end; its calibrated weights are in the result only.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from fsdp_hooks.torch_private import cpu_by_default
from layerwise.weights.hold import modules_of

__all__ = ["OnDisk"]

INDEX = "model.safetensors.index.json"


class OnDisk:
    """Weights of a model on the meta device.

    Args:
        path: a safetensors file, or a directory of them, with or without `model.safetensors.index.json`; tensors have
            the names of the model's state dict.
        model: the model; what of it is not on the meta device is left alone.
        device: where a stage gets its tensors (None: CPU).

    Raises:
        FileNotFoundError: there are no safetensors files.
        ValueError: a parameter or buffer on the meta device is not in them, or has another shape there.
    """

    def __init__(self, path: str | Path, model: nn.Module, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.files = _files_of(Path(path))
        self.names: dict[int, str] = {}  # id of a tensor -> a name that the files have; tied tensors have several
        shapes: dict[str, tuple[int, ...]] = {}
        for fqn, module in model.named_modules():
            for attribute, tensor in _meta_tensors(module):
                name = f"{fqn}.{attribute}".lstrip(".")
                shapes[name] = tuple(tensor.shape)
                if name in self.files:
                    self.names[id(tensor)] = name
        self._check(model, shapes, Path(path))

    def _check(self, model: nn.Module, shapes: dict[str, tuple[int, ...]], path: Path) -> None:
        missing = [
            f"{fqn}.{attribute}".lstrip(".")
            for fqn, module in model.named_modules()
            for attribute, tensor in _meta_tensors(module)
            if id(tensor) not in self.names
        ]
        if missing:
            raise ValueError(
                f"calibrate: {', '.join(missing[:5])}{' and more' if len(missing) > 5 else ''} of the model "
                f"{'are' if len(missing) > 1 else 'is'} on the meta device and not in {path}; build what the files do "
                "not hold (non-persistent buffers, say) on a real device"
            )
        for name in set(self.names.values()):
            with safe_open(self.files[name], framework="pt") as tensors:
                found = tuple(tensors.get_slice(name).get_shape())
            if found != shapes[name]:
                raise ValueError(f"calibrate: {name} has shape {found} in {path}, expected {shapes[name]}")

    def read(self, tensor: Tensor) -> Tensor:
        """The values of one tensor of the model, in its dtype, on the device."""
        name = self.names[id(tensor)]
        # safetensors makes tensors on the default device, and moves them from there unless that is the CPU
        with cpu_by_default(), safe_open(self.files[name], framework="pt", device=str(self.device)) as tensors:
            values: Tensor = tensors.get_tensor(name)
        return values.to(tensor.dtype, copy=True)  # products depend on alignment, which files have none of

    @contextmanager
    def hold(self, module: nn.Module, without: Sequence[nn.Module] = ()) -> Iterator[None]:
        """Fills the stage; on exit the same Parameter objects are there again, on the meta device."""
        stood: list[tuple[dict[str, Any], str, Tensor]] = []
        filled: dict[int, Tensor] = {}
        try:
            for child in modules_of(module, without).values():
                for attribute, tensor in list(_meta_tensors(child)):
                    if id(tensor) not in filled:
                        values = self.read(tensor)
                        is_param = isinstance(tensor, nn.Parameter)
                        filled[id(tensor)] = nn.Parameter(values, requires_grad=False) if is_param else values
                    registry: Any = child._parameters if attribute in child._parameters else child._buffers
                    stood.append((registry, attribute, tensor))
                    registry[attribute] = filled[id(tensor)]
            yield
        finally:
            for registry, attribute, tensor in stood:
                registry[attribute] = tensor


def _meta_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for registry in (module._parameters, module._buffers):
        for attribute, tensor in registry.items():
            if tensor is not None and tensor.is_meta:
                yield attribute, tensor


def _files_of(path: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    index = path / INDEX
    if index.is_file():
        return {name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] * path.is_file()
    found: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            found |= dict.fromkeys(tensors.keys(), file)
    if not found:
        raise FileNotFoundError(f"calibrate: {path} holds no safetensors; expected the weights of the model there")
    return found
