"""Parameters that others build anew by their class: `type(p)(value, **p.__dict__)`.

For a plain parameter that is nn.Parameter(value, requires_grad=...). The class of a quantized parameter is that of its
tensor, and what it consists of stands in its `__dict__`. accelerate does this wherever it moves a parameter
(init_empty_weights, init_on_device, cpu_offload, dispatch_model, set_module_tensor_to_device), with its own values on
another device, and without its `__dict__` where it exchanges values:

    type(p)(moved, **p.__dict__)                the moved parameter
    type(p)(moved, requires_grad=...)           the same
    type(p)(dense, **p.__dict__)                the dense values under the recipe of p
    type(p)(dense, requires_grad=...)           raises: nobody says by which recipe
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.torch_private import asking_package
from qtensor.spec.registry import describe

# What a parameter consists of beside its parts; the value brings its own.
CONTENTS = frozenset(
    {"recipe", "_lens", "_sharding", "_preserved", "_partners", "_note", "_turned", "_sign", "_fsdp_shard_rows"}
    | {"dense", "agreement", "padded_rows", "requires_grad", "payload", "scale", "global_scale", "amax_history"}
)


def make_anew(kind: type[Any], value: Tensor, remembered: Mapping[str, Any], build: Any) -> torch.nn.Parameter:
    """Return what `kind(value, **remembered)` returns.

    Args:
        kind: the class of the tensors of this storage, QuantizedTensor or HighPrecisionWeight.
        value: one of these, or dense.
        remembered: the `__dict__` of a parameter, and requires_grad; attributes that somebody gave it are kept.
        build: (dense, recipe) -> one of `kind`.

    Raises:
        TypeError: `value` is dense, and `remembered` holds no recipe; or it is of another storage, or a DTensor.
    """
    recipe = remembered.get("recipe")
    if not isinstance(value, kind):
        _check_dense(kind, value, recipe)
        value = build(value.detach(), recipe)
        value._partners = remembered.get("_partners")  # type: ignore[attr-defined] # once sync_scales has agreed on it
    param = torch.nn.Parameter(value.detach(), requires_grad=remembered.get("requires_grad", True))
    for name in remembered.keys() - CONTENTS:
        setattr(param, name, remembered[name])
    return param


def address(memory: Tensor) -> int:
    """Return what `data_ptr()` answers for a weight with bytes in `memory`: 0 to whoever would read values there.

    accelerate takes an address for the identity of a parameter, and would put one weight in the place of all others.
    """
    return memory.data_ptr() if asking_package() == "accelerate" else 0


def _check_dense(kind: type[Any], value: Any, recipe: Any) -> None:
    foreign = hasattr(value, "recipe")  # a weight of the other storage
    if foreign or isinstance(value, DTensor):
        what = describe(value.shape, value.recipe) if foreign else f"a DTensor {tuple(value.shape)}"
        raise TypeError(
            f"{kind.__name__}({type(value).__name__}): {what} can not take the place of a parameter of this class by "
            "calling it; assign nn.Parameter(value) to the module"
        )
    if recipe is None:
        raise TypeError(
            f"{kind.__name__} of a dense tensor {tuple(value.shape)}: nothing says by which recipe. accelerate's "
            "set_module_tensor_to_device does this with dense values, as do disk_offload and load_checkpoint_in_model "
            'with a device_map; build the model inside torch.device("meta") and quantized_model_init, call '
            "model.to_empty(device=...), and load by model.load_state_dict, or by dcp.load; or give the quantized "
            "value, quantize(value, recipe)"
        )
