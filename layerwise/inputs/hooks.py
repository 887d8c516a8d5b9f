"""Calls a layer with the hooks that its user gave it, and without FSDP's.

FSDP's hooks would gather and shard the layer's weights around every call; here they are held for all calls together.
Any other hook is part of what the layer computes: one that scales its output, say, changes what the next layer gets.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from fsdp_hooks.torch_private import hook_tables

FSDP = "torch.distributed.fsdp."


def call_without_fsdp(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What `layer(*args, **kwargs)` returns, with its forward hooks except those of FSDP."""
    for hook, with_kwargs in _hooks_of(layer, "forward_pre_hooks"):
        changed = hook(layer, args, kwargs) if with_kwargs else hook(layer, args)
        if changed is not None and with_kwargs:
            args, kwargs = changed
        elif changed is not None:
            args = changed if isinstance(changed, tuple) else (changed,)
    output = layer.forward(*args, **kwargs)
    for hook, with_kwargs in _hooks_of(layer, "forward_hooks"):
        changed = hook(layer, args, kwargs, output) if with_kwargs else hook(layer, args, output)
        output = output if changed is None else changed
    return output


def _hooks_of(layer: nn.Module, kind: str) -> list[tuple[Any, bool]]:
    """The hooks of a kind in order, each with whether it gets keyword arguments."""
    tables = hook_tables(layer)
    with_kwargs = tables[f"{kind}_with_kwargs"]
    return [
        (hook, key in with_kwargs)
        for key, hook in tables[kind].items()
        if not str(getattr(hook, "__module__", "")).startswith(FSDP)
    ]
