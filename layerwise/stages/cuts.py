"""Which mesh dims cut the weights of a model beside those of FSDP.

    tensor parallelism    cuts weights between the ranks of a group, which get the same batches
    expert parallelism    shares experts out: cuts [E, N, K] along E, between ranks that get batches of their own

Experts often lie on a mesh of their own, on which FSDP has fewer ranks than for all else. What counts is the parameter:
a dim of its mesh that cuts it along E is one of expert parallelism. If the same dim cuts other weights, too, the
ranks along it get the same batches (tensor_parallel.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from fsdp_hooks.torch_private import managed


@dataclass(frozen=True, eq=False)
class ParameterCut:
    """How one parameter at rest is cut beside FSDP.

    Attributes:
        param: the parameter.
        tensor: mesh dims that cut it, but not between experts.
        experts: mesh dims that cut it between experts.
    """

    param: DTensor
    tensor: tuple[int, ...]
    experts: tuple[int, ...]


def cuts(model: nn.Module) -> Iterator[ParameterCut]:
    """Yield the cuts of all parameters that are DTensors, each parameter once."""
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    sharded = {(id(owner), name) for group in groups for owner, name in managed(group)}
    seen: set[int] = set()
    for owner in model.modules():
        params: Sequence[tuple[str, Any]] = [*owner._parameters.items()]
        for name, param in params:
            # Tied parameters are registered more than once.
            if not isinstance(param, DTensor) or id(param) in seen:
                continue
            seen.add(id(param))
            holds = _holds_experts(owner, param)
            dims = _dims_beside_fsdp(param, fsdp=(id(owner), name) in sharded)
            # Dim 0 of [E, N, K] runs over the experts.
            experts = tuple(dim for dim in dims if holds and getattr(param.placements[dim], "dim", None) == 0)
            yield ParameterCut(param, tuple(dim for dim in dims if dim not in experts), experts)


def shares_out_experts(model: nn.Module) -> bool:
    """Return whether ranks hold different experts, beside FSDP; the same answer on all ranks."""
    return any(cut.experts for cut in cuts(model))


def _holds_experts(owner: nn.Module, param: DTensor) -> bool:
    """Return whether it is a weight [E, N, K], or has as many entries as one beside it (the biases of experts, [E, N]).

    Weights of convolutions look like it; what follows from it (a forward more) does them no harm.
    """
    beside = [one for one in owner._parameters.values() if one is not None and one.ndim == 3]
    return param.ndim > 0 and any(one.shape[0] == param.shape[0] for one in beside)


def _dims_beside_fsdp(param: DTensor, *, fsdp: bool) -> list[int]:
    """Return the mesh dims that cut a parameter at rest, without those of FSDP.

    FSDP comes first in a mesh, with one dim, or with two if the first is replicated (HSDP).
    """
    placements: Sequence[Any] = param.placements
    hybrid = len(placements) > 1 and isinstance(placements[0], Replicate)
    first = (2 if hybrid else 1) if fsdp else 0
    return [number for number in range(first, len(placements)) if hasattr(placements[number], "dim")]
