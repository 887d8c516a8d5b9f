"""A step on compressed states: some weights at a time are expanded, stepped by the inner optimizer, and compressed.

    take     which parameters step, and which of them is written here: those whose masters are remainders
    begin    before ranks agree: steps masters in fp32 and bf16 weights. Quantized ones whose scales others share, or
             which no step has written yet, step to find what they claim, and whether they moved
    finish   once they have agreed: steps all others and writes them

What a chunk was expanded to is kept from `begin` to `finish` if one chunk holds all of it; otherwise these weights step
twice, the first time without leaving a trace. A step is a function of what is kept, so both times end alike.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fsdp_hooks.scale_sync import cuts_of
from fsdp_hooks.torch_private import local_of
from qtensor.optim.compressed.entries import compress, expand
from qtensor.optim.compressed.guests import Guest, as_groups, chunks_of, copy_of_number
from qtensor.optim.compressed.masters import (
    dense_of,
    expand_master,
    round_master,
    words_of,
    write_dense,
    write_fp32,
    write_master,
)
from qtensor.optim.compressed.stacks import Stack, kind_of, stacks_of
from qtensor.optim.compressed.states import COUNT, SEED, CompressedStates
from qtensor.optim.compressed.storage import is_quantized
from qtensor.optim.masters import gradient_of
from qtensor.scales.agreement import claim_of, common_along
from qtensor.scales.cut_blocks import CutBlocks, cut_blocks_of
from qtensor.states.draws import Positions
from qtensor.tensor.contents import decode
from qtensor.tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from qtensor.optim.compressed.muon import MuonOfChunks
    from qtensor.optim.matrices.step import MatrixStep


class StepWeights(NamedTuple):
    """What a step is about; see the arguments of `FusedStep.take`. `elsewhere`: weights that are stepped elsewhere.

    `matrices`: of an optimizer that takes matrices as a whole.
    """

    stepped: Sequence[Tensor]
    masters: Mapping[Tensor, Tensor]
    groups: Mapping[Tensor, int]
    fresh: set[Tensor]
    elsewhere: Collection[Tensor] = ()
    matrices: "MatrixStep | None" = None


class CompressedStep:
    """One step.

    Attributes:
        params: those that it writes; `plain`: those of them that are not quantized.
        claims: parameter -> what `claim_of` its new master is, where scales are shared; after `begin`.
        moved: parameter -> bool [], whether its master moved, of those that no step has written; after `begin`.
    """

    def __init__(self, states: CompressedStates, inner: torch.optim.Optimizer, weights: StepWeights) -> None:
        self._states, self._inner = states, inner
        self._masters, self._groups = weights.masters, weights.groups
        stepped, fresh = weights.stepped, weights.fresh
        # counted where ranks have agreed: one that failed before is to draw with the others again
        self._counts = [group.get(COUNT, 0) + 1 for group in inner.param_groups]
        # here, once each and in one order: it is a collective, and weights step at other times on other ranks
        self._grads = {param: gradient_of(param) for param in stepped}
        self._stepped, self._fresh = {id(param) for param in stepped}, fresh
        self.claims: dict[Tensor, Tensor] = {}
        self.moved: dict[Tensor, Tensor] = {}
        held = self._held = {param: one for param, one in states.remainders.items() if param not in weights.elsewhere}
        quantized = [param for param in held if is_quantized(param) and (param.requires_grad or self._steps(param))]
        sharing = _share_scales(quantized)
        self._early = [param for param in quantized if param in sharing or (param in fresh and self._steps(param))]
        early = {id(param) for param in self._early}
        self._late = [param for param in quantized if id(param) not in early and self._steps(param)]
        own = {id(param) for param in quantized}
        self._first = [param for param in stepped if id(param) not in own]
        self._sharing = sharing
        self._muon = None if weights.matrices is None else _muon_of(weights.matrices, inner, weights, self._grads)
        self._kept: list[Guest] = []
        self.plain = {param for param in self._first if param in held}
        self.params = {*quantized, *self.plain}

    def begin(self) -> None:
        """Step what need not wait for other ranks, and find what is claimed."""
        if self._muon is not None:
            self._orthogonalize(self._muon)
        with self._brought(self._chunks(self._step_stacks(self._first))) as brought:
            for chunk in brought:
                guests = self._advance(chunk)
                while guests:
                    self._settle_dense(guests.pop())
        chunks = self._chunks(self._early)
        with self._brought(chunks, write=False) as brought:
            for chunk in brought:
                if len(chunks) == 1:
                    self._kept = self._advance(chunk, compare=True, apart=True)
                    self._claim(self._kept)
                    continue
                with self._untouched(chunk):
                    self._claim(self._advance(chunk, compare=True))

    def finish(self, writes: Mapping[Tensor, tuple[Tensor | None, CutBlocks | None]]) -> None:
        """Step the others, and write.

        Args:
            writes: parameter -> what was agreed on for its scales, and the blocks that shards cut; of those that moved
                on some rank.
        """
        kept, self._kept = self._kept, []
        if self._states.storage.compresses:
            for group, count in zip(self._inner.param_groups, self._counts, strict=True):
                group[COUNT] = count
        done = {id(param) for param in (*self._early, *self._late)}
        # without a gradient here, and moved on another rank
        others = [param for param in writes if param in self._held and id(param) not in done]
        # nothing was agreed on for these
        alone = [param for param in self._late if writes.get(param) == (None, None)]
        left = {id(param) for param in self._step_stacks(alone)}
        alike = {id(param) for param in alone} - left
        late = [param for param in self._late if id(param) not in alike]
        chunks = self._chunks([*([] if kept else self._early), *late, *others])
        with self._brought([self._early, *chunks] if kept else chunks) as brought:
            for chunk in brought:
                guests, kept = kept or self._advance(chunk), []
                while guests:
                    self._settle(guests.pop(), writes)
        self._states.settle()

    def _settle(self, guest: Guest, writes: Mapping[Tensor, tuple[Tensor | None, CutBlocks | None]]) -> None:
        """Compress and write one weight, and let go of what it was expanded to: the next chunk needs the memory."""
        self._keep_state(guest)
        shard = local_of(guest.param)
        assert isinstance(shard, QuantizedTensor)
        if self._states.holds_fp32(guest.param):
            self._keep_master(guest)
            if guest.param in writes:
                write_fp32(guest.master, shard, writes[guest.param])
            return
        if guest.param not in writes:
            return
        at = self._at(guest.param)
        guest.master = round_master(guest.master, shard, at)
        remainder = words_of(self._states.remainders[guest.param])
        write_master(guest.master, shard, remainder, writes[guest.param], at)
        self._states.loaded.pop(guest.param, None)

    def _keep_master(self, guest: Guest) -> None:
        """Write a master that is held in fp32 where it is held, if it has been stepped elsewhere."""
        held = local_of(self._states.remainders[guest.param])
        if guest.master is not held:
            held.copy_(guest.master)

    def _chunks(self, params: Sequence[Tensor]) -> list[list[Tensor]]:
        return list(chunks_of(params, self._states.chunk))

    @contextmanager
    def _brought(self, chunks: Sequence[list[Tensor]], *, write: bool = True) -> Iterator[Iterator[list[Tensor]]]:
        """Yield chunks, each while it is on its device; see `CompressedStates.brought`."""
        # closed after an error, too: a traceback would keep it open
        with closing(self._states.brought(chunks, self._inner.state, self._masters, write=write)) as brought:  # type: ignore[type-var]
            yield brought

    def _step_stacks(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Step and write small weights as one, and large ones in pieces; returns the others."""
        # a chunk of states in host memory is brought whole, and Muon does not treat rows apart
        if self._states.storage.on_host or self._muon is not None:
            return list(params)
        kinds: dict[Tensor, Hashable | None] = {}
        for param in params:
            held = self._states.remainders.get(param)
            if held is None or param in self._states.loaded:
                continue
            how, state = self._states.storage.moment_of(param), self._inner.state.get(self._masters[param]) or {}
            kind = kind_of(param, words_of(held), state, how)
            if kind is not None:
                kinds[param] = kind, self._groups[param], self._states.places.column(param)
        stacks, cut, single = stacks_of(params, kinds)
        for stack in stacks:
            self._step_stack(stack, [slice(None)])
        for param, pieces in cut:
            self._step_stack([param], pieces)
        return single

    def _step_stack(self, params: Sequence[Tensor], pieces: Sequence[slice]) -> None:
        """Step weights of one kind as one, or one weight in pieces, and write them."""
        number, states = self._groups[params[0]], self._states
        if states.storage.rounding == "nearest":
            at = states.places.nearest(params[0])
        else:
            streams = [(states.streams[param], self._counts[number]) for param in params]
            at = states.places.stacked(params, self._inner.param_groups[number].get(SEED, 0), streams)
        remainders = [words_of(states.remainders[param]) for param in params]
        kept = [self._inner.state.get(self._masters[param]) or {} for param in params]
        for rows in pieces:
            stack, here = Stack(params, remainders, rows), at.of(rows)
            master = stack.masters()
            guest = Guest(params[0], master, expand(stack.states(kept), master))
            grads = [self._grads[param][rows] for param in params]
            grad = (torch.cat(grads) if len(grads) > 1 else grads[0]).to(torch.float32)
            with as_groups(self._inner, [guest], [grad], self._groups):
                self._inner.step()
            stack.keep_states(compress(guest.state, master, states.storage.moment_of(params[0]), here), kept)
            stack.write(master, here)

    def _steps(self, param: Tensor) -> bool:
        return id(param) in self._stepped

    def _at(self, param: Tensor) -> Positions:
        states, number = self._states, self._groups[param]
        if states.storage.rounding == "nearest" or not states.storage.compresses:
            return states.places.nearest(param)
        return states.places.of(
            param, self._inner.param_groups[number].get(SEED, 0), (states.streams[param], self._counts[number])
        )

    def _advance(self, params: Sequence[Tensor], *, compare: bool = False, apart: bool = False) -> list[Guest]:
        """Return these weights, expanded; those that have gradients stepped.

        Args:
            params: the weights.
            compare: whether somebody asks if they moved.
            apart: whether numbers of states, `step` and the like, are stepped as copies: ranks have yet to agree.
        """
        guests = []
        for param in params:
            master = self._expand(param)
            asks = compare and param in self._fresh and self._steps(param)
            before = self._before(param, master) if asks else None
            # its state is that of what stands for it in the inner optimizer's groups
            state = self._inner.state.get(self._masters[param]) or {}
            expanded = expand(state, param) if self._steps(param) else {}
            if apart:
                expanded = {name: copy_of_number(value) for name, value in expanded.items()}
            guests.append(Guest(param, master, expanded, before))
        stepping = [guest for guest in guests if self._steps(guest.param)]
        if self._muon is not None:
            for guest in stepping:
                guest.state = self._muon.step(guest.param, guest.master, guest.state)
            return guests
        grads = [self._grads[guest.param].to(torch.float32) for guest in stepping]
        with as_groups(self._inner, stepping, grads, self._groups):
            self._inner.step()
        return guests

    def _orthogonalize(self, muon: "MuonOfChunks") -> None:
        """Find the orthogonal matrices of sharded weights; a collective."""

        def advance() -> None:
            with self._brought(self._chunks(muon.matrices.params), write=False) as brought:
                muon.advance(brought)

        muon.matrices.agree()
        muon.matrices.attempt(advance)
        muon.orthogonalize()

    def _before(self, param: Tensor, master: Tensor) -> Tensor:
        """Return what a master is compared with to tell whether it moved: of a loaded one, what the weight holds."""
        shard: Any = local_of(param)
        apart = param in self._states.loaded or self._states.holds_fp32(param)
        return decode(shard, torch.float32) if apart else master.clone()

    def _expand(self, param: Tensor) -> Tensor:
        """Return the master of a shard as a plain tensor: in fp32 the one that is kept, else a new one."""
        held = self._states.remainders.get(param)
        if held is None:
            return local_of(self._masters[param]).detach()
        loaded = self._states.loaded.get(param)
        return expand_master(param, held) if loaded is None else local_of(loaded).clone()

    def _claim(self, guests: Iterable[Guest]) -> None:
        for guest in guests:
            shard: Any = local_of(guest.param)
            if guest.before is not None:
                self.moved[guest.param] = (guest.before != guest.master).any()
                guest.before = None
            if guest.param in self._sharing:
                master = guest.master
                if not self._states.holds_fp32(guest.param):
                    master = round_master(master, shard, self._at(guest.param))
                self.claims[guest.param] = claim_of(master, shard.recipe, self._sharing[guest.param])

    def _keep_state(self, guest: Guest) -> None:
        if not self._steps(guest.param):
            return
        how, key = self._states.storage.moment_of(guest.param), self._masters[guest.param]
        kept = self._inner.state.get(key)
        self._inner.state[key] = compress(guest.state, guest.param, how, self._at(guest.param), kept)
        guest.state = {}

    def _settle_dense(self, guest: Guest) -> None:
        """Write a bf16 weight; masters in fp32 are where they were, and the general way writes what is behind them."""
        self._keep_state(guest)
        held = self._states.remainders.get(guest.param)
        if self._states.holds_fp32(guest.param):
            dense_of(local_of(guest.param)).copy_(guest.master)
        elif held is not None:
            write_dense(guest.master, local_of(guest.param), words_of(held), self._at(guest.param))
            self._states.loaded.pop(guest.param, None)

    @contextmanager
    def _untouched(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Inside, a step leaves no trace in what is kept: entries that are not expanded are put back."""
        keys = [self._masters[param] for param in params]
        own = [
            (value, value.clone())
            for key in keys
            for value in (self._inner.state.get(key) or {}).values()
            if isinstance(value, Tensor) and not is_quantized(value) and value.dtype in (torch.float32, torch.float64)
        ]
        try:
            yield
        finally:
            for value, before in own:
                value.copy_(before)


def _muon_of(
    matrices: "MatrixStep", inner: torch.optim.Optimizer, weights: StepWeights, grads: Mapping[Tensor, Tensor]
) -> "MuonOfChunks":
    from qtensor.optim.compressed.muon import MuonOfChunks

    return MuonOfChunks(matrices, inner, weights.masters, weights.groups, grads)


def _share_scales(params: Sequence[Tensor]) -> dict[Tensor, CutBlocks | None]:
    """Return the quantized parameters that have scales in common with other shards or parameters, and their cuts."""
    found = {}
    for param, cuts in zip(params, cuts_of(list(params)), strict=True):
        shard: Any = local_of(param)
        blocks = cut_blocks_of(param, shard.recipe) if cuts else None
        shares = any(common_along(shard.recipe, blocks, dim, shard.ndim) for dim, _ in cuts)
        if shares or shard._partners is not None:
            found[param] = blocks
    return found
