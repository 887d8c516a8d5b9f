"""Masters: the fp32 value behind a low-precision parameter, and whether the parameter still holds what it wrote.

A parameter can be written by others than the optimizer - a checkpoint loaded after the optimizer was built, a weight
copied in by hand. Its master is stale then, and the next step would silently undo that write. So the optimizer keeps a
digest of the bytes it wrote, and a parameter whose bytes are others gives its master a new start. Addresses and version
counters answer for free where nothing happened; FSDP moves shards to new storage (uneven ones before the first
forward), so only the bytes decide.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.scale_sync import local_of
from qtensor.tensor import QuantizedTensor

__all__ = ["Written", "master_of", "refill"]


@dataclass(frozen=True)
class Written:
    """What a parameter held at one moment: addresses and versions of its tensors, and a digest of their bytes."""

    stamp: tuple[int, ...]
    digest: Tensor

    @staticmethod
    def now(param: Tensor) -> "Written":
        """The record of this moment; costs one pass over the bytes, no host sync."""
        tensors = _tensors(param)
        return Written(_stamp(param, tensors), _digest(tensors))

    def holds(self, param: Tensor) -> bool:
        """Whether the parameter's bytes are still the same."""
        tensors = _tensors(param)
        return _stamp(param, tensors) == self.stamp or torch.equal(_digest(tensors), self.digest)


def master_of(param: Tensor) -> Tensor:
    """fp32 master of a parameter: itself in fp32, else a new tensor filled by `refill`."""
    if not isinstance(local_of(param), QuantizedTensor) and param.dtype == torch.float32:
        return param
    with torch.no_grad():
        master = torch.zeros_like(param, dtype=torch.float32).detach()
        refill(master, param)
    return master


@torch.no_grad()
def refill(master: Tensor, param: Tensor) -> None:
    """Set a master to its parameter's preserved initial value, or else to its (dequantized) value."""
    local = local_of(param)
    target = master.to_local() if isinstance(master, DTensor) else master
    if isinstance(local, QuantizedTensor):
        target.copy_(local.init_value if local.init_value is not None else local.dequantize(torch.float32))
    else:
        target.copy_(local)
    target.add_(0.0)  # no -0.0: adding an update of 0 would turn it into +0.0, which has another code


def _tensors(param: Tensor) -> list[Tensor]:
    local = local_of(param)
    return list(local.parts().values()) if isinstance(local, QuantizedTensor) else [local]


def _stamp(param: Tensor, tensors: list[Tensor]) -> tuple[int, ...]:
    """Addresses of the tensors; versions of theirs, the local tensor's and the parameter's.

    An operation counts where it enters: a copy_ into a DTensor raises the DTensor's version alone, not its parts'.
    """
    counted = [param, *tensors]
    with torch.no_grad():
        counted += [param.to_local()] if isinstance(param, DTensor) else []
    versions = tuple(0 if tensor.is_inference() else tensor._version for tensor in counted)
    return (*versions, *(tensor.data_ptr() for tensor in tensors))


def _digest(tensors: list[Tensor]) -> Tensor:
    """int64 [tensors]: the bytes of each as 64-bit words, summed with wrap-around; the odd rest added on."""
    sums = []
    for tensor in tensors:
        data = tensor.reshape(-1).view(torch.uint8)
        if data.storage_offset() % 8:
            data = data.clone()
        whole = data.numel() // 8 * 8
        sums.append(data[:whole].view(torch.int64).sum() + data[whole:].sum(dtype=torch.int64))
    return torch.stack(sums)
