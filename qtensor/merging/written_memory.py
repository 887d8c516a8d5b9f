"""Whether a parameter can be written in place, whatever it is made of; see fsdp_hooks/writable.py."""

from typing import Any

from torch import Tensor

from fsdp_hooks.torch_private import local_of
from fsdp_hooks.writable import unwritable
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.tensor.quantized_tensor import QuantizedTensor


def why_unwritable(param: Tensor) -> str | None:
    """Return why this rank's piece of a parameter cannot be written in place, and what to do; None if it can."""
    local: Any = local_of(param)
    if isinstance(local, QuantizedTensor):
        parts = local.parts()
    else:
        parts = {"": (local.dense if isinstance(local, HighPrecisionWeight) else local).detach()}
    return next(iter(unwritable(parts).values()), None)
