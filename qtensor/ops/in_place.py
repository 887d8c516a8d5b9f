"""Updates in place: the values are dequantized, computed on, and quantized again.

A part of the op table, see table.py; `copy_`, which keeps bytes where it can, is there.
"""

from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.versions import count_writes
from qtensor.ops import lost_updates
from qtensor.ops.stochastic import generator_for, refuse_to_stand_still, widen, widen_each
from qtensor.ops.table import implements, overloads
from qtensor.spec.codecs.rounding import armed
from qtensor.tensor.contents import decode, initial_value, write
from qtensor.tensor.quantized_tensor import QuantizedTensor, dequantize_all

__all__: list[str] = []

aten = torch.ops.aten


@implements(aten.zero_.default)
def zero_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Set every value to exactly 0."""
    q = args[0]
    write(q, torch.zeros(q.shape, dtype=q.dtype, device=q.device))
    return q


_IN_PLACE = {
    "fill_": ("Scalar", "Tensor"),
    "add_": ("Tensor", "Scalar"),
    "sub_": ("Tensor", "Scalar"),
    "mul_": ("Tensor", "Scalar"),
    "div_": ("Tensor", "Scalar"),
    "lerp_": ("Scalar", "Tensor"),
} | dict.fromkeys(("uniform_", "normal_", "addcmul_", "addcdiv_", "clamp_", "erfinv_", "neg_"), ("default",))
_FOREACH = {
    "_foreach_add_": ("Scalar", "List", "Tensor"),
    "_foreach_sub_": ("Scalar", "List"),
    "_foreach_mul_": ("Scalar", "List", "Tensor", "ScalarList"),
    "_foreach_div_": ("Scalar", "List", "ScalarList"),
    "_foreach_addcmul_": ("Scalar", "ScalarList", "Tensor"),
    "_foreach_addcdiv_": ("Scalar", "ScalarList", "Tensor"),
    "_foreach_lerp_": ("Scalar", "List"),
    "_foreach_zero_": ("default",),
}
_RANDOM_FILLS = {aten.uniform_.default, aten.normal_.default}
_LERP = {aten.lerp_.Scalar, aten.lerp_.Tensor, aten._foreach_lerp_.Scalar}


def _start(q: QuantizedTensor) -> Tensor:
    """Return what an update computes on: a copy of the preserved initial value, or else the dequantized values."""
    value = initial_value(q)
    return decode(q) if value is None else value.reshape(q.shape).clone()


@implements(*overloads(_IN_PLACE))
def requantize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do q.op_(...): compute on the dequantized values, then quantize.

    These have the appearance dtype, so that random fills draw what a plain tensor would. A preserved initial value
    takes their place. A plain tensor in front (`plain.add_(q)`) is updated with the dequantized values of q.
    Inside stochastic_rounding everything but random fills is computed in fp32, from the bytes.
    """
    q = args[0]
    if not isinstance(q, QuantizedTensor):
        return func(q, *dequantize_all(args[1:]), **dequantize_all(kwargs))
    generator = None if func in _RANDOM_FILLS else generator_for([q])
    looked = None
    if generator is not None:
        values = decode(q, torch.float32)
        func(values, *widen(args[1:]), **widen(kwargs))
    else:
        if func in _LERP:
            refuse_to_stand_still([q], args[2])
        looked = lost_updates.look(func, [q], args[1:], kwargs)
        values = _start(q)
        func(values, *dequantize_all(args[1:]), **dequantize_all(kwargs))
    with armed(generator):
        write(q, values)
    lost_updates.tell(looked)
    return q


@implements(*overloads(_FOREACH))
def requantize_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Do the _foreach_ twins: quantized members requantize, plain ones are updated as usual.

    torch counts the writes of other in-place operations itself, but leaves counting those of a list to the handler:
    of all members, plain ones too.
    """
    generator, operands = generator_for(args[0]), args[1:]
    looked = None
    if generator is None:
        if func in _LERP:
            refuse_to_stand_still(args[0], args[2])
        looked = lost_updates.look(func, args[0], operands, kwargs)
        values = [_start(each) if isinstance(each, QuantizedTensor) else each for each in args[0]]
        operands = dequantize_all(operands)
    else:
        values, operands = widen_each(args[0], list(args[0])), tuple(widen_each(args[0], o) for o in operands)
    func(values, *operands, **dequantize_all(kwargs))
    for q, value in zip(args[0], values, strict=True):
        if isinstance(q, QuantizedTensor):
            with armed(generator):
                write(q, value)
    # torch does not count writes of lists, not even those of plain members
    count_writes(args[0])
    lost_updates.tell(looked)
