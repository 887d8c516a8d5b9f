"""How a stage of a model (one layer, or all that is outside of layers) gets its weights, and gives them back.

    Sharded    FSDP2, tensor parallelism: gathered once for the stage; changes go into the shards afterwards
    Resident   plain modules, moved to the device of the calibration and back if they live elsewhere
    OnDisk     modules on the meta device, filled from safetensors for the stage and emptied again   (on_disk.py)

Inside `hold` and `working` every target is a plain dense parameter, even if it is stored quantized: such a weight is
dequantized into a working copy, and gets its calibrated bytes afterwards (shards.py). One that gathers only quantize
(storage="high_precision") is its dense values (whole.py).
"""

from collections.abc import Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_hooks.unshard import hold_gathered
from layerwise.stages.stage import Stage
from layerwise.stages.targets import Target
from layerwise.weights.own_hooks import KINDS, own_hooks_may_fail
from layerwise.weights.whole import high_precision, whole
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.tensor.quantized_tensor import QuantizedTensor


class Weights(Protocol):
    """Brings in the weights of a stage. Called by all ranks alike."""

    def hold(self, stage: Stage) -> AbstractContextManager[None]:
        """Inside, the parameters of the stage are full, plain tensors."""


class Sharded:
    """Weights under FSDP2, tensor parallelism, or both.

    FSDP modules inside a stage (such as experts wrapped one by one) are called many times in it. So they are told to
    keep what they gathered, and to prefetch nothing: that would be a collective in the loop over batches. Afterwards
    they reshard after forward and prefetch nothing explicitly, since their earlier settings cannot be read.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @contextmanager
    def hold(self, stage: Stage) -> Iterator[None]:
        """Gather the stage, by one all-gather for each FSDP module; changes are stored unless the body raises.

        What is a DTensor even then, and weights of high-precision storage, are gathered one by one.
        """
        module, dense = stage.module, high_precision(stage)
        groups = [child for child in stage.everything() if isinstance(child, FSDPModule)]
        # A layer is called without FSDP's hooks; FSDP modules inside it, and the root, are called with them.
        called = [group for group in groups if group is not module or module is self.model]
        with hold_gathered(module, groups, writeback=True):
            for group in called:
                group.set_reshard_after_forward(reshard_after_forward=False, recurse=False)
                group.set_modules_to_forward_prefetch([])
            if module is self.model and called:  # let FSDP find its root while all modules are in their places
                # FSDP takes the first of its modules that is called as the root. A forward that
                # computes nothing makes it this one. It is set on the instance, so it hides the
                # method of the class.
                module.forward = lambda *args, **kwargs: None  # on the instance, so it hides the method of the class
                try:
                    with own_hooks_may_fail(module, *KINDS):
                        # On a GPU, FSDP of torch 2.11 and 2.12 moves the first argument, and fails if there is none.
                        module(None)
                finally:
                    del module.forward
            try:
                with whole(stage, dense):
                    yield
            finally:
                for group in called:
                    # FSDP keeps the weights of its root after a forward, by default.
                    if group is not self.model:
                        group.set_reshard_after_forward(reshard_after_forward=True, recurse=False)


class Resident:
    """Weights of a model without FSDP, moved to `device` for their stage if they live elsewhere."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device

    @contextmanager
    def hold(self, stage: Stage) -> Iterator[None]:
        """Move the stage to the device and back; Parameter objects stay the same.

        An exception restores the values, too, except for what a callback wrote into an embedding's table.
        """
        owners = stage.everything()
        places = [(owner, name, param) for owner in owners for name, param in owner._parameters.items()]
        # Tables of embeddings are large and not calibrated, so there is no copy of those that are on the
        # device already.
        tables = {id(owner.weight) for owner in owners if isinstance(owner, nn.Embedding)}
        registered = (one for owner in owners for own in (owner._parameters, owner._buffers) for one in own.values())
        tensors = {id(one): one for one in registered if one is not None and self._moves(one, tables)}
        homes = {key: tensor.data for key, tensor in tensors.items()}
        with self._move_quantized(owners), whole(stage, high_precision(stage)):
            try:
                for key, tensor in tensors.items():
                    # A copy even on the same device: after an exception the old values must still
                    # be there.
                    tensor.data = homes[key].to(self.device or tensor.device, copy=True)
                yield
                for owner, name, param in places:
                    _take_replacement(owner, name, param)
                for key, tensor in tensors.items():
                    homes[key].copy_(tensor.data)
            finally:
                for owner, name, param in places:
                    owner._parameters[name] = param
                for key, tensor in tensors.items():
                    tensor.data = homes[key]

    def _moves(self, tensor: Tensor, tables: Container[int]) -> bool:
        """Return whether the stage gets a copy; quantized weights are not copied, nor tables that are there already."""
        there = self.device in (None, tensor.device)
        return not isinstance(tensor, QuantizedTensor | HighPrecisionWeight) and not (id(tensor) in tables and there)

    @contextmanager
    def _move_quantized(self, owners: Iterable[nn.Module]) -> Iterator[None]:
        """Inside, copies on the device stand for quantized parameters; nobody writes into these.

        They are new Parameters, since assigning the `data` of a quantized one is not defined.
        """
        stood: list[tuple[nn.Module, str, Any]] = []
        for owner in owners:
            for name, param in owner._parameters.items():
                held: Any = param
                quantized = isinstance(held, QuantizedTensor | HighPrecisionWeight)
                if quantized and self.device not in (None, held.device):
                    stood.append((owner, name, held))
                    owner._parameters[name] = nn.Parameter(held.detach().to(self.device), requires_grad=False)
        try:
            yield
        finally:
            for owner, name, param in stood:
                owner._parameters[name] = param


def _take_replacement(owner: nn.Module, name: str, param: Any) -> None:
    """Copy the values of a parameter into the original that it has replaced."""
    now = owner._parameters[name]
    if now is param or isinstance(param, QuantizedTensor | HighPrecisionWeight):
        return
    if now is None or now.shape != param.shape:
        found = "is gone" if now is None else f"has shape {tuple(now.shape)}"
        raise ValueError(f"{name} of a {type(owner).__name__} {found}, expected shape {tuple(param.shape)}")
    # The model keeps its own Parameter objects, which optimizers and ties refer to.
    param.data = now.data.to(param.dtype)


@contextmanager
def working(targets: Iterable[Target]) -> Iterator[None]:
    """Inside, each target whose gathered weight is quantized is a dense parameter with the dequantized values."""
    stood: list[tuple[Target, nn.Parameter]] = []
    try:
        for target in targets:
            param = target.param
            if isinstance(param, QuantizedTensor):
                stood.append((target, param))
                # Folds write dense values, which quantized bytes could not take.
                dense = nn.Parameter(param.dequantize(), requires_grad=False)
                target.owner._parameters[target.attribute] = dense
        yield
    finally:
        for target, param in stood:
            target.owner._parameters[target.attribute] = param
