"""Agreement on tensor-wide scales: all shards of a weight hold the same value, by one fused all-reduce a group.

A weight is cut along the mesh dims whose placement is a Shard; those are the dims over which its shards must agree
(replicas hold equal bytes already). Values of all weights are stacked and reduced together, once for each distinct
process group: 1 all-reduce for FSDP and HSDP, 2 for FSDP x TP. Which group that is, is read from the DTensor at the
moment of use and stored nowhere.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.all_gather import AllGatherHooks

__all__ = ["local_of", "max_over_shards", "sync_scales"]


def sync_scales(model_or_params: torch.nn.Module | Iterable[Tensor]) -> int:
    """Make every tensor-wide scale agreed, by re-encoding the shards whose scale differs onto the largest one.

    Call it on all ranks, after writing to shards by hand (an init function, `copy_` of a dense shard). Shards that
    hold the largest scale keep their bytes, and so does everything that was agreed already. Shards of zeros only
    never decide a scale. A weight that still carries its high-precision initial value is re-encoded from that.

    Args:
        model_or_params: a module, or parameters (DTensors or plain; what is not quantized, or has no tensor-wide
            scale, is passed over).

    Returns:
        The number of all-reduces: one for each distinct group with anything to agree on, 0 in a single process.
    """
    params = model_or_params.parameters() if isinstance(model_or_params, torch.nn.Module) else model_or_params
    wide = [param for param in params if tensor_wide_of(param) is not None]
    if not wide:
        return 0
    if any(param.is_meta for param in wide):
        raise ValueError(
            "sync_scales: the parameters are on the meta device; call to_empty() and initialise or load them first"
        )
    with torch.no_grad():
        claims = torch.stack([local_of(param).scale_claim() for param in wide])  # type: ignore[attr-defined]  # [params, 2]
        agreed, collectives = max_over_shards(claims, wide)
        if collectives:
            for param, claim in zip(wide, agreed, strict=True):
                local_of(param).adopt_scale(claim)  # type: ignore[attr-defined]
    return collectives


def tensor_wide_of(param: Tensor) -> str | None:
    """The name of a parameter's tensor-wide scale; None where it has none, or is not quantized."""
    local: Any = local_of(param)
    return local.tensor_wide() if isinstance(local, AllGatherHooks) else None  # type: ignore[attr-defined]


def local_of(param: Tensor) -> Tensor:
    """The local tensor of a DTensor, or the tensor itself, without autograd history."""
    with torch.no_grad():
        return param.to_local() if isinstance(param, DTensor) else param.detach()


def max_over_shards(values: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Elementwise maximum of each row of `values` over the shards of its parameter.

    Args:
        values: fp32 [len(params), columns], this rank's values.
        params: the parameters they belong to, in the same order on every rank.

    Returns:
        The maxima (a new tensor), and the number of all-reduces it took.
    """
    groups: dict[dist.ProcessGroup, list[int]] = {}
    for row, param in enumerate(params):
        for group in shard_groups(param):
            groups.setdefault(group, []).append(row)
    result = values.clone()
    for group, rows in groups.items():
        fused = result[rows].contiguous()
        dist.all_reduce(fused, op=dist.ReduceOp.MAX, group=group)
        result[rows] = fused
    return result, len(groups)


def shard_groups(param: Tensor) -> list[dist.ProcessGroup]:
    """The groups over which the shards of a parameter are spread, one a sharded mesh dim with more than one rank."""
    if not isinstance(param, DTensor):
        return []
    mesh = param.device_mesh
    return [
        mesh.get_group(dim)
        for dim, placement in enumerate(param.placements)
        if placement.is_shard() and mesh.size(dim) > 1
    ]
