"""MasterWeightOptimizer: any torch optimizer on fp32 masters, its result quantized back into the shards.

    step:   grad (q.dtype) -> fp32 -> inner.step() on the masters        chunk by chunk, see inner_step.py
            -> amax of each master shard -> one all-reduce for all tensor-wide scales of the model
            -> requantize every shard in place -> digest of what was written (see masters.py)

On CUDA the steps of torch's AdamW, Adam and SGD write masters and parts in one pass instead (see fused/).

A master is the shard in fp32, and a DTensor if the parameter is one; parameters in fp32 are their own masters. The
bytes of a parameter depend only on its full master and the recipe (and on its history, with delayed scaling). So they
are the same for every world size, and a step that moves no master moves no byte:

    bytes == quantize(master)                     once a step has written the parameter
    master == dequantize(bytes), still "fresh"    before that, if the master was made from the bytes (quantizing
                                                  again could choose other codes for the same values, so a fresh
                                                  parameter is written only when some shard's master moved)

`param_groups` holds the parameters themselves (schedulers, clipping and torch.distributed.checkpoint.state_dict see an
ordinary optimizer). `state[p]` holds "master_weight" beside the inner optimizer's own entries, from the first step or
load that p takes part in.

A copied or pickled optimizer takes its masters and the inner optimizer along and drops hooks, as torch's optimizers do.
A copy of (model, optimizer) is tied as the originals are; a copy of the optimizer alone has parameters of its own.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_hooks.ranks.scale_partners import check_complete
from fsdp_hooks.scale_sync import (
    SharedScales,
    agree_on_scales,
    cuts_of,
    label_of,
    meeting_of,
    partners_of,
    scales_of,
    tell_sharing,
)
from fsdp_hooks.torch_private import local_of, locals_of, without_torch_function
from fsdp_hooks.versions import count_writes
from qtensor.numerics.triton_kernels import available
from qtensor.optim import fused, master_states, optimizer_modes
from qtensor.optim.batches import write_each
from qtensor.optim.inner_step import step_masters
from qtensor.optim.masters import LastWrites, check_trainable, copy_many, master_of, refill
from qtensor.optim.replicas import Replicas
from qtensor.optim.step_agreement import TRAINED, StepOutcome, Trained, agree, tell
from qtensor.scales.high_precision import HighPrecisionWeight
from qtensor.tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from qtensor.optim.compressed.step import CompressedStates, CompressedStep
    from qtensor.optim.compressed.storage import Storage
    from qtensor.optim.fused.step import FusedStep, Taken


class MasterWeightOptimizer(torch.optim.Optimizer):
    """An optimizer with fp32 master weights for quantized (and other low-precision) parameters.

    Building it is a collective if parameters are sharded (shards that share scales agree on these first, see
    `fsdp_hooks.sync_scales`); `step` is a collective, too.

    Args:
        optimizer_cls: the optimizer that updates the masters, such as torch.optim.AdamW.
        params: parameters or parameter groups, as for any torch optimizer; DTensors after fully_shard. Parameters
            given with names (`model.named_parameters()`) are matched across ranks by name; others by group, shape,
            dtype, recipe and placements, and by their order if all of these are equal.
        check_replicas: each step compares what replicas (HSDP, DDP) hold as it begins, in its one all-reduce; a flipped
            bit in one of them is an error on all ranks that names the parameter and the rank. All ranks of the default
            group must hold the same parameters; those that are no DTensors count as replicated over all of them.
        fused_step: steps and quantizes in one pass over memory (torch.optim.AdamW, Adam and SGD on CUDA, where Triton
            is; see docs/speed.md). None (the default): for all parameters that can take it, with the bytes that
            foreach=True has; the logger "qtensor.optim.fused.step" tells at level DEBUG why others do not. False:
            for none. True: for all, and one that cannot take it is an error. `fused=True` is torch's own kernel where
            this way is not taken; its last bits differ from foreach=True's.
        masters: "fp32", or "remainder": 16 bits beside a weight's own bytes, which say the rest (see docs/memory.md).
            For quantized and bf16 weights; those in fp32 are their own masters.
        moments: "fp32", "bfloat16" or "float8" (MXFP8): what the inner optimizer's moments are kept in between steps.
            In 8 bits those of weights [.., K], K a multiple of 32; others stay in fp32.
        rounding: of both, "stochastic", by counters of `param_groups[..]["states_seed"]`, the step and the place of
            each element in the whole weight, or "nearest", which loses what is less than half a unit, in every step.
        **optimizer_kwargs: passed to `optimizer_cls`.

    Raises:
        ValueError: a parameter is on the meta device; one shares its scale (`share_scales`) with another that is frozen
            or not among the parameters; or its recipe, dtype or cut does not go with `masters` or `moments`.
        RuntimeError: on all ranks of a group, if they do not list the same parameters.
        NotImplementedError: the optimizer is torch.optim.Adafactor and a parameter is sharded, which torch cannot step
            without masters either; or `masters` or `moments` are asked of one that does not step each element alone.

    Example:
        ```python
        >>> with quantized_model_init(MXFP8BlockScaling()):
        ...     model = nn.Linear(64, 64)
        >>> optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
        >>> model(torch.randn(8, 64)).sum().backward()
        >>> optimizer.step()
        ```
    """

    _wants_fused: bool | None = None
    _fused_way: "FusedStep | None" = None  # made by the first step that it may be for, and not pickled
    _states: "CompressedStates | None" = None  # if masters or moments are compressed
    _torn: bool = False  # whether this rank failed in a step after ranks had agreed to it
    _expected: "Storage | None" = None  # the form of states that are about to be loaded
    # what takes the fused way, or steps on compressed states, from the masters' step to the parts' write
    _taken: "Taken | CompressedStep | None" = None

    def __init__(  # noqa: PLR0913 - its options, by name
        self,
        optimizer_cls: type[torch.optim.Optimizer],
        params: Iterable[Any],
        *,
        check_replicas: bool = False,
        fused_step: bool | None = None,
        masters: str = "fp32",
        moments: str = "fp32",
        rounding: str = "stochastic",
        **optimizer_kwargs: Any,
    ) -> None:
        if (masters, moments, rounding) != ("fp32", "fp32", "stochastic"):
            from qtensor.optim.compressed.step import CompressedStates
            from qtensor.optim.compressed.storage import Storage

            storage = Storage(masters, moments, rounding)
            self._states = CompressedStates(storage) if storage.compresses else None
            if fused_step and storage.compresses:
                raise ValueError(
                    f"MasterWeightOptimizer(fused_step=True, masters={masters!r}, moments={moments!r}): the fused step "
                    "is for states in fp32; leave fused_step out"
                )
        self._check_replicas, self._wants_fused = check_replicas, fused_step
        self._inner: torch.optim.Optimizer | None = None
        self._masters: dict[Tensor, Tensor] = {}
        self._group: dict[Tensor, int] = {}  # the number of each parameter's group
        self._labels: dict[Tensor, str] = {}  # by which ranks tell parameters apart
        self._fresh: set[Tensor] = set()
        self._written = LastWrites()
        # loaded beside masters in fp32, which the next step makes of them and the weights that are loaded by then
        self._remainders: dict[Tensor, Tensor] = {}
        super().__init__(params, {})
        self._check_trainable(optimizer_cls, self._named())
        self._sync(0)
        groups = [self._master_group(number) for number in range(len(self.param_groups))]
        self._inner = optimizer_cls(groups, **optimizer_kwargs)
        self.defaults = self._inner.defaults
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(master_states.options_of(inner))
        self._publish_state(())

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {
            "_check_replicas": self._check_replicas,
            "_wants_fused": self._wants_fused,
            "_inner": self._inner,
            "_masters": self._masters,
            "_group": self._group,
            "_labels": self._labels,
            "_fresh": self._fresh,
            "_written": self._written.records(),
            "_states": self._states,
            "_torn": self._torn,
            "_remainders": self._remainders,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_fused_step" in state:  # as older pickles name it
            state = {"_wants_fused" if name == "_fused_step" else name: value for name, value in state.items()}
        # torch calls it to load a state dict, too, with states and groups alone
        if "_written" in state:
            # older pickles hold no remainders
            state = {"_remainders": {}} | state | {"_written": LastWrites(state["_written"])}
        super().__setstate__(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; a collective if any parameter is sharded."""
        if self._inner is not None:
            given = param_group["params"]
            # torch itself refuses a set, since it has no order
            if not isinstance(given, Tensor | set):
                given = list(given)  # may be a generator
            named = [given] if isinstance(given, Tensor) else given
            pairs = [one if isinstance(one, tuple) else (f"group {len(self.param_groups)}", one) for one in named]
            self._check_trainable(type(self._inner), pairs)
            with self._tell_errors([pair for pair in pairs if isinstance(pair[1], Tensor)]):
                super().add_param_group({**param_group, "params": given})
            group = self.param_groups[-1]
            self._sync(len(self.param_groups) - 1)
            self._inner.add_param_group(self._master_group(len(self.param_groups) - 1))
            group.update(master_states.options_of(self._inner.param_groups[-1]))
            return
        super().add_param_group(param_group)

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
        self._move(lambda inner: optimizer_modes.switch(inner, mode, self._masters), frozen=True)

    def _step_masters(self, inner: torch.optim.Optimizer) -> list[Tensor]:
        """Step the inner optimizer; returns the parameters that took part."""
        # otherwise reading an attribute of a subclass goes through it
        with without_torch_function():
            # a frozen parameter may still have a gradient, which is ignored
            stepped = [param for param in self._masters if param.grad is not None and param.requires_grad]
        if self._states is not None:
            self._taken = self._states.take(inner, stepped, self._masters, self._group, self._fresh)
            self._taken.begin()
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
        first = next(iter(self._masters.values()), None)
        applies = first is not None and first.device.type in fused.FUSED_ON and available()
        if self._wants_fused is False or not (self._wants_fused or applies):
            return None
        if self._fused_way is None:
            from qtensor.optim.fused.step import FusedStep

            self._fused_way = FusedStep(required=self._wants_fused is True)
        return self._fused_way.take(inner, stepped, self._masters, self._group, self._fresh)

    def _move(self, move: Callable[[torch.optim.Optimizer], list[Tensor]], *, frozen: bool = False) -> None:
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
            moved = move(self._inner)
            for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
                # some optimizers keep state in their groups
                group.update(master_states.options_of(inner))
            trained, dense, plain = self._collect_writes(set(moved), frozen=frozen)
            if plain:
                copy_many([(shard, master) for _, shard, master in plain])
        except Exception:
            # the error that led here is the one to report
            with contextlib.suppress(Exception):
                tell(*self._collect_writes(set(), frozen=frozen)[:2], self._labels, replicas)
            self.__dict__.pop("_taken", None)  # what it holds of the weights is no use any more
            raise
        # behind all that may fail on one rank: no quantized byte is written before all ranks have come here
        outcome = agree(trained, dense, self._labels, replicas)
        self._torn = True  # until all is written; then ranks are at one again
        written = self._requantize(trained, outcome) | {param for param, _, _ in plain}
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

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of any optimizer, with masters in it."""
        master_states.forget_looks(self.state, self._masters)
        self._join_masters()
        if self._states is not None and self._expected is None:
            # a remainder belongs to the bytes beside it: those that others wrote have none
            with torch.no_grad():
                self._follow_outside_writes(self._written.look())
                self._publish_state(())
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned.

        Masters keep fp32; the base class would cast them to the parameter's dtype.

        Raises:
            ValueError: groups or parameters differ, or a master weight is missing or does not fit; nothing has been
                loaded then.
        """
        assert self._inner is not None
        params = [param for group in self.param_groups for param in group["params"]]
        master_states.forget_looks(self.state, self._masters)
        saved = master_states.saved_states(params, state_dict)
        held = self._states.remainders if self._states is not None else {}
        master_states.check_masters(self._masters | held, saved)
        counters = [] if self._states is None else self._states.counters_of(self.param_groups)
        converted = None
        if self._states is not None or master_states.has_compressed(saved):
            from qtensor.optim.compressed.entries import converted_states
            from qtensor.optim.compressed.storage import Storage

            # what it refuses, it refuses before anything is loaded
            converted = converted_states(saved, Storage() if self._states is None else self._states.storage)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._torn = False
        for group, own in zip(self.param_groups, counters, strict=False):
            # a checkpoint of other states has none
            group.update(own | group)
        self._remainders = master_states.load_masters(self._masters, saved, self._states)
        self._start_anew(self._masters)
        # torch restores an optimizer before its model, so the loaded masters hold until the next step writes them
        self._written.forget(saved)
        if converted is not None:
            moments, others = converted
            self._inner.load_state_dict(master_states.for_inner(self.param_groups, others))
            for param, entries in moments.items():
                if entries:
                    self._inner.state[self._masters[param]].update(entries)
        else:
            self._inner.load_state_dict(master_states.for_inner(self.param_groups, saved))
        self._expected = None
        self._publish_state(saved)

    @contextlib.contextmanager
    def expecting_states(self, *, masters: str = "fp32", moments: str = "fp32") -> Iterator[None]:
        """Inside, the state dict has the entries of a checkpoint whose states are of another form, to load it into.

        `load_state_dict` inside converts what was loaded to this optimizer's own form, and ends it. Do not save what
        the state dict holds before that: masters in fp32 do not fit in remainders, which begin as zeros.

        Args:
            masters: that of the optimizer that saved the checkpoint.
            moments: that of this optimizer, too.

        Raises:
            ValueError: no such form, or not of these parameters.

        Example:
            ```python
            >>> with optimizer.expecting_states(masters="fp32", moments="fp32"):
            ...     state = get_optimizer_state_dict(model, optimizer)
            ...     dcp.load({"optim": state}, checkpoint_id="step-1000", planner=QuantizedLoadPlanner())
            ...     set_optimizer_state_dict(model, optimizer, state)
            ```
        """
        from qtensor.optim.compressed.expected import restore_counters
        from qtensor.optim.compressed.step import CompressedStates
        from qtensor.optim.compressed.storage import Storage, check_storage

        assert self._inner is not None
        expected = Storage(masters, moments)
        if expected.compresses:
            check_storage(expected, type(self._inner), self._named())
        counters, self._expected = CompressedStates.counters_of(self.param_groups), expected
        try:
            self._publish_state([*self.state])
            yield
        finally:
            self._expected = None
            restore_counters(self.param_groups, counters)
            self._publish_state([*self.state])

    def _check_trainable(self, kind: type[torch.optim.Optimizer], named: Iterable[tuple[str, Any]]) -> None:
        """Do `check_trainable`; an error on this rank alone reaches those that go on to `_sync`."""
        tensors = [(name, param) for name, param in named if isinstance(param, Tensor)]
        with self._tell_errors(tensors):
            check_trainable(kind, [param for _, param in tensors])
            partners = [partners_of(param) for _, param in tensors if param.requires_grad]
            check_complete("MasterWeightOptimizer", partners, TRAINED)
            if self._states is not None:
                from qtensor.optim.compressed.storage import check_storage

                check_storage(self._states.storage, kind, tensors)

    @contextlib.contextmanager
    def _tell_errors(self, named: Sequence[tuple[str, Tensor]]) -> Iterator[None]:
        """Tell an error in this block to the ranks that go on to `_sync` of these parameters."""
        try:
            yield
        except Exception:
            tell_sharing(named, self._meeting(named))
            raise

    def _refuse_exchanged(self) -> None:
        """Raise if others put parameters into the groups: these have no masters, and a step would pass them over."""
        given = [param for group in self.param_groups for param in group["params"]]
        if len(given) != len(self._masters) or any(a is not b for a, b in zip(self._masters, given, strict=True)):
            raise RuntimeError(
                "MasterWeightOptimizer.step: param_groups no longer hold the parameters it was built with "
                "(accelerate's prepare exchanges them as it shards); shard the model first, then build the optimizer "
                "from model.parameters(), and use add_param_group for more"
            )

    def _master_group(self, number: int) -> dict[str, Any]:
        """Return the group of this number over masters."""
        group = self.param_groups[number]
        if self._states is not None:
            self._states.begin_group(group, number)
        for param in group["params"]:
            held = None if self._states is None else self._states.hold(param)
            self._masters[param] = master_of(param) if held is None else held
            self._group[param] = number
        for name, param in master_states.names_of(group, number):
            self._labels[param] = label_of(name, param)
        self._start_anew(group["params"])
        options = master_states.options_of(group)
        return {**options, "params": [self._masters[param] for param in group["params"]]}

    def _start_anew(self, params: Iterable[Tensor]) -> None:
        """Take note of parameters' bytes; quantized ones are fresh until a step moves their master."""
        params = list(params)
        self._fresh.update(param for param in params if isinstance(local_of(param), QuantizedTensor))
        self._written.note([param for param in params if self._masters[param] is not param])

    def _follow_outside_writes(self, same: Tensor | None) -> None:
        """Give parameters that were written by others since (a load, a copy_) a new master, given `LastWrites.look`."""
        if changed := self._written.changed(same):
            for param in changed:
                if self._states is None or not self._states.forget(param):
                    refill(self._masters[param], param)
            self._start_anew(changed)

    def _sync(self, first: int) -> None:
        """Make the scales of the groups from this number on agreed."""
        named = self._named(first)
        agree_on_scales("MasterWeightOptimizer", named, self._meeting(named))

    def _meeting(self, named: Sequence[tuple[str, Tensor]]) -> list[dist.ProcessGroup]:
        """Return the groups that cut these parameters or those held already; all ranks if replicas compare."""
        labels = self._labels | {param: label_of(name, param) for name, param in named}
        everybody = Replicas(named).everybody if self._check_replicas else []
        return list(dict.fromkeys([*meeting_of(list(labels.values()), cuts_of(list(labels))), *everybody]))

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

    def _named(self, first: int = 0) -> list[tuple[str, Tensor]]:
        """Return (name, parameter) of the groups from this number on."""
        groups = list(enumerate(self.param_groups))[first:]
        return [pair for number, group in groups for pair in master_states.names_of(group, number)]

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

    def _publish_state(self, params: Iterable[Tensor]) -> None:
        assert self._inner is not None
        shown = None if self._states is None else self._states.shown
        master_states.publish(self.state, self._masters, self._inner.state, params, shown)
        if self._expected is not None:
            from qtensor.optim.compressed.expected import hide_counters, show_as

            show_as(self.state, self._expected, self._states)
            hide_counters(self.param_groups, self._expected)

    def _join_masters(self) -> None:
        """Make masters in fp32 of remainders that were loaded, and of what the weights hold now."""
        if self._remainders:
            from qtensor.optim.compressed.masters import expand_master

            for param, remainder in self._remainders.items():
                local_of(self._masters[param]).copy_(expand_master(param, remainder))
