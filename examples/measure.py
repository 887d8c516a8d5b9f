"""What the examples measure, counted from real storages, buffers and files: bytes at rest, gathered, on disk."""

from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from qtensor import QuantizedTensor

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13


class CountingAllGather:
    """FSDP2's all-gather with a byte counter, attached through its public `set_custom_all_gather`."""

    def __init__(self) -> None:
        self.received = self.calls = 0

    @classmethod
    def attach(cls, model: nn.Module) -> Self:
        """One counter for all FSDP groups of a model."""
        counter = cls()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(counter)  # type: ignore[arg-type]
        return counter

    def reset(self) -> None:
        """Start counting anew."""
        self.received = self.calls = 0

    def received_per_round(self, model: nn.Module) -> float:
        """Bytes from other ranks for each gather of the whole model; 0 on one rank, where nothing travels."""
        groups = sum(isinstance(module, FSDPModule) for module in model.modules())
        return self.received * groups / self.calls if self.calls else 0.0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The output buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002 - FSDP2's signature
    ) -> Any:
        """Gather, counting what came from other ranks."""
        self.received += output_tensor.nbytes - input_tensor.nbytes
        self.calls += 1
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


def bytes_at_rest(model: nn.Module) -> dict[str, float]:
    """Bytes this rank stores for each element of its shards: of all parameters, and of the linear weights alone."""
    linear = {id(child.weight) for child in model.modules() if isinstance(child, nn.Linear)}
    linear -= {id(child.weight) for child in model.modules() if isinstance(child, nn.Embedding)}
    stored = {"all": [0, 0], "linear": [0, 0]}
    with torch.no_grad():
        for param in model.parameters():
            local = param.to_local() if isinstance(param, DTensor) else param
            parts = local.parts().values() if isinstance(local, QuantizedTensor) else [local]
            size = sum(part.untyped_storage().nbytes() for part in parts)
            for kind in ("all", "linear") if id(param) in linear else ("all",):
                stored[kind][0] += size
                stored[kind][1] += local.numel()
    return {f"bytes_per_param_{kind}": size / max(numel, 1) for kind, (size, numel) in stored.items()}


def saved_weight_bytes(checkpoint: str, prefix: str) -> int:
    """Bytes of the entries below `prefix` in a checkpoint's files."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    return sum(info.length for index, info in metadata.storage_data.items() if index.fqn.startswith(prefix))
