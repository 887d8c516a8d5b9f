"""Calls a layer as its parent would, without FSDP's gathering.

FSDP's hooks would gather and shard the layer's weights around every call; here they are held for all calls together.
What else they do is part of what the layer computes, as all other hooks are: under mixed precision they cast inputs
and outputs. So in their places stand hooks that only cast, between the same neighbours.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_hooks.torch_private import apply_to_tensors, group_size, hook_tables, mixed_precision
from layerwise.weights.own_hooks import KINDS, is_fsdp

EACH_OF_A_GROUP_CASTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def check_groups(layers: Sequence[tuple[str, nn.Module]]) -> None:
    """Check that what a layer casts does not depend on where it stands in a group of `fully_shard([...])`.

    Raises:
        NotImplementedError: this torch casts the inputs of a group's first module and the outputs of its last.
    """
    for name, layer in layers if not EACH_OF_A_GROUP_CASTS else ():
        if not isinstance(layer, FSDPModule) or group_size(layer) == 1:
            continue
        policy = mixed_precision(layer)
        if policy.output_dtype is not None or (policy.cast_forward_inputs and policy.param_dtype is not None):
            raise NotImplementedError(
                f"calibrate: layer {name} shares its fully_shard call with other modules, under {policy}; "
                f"torch {torch.__version__} casts the inputs of the first of them and the output of the last, which is "
                "not known of a layer alone. Call fully_shard for each layer, take torch 2.13 or newer, or layers=()"
            )


def call_without_fsdp(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What `layer(*args, **kwargs)` returns, with FSDP's hooks replaced by the casts of its mixed precision."""
    with _without_fsdp(layer):
        return layer(*args, **kwargs)


@contextmanager
def _without_fsdp(layer: nn.Module) -> Iterator[None]:
    tables = hook_tables(layer)
    places = [(kind, key, hook) for kind in KINDS for key, hook in tables[kind].items() if is_fsdp(hook)]
    casts = dict(zip(KINDS, _casts(layer), strict=True)) if places else {}
    try:
        for kind, key, _ in places:
            tables[kind][key] = casts[kind]
        yield
    finally:
        for kind, key, hook in places:
            tables[kind][key] = hook


def _casts(layer: nn.Module) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The hooks that cast the inputs and the output of an FSDP module as its policy says."""
    policy = mixed_precision(layer)
    before = policy.param_dtype if policy.cast_forward_inputs else None

    def inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if before is None else (_cast(args, before), _cast(kwargs, before))

    def output(_: nn.Module, args: tuple[Any, ...], returned: Any) -> Any:
        return None if policy.output_dtype is None else _cast(returned, policy.output_dtype)

    return inputs, output


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return apply_to_tensors(partial(_cast_tensor, dtype), value)


def _cast_tensor(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
