"""What torch's own optimizers do to a parameter besides updating it in place (for that see in_place.py).

    gradient + weight_decay * parameter     a PLAIN gradient, from the dequantized weight
    fused kernels                           raise: they would read the payload as values

A part of the op table, see table.py.
"""

from typing import Any

import torch
from torch import Tensor

from qtensor.ops.table import implements, overloads
from qtensor.spec.registry import describe
from qtensor.tensor.quantized_tensor import QuantizedTensor, dequantize_all

__all__: list[str] = []

aten = torch.ops.aten


@implements(aten.add.Tensor, *overloads({"_foreach_add": ("List",)}))
def decay(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute `plain.add(q, alpha=weight_decay)`, as SGD and Adam do; raise for a quantized tensor in front.

    Its sum with something else would be dense, and no optimizer needs that.
    """
    for member in [args[0]] if isinstance(args[0], Tensor) else args[0]:
        if isinstance(member, QuantizedTensor):
            raise NotImplementedError(
                f"{func} is not defined for quantized tensors (got {type(member).__name__}); call .dequantize() on "
                "them first if a dense result is what you want"
            )
    return func(*dequantize_all(args), **kwargs)


@implements(
    aten._fused_adam_.default, aten._fused_adamw_.default, aten._fused_sgd_.default, aten._fused_adagrad_.default
)
def refuse_fused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise: fused kernels would read the payload as values."""
    q = next(member for member in args[0] if isinstance(member, QuantizedTensor))
    raise NotImplementedError(
        f"fused=True: fused optimizers can not update {describe(q.shape, q.recipe)}; leave fused out, or use "
        "MasterWeightOptimizer, whose fp32 masters are plain tensors"
    )
