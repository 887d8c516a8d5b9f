"""Full, plain tensors in place of what FSDP's gather leaves of a stage's parameters.

    pieces of tensor parallelism    gathered over the mesh dims that are left, one parameter after the other
    storage="high_precision"        the dense values of all shards, since FSDP's own gather quantizes them

A layer computes with them what it computes in one process. Changes go back into the pieces, from where FSDP's own
write-back takes them; those of high-precision storage go into the shards with the result.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_hooks.torch_private import compute_local_shape_and_global_offset, local_of
from fsdp_hooks.versions import count_writes
from layerwise.stages.stage import Stage
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.tensor.quantized_tensor import QuantizedTensor

Place = tuple[nn.Module, str]  # the owner of a parameter, and its name there


def high_precision(stage: Stage) -> dict[Place, nn.Parameter]:
    """Return the targets of a stage with storage="high_precision"; call it before the stage is gathered."""
    return {
        (target.owner, target.attribute): target.param
        for target in stage.targets
        if isinstance(local_of(target.param), HighPrecisionWeight)
    }


@contextmanager
def whole(stage: Stage, dense: Mapping[Place, nn.Parameter]) -> Iterator[None]:
    """Inside, each parameter is a full tensor and no DTensor; changes are stored unless the body raises. Collective.

    Args:
        stage: gathered by FSDP, if that shards it.
        dense: `high_precision(stage)` from before.

    Raises:
        ValueError: a parameter is gone or has another shape than before; nothing was stored.
    """
    stood: list[tuple[nn.Module, str, nn.Parameter]] = []
    full: dict[int, nn.Parameter] = {}  # by the parameter that it stands for: tied ones are gathered once
    try:
        for owner in stage.everything():
            for name, param in list(owner._parameters.items()):
                rest = dense.get((owner, name))
                if param is None or (rest is None and not isinstance(param, DTensor)):
                    continue
                if id(param) not in full:
                    full[id(param)] = nn.Parameter(_gather(param, rest), requires_grad=False)
                stood.append((owner, name, param))
                owner._parameters[name] = full[id(param)]
        yield
        for param, values in [(param, _check(owner, name, param)) for owner, name, param in stood]:
            _store(values, param)
    finally:
        for owner, name, param in stood:
            owner._parameters[name] = param


@torch.no_grad()
def _gather(param: nn.Parameter, rest: nn.Parameter | None) -> Tensor:
    """Return all values of a parameter, in new memory; `rest`: the shards, if they are dense and gathers are not."""
    if rest is None:
        assert isinstance(param, DTensor)
        local = local_of(param).detach()
        if isinstance(local, QuantizedTensor):  # pieces may have tensor-wide scales of their own
            local = local.dequantize()
        mesh, places = param.device_mesh, param.placements
        pieces = DTensor.from_local(local, mesh, places, run_check=False, shape=param.shape, stride=param.stride())
        full: Tensor = pieces.full_tensor()
        return full.clone() if full.data_ptr() == local.data_ptr() else full  # a replica, or a mesh of one rank
    shard = local_of(rest)
    assert isinstance(shard, HighPrecisionWeight)
    values = shard.dense.detach()
    if isinstance(rest, DTensor):
        values = DTensor.from_local(
            values, rest.device_mesh, rest.placements, run_check=False, shape=rest.shape, stride=rest.stride()
        ).full_tensor()
    return values.to(param.device, param.dtype, copy=True)  # mixed precision gathers in another dtype


def _check(owner: nn.Module, name: str, param: nn.Parameter) -> Tensor:
    """Return the values that stand in the place of a parameter at the end."""
    now = owner._parameters[name]
    if now is None or now.shape != param.shape:
        found = "is gone" if now is None else f"has shape {tuple(now.shape)}"
        raise ValueError(f"{name} of a {type(owner).__name__} {found}, expected shape {tuple(param.shape)}")
    return now.detach()


@torch.no_grad()
def _store(values: Tensor, param: nn.Parameter) -> None:
    """Put this rank's piece of dense values into a parameter; quantized ones get theirs with the result."""
    local = local_of(param)
    if isinstance(local, QuantizedTensor | HighPrecisionWeight) or not isinstance(param, DTensor):
        return
    sizes, starts = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    piece = values[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
    local.copy_(piece)
    # A write into a local tensor is not counted for the DTensor around it, so a backward that saved it would not
    # notice.
    count_writes([param])
