"""Calls a layer as its parent would, without FSDP's gathering."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_hooks.torch_private import group_size, mixed_precision
from layerwise.stages.caller import caller
from layerwise.weights.without_fsdp import without_fsdp

# Before torch 2.13, FSDP casts the inputs of a group's first module and the outputs of its last, and no others.
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
                f"{caller()}: layer {name} shares its fully_shard call with other modules, under {policy}; "
                f"torch {torch.__version__} casts the inputs of the first of them and the output of the last, which is "
                "not known of a layer alone. Call fully_shard for each layer, take torch 2.13 or newer, or layers=()"
            )


def call_without_fsdp(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a layer, with FSDP's hooks replaced by the casts of its mixed precision: its weights are held already."""
    with without_fsdp(layer):
        return layer(*args, **kwargs)
