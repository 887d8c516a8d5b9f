"""Sends every token of a block to each of its experts, for statistics alone, while a stage runs on one batch.

    the block is called with its tokens x [T, K]
        for each expert    it runs on a copy of x; what comes to its linears counts, what it returns is dropped
    the block runs as it always does; what comes to its experts' linears does not count

So the block's output stays the routed one, bit for bit, and each expert sees each token of its block once. Experts of a
list are called with x. Stacked ones are called with x, the number of this one expert for every token, and weights of 1.

Experts whose first linears take x itself have their statistics measured once, and share them.

What is not as `stages/experts.py` describes it is refused by name: an expert that gets other rows than those of x when
tokens are routed (normed, weighted, padded), one that is used while its block is not called, linears that do not get
each token once, an expert that writes into its tokens.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_hooks.digest import GOLDEN
from layerwise.stages.experts import INSTEAD, STACKED_CALL, Expert, ExpertBlock
from layerwise.statistics.watching import Product

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element
_PLAIN = (Tensor, nn.Parameter)


@dataclass(eq=False)
class _Call:
    """A call of a block.

    Attributes:
        tokens: [T, K], a copy.
        routed: rows that its experts got when it ran.
    """

    tokens: Tensor
    routed: list[tuple[str, Tensor]] = field(default_factory=list)


@dataclass(eq=False)
class _Turn:
    """An expert while it runs on all tokens."""

    expert: Expert
    tokens: Tensor
    rows: Counter[str] = field(default_factory=Counter)  # that came to each linear


class EveryToken:
    """Decides which products of one batch count.

    Args:
        blocks: whose experts see every token; with none, all products count.
        on_product: called with each product that counts.
        around: a context manager around each expert's run on all tokens, which gets these.
    """

    def __init__(
        self,
        blocks: Sequence[ExpertBlock],
        on_product: Callable[[Product], None],
        around: Callable[[Tensor], AbstractContextManager[None]],
    ) -> None:
        self._blocks, self._on_product, self._around = blocks, on_product, around
        self._block_of = {name: block for block in blocks for expert in block.experts for name in expert.names}
        self._calls: dict[ExpertBlock, _Call] = {}
        self._turn: _Turn | None = None
        self._first: set[str] = set()  # linears that take the tokens of their block as they are

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Context manager around the run; enter it last."""
        with ExitStack() as hooks:
            for block in self._blocks:
                before, after = partial(self._before, block), partial(self._after, block)
                handles = [block.module.register_forward_pre_hook(before, with_kwargs=True)]
                handles.append(block.module.register_forward_hook(after))
                for expert in block.experts if not block.stacked else ():
                    assert expert.module is not None
                    noting = partial(self._note_call, block, expert)
                    handles.append(expert.module.register_forward_pre_hook(noting, with_kwargs=True))
                for handle in handles:
                    hooks.callback(handle.remove)
            yield

    def take(self, product: Product) -> None:
        """Take a product, and hand it on if it counts."""
        block = self._block_of.get(product.names[0]) if product.names else None
        turn = self._turn
        if turn is None and block is None:
            self._on_product(product)
        elif turn is None and block is not None:
            call = self._called(block, product.names[0])
            if block.stacked and product.rows.numel() and not self._first.isdisjoint(product.names):
                call.routed.append((product.names[0], product.rows))
        elif turn is not None and block is not None and product.rows.numel():
            self._take_in_turn(turn, block, product)

    def _take_in_turn(self, turn: _Turn, block: ExpertBlock, product: Product) -> None:
        if not {*product.names} <= {*turn.expert.names}:
            raise _refusal(
                block, f"all tokens were sent to expert {turn.expert.number}, and {product.names[0]} got some"
            )
        rows = product.rows.detach().reshape(-1, product.rows.shape[-1])
        turn.rows.update(dict.fromkeys(product.names, len(rows)))
        if _equal(rows, turn.tokens):
            self._first |= {*product.names}
            product = Product(turn.tokens, (), turn.tokens, product.names)
        self._on_product(product)

    def _before(self, block: ExpertBlock, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._turn is not None:  # a stacked block that is called by `run`
            return
        tokens, run = (_stacked_call if block.stacked else _list_call)(block, module, args, kwargs)
        self._calls[block] = _Call(tokens)
        if not tokens.numel():
            return
        for expert in block.experts:
            version = tokens._version
            with self._around(tokens):
                self._turn = turn = _Turn(expert, tokens)
                try:
                    run(expert, tokens)
                except Exception as error:
                    error.add_note(
                        f'while all tokens were sent to expert {expert.number} of {block.name}, for expert_inputs="all"'
                    )
                    raise
                finally:
                    self._turn = None
            self._check_turn(block, turn, written=tokens._version != version)

    def _check_turn(self, block: ExpertBlock, turn: _Turn, *, written: bool) -> None:
        if written:
            raise _refusal(block, f"expert {turn.expert.number} writes into the tokens that it is called with")
        for name in turn.expert.names:
            if turn.rows[name] != len(turn.tokens):
                raise _refusal(
                    block,
                    f"of {len(turn.tokens)} tokens that were sent to expert {turn.expert.number}, {turn.rows[name]} "
                    f"came to {name}",
                )

    def _after(self, block: ExpertBlock, *_: Any) -> None:
        if self._turn is not None:
            return
        call = self._calls.pop(block, None)
        if call is None or not call.routed:
            return
        known = _row_digests(call.tokens)
        for name, rows in call.routed:
            like = rows.dtype == call.tokens.dtype and rows.shape[-1] == call.tokens.shape[-1]
            if not like or not bool(torch.isin(_row_digests(rows), known).all()):
                raise _refusal(
                    block,
                    f"{name} got rows that are none of the tokens that the block is called with (normed, weighted or "
                    "padded ones, say)",
                )

    def _note_call(
        self, block: ExpertBlock, expert: Expert, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._turn is not None:
            return
        name = f"{block.name}.{expert.number}"
        call = self._called(block, name)
        if len(args) != 1 or kwargs or type(args[0]) not in _PLAIN:
            raise _refusal(block, f"{name} is called with something else than one tensor")
        if args[0].numel():
            call.routed.append((name, args[0]))

    def _called(self, block: ExpertBlock, name: str) -> _Call:
        if block not in self._calls:
            raise _refusal(block, f"{name} is used while the module around the experts is not called")
        return self._calls[block]


Run = Callable[[Expert, Tensor], object]


def _list_call(
    block: ExpertBlock, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, Run]:
    """The tokens in a call of a block, and what sends all of them to one expert."""

    def run(expert: Expert, tokens: Tensor) -> None:
        assert expert.module is not None
        expert.module(tokens)

    for value in (*args, *kwargs.values()):
        if _is_rows(value):
            return _copied(value), run
    raise _refusal(block, "the module around the experts is called without tokens [.., K]")


def _stacked_call(
    block: ExpertBlock, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, Run]:
    """The tokens in a call of a block, and what sends all of them to one expert."""
    signature = inspect.signature(module.forward)
    bound = signature.bind(*args, **kwargs)
    names = list(signature.parameters)[:3]
    found: list[Any] = [bound.arguments.get(name) for name in names]
    tokens, numbers, weights = found
    if not (
        _is_rows(tokens)
        and _is_matrix(numbers)
        and _is_matrix(weights)
        and weights.is_floating_point()
        and numbers.shape == weights.shape
        and numbers.dtype in (torch.int32, torch.int64)
        and len(numbers) * tokens.shape[-1] == tokens.numel()
    ):
        got = ", ".join(f"{name}={_words(value)}" for name, value in zip(names, found, strict=True))
        raise _refusal(block, f"it is called with {got}; {STACKED_CALL}")

    def run(expert: Expert, tokens: Tensor) -> None:
        shape = (len(tokens), 1)
        chosen = torch.full(shape, expert.number, dtype=numbers.dtype, device=numbers.device)
        ones = torch.ones(shape, dtype=weights.dtype, device=weights.device)
        bound.arguments.update(dict(zip(names, (tokens, chosen, ones), strict=True)))
        module(*bound.args, **bound.kwargs)

    return _copied(tokens), run


def _refusal(block: ExpertBlock, what: str) -> NotImplementedError:
    return NotImplementedError(
        f'calibrate: expert_inputs="all": {block.name}: {what}; so its tokens cannot all be sent to each '
        f"of its experts. For these {INSTEAD}"
    )


def _is_rows(value: Any) -> bool:
    return type(value) in _PLAIN and value.is_floating_point() and value.ndim >= 2


def _is_matrix(value: Any) -> bool:
    return type(value) in _PLAIN and value.ndim == 2


def _words(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _copied(tokens: Tensor) -> Tensor:
    """[T, K]: experts that write into it do not change what the block computes with."""
    return tokens.detach().reshape(-1, tokens.shape[-1]).clone(memory_format=torch.contiguous_format)


def _equal(rows: Tensor, tokens: Tensor) -> bool:
    return rows.dtype == tokens.dtype and rows.shape == tokens.shape and torch.equal(rows, tokens)


def _row_digests(rows: Tensor) -> Tensor:
    """int64 [T]: 64 bits of each row of floating rows [.., K]; rows of the same bits have the same."""
    flat = rows.detach().reshape(-1, rows.shape[-1]).contiguous()
    words = flat.view(_INTEGERS[flat.element_size()]).to(torch.int64)  # [T, K]
    places = torch.arange(1, flat.shape[1] + 1, dtype=torch.int64, device=flat.device)
    return (words * (places * GOLDEN | 1)).sum(dim=1)
