"""Stochastic rounding: optimizer writes whose expectation is the exact value.

A weight without a master loses every update smaller than half a step of its element, since rounding to nearest takes it
back. If values are rounded up with a probability equal to the fraction left over, such updates arrive on average:

    x = steps * step,  lower = floor(steps)        written: (lower + 1) * step  with probability steps - lower
    E[written] = x                                          lower * step        else

With `stochastic_rounding(generator)` the user asks for this in a stretch of code. Only the op table acts on it: it arms
the generator for just the write of an in-place operation (`rounding.armed`). So what writes without the op table
(quantize, MasterWeightOptimizer, sync_scales, loading) rounds to nearest inside the context, too.

Only elements are rounded stochastically. Scales are those of nearest mode, and values are clamped to the largest
element first. So values that nearest mode saturates (NVFP4 blocks whose scale was rounded down, MXFP8 and MXFP4 with
scale_rounding="floor", INT4 above 7, INT8 above 127) or flushes to 0 (NVFP4 blocks whose scale is 0) do not arrive on
average either.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.devices import same_device
from fsdp_hooks.torch_private import is_tracing, tree_map
from qtensor.spec.registry import describe
from qtensor.tensor.contents import decode, initial_value
from qtensor.tensor.quantized_tensor import QuantizedTensor, dequantize_all

_wish: ContextVar[torch.Generator | None] = ContextVar("qtensor.stochastic_rounding", default=None)


@contextmanager
def stochastic_rounding(generator: torch.Generator) -> Iterator[None]:
    """Inside, what ordinary torch optimizers write into quantized parameters is rounded stochastically: without bias.

    It concerns in-place arithmetic (`add_`, `addcdiv_`, `lerp_` ... and the `_foreach_` twins) and a `copy_` that
    requantizes. Values are computed in fp32, because rounding to the appearance dtype would add a bias, and always from
    the bytes: a preserved initial value is overwritten by what was computed. Random fills (`uniform_`, `normal_`),
    `quantize`, `MasterWeightOptimizer`, `sync_scales` and loads by DCP still round to nearest.

    Random numbers come from `generator` alone, one fp32 number for each element of each write, in the order of the
    writes: equal seeds give equal bytes for equal writes. foreach=True and foreach=False order the writes differently,
    and each rank draws for its own shard, so bytes depend on both. Give ranks different seeds, but give replicas of the
    same shard (HSDP) the same seed.

    The expectation is exact up to the fp32 rounding of value / scale, and 2^-24 of an element's step. A nested context
    replaces the outer one. The context holds in the thread or asyncio task that entered it: an optimizer that steps in
    gradient hooks, which may run in threads of autograd, must enter it there.

    Args:
        generator: on the device of the parameters.

    Raises:
        TypeError: `generator` is not a torch.Generator.
        ValueError: a quantized tensor is on another device than the generator (raised before it is written).
        RuntimeError: torch.compile traces a write. Code that was compiled outside rounds to nearest inside, too.

    Example:
        ```python
        >>> with quantized_model_init(MXFP8BlockScaling()):
        ...     model = nn.Linear(64, 64)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        >>> model(torch.randn(8, 64)).sum().backward()
        >>> with stochastic_rounding(torch.Generator("cpu").manual_seed(0)):  # on several ranks: seed + rank
        ...     optimizer.step()
        ```
    """
    if not isinstance(generator, torch.Generator):
        raise TypeError(
            f"stochastic_rounding expects a torch.Generator, got {type(generator).__name__}; make one on the device of "
            "the parameters: torch.Generator(device).manual_seed(seed)"
        )
    token = _wish.set(generator)
    try:
        yield
    finally:
        _wish.reset(token)


def generator_for(written: Iterable[Any]) -> torch.Generator | None:
    """Return the generator for a write into the quantized ones of `written`; None (to nearest) outside of the context.

    Raises:
        ValueError: one of them is on another device than the generator.
        RuntimeError: torch.compile is tracing.
    """
    generator = _wish.get()
    if generator is None:
        return None
    for q in written:
        if isinstance(q, QuantizedTensor) and not same_device(q.device, generator.device):
            raise ValueError(
                f"stochastic_rounding: the generator is on {generator.device} and {describe(q.shape, q.recipe)} is on "
                f"{q.device}; nothing was written; use torch.Generator({str(q.device)!r})"
            )
    if is_tracing():
        raise RuntimeError(
            "stochastic_rounding can not be compiled, since a graph has no place for the state of a torch.Generator; "
            "run this optimizer step outside of torch.compile"
        )
    return generator


def refuse_to_stand_still(averages: Iterable[Any], given: float | Tensor) -> None:
    """Raise if a moving average in quantized storage, rounded to nearest, would stand still (a small lerp_ weight).

    A step of E2M1, the coarsest element, is a quarter to a half of the value, so rounding to nearest takes back a
    change of less than an eighth. An average with a preserved initial value is computed on that value and does move.
    """
    weight = float(given.max()) if isinstance(given, Tensor) else given
    for q in averages if 0 < weight < 1 / 8 else ():
        if isinstance(q, QuantizedTensor) and initial_value(q) is None:
            raise RuntimeError(
                f"lerp_ with weight {weight:g} on {describe(q.shape, q.recipe)}: rounding to nearest takes back what "
                "is less than half a step, so an average with such small weights stands still; update it inside "
                "qtensor.stochastic_rounding(generator), or average .dequantize(torch.float32) into plain tensors"
            )


def widen(value: Any) -> Any:
    """Return `value` with every floating-point tensor in it as plain fp32: lerp_ and others do not promote dtypes."""

    def widen_leaf(leaf: Any) -> Any:
        if isinstance(leaf, QuantizedTensor):
            return decode(leaf, torch.float32)
        return leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(widen_leaf, value)


def widen_each(members: Sequence[Tensor], operand: Any) -> Any:
    """Return an operand of a _foreach_ op, its pieces widened if they belong to a quantized member."""
    if not (isinstance(operand, list | tuple) and isinstance(operand[0], Tensor)):
        return operand  # numbers
    return [
        widen(own) if isinstance(member, QuantizedTensor) else dequantize_all(own)
        for member, own in zip(members, operand, strict=True)
    ]
