"""A step of MasterWeightOptimizer, from gradients to written shards.

    before     what others wrote is followed, and remainders that were loaded become masters
    masters    move: by the inner optimizer (inner_step.py), in one pass on CUDA (fused/), or compressed (compressed/)
    agree      one all-reduce: which masters moved, under which amaxes, and has anybody failed (step_agreement.py)
    write      the shards, and what their digests are

Nothing quantized is written before all ranks have agreed; whatever may fail on one rank alone stands before that.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.ranks.exchange import RanksDifferError
from fsdp_hooks.scale_sync import SharedScales, scales_of
from fsdp_hooks.torch_private import local_of, locals_of, without_torch_function
from fsdp_hooks.versions import count_writes
from qtensor.numerics.triton_kernels import available
from qtensor.optim import fused, master_states, optimizer_modes
from qtensor.optim.batches import write_each
from qtensor.optim.inner_step import step_masters
from qtensor.optim.masters import LastWrites, copy_many, refill
from qtensor.optim.replicas import Replicas
from qtensor.optim.step_agreement import StepOutcome, Trained, agree, meeting_about, tell
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.states.kinds import MATRICES
from qtensor.tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from qtensor.optim.compressed.states import CompressedStates
    from qtensor.optim.compressed.step import CompressedStep
    from qtensor.optim.compressed.storage import Storage
    from qtensor.optim.fused.compressed.step import BothWays, FusedCompressedStep
    from qtensor.optim.fused.step import FusedStep, Taken
    from qtensor.optim.matrices.step import MatrixStep


class MasterStep(torch.optim.Optimizer):
    """The half of MasterWeightOptimizer that steps; the other half says what it steps, shows and loads.

    Attributes:
        _inner: steps the masters; None while the first groups are added.
        _masters: parameter -> its master, in the order of the groups.
        _group: parameter -> the number of its group.
        _labels: parameter -> what ranks tell it apart by.
        _fresh: quantized parameters that no step has written yet.
        _written: digests of what was written.
        _remainders: parameter -> one that was loaded where its master is kept in fp32: the next step makes the master
            of it and the weight that is loaded by then.
        _states: if masters or moments are compressed.
        _expected: the form of states that are about to be loaded.
        _torn: whether this rank failed in a step after ranks had agreed to it.
        _fused_way: made by the first step that it may be for, and not pickled.
        _fused_compressed: likewise, for compressed states.
        _taken: what takes the fused way, or steps on compressed states, from the masters' step to the parts' write.
    """

    _inner: torch.optim.Optimizer | None
    _masters: dict[Tensor, Tensor]
    _group: dict[Tensor, int]
    _labels: dict[Tensor, str]
    _fresh: set[Tensor]
    _written: LastWrites
    _remainders: dict[Tensor, Tensor]
    _check_replicas: bool
    _wants_fused: bool | None = None
    _states: "CompressedStates | None" = None
    _expected: "Storage | None" = None
    _torn: bool = False
    _fused_way: "FusedStep | None" = None
    _fused_compressed: "FusedCompressedStep | None" = None
    _taken: "Taken | CompressedStep | BothWays | None" = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the masters and requantize the parameters in place.

        Call it on all ranks; it makes one all-reduce for each group of ranks that shard parameters.
        A parameter that others wrote since the last step (a checkpoint loaded later, a copy_) keeps that value: its
        master starts anew from it.

        Raises:
            RuntimeError: `param_groups` hold other parameters than those it was built with; nothing has been written.
                On all ranks, an earlier step failed on one of them behind what they agree on (out of memory, say).
                On all ranks, replicas differ (`check_replicas`).
                Also, on all ranks of a group, if the ranks do not list the same parameters or the inner optimizer
                failed on one of them. No quantized parameter has been written then, but masters may have moved and
                other parameters may have been written, so load a checkpoint.
        """
        # before the closure: a step that cannot be finished should not begin with a forward
        self._refuse_exchanged()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._move(self._step_masters)
        return loss

    def __getattr__(self, name: str) -> Any:
        """Return `train` and `eval` if the inner optimizer has modes (see optimizer_modes.py); raise clear errors else.

        Both are collectives as `step` is; quantized weights follow the masters.
        """
        inner = self.__dict__.get("_inner")
        if name not in optimizer_modes.MODES or not hasattr(inner, name):
            raise optimizer_modes.missing_attribute(inner, name)
        return functools.partial(self._switch, name)

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        self._refuse_exchanged()
        self._move(lambda inner, _: optimizer_modes.switch(inner, mode, self._masters), frozen=True)

    def _step_masters(self, inner: torch.optim.Optimizer, replicas: Replicas | None) -> list[Tensor]:
        """Step the inner optimizer; returns the parameters that took part."""
        # otherwise reading an attribute of a subclass goes through it
        with without_torch_function():
            # a frozen parameter may still have a gradient, which is ignored
            stepped = [param for param in self._masters if param.grad is not None and param.requires_grad]
        matrices = self._take_matrices(inner, stepped, replicas) if type(inner) in MATRICES else None
        if self._states is not None:
            self._taken = self._take_compressed(self._states, inner, stepped, matrices)
            self._taken.begin()
            return stepped
        if matrices is not None:
            if self._wants_fused:
                self._take_fused(inner, stepped)  # which it refuses
            # a rank outside of a parameter's mesh has no piece of it
            plain = [param for param in stepped if not isinstance(param, DTensor)]
            step_masters(inner, plain, self._masters, self._group)
            matrices.step(self._masters)
            return stepped
        self._taken = taken = self._take_fused(inner, stepped)
        if taken is None:
            step_masters(inner, stepped, self._masters, self._group)
            return stepped
        rest = [param for param in stepped if param not in taken.params]
        # an optimizer that it does not cover steps also if nothing has a gradient
        if rest or not taken.params:
            with taken.like_foreach():
                step_masters(inner, rest, self._masters, self._group)
        taken.begin()
        return stepped

    def _take_fused(self, inner: torch.optim.Optimizer, stepped: list[Tensor]) -> "Taken | None":
        """Return what takes the fused way; None where nothing could, and nothing is imported."""
        if not self._may_fuse():
            return None
        if self._fused_way is None:
            from qtensor.optim.fused.step import FusedStep

            self._fused_way = FusedStep(required=self._wants_fused is True)
        return self._fused_way.take(inner, stepped, self._masters, self._group, self._fresh)

    def _take_matrices(
        self, inner: torch.optim.Optimizer, stepped: list[Tensor], replicas: Replicas | None
    ) -> "MatrixStep":
        """Return the step of those whose matrices are sharded."""
        from qtensor.optim.matrices.step import MatrixStep, Optimized

        meeting = meeting_about(self._labels, replicas)
        return MatrixStep(Optimized(inner, self._labels, self._group, *meeting), stepped)

    def _take_compressed(
        self,
        states: "CompressedStates",
        inner: torch.optim.Optimizer,
        stepped: list[Tensor],
        matrices: "MatrixStep | None",
    ) -> "CompressedStep | BothWays":
        """Return the step on compressed states, with what takes the fused way where something could."""
        from qtensor.optim.compressed.step import CompressedStep, StepWeights

        weights = StepWeights(stepped, self._masters, self._group, self._fresh, matrices=matrices)
        if states.storage.on_host or not self._may_fuse():
            return CompressedStep(states, inner, weights)
        if self._fused_compressed is None:
            from qtensor.optim.fused.compressed.step import FusedCompressedStep

            self._fused_compressed = FusedCompressedStep(required=self._wants_fused is True)
        return self._fused_compressed.take(states, inner, weights)

    def _may_fuse(self) -> bool:
        first = next(iter(self._masters.values()), None)
        applies = first is not None and first.device.type in fused.FUSED_ON and available()
        return self._wants_fused is not False and bool(self._wants_fused or applies)

    def _move(
        self, move: Callable[[torch.optim.Optimizer, Replicas | None], list[Tensor]], *, frozen: bool = False
    ) -> None:
        """Have masters moved, and write the parameters that `move` returns: with `frozen`, those frozen since, too."""
        assert self._inner is not None
        replicas = Replicas(self._named()) if self._check_replicas else None
        self.__dict__.pop("_taken", None)
        try:
            if self._torn:
                raise RuntimeError(
                    "MasterWeightOptimizer.step: an earlier step failed on this rank when all had agreed to it, so its "
                    "shards are a step behind theirs; load a checkpoint"
                )
            same = self._written.look()
            if replicas is not None:
                replicas.look()
            for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
                inner.update(master_states.options_of(group))
            self._join_masters()
            # a checkpoint that was loaded since the last step wins over the masters of before
            self._follow_outside_writes(same)
            moved = move(self._inner, replicas)
            for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
                # some optimizers keep state in their groups
                group.update(master_states.options_of(inner))
            trained, dense, plain = self._collect_writes(set(moved), frozen=frozen)
            if plain:
                copy_many([(shard, master) for _, shard, master in plain])
        except RanksDifferError:  # of an agreement before the step's: all ranks of the groups have it
            self._let_go()
            raise
        except Exception:
            # the error that led here is the one to report
            with contextlib.suppress(Exception):
                tell(*self._collect_writes(set(), frozen=frozen)[:2], self._labels, replicas)
            self._let_go()
            raise
        # behind all that may fail on one rank: no quantized byte is written before all ranks have come here
        outcome = agree(trained, dense, self._labels, replicas)
        self._torn = True  # until all is written; then ranks are at one again
        try:
            written = self._requantize(trained, outcome) | {param for param, _, _ in plain}
        except BaseException:
            self._let_go()
            raise
        self._torn = False
        if self._taken is not None:
            written, self._taken = written | self._taken.plain, None
        if self._states is not None:
            for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
                group.update(master_states.options_of(inner))
        count_writes(written)
        low = (param for param, master in self._masters.items() if master is not param)
        self._written.note([param for param in low if param in written or param not in self._written])
        self._remainders.clear()
        self._publish_state(moved)
        if replicas is not None:
            # now that all ranks are known to step the same parameters
            replicas.warn_of_none()

    def _let_go(self) -> None:
        """Drop what a step that failed holds of the weights, once nothing is on its way any more."""
        self.__dict__.pop("_taken", None)
        if self._states is not None:
            self._states.settle()

    def _collect_writes(
        self, with_grad: set[Tensor], *, frozen: bool
    ) -> tuple[list[Trained], list[tuple[str, Tensor, SharedScales]], list[tuple[Tensor, Tensor, Tensor]]]:
        """Return what a step writes: quantized; storage="high_precision"; plain (parameter, shard, local master).

        With `frozen`, whatever took part in a step once: ranks list the same, though masters may move on one of them.
        """
        trained: list[Trained] = []
        dense: list[tuple[str, Tensor, SharedScales]] = []
        plain: list[tuple[Tensor, Tensor, Tensor]] = []
        written: set[Tensor] = set()
        claims: dict[Tensor, Tensor] = {}
        found_moved: dict[Tensor, Tensor] = {}
        if (taken := self._taken) is not None:
            written, claims, found_moved = taken.params, taken.claims, taken.moved
        with without_torch_function():
            count, held = len(self._masters), locals_of([*self._masters, *self._masters.values()])
            for (param, master), shard, own in zip(self._masters.items(), held[:count], held[count:], strict=True):
                listed = param.requires_grad or (frozen and bool(self.state.get(param)))
                if isinstance(shard, QuantizedTensor):
                    # also one without a gradient: another rank may have one for its shard
                    if listed or param in with_grad:
                        # each question to a dictionary takes a microsecond of a step with thousands of weights
                        facts = param in with_grad, bool(self._fresh) and param in self._fresh
                        claim = claims.get(param) if claims else None
                        moves = found_moved.get(param) if found_moved else None
                        trained.append(Trained(self._labels[param], param, shard, own, *facts, claim, moves))
                    continue
                if master is not param and param in with_grad and param not in written:
                    plain.append((param, shard, own))
                if listed and isinstance(shard, HighPrecisionWeight) and (scales := scales_of(param)) is not None:
                    dense.append((self._labels[param], param, scales))
        return trained, dense, plain

    def _requantize(self, trained: list[Trained], outcome: StepOutcome) -> set[Tensor]:
        """Write the quantized parameters whose masters moved on any rank; returns those."""
        # asking is a host sync: once each has been written, and while all take part in each step, nobody needs to ask
        wait = any(one.fresh or not one.stepped for one in trained)
        moves = outcome.moves() if wait else [True] * len(trained)
        moved = [number for number, yes in enumerate(moves) if yes]
        due = moved
        if self._taken is not None:
            due = [number for number in moved if trained[number].param not in self._taken.params]
            asked = self._taken.claims or self._states is not None
            agreed = zip(trained, outcome.scales, outcome.cuts, moves, strict=True) if asked else ()
            self._taken.finish({one.param: (scale, cut) for one, scale, cut, yes in agreed if yes})
        write_each(
            [trained[number].shard for number in due],
            [trained[number].master for number in due],
            [outcome.scales[number] for number in due],
            [outcome.cuts[number] for number in due],
        )
        # a shard without elements stays fresh: it cannot say that something moved
        if self._fresh:
            self._fresh -= {trained[number].param for number in moved if trained[number].shard.payload.numel()}
        return {trained[number].param for number in moved}

    def _refuse_exchanged(self) -> None:
        """Raise if others put parameters into the groups: these have no masters, and a step would pass them over."""
        given = [param for group in self.param_groups for param in group["params"]]
        if len(given) != len(self._masters) or any(a is not b for a, b in zip(self._masters, given, strict=True)):
            raise RuntimeError(
                "MasterWeightOptimizer.step: param_groups no longer hold the parameters it was built with "
                "(accelerate's prepare exchanges them as it shards); shard the model first, then build the optimizer "
                "from model.parameters(), and use add_param_group for more"
            )

    def _join_masters(self) -> None:
        """Make masters in fp32 of remainders that were loaded, and of what the weights hold now."""
        if self._remainders:
            from qtensor.optim.compressed.entries import on_device
            from qtensor.optim.compressed.masters import expand_master

            for param, remainder in self._remainders.items():
                held = {} if self._states is None else self._states.remainders
                master = expand_master(param, on_device(remainder, param))
                local_of(held.get(param, self._masters[param])).copy_(master)

    def _follow_outside_writes(self, same: Tensor | None) -> None:
        """Give parameters that were written by others since (a load, a copy_) a new master, given `LastWrites.look`."""
        if changed := self._written.changed(same):
            for param in changed:
                if self._states is None or not self._states.forget(param):
                    refill(self._masters[param], param)
            self._start_anew(changed)

    def _start_anew(self, params: Iterable[Tensor]) -> None:
        """Take note of parameters' bytes; quantized ones are fresh until a step moves their master."""
        params = list(params)
        self._fresh.update(param for param in params if isinstance(local_of(param), QuantizedTensor))
        self._written.note([param for param in params if self._masters[param] is not param])

    def _publish_state(self, params: Iterable[Tensor]) -> None:
        assert self._inner is not None
        shown = None if self._states is None else self._states.shown
        master_states.publish(self.state, self._masters, self._inner.state, params, shown)
        if self._expected is not None:
            from qtensor.optim.compressed.expected import hide_counters, show_as

            show_as(self.state, self._expected, self._states)
            hide_counters(self.param_groups, self._expected)

    def _named(self, first: int = 0) -> list[tuple[str, Tensor]]:
        """Return (name, parameter) of the groups from this number on."""
        groups = list(enumerate(self.param_groups))[first:]
        return [pair for number, group in groups for pair in master_states.names_of(group, number)]
