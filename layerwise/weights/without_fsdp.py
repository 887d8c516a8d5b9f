"""Calls of modules whose weights are held, with FSDP's hooks replaced by the casts of its mixed precision.

FSDP's hooks would gather and shard the weights around every call; here they are held for all calls together. Nor do
they expect a call inside of a call: at the end of the outer one they would shard weights that were to be kept.
What else they do is part of what a module computes, as all other hooks are: under mixed precision they cast inputs
and outputs. So in their places stand hooks that only cast, between the same neighbours.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_hooks.torch_private import apply_to_tensors, hook_tables, mixed_precision
from layerwise.weights.own_hooks import KINDS, is_fsdp


@contextmanager
def without_fsdp(layer: nn.Module) -> Iterator[None]:
    """Inside, a module whose weights are held is called without FSDP's hooks, but with what these cast."""
    tables = hook_tables(layer)
    places = [(kind, key, hook) for kind in KINDS for key, hook in tables[kind].items() if is_fsdp(hook)]
    casts = dict(zip(KINDS, _casts(layer), strict=True)) if places else {}
    try:
        for kind, key, _ in places:
            # Under the key of the hook it stands for, so that all other hooks keep their neighbours.
            tables[kind][key] = casts[kind]
        yield
    finally:
        for kind, key, hook in places:
            tables[kind][key] = hook


def _casts(layer: nn.Module) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Make the hooks that cast the inputs and the output of an FSDP module as its policy says."""
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
