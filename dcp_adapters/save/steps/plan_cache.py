"""Plan caching: a save whose plan is that of an earlier one sends neither items nor plans, and writes the same chunks.

A cached plan is identified by a token, which the coordinator drew when it made the global plan, and by the rank's place
in it. In the steps of a save:

    local_plan     a rank whose plan equals one it holds a token for sends the token instead, with what may differ at
                   every save (scales); after any difference, in formats too, it sends the full plan
    receive        the coordinator puts what it kept under the token in place of the missing plans; a token it does not
                   know raises
    agree          if all are unchanged, nothing is planned
    planned        the coordinator keeps what was planned, under a new token
    finish_plan    a rank takes what it kept under the token, or keeps the new plan

A rank forgets an entry when it sends the token and remembers it in finish_plan. So a save that fails anywhere leaves no
rank relying on what another one may have lost: the next one sends full plans.

A few entries are kept in the process, not in planners, which come and go with each save.
"""

import dataclasses
import logging
import threading
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import Metadata, SavePlan

from dcp_adapters.records.manifest import Manifest, tensor_of
from dcp_adapters.save.steps.coordinator import RankRecord, TellsNow, with_manifest
from dcp_adapters.save.steps.step import GlobalSave, SaveStep, Saving, Source

LOG = logging.getLogger(__name__)
KEPT = 4  # state dicts saved in turn: a model, an optimizer, ...


@dataclasses.dataclass(frozen=True)
class UnchangedPlan:
    """Planner data of a rank that sends no plan."""

    token: str
    place: int
    now: TellsNow


@dataclasses.dataclass(frozen=True)
class KeptLocal:
    """What a rank keeps: the plan it had sent, the one it got, and where the coordinator finds both."""

    token: str
    place: int
    sent: SavePlan
    final: SavePlan


@dataclasses.dataclass(frozen=True)
class KeptGlobal:
    """What the coordinator keeps: the plans it was sent, and what describes those it made of them."""

    sent: list[SavePlan]
    metadata: Metadata
    manifest: Manifest
    stored: Tensor  # the manifest


class PlanCache(SaveStep):
    """One rank's part in one save; the last step of all, since it compares what the others tell."""

    def __init__(self, saving: Saving) -> None:
        self.full: SavePlan | None = None  # the plan of this rank
        self.cached: KeptLocal | None = None  # that of an earlier save, if it is the same
        self.token: str | None = None  # the coordinator's, if no rank has changed
        self.whole: list[SavePlan] = []  # the plans of all ranks

    def local_plan(self, plan: SavePlan, data: Source) -> SavePlan:
        """Send a token, if an earlier plan was the same."""
        self.full, self.cached = plan, lookup_local(plan)
        if self.cached is None:
            LOG.info("plan cache: no earlier plan is the same, so all %d items are sent", len(plan.items))
            return plan
        LOG.info("plan cache: an earlier plan is the same, so none of %d items is sent", len(plan.items))
        unchanged = UnchangedPlan(self.cached.token, self.cached.place, plan.planner_data.now)
        # torch's plans say with `usable=False` that a cached plan is to be written instead
        return SavePlan([], planner_data=unchanged, usable=False)

    def receive(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the full plans. Raises as `restored`."""
        plans, self.token = restored(plans)
        return plans

    def agree(self, save: GlobalSave) -> None:
        """Take what was planned for an earlier save, if no plan has changed."""
        self.whole, token, self.token = save.plans, self.token, None
        kept = None if token is None else lookup_global(token)
        if kept is None:
            return
        metadata, stored = kept.metadata, kept.stored
        # digests stand in the manifest, and differ under the same plan
        if kept.manifest != save.manifest:
            record = save.manifest.to_json()
            metadata, stored = with_manifest(metadata, record), tensor_of(record)
        # the kept plans say how long the manifest is: with another length all is planned anew
        if stored.shape == kept.stored.shape:
            save.metadata, save.stored, self.token = metadata, stored, token
            save.plans = [SavePlan([], usable=False) for _ in save.plans]

    def planned(self, save: GlobalSave) -> None:
        """Keep new plans, and tell all ranks the token."""
        if self.token is None:
            assert save.metadata is not None
            assert save.stored is not None
            self.token = remember_global(KeptGlobal(self.whole, save.metadata, save.manifest, save.stored))
        save.answers["plan_cache"] = self.token

    def finish_plan(self, plan: SavePlan, answers: Mapping[str, Any]) -> SavePlan:
        """Return the kept plan, or keep and return the new one."""
        if plan.usable:
            assert self.full is not None
            remember_local(KeptLocal(answers["plan_cache"], answers["place"], self.full, plan))
            return plan
        assert self.cached is not None
        remember_local(self.cached)
        # the names of files are this save's own
        return dataclasses.replace(self.cached.final, storage_data=plan.storage_data)


_lock = threading.Lock()  # the uploads of async saves overlap
_locals: OrderedDict[str, KeptLocal] = OrderedDict()
_globals: OrderedDict[str, KeptGlobal] = OrderedDict()


def lookup_local(plan: SavePlan) -> KeptLocal | None:
    """Take out the entry whose plan is this one, formats included; scales may differ."""
    with _lock:
        for token, entry in _locals.items():
            if _is_same_plan(entry.sent, plan):
                # it comes back in finish_plan: a save that fails before that leaves no rank that relies on it
                return _locals.pop(token)
    return None


def remember_local(entry: KeptLocal) -> None:
    """Keep (or put back) an entry, among the newest."""
    with _lock:
        _locals[entry.token] = entry
        _trim(_locals, KEPT)


def lookup_global(token: str) -> KeptGlobal | None:
    """Return what the coordinator kept under a token; it becomes the newest entry, as it does on the ranks."""
    with _lock:
        if token in _globals:
            _globals.move_to_end(token)
        return _globals.get(token)


def remember_global(entry: KeptGlobal) -> str:
    """Keep an entry under a new token, and return that."""
    token = uuid.uuid4().hex
    with _lock:
        _globals[token] = entry
        # some are of saves that failed, and no rank remembers them
        _trim(_globals, 2 * KEPT)
    return token


def restored(all_plans: list[SavePlan]) -> tuple[list[SavePlan], str | None]:
    """Return the full plans behind what ranks sent, and the token if all of them are unchanged.

    Raises:
        ValueError: a rank sent a token that this process did not give out, or gave to another rank.
    """
    deltas = [plan.planner_data for plan in all_plans]
    tokens = {delta.token for delta in deltas if isinstance(delta, UnchangedPlan)}
    plans = [_restore_one(rank, plan, len(all_plans)) for rank, plan in enumerate(all_plans)]
    unchanged = len(tokens) == 1 and all(isinstance(delta, UnchangedPlan) for delta in deltas)
    return plans, tokens.pop() if unchanged else None


def _restore_one(rank: int, plan: SavePlan, ranks: int) -> SavePlan:
    delta = plan.planner_data
    if not isinstance(delta, UnchangedPlan):
        return plan
    kept = lookup_global(delta.token)
    if kept is None or len(kept.sent) != ranks or delta.place != rank:
        raise ValueError(
            f"plan caching: rank {rank} of {ranks} relies on a plan of an earlier save that this coordinator does not "
            "hold for it; the earlier one went through another process group or another coordinator. Nothing was "
            "written, and the next save sends full plans; with groups that take turns, leave enable_plan_caching off"
        )
    sent = kept.sent[rank]
    return dataclasses.replace(sent, planner_data=dataclasses.replace(sent.planner_data, now=delta.now))


def _is_same_plan(one: SavePlan, other: SavePlan) -> bool:
    mine: RankRecord = one.planner_data
    theirs: RankRecord = other.planner_data
    return (
        mine.options == theirs.options
        and mine.kinds == theirs.kinds
        and mine.recipes == theirs.recipes
        and one.items == other.items
        and mine.mappings == theirs.mappings
    )


def _trim(entries: OrderedDict[str, Any], most: int) -> None:
    while len(entries) > most:
        entries.popitem(last=False)
