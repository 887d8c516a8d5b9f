"""Tells, once a process for each device and reason, that products of quantized inputs are emulated where they are slow.

On a CPU emulation is what is meant: nothing multiplies these formats there. On a GPU the recipe was probably chosen for
its speed, and an fp32 product takes far longer than the bf16 one of dense inputs.
"""

import contextlib
import re
import warnings

import torch
from torch import Tensor

from fsdp_hooks.torch_private import constant_in_graphs

MEANT_ON = ("cpu", "meta")
_told: set[tuple[str, str, str]] = set()


def tell_of_emulation(device: torch.device, name: str, reason: str) -> None:
    """Warn that products of a recipe of this name are emulated on a device.

    Args:
        device: of the input.
        name: of the recipe's class.
        reason: why, as of `scaled_mm_support`; "" inside of a graph, where the shapes are no numbers.
    """
    if device.type not in MEANT_ON:
        _warn(device.type, name, reason)


@constant_in_graphs  # a warning is no operation of a graph
def _warn(kind: str, name: str, reason: str) -> None:
    key = kind, name, re.sub(r"=\d+", "", reason)  # once for all shapes
    if key in _told:
        return
    _told.add(key)
    warnings.warn(
        f'{name}(activations="dynamic") is emulated on this device ({kind}): '
        f"{reason or 'scaled_mm has no kernel for it, or for the shapes and dtypes of this graph'}. Both operands are "
        "decoded and multiplied in fp32, which takes about 15 times as long as a bf16 product on an H100 or H200. "
        'Leave activations="dynamic" out, which multiplies the same weights in bf16; or take '
        'Float8CurrentScaling(activations="dynamic") from compute capability 8.9 on; or call '
        'torch.set_float32_matmul_precision("high"), which takes about twice as long as bf16',
        UserWarning,
        stacklevel=2,
    )


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Turn off autocast, which would round the operands of a product (the meta device has no autocast)."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def as_autocast(x: Tensor) -> Tensor:
    """Return `x` in the dtype that autocast computes linear layers in, if it is on (the meta device has none)."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if kind != "meta" and torch.is_autocast_enabled(kind) else x
