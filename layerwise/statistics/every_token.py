"""Sends every token of a block to each of its experts, for statistics alone, while a stage runs on one batch.

    the block is called with its tokens x [T, K]
        for each expert    it runs on a copy of x; what comes to its linears counts, what it returns is dropped
    the block runs as it always does; what comes to its experts' linears does not count

So the block's output stays the routed one, bit for bit, and each expert sees each token of its block once. Buffers and
random numbers are left as they were. Experts of a list are called with x. Stacked ones are called with x, the number of
this one expert for every token, and weights of 1 (expert_calls.py). They must not weight their tokens before a product:
the first tokens are routed twice, with different weights, and must come to each product with the same bits.

Experts whose first linears take x itself have their statistics measured once, and share them.

What is not as `stages/experts.py` describes it is refused by name: an expert that gets other rows than those of x when
tokens are routed (normed, weighted, padded), one that is used while its block is not called or past its own call,
linears that do not get each token once, an expert that writes into its tokens.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.stages.experts import Expert, ExpertBlock
from layerwise.statistics.expert_calls import (
    BlockCall,
    call_with,
    refusal,
    row_digests,
    rows_of_call,
    same_bits,
    without_trace,
)
from layerwise.statistics.watching import PRODUCTS_SEEN, Product


@dataclass(eq=False)
class _Turn:
    """An expert while it runs on all tokens."""

    expert: Expert
    tokens: Tensor
    rows: Counter[str] = field(default_factory=Counter)  # that came to each linear
    inputs: list[tuple[str, Tensor, int, tuple[int, ...]]] = field(default_factory=list)  # with versions and parts

    def count(self, product: Product) -> None:
        """Count the rows of a product; an input that comes to a linear once more (to a part of it) counts once."""
        for name in product.names:
            known = False
            if not product.x.is_inference():
                version = product.x._version
                known = any(
                    (name, version, product.part) == (one, *rest) and x is product.x for one, x, *rest in self.inputs
                )
                self.inputs.append((name, product.x, version, product.part))
            if not known:
                self.rows[name] += product.rows.shape[:-1].numel()


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
        self._owner = {name: (block, one) for block in blocks for one in block.experts for name in one.names}
        self._calls: dict[ExpertBlock, BlockCall] = {}
        self._inside: set[Expert] = set()  # experts of lists whose call is under way
        self._turn: _Turn | None = None
        self._probed: list[Tensor] | None = None  # rows of products while a block is probed
        self._first: set[str] = set()  # linears that take the tokens of their block as they are

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Inside, the stage runs with these hooks; enter it last."""
        with ExitStack() as hooks:
            for block in self._blocks:
                before, after = partial(self._before, block), partial(self._after, block)
                handles = [block.module.register_forward_pre_hook(before, with_kwargs=True)]
                handles.append(block.module.register_forward_hook(after))
                for expert in block.experts if not block.stacked else ():
                    assert expert.module is not None
                    entering, leaving = partial(self._enter, block, expert), partial(self._leave, expert)
                    # First of all, so that it sees what the block gives, and not what other hooks (casts) make of it.
                    handles.append(expert.module.register_forward_pre_hook(entering, prepend=True, with_kwargs=True))
                    # Also if the expert raises, or all that comes later would seem to be inside
                    # of it.
                    handles.append(expert.module.register_forward_hook(leaving, always_call=True))
                for handle in handles:
                    hooks.callback(handle.remove)
            yield

    def take(self, product: Product) -> None:
        """Take a product, and hand it on if it counts."""
        owner = self._owner.get(product.names[0]) if product.names else None
        turn = self._turn
        if self._probed is not None:
            if owner is not None:
                self._probed.append(product.rows.detach().clone())
        elif turn is None and owner is None:
            self._on_product(product)
        elif turn is None and owner is not None:
            self._take_routed(*owner, product)
        elif turn is not None and owner is not None and product.rows.numel():
            self._take_in_turn(turn, owner[0], product)

    def _take_routed(self, block: ExpertBlock, expert: Expert, product: Product) -> None:
        call = self._call(block, product.names[0])
        if not block.stacked and expert not in self._inside:
            raise refusal(block, f"{product.names[0]} is used past the call of its expert {expert.fqn}")
        if block.stacked and product.rows.numel() and not self._first.isdisjoint(product.names):
            call.routed.append((product.names[0], product.rows))

    def _take_in_turn(self, turn: _Turn, block: ExpertBlock, product: Product) -> None:
        if not {*product.names} <= {*turn.expert.names}:
            raise refusal(
                block, f"all tokens were sent to expert {turn.expert.number}, and {product.names[0]} got some"
            )
        rows = product.rows.detach().reshape(-1, product.rows.shape[-1])
        if same_bits(rows, turn.tokens):
            self._first |= {*product.names}
            product = Product(turn.tokens, (), turn.tokens, product.names)
        turn.count(product)
        self._on_product(product)

    def _before(self, block: ExpertBlock, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._turn is not None or self._probed is not None:  # a stacked block that is called by its BlockCall
            return
        self._calls[block] = call = call_with(block, module, args, kwargs)
        tokens = call.tokens
        if not tokens.numel():
            return
        if call.probe is not None:
            self._check_weights(block, call.probe, tokens.device)
        for expert in block.experts:
            version = tokens._version
            with self._around(tokens), without_trace(expert.module or block.module, tokens.device):
                self._turn = turn = _Turn(expert, tokens)
                try:
                    call.send(expert, tokens)
                except Exception as error:
                    error.add_note(
                        f'while all tokens were sent to expert {expert.number} of {block.name}, for expert_inputs="all"'
                    )
                    raise
                finally:
                    self._turn = None
            self._check_turn(block, turn, written=tokens._version != version)

    def _check_weights(self, block: ExpertBlock, probe: Callable[[int], object], device: torch.device) -> None:
        """Route the first tokens with two kinds of weights, which no input of a linear may depend on."""
        found = []
        for step in (0, 1):
            self._probed = []
            try:
                with without_trace(block.module, device):
                    probe(step)
                found.append(self._probed)
            finally:
                self._probed = None
        if len(found[0]) != len(found[1]) or not all(map(same_bits, *found)):
            raise refusal(block, "it weights its tokens before a product")

    def _check_turn(self, block: ExpertBlock, turn: _Turn, *, written: bool) -> None:
        if written:
            raise refusal(block, f"expert {turn.expert.number} writes into the tokens that it is called with")
        for name in turn.expert.names:
            if not turn.rows[name]:
                raise refusal(
                    block,
                    f"no product of {name} was seen when all tokens were sent to expert {turn.expert.number}; "
                    f"{PRODUCTS_SEEN}",
                )
            if turn.rows[name] != len(turn.tokens):
                raise refusal(
                    block,
                    f"of {len(turn.tokens)} tokens that were sent to expert {turn.expert.number}, {turn.rows[name]} "
                    f"came to {name}",
                )

    def _after(self, block: ExpertBlock, *_: Any) -> None:
        if self._turn is not None or self._probed is not None:
            return
        call = self._calls.pop(block, None)
        if call is None or not call.routed:
            return
        # Which token a row is does not matter, so digests are looked up and not compared in order.
        known = row_digests(call.tokens)
        for name, rows in call.routed:
            like = rows.dtype == call.tokens.dtype and rows.shape[-1] == call.tokens.shape[-1]
            if not like or not bool(torch.isin(row_digests(rows), known).all()):
                raise refusal(
                    block,
                    f"{name} got rows that are none of the tokens that the block is called with (normed, weighted or "
                    "padded ones, say)",
                )

    def _enter(
        self, block: ExpertBlock, expert: Expert, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._turn is not None:
            return
        call = self._call(block, expert.fqn)
        rows = rows_of_call(block, expert, module, args, kwargs)
        self._inside.add(expert)
        if rows.numel():
            call.routed.append((expert.fqn, rows))

    def _leave(self, expert: Expert, *_: Any) -> None:
        if self._turn is None:
            self._inside.discard(expert)

    def _call(self, block: ExpertBlock, name: str) -> BlockCall:
        if block not in self._calls:
            raise refusal(block, f"{name} is used while the module around the experts is not called")
        return self._calls[block]
