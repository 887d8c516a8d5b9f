"""Which mesh dims cut the weights of a model beside those of FSDP.

    tensor parallelism    cuts weights between the ranks of a group, which get the same batches
    expert parallelism    shares experts out: cuts [E, N, K] along E, between ranks that get batches of their own

Experts often lie on a mesh of their own, on which FSDP has fewer ranks than for all else. What counts is the parameter:
a dim of its mesh that cuts it along E is one of expert parallelism, unless it cuts other weights, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate


@dataclass(frozen=True, eq=False)
class Cut:
    """How one parameter at rest is cut beside FSDP.

    Attributes:
        param: the parameter.
        tensor: mesh dims that cut it, but not between experts.
        experts: mesh dims that cut it between experts.
        holds_experts: whether it has an entry for each expert.
    """

    param: DTensor
    tensor: tuple[int, ...]
    experts: tuple[int, ...]
    holds_experts: bool


def cuts(model: nn.Module) -> Iterator[Cut]:
    """The cuts of all parameters that are DTensors, each parameter once."""
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    wrapped = {id(param) for group in groups for param in group.parameters()}
    seen: set[int] = set()
    for owner in model.modules():
        params: Sequence[Any] = [*owner._parameters.values()]
        for param in params:
            if not isinstance(param, DTensor) or id(param) in seen:
                continue
            seen.add(id(param))
            holds = _holds_experts(owner, param)
            dims = _dims_beside_fsdp(param, fsdp=id(param) in wrapped)
            experts = tuple(dim for dim in dims if holds and getattr(param.placements[dim], "dim", None) == 0)
            yield Cut(param, tuple(dim for dim in dims if dim not in experts), experts, holds)


def shares_out_experts(model: nn.Module) -> bool:
    """Whether some ranks have other experts than others, beside FSDP; the same on all ranks.

    Also where FSDP leaves the experts alone (`ignored_params`): then they are on another mesh than all else.
    """
    found = list(cuts(model))
    meshes: tuple[list[Any], list[Any]] = ([], [])
    for cut in found:
        meshes[cut.holds_experts].append(cut.param.device_mesh)
    others, own = meshes
    return any(cut.experts for cut in found) or bool(others and any(mesh not in others for mesh in own))


def _holds_experts(owner: nn.Module, param: DTensor) -> bool:
    """Whether it is a weight [E, N, K], or has as many entries as one beside it (the biases of experts, [E, N])."""
    beside = [one for one in owner._parameters.values() if one is not None and one.ndim == 3]
    return param.ndim > 0 and any(one.shape[0] == param.shape[0] for one in beside)


def _dims_beside_fsdp(param: DTensor, *, fsdp: bool) -> list[int]:
    """The mesh dims that cut a parameter at rest, without those of FSDP.

    FSDP comes first in a mesh, with one dim, or with two where the first is replicated (HSDP).
    """
    placements: Sequence[Any] = param.placements
    hybrid = len(placements) > 1 and isinstance(placements[0], Replicate)
    first = (2 if hybrid else 1) if fsdp else 0
    return [number for number in range(first, len(placements)) if hasattr(placements[number], "dim")]
