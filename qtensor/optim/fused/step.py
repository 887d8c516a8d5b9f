"""The fused step: asks which parameters take it, fills the table, launches.

    take     which parameters take it (decision.py, facts.py, tasks.py); the others are for the inner optimizer
    begin    before ranks agree, pass "now": steps what stores no parts, and what waits for an amax, found on the way
    finish   once they have agreed, pass "behind": steps the others, and writes their parts in the same pass;
             then pass "later": writes the parts of those that waited, under the amax that all agreed on

So no quantized byte is written before all ranks have come so far, as on the general way. Each pass (plan.py) has a
launch for each kind of task (optimizer, gradient's dtype, format, length of rows under one scale), whatever their
number.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_hooks.kernels.compiled import use_kernels
from fsdp_hooks.torch_private import has_step_hooks, is_tracing, is_watched, local_of, without_torch_function
from qtensor.optim.fused.counts import advance_counts, read_counts
from qtensor.optim.fused.decision import Output, Rule, numbers_of, refuse_optimizer, rule_of
from qtensor.optim.fused.facts import STEP, Facts, FactsReader
from qtensor.optim.fused.plan import Pass, Plan, Plans
from qtensor.optim.fused.probe import prove
from qtensor.optim.fused.table import ROW, Owners, filled, packed
from qtensor.optim.fused.tasks import Kind, Task, output_of, task_of
from qtensor.optim.fused.trials import CAPTURED, Reasons, Trials
from qtensor.spec.codecs.rounding import is_armed
from qtensor.spec.recipes import Recipe
from qtensor.tensor.quantized_tensor import QuantizedTensor

LOG = logging.getLogger(__name__)

# reasons that pass by themselves
FIRST = "its first step makes the inner optimizer's state"
FRESH = "no step has written it since it was made, loaded or written by others"
UNREAD = "its state or its parts are tensors of other classes"


class Turn(NamedTuple):
    """What takes the fused way in one step.

    Attributes:
        task: what is known from step to step.
        grad: where its gradient begins.
        taken: how many steps it has taken, where the rule counts them.
        options: of its group.
    """

    task: Task
    grad: int
    taken: Tensor | None
    options: Mapping[str, Any]


class FusedStep:
    """The fused way of one optimizer; what it keeps, a later step could make anew.

    Args:
        required: whether a parameter that cannot take it is an error.
    """

    def __init__(self, *, required: bool) -> None:
        self._reasons = Reasons(LOG, required=required, passing=(FIRST, FRESH))
        self._kept: dict[Tensor, tuple[Facts, Task | str]] = {}  # what follows from facts of a parameter
        self._plans = Plans()
        self._trials = Trials("the fused step")
        self._owners = Owners()

    @torch.no_grad()
    def take(
        self,
        inner: torch.optim.Optimizer,
        stepped: Sequence[Tensor],
        masters: Mapping[Tensor, Tensor],
        groups: Mapping[Tensor, int],
        fresh: set[Tensor],
    ) -> "Taken":
        """Return what takes the fused way.

        Args:
            inner: the optimizer of the masters.
            stepped: the parameters that have gradients.
            masters: parameter -> its master; itself if it is in fp32.
            groups: parameter -> the number of its group.
            fresh: the parameters whose bytes are not made of their masters.

        Raises:
            RuntimeError: it is required, and a parameter can not take it.
        """
        watched = is_tracing() or is_watched() or is_armed() or use_kernels.mode == "eager"
        why = refuse_optimizer(inner, hooked=has_step_hooks(inner), watched=watched)
        rules = [why or rule_of(type(inner), group) for group in inner.param_groups]
        turns: list[Turn] = []
        reader = FactsReader()
        with without_torch_function():
            for param in stepped:
                group, master = groups[param], masters[param]
                rule = rules[group]
                if isinstance(rule, str):
                    self._reasons.tell(param, rule)
                    continue
                if fresh and param in fresh:
                    self._reasons.tell(param, FRESH)
                    continue
                state = inner.state.get(master) or {}
                found, grad = self._look((param, master), state, rule, reader)
                if isinstance(found, Task):
                    turns.append(Turn(found, grad, state[STEP] if rule.counts else None, inner.param_groups[group]))
                else:
                    self._reasons.tell(param, found)
        covered = [group for group, rule in zip(inner.param_groups, rules, strict=True) if isinstance(rule, Rule)]
        return Taken(turns, self._plans.of([turn.task for turn in turns]), self._owners, covered)

    def _look(
        self, pair: tuple[Tensor, Tensor], state: Mapping[str, Any], rule: Rule, reader: FactsReader
    ) -> tuple[Task | str, int]:
        """Return what is known of a parameter's step, and where its gradient begins."""
        if rule.states and not state:
            return FIRST, 0
        param, read = pair[0], reader.read(*pair, state, rule)
        if read is None:
            self._kept.pop(param, None)
            found = self._decide(pair, state, rule)
            return (found if isinstance(found, str) else UNREAD), 0
        facts, grad = read
        known = self._kept.get(param)
        if known is None or known[0] != facts:
            known = facts, self._decide(pair, state, rule)
            # a capture ends, and no fact of the parameter tells so
            if known[1] == CAPTURED:
                self._kept.pop(param, None)
            else:
                self._kept[param] = known
        return known[1], grad

    def _decide(self, pair: tuple[Tensor, Tensor], state: Mapping[str, Any], rule: Rule) -> Task | str:
        output = output_of(*pair)
        if isinstance(output, str):
            return output
        task = task_of(pair, state, rule, output)
        if isinstance(task, str):
            return task
        shard, device = local_of(pair[0]), task.kind.device
        recipe = shard.recipe if isinstance(shard, QuantizedTensor) else None
        if why := self._compiled(task.kind, device, recipe):
            return why
        return (task.later and self._compiled(task.later.output, device, recipe)) or task

    def _compiled(self, what: Kind | Output, device: torch.device, recipe: Recipe | None) -> str:
        """Return why a kernel cannot be used; see `Trials.why_not`."""

        def attempt() -> None:
            table = torch.zeros(1, ROW, dtype=torch.int64, device=device)
            none, amax = (torch.zeros(size, dtype=torch.int32, device=device) for size in (0, 1))
            run(what, table, none, amax)
            prove(what, device, recipe, run)

        return self._trials.why_not(what, device, attempt)


@dataclass
class _OnDevice:
    """The table of a device, its amaxes (int32 bits, a slot for each task) and what goes through it."""

    table: Tensor
    amaxes: Tensor
    plan: Plan


class Taken:
    """What takes the fused way in one step.

    Attributes:
        params: all of it.
        claims: parameter -> fp32 [1], the amax of its new master, where its values share a scale; after `begin`.
    """

    def __init__(
        self, turns: Sequence[Turn], plans: Sequence[Plan], owners: Owners, covered: Sequence[dict[str, Any]]
    ) -> None:
        self._turns, self._plans, self._owners, self._covered = turns, plans, owners, covered
        self.params = {turn.task.param for turn in turns}
        self.plain = self.params
        self.claims: dict[Tensor, Tensor] = {}
        self.moved: dict[Tensor, Tensor] = {}  # nothing fresh takes this way
        self._on: list[_OnDevice] = []

    @contextmanager
    def like_foreach(self) -> Iterator[None]:
        """Inside, the groups that the fused way covers ask torch for its foreach step, whose bytes are those here.

        A weight may go the other way in any step: in its first one, behind a load, where ranks share its rows. So both
        ways are one step, and what torch takes by itself (its own fused kernel, a loop) would be another.
        """
        with asking_foreach(self._covered):
            yield

    def begin(self) -> None:
        """Step what need not wait for other ranks; finds the amaxes that are claimed."""
        numbers = self._numbers()
        for plan in self._plans:
            grads = [self._turns[number].grad for number in plan.tasks]
            table = filled(plan.rows, grads, [numbers[number] for number in plan.tasks], plan.device)
            amaxes = torch.zeros(len(numbers), dtype=torch.int32, device=plan.device)
            self._on.append(_OnDevice(table, amaxes, plan))
            found = amaxes.view(torch.float32)
            for number in dict.fromkeys(plan.tasks):
                if (task := self._turns[number].task).later is not None:
                    self.claims[task.param] = found[number : number + 1]
        self._launch("now")
        self._advance(behind=False)

    def finish(self, writes: Mapping[Tensor, tuple[Tensor | None, object]]) -> None:
        """Do the other tasks, and write all parts.

        Args:
            writes: parameter -> (fp32 [1], the amax that all ranks agreed on; None: that of this rank; cut blocks,
                which nothing that takes this way has).
        """
        agreed = {param: amax for param, (amax, _) in writes.items()}
        self._launch("behind")
        self._advance(behind=True)
        if any(agreed.get(param) is not None for param in self.claims):
            # a slot for each task, whether it claims one or not
            for on in self._on:
                own = on.amaxes.view(torch.float32)
                given = [
                    amax if (amax := agreed.get(turn.task.param)) is not None else own[number : number + 1]
                    for number, turn in enumerate(self._turns)
                ]
                on.amaxes = torch.cat([one.to(own.device) for one in given]).view(torch.int32)
        self._launch("later")

    def _launch(self, at: Pass) -> None:
        for on in self._on:
            for launch in on.plan.launches:
                if launch.at == at:
                    owner = self._owners.of(launch.first, launch.programs, on.plan.device)
                    run(launch.what, on.table, owner, on.amaxes)

    def _advance(self, *, behind: bool) -> None:
        """Count the step of those that have taken it."""
        advance_counts([turn.taken for turn in self._turns if turn.taken is not None and turn.task.behind == behind])

    def _numbers(self) -> list[bytes]:
        """Return what each row says of its group and of its step."""
        counts = iter(read_counts([turn.taken for turn in self._turns if turn.taken is not None]))
        known: dict[tuple[int, float], bytes] = {}
        found = []
        for task, _, count, options in self._turns:
            key = id(options), next(counts) + 1 if count is not None else 1.0
            if key not in known:
                known[key] = packed(numbers_of(task.kind.rule, options, key[1]))
            found.append(known[key])
        return found


@contextmanager
def asking_foreach(groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Inside, these groups ask torch for its foreach step."""
    asked = [(group, group["foreach"], group["fused"]) for group in groups]
    try:
        for group in groups:
            group["foreach"], group["fused"] = True, None
        yield
    finally:
        for group, foreach, fused in asked:
            group["foreach"], group["fused"] = foreach, fused


def run(what: Kind | Output, table: Tensor, owner: Tensor, amaxes: Tensor) -> None:
    """Launch what a kind of tasks needs, or parts that are written later."""
    # nobody else imports Triton
    from qtensor.optim.fused import launches

    if isinstance(what, Kind):
        launches.step(what, table, owner, amaxes)
    else:
        launches.encode_under(what, table, owner, amaxes.view(torch.float32))
