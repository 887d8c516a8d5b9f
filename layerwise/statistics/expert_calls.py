"""What a block of experts is called with, and what sends tokens to one of its experts.

    call = call_with(block, module, args, kwargs)
    call.send(expert, call.tokens)          # all tokens to this one expert

Experts of a list are called with the tokens. Stacked ones are called with the tokens, the number of this one expert for
every token, and weights of 1. Whether they weight their tokens before a product shows when `probe` sends the first
tokens with other weights.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_hooks.kernels.digest import GOLDEN
from fsdp_hooks.lazy_bits import resolve
from layerwise.stages.caller import caller
from layerwise.stages.experts import INSTEAD, STACKED_CALL, Expert, ExpertBlock
from layerwise.weights.without_fsdp import without_fsdp

PROBED_TOKENS = 16
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element
_PLAIN = (Tensor, nn.Parameter)


@dataclass(eq=False)
class BlockCall:
    """A call of a block.

    Attributes:
        tokens: [T, K], a copy.
        send: sends tokens to one expert.
        probe: sends the first tokens to their own experts, with weights of 1 (for 0) or of 2, 3, .. (for 1); None if
            the block takes no weights.
        routed: rows that its experts got when it ran.
    """

    tokens: Tensor
    send: Callable[[Expert, Tensor], object]
    probe: Callable[[int], object] | None = None
    routed: list[tuple[str, Tensor]] = field(default_factory=list)


def call_with(block: ExpertBlock, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BlockCall:
    """Return the call of a block with these arguments.

    Raises:
        NotImplementedError: they are not what a block gets.
    """
    return _stacked_call(block, module, args, kwargs) if block.stacked else _list_call(block, args, kwargs)


def _list_call(block: ExpertBlock, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BlockCall:
    def send(expert: Expert, tokens: Tensor) -> None:
        assert expert.module is not None
        expert.module(tokens)

    columns = frozenset.intersection(*(expert.columns for expert in block.experts))
    for value in (*args, *kwargs.values()):
        if _is_rows(value) and value.shape[-1] in columns:
            return BlockCall(_copy(value), send)
    takes = f"of a K that all its experts take ({', '.join(map(str, sorted(columns))) or 'there is none'})"
    raise refusal(block, f"the module around the experts is called without tokens [.., K] {takes}")


def _stacked_call(block: ExpertBlock, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BlockCall:
    signature = inspect.signature(module.forward)
    bound = signature.bind(*args, **kwargs)
    names = list(signature.parameters)[:3]
    found: list[Any] = [bound.arguments.get(name) for name in names]
    tokens, numbers, weights = found
    if not (
        _is_rows(tokens)
        and tokens.ndim == 2
        and _is_matrix(numbers)
        and _is_matrix(weights)
        and weights.is_floating_point()
        and numbers.shape == weights.shape
        and numbers.dtype in (torch.int32, torch.int64)
        and len(numbers) == len(tokens)
    ):
        got = ", ".join(f"{name}={_words(value)}" for name, value in zip(names, found, strict=True))
        raise refusal(block, f"it is called with {got}; {STACKED_CALL}")
    # The block may write into its arguments, and they are used again after it.
    copy, chosen = _copy(tokens), numbers.detach().clone()
    beside = [value for name, value in bound.arguments.items() if name not in names]

    def call(*values: Tensor) -> None:
        bound.arguments.update(dict(zip(names, values, strict=True)))
        with without_fsdp(module):  # it is being called
            module(*bound.args, **bound.kwargs)

    def send(expert: Expert, tokens: Tensor) -> None:
        shape = (len(tokens), 1)
        call(
            tokens,
            torch.full(shape, expert.number, dtype=numbers.dtype, device=numbers.device),
            torch.ones(shape, dtype=weights.dtype, device=weights.device),
        )

    def probe(step: int) -> None:
        # What else the block takes may have a row for each token: then all of them are sent.
        count = len(copy) if any(isinstance(value, Tensor) for value in beside) else PROBED_TOKENS
        factors = torch.ones(weights[:count].shape, dtype=weights.dtype, device=weights.device)
        # The factors of a token's choices differ, so that they show even if the block divides them by their sum.
        factors += step * torch.arange(1, factors.shape[1] + 1, dtype=weights.dtype, device=weights.device)
        call(copy[:count].clone(), chosen[:count].clone(), factors)

    return BlockCall(copy, send, probe)


def refusal(block: ExpertBlock, what: str) -> NotImplementedError:
    """Make the error for a block that is not as `stages/experts.py` describes it."""
    return NotImplementedError(
        f'{caller()}: expert_inputs="all": {block.name}: {what}; so its tokens cannot all be sent to each '
        f"of its experts. For these {INSTEAD}"
    )


def rows_of_call(
    block: ExpertBlock, expert: Expert, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor:
    """Return what an expert of a list is called with, [T, K].

    Raises:
        NotImplementedError: it is something else.
    """
    first = next(iter(inspect.signature(module.forward).parameters), "")
    values = [*args, *kwargs.values()]
    if len(values) != 1 or type(values[0]) not in _PLAIN or not {*kwargs} <= {first}:
        raise refusal(block, f"{expert.fqn} is called with something else than one tensor")
    rows: Tensor = values[0]
    if rows.ndim != 2:
        raise refusal(block, f"{expert.fqn} is called with {_words(rows)}; expected rows [T, K]")
    return rows


@contextmanager
def without_trace(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, runs of a module may draw random numbers and change its buffers; afterwards all are as they were."""
    held = [
        (owner, key, buffer, buffer.detach().clone())
        for owner in module.modules()
        for key, buffer in owner.named_buffers(recurse=False)
    ]
    on_cpu = device.type == "cpu"
    with torch.random.fork_rng(devices=[] if on_cpu else [device], device_type=device.type):
        try:
            yield
        finally:
            for owner, key, buffer, before in held:
                if not same_bits(buffer, before):
                    buffer.copy_(before)
                if getattr(owner, key) is not buffer:
                    setattr(owner, key, buffer)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes; NaNs are compared by their bytes, too."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(resolve(x.detach()).contiguous().reshape(-1).view(torch.uint8) for x in (one, other)))


def row_digests(rows: Tensor) -> Tensor:
    """int64 [T]: 64 bits of each row of floating rows [.., K]; rows of the same bits have the same."""
    flat = resolve(rows.detach()).reshape(-1, rows.shape[-1]).contiguous()
    words = flat.view(_INTEGERS[flat.element_size()]).to(torch.int64)  # [T, K]
    places = torch.arange(1, flat.shape[1] + 1, dtype=torch.int64, device=flat.device)
    # Odd factors that differ by place: the same words in another order give another sum.
    return (words * (places * GOLDEN | 1)).sum(dim=1)


def _is_rows(value: Any) -> bool:
    return type(value) in _PLAIN and value.is_floating_point() and value.ndim >= 2


def _is_matrix(value: Any) -> bool:
    return type(value) in _PLAIN and value.ndim == 2


def _words(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _copy(tokens: Tensor) -> Tensor:
    """Copy tokens to [T, K]: an expert may write into a copy without harm, and torch counts its writes."""
    with torch.inference_mode(mode=False), torch.no_grad():
        return tokens.detach().reshape(-1, tokens.shape[-1]).clone(memory_format=torch.contiguous_format)
