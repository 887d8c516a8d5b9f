"""The fused step on compressed states, and beside it the general one of those that cannot take it.

    take     which parameters take it (tasks.py, decision.py); the others are for compressed/step.py
    begin    before ranks agree: weights without parts
    finish   once they have agreed: quantized ones, weight, remainder and moments in one pass

Both ways have the same bytes, so a weight may go either way in any step: the general one in its first step, behind a
load or a write of others, and where masters in fp32 were loaded.
"""

import logging
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_hooks.kernels.compiled import use_kernels
from fsdp_hooks.torch_private import has_step_hooks, is_tracing, is_watched, without_torch_function
from qtensor.optim.compressed.states import COUNT, SEED, CompressedStates
from qtensor.optim.compressed.step import CompressedStep, StepWeights
from qtensor.optim.fused.compressed.decision import EMPTY, packed, refuse_rule
from qtensor.optim.fused.compressed.probe import prove
from qtensor.optim.fused.compressed.table import ROW
from qtensor.optim.fused.compressed.tasks import Kind, Task, task_of
from qtensor.optim.fused.counts import advance_counts, read_counts
from qtensor.optim.fused.decision import ADAM, Rule, numbers_of, refuse_optimizer, rule_of
from qtensor.optim.fused.step import FIRST, FRESH, asking_foreach
from qtensor.optim.fused.table import Owners, filled
from qtensor.optim.fused.trials import Reasons, Trials
from qtensor.scales.cut_blocks import CutBlocks
from qtensor.spec.codecs.rounding import is_armed
from qtensor.states.draws import key_of

LOG = logging.getLogger(__name__)

LOADED = "its master was loaded in fp32, and no step has compressed it yet"
PASSING = (FIRST, FRESH, LOADED, EMPTY)  # reasons that pass by themselves, or of shards that have nothing to step


class FusedCompressedStep:
    """The fused way of one optimizer with compressed states.

    Args:
        required: whether a parameter that cannot take it is an error.
    """

    def __init__(self, *, required: bool) -> None:
        self._reasons = Reasons(LOG, required=required, passing=PASSING)
        self._trials = Trials("the fused step on compressed states")
        self._owners = Owners()

    @torch.no_grad()
    def take(self, states: CompressedStates, inner: torch.optim.Optimizer, weights: StepWeights) -> "BothWays":
        """Return the step of these weights.

        Raises:
            RuntimeError: it is required, and a parameter can not take it.
        """
        stepped, masters, groups, fresh, *_ = weights
        watched = is_tracing() or is_watched() or is_armed() or use_kernels.mode == "eager"
        why = refuse_optimizer(inner, hooked=has_step_hooks(inner), watched=watched)
        rules = [why or rule_of(type(inner), group) for group in inner.param_groups]
        tasks: list[Task] = []
        with without_torch_function():
            for param in stepped:
                found = self._look(param, rules[groups[param]], states, inner.state.get(masters[param]) or {}, fresh)
                if isinstance(found, Task):
                    tasks.append(found)
                else:
                    self._reasons.tell(param, found)
        taken = {task.param for task in tasks}
        rest = [param for param in stepped if param not in taken]
        general = CompressedStep(states, inner, StepWeights(rest, masters, groups, fresh, taken, weights.matrices))
        own = [inner.param_groups[groups[task.param]] for task in tasks]
        drawn = states.storage.rounding == "stochastic"
        rows = [
            key_of(group.get(SEED, 0), states.streams[task.param], group.get(COUNT, 0) + 1) if drawn else (0, 0)
            for task, group in zip(tasks, own, strict=True)
        ]
        covered = [group for group, rule in zip(inner.param_groups, rules, strict=True) if isinstance(rule, Rule)]
        return BothWays(general, [*zip(tasks, own, rows, strict=True)], self._owners, covered)

    def _look(
        self,
        param: Tensor,
        rule: Rule | str,
        states: CompressedStates,
        state: Mapping[str, Any],
        fresh: set[Tensor],
    ) -> Task | str:
        """Return the task of a parameter, or why it takes the general way."""
        if why := refuse_rule(rule):
            return why
        if param in fresh:
            return FRESH
        if param in states.loaded:
            return LOADED
        if not state:
            return FIRST
        task = task_of(param, states.remainders.get(param), state, states.storage)
        return task if isinstance(task, str) else self._compiled(task.kind) or task

    def _compiled(self, kind: Kind) -> str:
        """Return why a kernel cannot be used; see `Trials.why_not`."""

        def attempt() -> None:
            table = torch.zeros(1, ROW, dtype=torch.int64, device=kind.device)
            run(kind, table, torch.zeros(0, dtype=torch.int32, device=kind.device))
            prove(kind, run)

        return self._trials.why_not(kind, kind.device, attempt)


class _Pass(NamedTuple):
    launches: list[tuple[Kind, Tensor, Tensor]]
    counts: list[Tensor]


class BothWays:
    """One step: what takes the fused way, and a `CompressedStep` of the rest, whose attributes it has."""

    def __init__(
        self,
        general: CompressedStep,
        turns: Sequence[tuple[Task, dict[str, Any], tuple[int, int]]],
        owners: Owners,
        covered: Sequence[dict[str, Any]],
    ) -> None:
        self._general, self._turns, self._owners, self._covered = general, turns, owners, covered
        own = {task.param for task, _, _ in turns}
        self.params = general.params | own
        self.plain = general.plain | own
        self.claims, self.moved = general.claims, general.moved
        self._behind: _Pass | None = None

    def begin(self) -> None:
        """Step what need not wait for other ranks, and make ready what does: behind the agreement nothing may fail."""
        with asking_foreach(self._covered):
            self._general.begin()
        self._behind = self._ready(behind=True)
        self._step(self._ready(behind=False))

    def finish(self, writes: Mapping[Tensor, tuple[Tensor | None, CutBlocks | None]]) -> None:
        """Step the others, and write; see `CompressedStep.finish`."""
        with asking_foreach(self._covered):
            self._general.finish(writes)
        assert self._behind is not None
        self._step(self._behind)

    def _ready(self, *, behind: bool) -> "_Pass":
        """Return the launches of a pass, and the counts of steps that it advances."""
        turns = [turn for turn in self._turns if turn[0].behind == behind]
        counts = read_counts([task.taken for task, _, _ in turns])
        found: dict[Kind, list[tuple[Task, bytes]]] = {}
        for (task, group, keys), count in zip(turns, counts, strict=True):
            numbers = packed(numbers_of(ADAM, group, count + 1), keys)
            found.setdefault(task.kind, []).append((task, numbers))
        return _Pass([self._launch(kind, own) for kind, own in found.items()], [task.taken for task, _, _ in turns])

    def _step(self, ready: "_Pass") -> None:
        for kind, table, owner in ready.launches:
            run(kind, table, owner)
        advance_counts(ready.counts)

    def _launch(self, kind: Kind, own: Sequence[tuple[Task, bytes]]) -> tuple[Kind, Tensor, Tensor]:
        """Return a launch: its kind, the table of its tasks, and which of them each program works for."""
        rows, begin = array("q"), 0
        for task, _ in own:
            rows.extend(task.addresses.row(begin))
            begin += task.programs
        grads = [task.grad for task, _ in own]
        table = filled(rows.tobytes(), grads, [numbers for _, numbers in own], kind.device, row=ROW)
        return kind, table, self._owners.of(0, tuple(task.programs for task, _ in own), kind.device)


def run(kind: Kind, table: Tensor, owner: Tensor) -> None:
    """Launch what a kind of tasks needs."""
    # nobody else imports Triton
    from qtensor.optim.fused.compressed import launches

    launches.step(kind, table, owner)
