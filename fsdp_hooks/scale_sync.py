"""Agreement on shared scales: all shards that share a scale hold the same value, by one fused all-reduce a group.

A mesh dim over which shards must agree is one whose placement cuts the weight along a dim that some scale does not
extend along: every sharded dim for a tensor-wide scale, the one that cuts K for a scale a row, none for scales of
blocks (replicas hold equal bytes already). The values of all weights are laid end to end and reduced together, once for
each distinct process group: 1 all-reduce for FSDP and HSDP, up to 2 for FSDP x TP. Which group that is, is read from
the DTensor at the moment of use and stored nowhere.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_hooks.all_gather import AllGatherHooks

__all__ = ["SharesScales", "cuts_of", "groups_sharing", "local_of", "max_over_groups", "sync_scales"]


class SharesScales:
    """What `sync_scales` asks of a shard, in this order: whether pieces share a scale, its claim, and to adopt."""

    def shares_scale_along(self, dim: int) -> bool:
        """Whether pieces cut along tensor dim `dim` have a scale in common."""
        raise NotImplementedError

    def scale_claim(self) -> Tensor:
        """fp32 [n]: what this shard brings; the maximum over all shards decides. n is the same on all of them."""
        raise NotImplementedError

    def adopt_scale(self, agreed: Tensor) -> None:
        """Re-encode under what was agreed on (fp32 [n]); leaves the bytes alone where they fit already."""
        raise NotImplementedError


def sync_scales(model_or_params: torch.nn.Module | Iterable[Tensor]) -> int:
    """Make every shared scale agreed, by re-encoding the shards whose scale differs onto the largest one.

    Call it on all ranks, after writing to shards by hand (an init function, `copy_` of a dense shard), and with
    storage="high_precision" after every optimizer step. Shards that hold the largest scale keep their bytes, and so
    does everything that was agreed already. Shards of zeros only never decide a scale. A weight that still carries its
    high-precision initial value is re-encoded from that.

    Args:
        model_or_params: a module, or parameters (DTensors or plain; what is not quantized, or shares no scale with
            other shards, is passed over).

    Returns:
        The number of all-reduces: one for each distinct group with anything to agree on, 0 in a single process.

    Raises:
        ValueError: such parameters are on the meta device, or are gathered.
    """
    params = parameters_at_rest(model_or_params) if isinstance(model_or_params, torch.nn.Module) else model_or_params
    params = [param for param in params if _can_share(param)]
    if any(_is_gathered(param) for param in params):
        raise ValueError(
            "sync_scales: the parameters are those gathered for a forward, not the shards; call reshard() on their "
            "FSDP modules, and take model.parameters() anew"
        )
    shared = [(param, groups) for param in params if (groups := groups_sharing(param))]
    if any(param.is_meta for param in params):
        raise ValueError(
            "sync_scales: the parameters are on the meta device; call to_empty() and initialise or load them first"
        )
    with torch.no_grad():
        shards: list[Any] = [local_of(param) for param, _ in shared]
        agreed, collectives = max_over_groups([shard.scale_claim() for shard in shards], [g for _, g in shared])
        for shard, claim in zip(shards, agreed, strict=True):
            shard.adopt_scale(claim)
    return collectives


def parameters_at_rest(module: torch.nn.Module) -> Iterator[Tensor]:
    """The parameters of a module, sharded: a forward without backward leaves some gathered, such as a root's own."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()
    yield from module.parameters()


def _is_gathered(param: Tensor) -> bool:
    local = local_of(param)
    return isinstance(local, AllGatherHooks) and local.arrangement.shards is not None


def _can_share(param: Tensor) -> bool:
    local = local_of(param)
    return isinstance(local, SharesScales) and any(local.shares_scale_along(dim) for dim in range(param.ndim))


def local_of(param: Tensor) -> Tensor:
    """The local tensor of a DTensor, or the tensor itself, without autograd history."""
    with torch.no_grad():
        return param.to_local() if isinstance(param, DTensor) else param.detach()


def max_over_groups(
    values: Sequence[Tensor], groups: Sequence[Sequence[dist.ProcessGroup]]
) -> tuple[list[Tensor], int]:
    """Elementwise maximum of each tensor over the groups that belong to it.

    Args:
        values: fp32, 1-D, on one device; the same order and sizes on every rank of a group.
        groups: for each of them the groups it is reduced over, none or more.

    Returns:
        The maxima (the tensors themselves where there is no group), and the number of all-reduces it took.
    """
    result = list(values)
    members: dict[dist.ProcessGroup, list[int]] = {}
    for index, own in enumerate(groups):
        for group in own:
            members.setdefault(group, []).append(index)
    for group, indices in members.items():
        fused = torch.cat([result[index] for index in indices])
        dist.all_reduce(fused, op=dist.ReduceOp.MAX, group=group)
        for index, piece in zip(indices, fused.split([result[index].numel() for index in indices]), strict=True):
            result[index] = piece
    return result, len(members)


def groups_sharing(param: Tensor) -> list[dist.ProcessGroup]:
    """The groups over which the shards of a parameter share a scale; empty for one that has no such scale."""
    local = local_of(param)
    if not isinstance(local, SharesScales):
        return []
    return [group for dim, group in cuts_of([param])[0] if local.shares_scale_along(dim)]


def cuts_of(params: Sequence[Tensor]) -> list[list[tuple[int, dist.ProcessGroup]]]:
    """For each parameter: (tensor dim, group) of every mesh dim that shards it over more than one rank.

    Parameters of the same layout get the same list.
    """
    known: dict[Any, list[tuple[int, dist.ProcessGroup]]] = {}
    found = []
    for param in params:
        layout = (param.device_mesh, param.placements, param.ndim) if isinstance(param, DTensor) else None
        if layout not in known:
            known[layout] = _cuts(param)
        found.append(known[layout])
    return found


def _cuts(param: Tensor) -> list[tuple[int, dist.ProcessGroup]]:
    if not isinstance(param, DTensor):
        return []
    mesh = param.device_mesh
    return [
        (placement.dim % param.ndim, mesh.get_group(number))
        for number, placement in enumerate(param.placements)
        # FSDP over TP on the same dim is a strided placement, which answers False to is_shard()
        if hasattr(placement, "dim") and mesh.size(number) > 1
    ]
