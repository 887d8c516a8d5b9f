"""`share_scales`: the user says which weights share one scale, so that what an engine runs as one is quantized as one.

    scale of each = the scale that the largest magnitude among all of them asks for

Each weight knows by name whose scale it shares (`Partners`); copies, shards and state dict entries of it know, too.
What agrees on scales over shards then agrees over partners, too, by the same all-reduce (see the story in
qtensor/scales/__init__.py). Checkpoints do not hold it: shared scales are stored as any others.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_hooks.ranks.scale_partners import Partners
from fsdp_hooks.torch_private import local_of
from fsdp_hooks.wrappers import plain_modules
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.spec.registry import tensor_wide
from qtensor.tensor.quantized_tensor import QuantizedTensor

Weight = QuantizedTensor | HighPrecisionWeight


def share_scales(model: nn.Module, groups: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Let weights share one tensor-wide scale (NVFP4's global scale, that of Float8 with granularity="tensor").

    Call it once the model is built under `quantized_model_init` or `quantize_`, before `fully_shard`; it writes
    nothing. From then on `fsdp_hooks.sync_scales`, `MasterWeightOptimizer` and loads of dense values give the weights
    of a group the scale that the largest magnitude among all of them asks for, whatever their sharding and without
    another collective. So linears that engines fuse are trained and stored under the scale with which they are
    exported. `merge_` does the same. What writes weights one by one (their initialisation, `copy_`, an ordinary
    optimizer, a load of some of them, a checkpoint in which they share none) leaves each with a scale of its own: call
    `sync_scales`.

    Args:
        model: with quantized weights, in either storage, on any device.
        groups: for each, the names of the modules whose weights share a scale, with or without steps into wrappers;
            `dcp_adapters.fused_linears(model)` gives those that engines fuse. All others share none, also where an
            earlier call said so.

    Returns:
        For each group that shares a scale, the names of its parameters. Groups that are dense, or whose recipe has no
        tensor-wide scale, have none to share.

    Raises:
        ValueError: a name is that of no module with a weight; some of a group are not quantized, or not under the same
            recipe and in the same storage; a weight is in two groups, or sharded already. Nothing has been changed.
        TypeError: a group is a string.

    Example:
        ```python
        >>> model = nn.ModuleDict({"gate": nn.Linear(64, 64), "up": nn.Linear(64, 64)})
        >>> quantize_(model, NVFP4BlockScaling())
        >>> share_scales(model, [["gate", "up"]])
        [('gate.weight', 'up.weight')]
        >>> sync_scales(model)  # makes them equal
        >>> torch.equal(model["gate"].weight.global_scale, model["up"].weight.global_scale)
        True
        ```
    """
    shared: dict[int, Partners] = {}
    taken = []
    for group in groups:
        weights = _weights(model, group)
        if len(weights) < 2:
            continue
        names = tuple(weights)
        for name, weight in weights.items():
            if id(weight) in shared:
                raise ValueError(
                    f"share_scales: {name} is in the group of {' and '.join(shared[id(weight)].names)} and in that of "
                    f"{' and '.join(names)}; give one group that has all of them"
                )
        shared |= {id(weight): Partners(name, names) for name, weight in weights.items()}
        taken.append(names)
    # copies that FSDP holds of the weight know the partners they were made with
    for name, param in model.named_parameters():
        if isinstance(param, DTensor) and getattr(local_of(param), "_partners", None) is not None:
            raise ValueError(
                f"share_scales: {name} is a DTensor already, and shares a scale since an earlier call, which nothing "
                "would change now; call it before fully_shard"
            )
    every: Iterable[Any] = model.parameters()
    for param in every:
        if isinstance(param, Weight) and param._partners != (partners := shared.get(id(param))):
            param._partners = partners
            if isinstance(param, HighPrecisionWeight):
                param.agreement.claims = None  # it was made with others
    return taken


def _weights(model: nn.Module, group: Sequence[str]) -> dict[str, Any]:
    """Return name -> weight of a group, each weight once; empty if there is no tensor-wide scale to share."""
    if isinstance(group, str):
        raise TypeError(f"share_scales: {group!r} is a string; a group is a list of the names of modules")
    found: dict[str, Any] = {}
    modules = {**dict(plain_modules(model)), **dict(model.named_modules())}
    for fqn in group:
        weight = getattr(modules.get(fqn), "weight", None)
        name = f"{fqn}.weight".lstrip(".")
        if not isinstance(weight, nn.Parameter):
            raise ValueError(f"share_scales: the model has no parameter {name}; give names of named_modules()")
        if isinstance(weight, DTensor):
            raise ValueError(f"share_scales: {name} is a DTensor already; call it before fully_shard")
        if not any(weight is other for other in found.values()):
            found[name] = weight
    kinds = {name: _kind(weight) for name, weight in found.items()}
    first = next(iter(kinds), "")
    for name, kind in kinds.items():
        if kind != kinds[first]:
            raise ValueError(
                f"share_scales: {first} is {kinds[first]} and {name} is {kind}; quantize all of the group alike, or "
                "leave it out of `groups`"
            )
    # a scale of its own for each row or block is nothing to share
    shares = all(isinstance(weight, Weight) and tensor_wide(weight.recipe) for weight in found.values())
    return found if shares else {}


def _kind(weight: Any) -> str:
    if not isinstance(weight, Weight):
        return "not quantized"
    storage = "high_precision" if isinstance(weight, HighPrecisionWeight) else "quantized"
    return f'{weight.recipe} with storage="{storage}"'
