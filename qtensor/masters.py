"""Masters: the fp32 value behind a low-precision parameter, and whether the parameter still holds what it wrote.

A parameter can be written by others than the optimizer - a checkpoint loaded after the optimizer was built, a weight
copied in by hand. Its master is stale then, and the next step would silently undo that write. So the optimizer keeps a
digest of the bytes it wrote, and a parameter whose bytes are others gives its master a new start. Only the bytes can
tell: version counters miss writes through aliases such as those of a state dict, and FSDP moves uneven shards to new
storage without writing them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.digest import digest
from fsdp_hooks.scale_sync import local_of
from qtensor.tensor import QuantizedTensor

__all__ = ["digest_of", "master_of", "outside_writes", "refill"]


def outside_writes(records: Mapping[Tensor, Tensor]) -> list[Tensor]:
    """The parameters whose bytes are no longer those of their recorded digests; one host sync for all of them.

    One whose preserved initial value was not written along (a write into its parts) loses that: it is another weight's.
    """
    if not records:
        return []
    now = torch.stack([digest_of(param) for param in records])
    same = (now == torch.stack(list(records.values()))).tolist()  # [params, 2]
    changed = []
    for param, (bytes_kept, init_kept) in zip(records, same, strict=True):
        local = local_of(param)
        if bytes_kept:
            continue
        if init_kept and isinstance(local, QuantizedTensor):
            local.init_value = None
        changed.append(param)
    return changed


def digest_of(param: Tensor) -> Tensor:
    """int64 [2]: digests of all bytes of a parameter on this rank, and of its preserved initial value (0 for none)."""
    local = local_of(param)
    init = local.init_value if isinstance(local, QuantizedTensor) else None
    held = digest(local.parts().values() if isinstance(local, QuantizedTensor) else [local])
    return torch.stack([held, torch.zeros_like(held) if init is None else digest([init])])


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
