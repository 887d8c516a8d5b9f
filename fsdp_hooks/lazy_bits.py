"""Lazy bits: a plain tensor whose memory holds other values than its own.

    x.conj()           the conjugates of what its memory holds                 is_conj()
    x.conj().imag      the negatives of it (so does torch._neg_view)           is_neg()
    a tangent of 0     nothing: torch's zero tensors have no memory            _is_zerotensor()

torch applies such a bit before an operation runs, but not in two places: where memory is read as bytes, and inside
`__torch_dispatch__`, for everything torch does before it is switched off there. So values would change their sign
without an error. Who reads bytes calls `resolve`; the op tables call `call_resolved`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fsdp_hooks.torch_private import is_zero_tensor, tree_map, without_torch_function, written_by

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def resolve(x: Tensor) -> Tensor:
    """Return `x` itself if its memory holds its values, else a copy whose memory does."""
    # it can trace these, but not the questions
    if torch.compiler.is_dynamo_compiling():
        return x.resolve_conj().resolve_neg()
    return x.clone() if is_lazy(x) else x


def call_resolved(handler: Handler, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do handler(func, args, kwargs) with no operand lazy; what the op writes is written into a lazy operand itself.

    For `__torch_dispatch__`, which calls it for all operands at once.
    """
    with without_torch_function():  # which each question would go through otherwise
        lazy = _any_lazy(args) or (kwargs and _any_lazy(kwargs.values()))
    if not lazy:
        return handler(func, args, kwargs)
    copies: list[tuple[Tensor, Tensor]] = []

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not is_lazy(leaf):
            return leaf
        copies.append((leaf, leaf.clone()))
        return copies[-1][1]

    # what the op writes into a copy belongs into the lazy operand
    written: list[tuple[Tensor, Tensor]] = []
    given = []
    for arg, writes in zip(args, written_by(func), strict=False):
        copies.clear()
        given.append(tree_map(plain, arg))
        if writes:
            written += copies
    result = handler(func, tuple(given), {name: tree_map(plain, value) for name, value in kwargs.items()})
    for own, copy in written:
        own.copy_(copy)
    return next((own for own, copy in written if copy is result), result)


def _any_lazy(values: Iterable[Any]) -> bool:
    return any(
        is_lazy(value) if isinstance(value, Tensor) else isinstance(value, list | tuple) and _any_lazy(value)
        for value in values
    )


def is_lazy(x: Tensor) -> bool:
    """Return whether memory holds other values than the tensor's own."""
    return x.is_neg() or x.is_conj() or is_zero_tensor(x)
