"""Where the weights of a model live, and how a stage of it (one layer, or all that is outside of layers) gets them.

    Sharded    FSDP2: gathered once for the stage, the shards written on the way out
    Resident   plain modules, moved to the device of the calibration and back where they live elsewhere
    OnDisk     modules on the meta device, filled from safetensors for the stage and emptied again

Inside `hold` every target is a plain dense parameter, whatever its storage: quantized weights are dequantized into a
working copy, and get their calibrated bytes afterwards, into the shards (`own_rows`, `store`).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_hooks.scale_sync import local_of
from fsdp_hooks.torch_private import dtensor_like
from fsdp_hooks.unshard import holding
from layerwise.targets import Target
from qtensor.tensor import QuantizedTensor

__all__ = ["OnDisk", "Resident", "Sharded", "Weights", "is_sharded", "own_rows", "store", "working"]


class Weights(Protocol):
    """Brings in the weights of a stage. Called by all ranks alike."""

    def hold(self, module: nn.Module, without: Sequence[nn.Module] = ()) -> Any:
        """Context manager in which the parameters of `module`, less those of `without`, are full and plain to use."""


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 holds parameters of the model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


class Sharded:
    """Weights under FSDP2.

    Modules that are FSDP modules of their own inside a stage (experts, say) are called many times in it, so they are
    told to keep what they gathered; afterwards they reshard after forward. Which policy they had can not be read.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        self.model = model
        inside = {id(child) for layer in layers for child in layer.modules()}
        self.outer = [
            child for child in model.modules() if isinstance(child, FSDPModule) and id(child) not in inside
        ]

    @contextmanager
    def hold(self, module: nn.Module, without: Sequence[nn.Module] = ()) -> Iterator[None]:
        """One all-gather for each FSDP module in the stage; changes go to the shards unless the body raises."""
        left_out = {id(child) for layer in without for child in layer.modules()}
        groups = [
            child for child in module.modules() if isinstance(child, FSDPModule) and id(child) not in left_out
        ]
        with holding(module, groups, writeback=True):
            called = [group for group in groups if group is not module]
            for group in called:
                group.set_reshard_after_forward(reshard_after_forward=False, recurse=False)
            if module is self.model and module in groups:
                called.append(module)
                module.set_reshard_after_forward(reshard_after_forward=False, recurse=False)
                _initialise(module)
            try:
                yield
            finally:
                for group in called:
                    if group is not module:
                        group.set_reshard_after_forward(reshard_after_forward=True, recurse=False)


def _initialise(root: nn.Module) -> None:
    """Let FSDP see its root and all its modules in place, by a forward that does nothing, before any is exchanged."""
    _without_forward(root, lambda *args, **kwargs: None)()


def _without_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def call() -> Any:
        own = module.__dict__.get("forward")
        module.forward = forward  # an attribute of this module only
        try:
            return module()
        finally:
            if own is None:
                del module.__dict__["forward"]
            else:
                module.forward = own

    return call


class Resident:
    """Weights of a model without FSDP, moved to `device` for their stage where they live elsewhere."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device

    @contextmanager
    def hold(self, module: nn.Module, without: Sequence[nn.Module] = ()) -> Iterator[None]:
        """Moves the tensors of the stage there and back; the Parameter objects stay the same."""
        if self.device is None:
            yield
            return
        left_out = {id(child) for layer in without for child in layer.modules()}
        homes: list[tuple[Any, torch.device]] = []
        try:
            for child in module.modules():
                if id(child) not in left_out:
                    homes += [(tensor, tensor.device) for tensor in _tensors_of(child) if tensor.device != self.device]
            for tensor, _ in homes:
                tensor.data = tensor.data.to(self.device)
            yield
        finally:
            for tensor, home in homes:
                tensor.data = tensor.data.to(home)


class OnDisk:
    """Weights of a model on the meta device, read from safetensors files for their stage.

    Args:
        path: a safetensors file, or a directory of them with or without model.safetensors.index.json.
        device: where the stage gets its tensors.
    """

    def __init__(self, path: str | Path, device: torch.device | None) -> None:
        self.device = device or torch.device("cpu")
        self.files = _tensor_files(Path(path))

    @contextmanager
    def hold(self, module: nn.Module, without: Sequence[nn.Module] = ()) -> Iterator[None]:
        """Fills what is on the meta device; on exit it is there again, with the same Parameter objects."""
        raise NotImplementedError
        yield


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from (param for param in module._parameters.values() if param is not None)
    yield from (buffer for buffer in module._buffers.values() if buffer is not None)


def _tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return {name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    found: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            found |= dict.fromkeys(tensors.keys(), file)
    if not found:
        raise FileNotFoundError(f"{path} holds no safetensors files; expected the weights of the model there")
    return found
