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
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_hooks.ranks.scale_partners import check_complete
from fsdp_hooks.scale_sync import agree_on_scales, cuts_of, label_of, meeting_of, partners_of, tell_sharing
from qtensor.optim import master_states
from qtensor.optim.inner_step import check_inner, check_split
from qtensor.optim.master_step import MasterStep
from qtensor.optim.masters import LastWrites, master_of
from qtensor.optim.replicas import Replicas
from qtensor.optim.step_agreement import TRAINED

if TYPE_CHECKING:
    from qtensor.optim.compressed.states import CompressedStates


class MasterWeightOptimizer(MasterStep):
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
            foreach=True has; the logger "qtensor.optim.fused.step" (with compressed states
            "qtensor.optim.fused.compressed.step") tells at level DEBUG why others do not. False: for none. True: for
            all, and one that cannot take it is an error. `fused=True` is torch's own kernel where this way is not
            taken; its last bits differ from foreach=True's.
        masters: "fp32", or "remainder": 16 bits beside a weight's own bytes, which say the rest (see docs/memory.md).
            For quantized and bf16 weights; those in fp32 are their own masters.
        moments: "fp32", "bfloat16" or "float8" (MXFP8): what the inner optimizer's moments are kept in between steps.
            In 8 bits those of weights [.., K], K a multiple of 32; others stay in fp32. None: "float8" with remainders,
            else "fp32".
        rounding: of both, "stochastic", by counters of `param_groups[..]["states_seed"]`, the step and the place of
            each element in the whole weight, or "nearest", which loses what is less than half a unit, in every step.
        states: "device", or "host": masters and moments are in host memory between steps (pinned, where weights are on
            a device), and a step streams them through the device, for Muon and torch's optimizers that step each
            element alone. Weights and gradients stay where they are, and all bytes are the same (see docs/memory.md).
        **optimizer_kwargs: passed to `optimizer_cls`.

    Raises:
        ValueError: a parameter is on the meta device; one shares its scale (`share_scales`) with another that is frozen
            or not among the parameters; or its recipe, dtype or cut does not go with `masters` or `moments`; or it is
            no matrix, for Muon; or `fused_step=True` with states="host".
        RuntimeError: on all ranks of a group, if they do not list the same parameters.
        NotImplementedError: the optimizer is torch.optim.Adafactor and a parameter is sharded, which torch cannot step
            without masters either; or `masters`, `moments` or states="host" are asked of one that neither steps each
            element alone nor is torch.optim.Muon; or Muon's step cannot be split between shards as they are placed, or
            as this torch computes it.

    Example:
        ```python
        >>> with quantized_model_init(MXFP8BlockScaling()):
        ...     model = nn.Linear(64, 64)
        >>> optimizer = MasterWeightOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
        >>> model(torch.randn(8, 64)).sum().backward()
        >>> optimizer.step()
        ```
    """

    def __init__(  # noqa: PLR0913 - its options, by name
        self,
        optimizer_cls: type[torch.optim.Optimizer],
        params: Iterable[Any],
        *,
        check_replicas: bool = False,
        fused_step: bool | None = None,
        masters: str = "fp32",
        moments: str | None = None,
        rounding: str = "stochastic",
        states: str = "device",
        **optimizer_kwargs: Any,
    ) -> None:
        if (masters, moments, rounding, states) != ("fp32", None, "stochastic", "device"):
            self._states = _states_of(masters, moments, rounding, states, fused_step=fused_step is True)
        self._check_replicas, self._wants_fused = check_replicas, fused_step
        self._inner = None
        self._masters, self._group, self._labels = {}, {}, {}
        self._fresh = set()
        self._written = LastWrites()
        self._remainders = {}
        super().__init__(params, {})
        self._check_trainable(optimizer_cls, self._named())
        self._sync(0)
        groups = [self._master_group(number) for number in range(len(self.param_groups))]
        self._inner = optimizer_cls(groups, **optimizer_kwargs)
        self.defaults = self._inner.defaults
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(master_states.options_of(inner))
        check_split(self._inner, self._inner.param_groups, expanded=self._states is not None)
        self._bring_home()
        self._publish_state(())

    def __getstate__(self) -> dict[str, Any]:
        if self._states is not None:
            self._states.settle()
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
        if "_written" in state:
            self._bring_home()  # a copy is in memory that is not pinned

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
            tensors = [pair for pair in pairs if isinstance(pair[1], Tensor)]
            with self._tell_errors(tensors):
                asked = {**self._inner.defaults, **param_group, "params": [param for _, param in tensors]}
                check_split(self._inner, [asked], expanded=self._states is not None)
                super().add_param_group({**param_group, "params": given})
            group = self.param_groups[-1]
            self._sync(len(self.param_groups) - 1)
            self._inner.add_param_group(self._master_group(len(self.param_groups) - 1))
            group.update(master_states.options_of(self._inner.param_groups[-1]))
            self._bring_home()
            return
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of any optimizer, with masters in it."""
        master_states.forget_looks(self.state, self._masters)
        if self._states is not None:
            self._states.settle()
        self._join_masters()
        if self._states is not None and self._states.storage.compresses and self._expected is None:
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
            kept = Storage() if self._states is None else self._states.storage
            converted = converted_states(saved, kept, self._states.home if self._states and kept.on_host else None)
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
            self._bring_home()
        else:
            self._inner.load_state_dict(master_states.for_inner(self.param_groups, saved))
        self._expected = None
        self._publish_state(saved)

    @contextlib.contextmanager
    def expecting_states(self, *, masters: str = "fp32", moments: str | None = None) -> Iterator[None]:
        """Inside, the state dict has the entries of a checkpoint whose states are of another form, to load it into.

        `load_state_dict` inside converts what was loaded to this optimizer's own form, and ends it. Do not save what
        the state dict holds before that: masters in fp32 do not fit in remainders, which begin as zeros.

        Args:
            masters: that of the optimizer that saved the checkpoint.
            moments: likewise; None: those that go with such masters, as of this class.

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
        from qtensor.optim.compressed.states import CompressedStates
        from qtensor.optim.compressed.storage import Storage, check_storage, moments_beside

        assert self._inner is not None
        expected = Storage(masters, moments_beside(masters, moments))
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
        """Do `check_inner` and others; an error on this rank alone reaches those that go on to `_sync`."""
        tensors = [(name, param) for name, param in named if isinstance(param, Tensor)]
        with self._tell_errors(tensors):
            check_inner(kind, tensors)
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

    def _sync(self, first: int) -> None:
        """Make the scales of the groups from this number on agreed."""
        named = self._named(first)
        agree_on_scales("MasterWeightOptimizer", named, self._meeting(named))

    def _meeting(self, named: Sequence[tuple[str, Tensor]]) -> list[dist.ProcessGroup]:
        """Return the groups that cut these parameters or those held already; all ranks if replicas compare."""
        labels = self._labels | {param: label_of(name, param) for name, param in named}
        everybody = Replicas(named).everybody if self._check_replicas else []
        return list(dict.fromkeys([*meeting_of(list(labels.values()), cuts_of(list(labels))), *everybody]))

    def _bring_home(self) -> None:
        """Bring states that were made or copied elsewhere into host memory, if they belong there."""
        if self._states is not None and self._inner is not None:
            self._states.house(self._inner.state, self._masters)


def _states_of(
    masters: str, moments: str | None, rounding: str, states: str, *, fused_step: bool
) -> "CompressedStates | None":
    """Return what keeps states of this form; None: nobody needs to."""
    from qtensor.optim.compressed.storage import Storage, moments_beside

    storage = Storage(masters, moments_beside(masters, moments), rounding, states)
    if fused_step and storage.on_host:
        raise ValueError(
            f"MasterWeightOptimizer(fused_step=True, states={states!r}): the fused step reads states where the weights "
            'are; leave fused_step out, or use states="device"'
        )
    if storage.on_host:
        from qtensor.optim.compressed.host import HostStates

        return HostStates(storage)
    if storage.compresses:
        from qtensor.optim.compressed.states import CompressedStates

        return CompressedStates(storage)
    return None
