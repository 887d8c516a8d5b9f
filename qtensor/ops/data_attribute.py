"""Assigning `.data` of a weight: `p.data = p.data.to(torch.float32)` and `p.data += update`, as peft writes them.

torch's setter exchanges what a tensor is (shape, dtype, device) and its bytes, and keeps the parameter. A wrapper has
its bytes in attributes, which torch does not know of. So both are exchanged, if the value is a weight of the same
storage, recipe and shape: the bytes are those of the value then, and nothing is requantized. Any other value is
refused, and so is one for a weight that FSDP2 holds, which would go on with the parts that it knows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.all_gather import AT_REST
from fsdp_hooks.torch_private import without_torch_function
from qtensor.spec.lens import OWN
from qtensor.spec.registry import describe, specs_of
from qtensor.tensor.quantized_tensor import TORCH_FUNCTIONS, QuantizedTensor

SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def exchange_data(weight: Any, value: Any, contents: Sequence[str]) -> bool:
    """Do `weight.data = value`; return False, with nothing done, if it is not defined.

    Args:
        weight: what is written.
        value: the new value; its parts are aliased.
        contents: the attributes that a weight of this class consists of.
    """
    alike = type(weight) is type(value) and weight.recipe == value.recipe and weight.shape == value.shape
    if not alike:
        return False
    # torch exchanges the wrapper's looks alone; the bytes are in attributes that it does not know
    with torch.no_grad(), without_torch_function():
        SET_DATA(weight, value.detach())
        for name in contents:
            setattr(weight, name, getattr(value, name))
    return True


def set_data(q: Tensor, value: Tensor) -> None:
    """Do `q.data = value`; raise if the value is no weight of the same recipe and shape."""
    both = [each for each in (q, value) if isinstance(each, QuantizedTensor)]
    if len(both) == 2 and all(each._lens == OWN and each._sharding == AT_REST for each in both):
        parts = [spec.name for spec in specs_of(both[0].recipe)]
        if exchange_data(q, value, [*parts, "_preserved"]):
            return
    what = (
        describe(q.shape, q.recipe)
        if isinstance(q, QuantizedTensor)
        else "a plain tensor's .data to a quantized weight"
    )
    raise NotImplementedError(
        f"assigning .data of {what} is not defined; call .copy_(value) on it under torch.no_grad() (it requantizes in "
        "place, and copies the bytes where the recipes agree), or assign a new nn.Parameter to the module"
    )


TORCH_FUNCTIONS[SET_DATA] = set_data
