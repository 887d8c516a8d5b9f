"""Plan caching: a save whose plan is that of an earlier one sends neither items nor plans, and writes the same chunks.

A cached plan is identified by a token, which the coordinator drew when it made the global plan, and by the rank's place
in it. In the steps of a save:

    create_local_plan    a rank whose plan equals one it holds a token for sends the token instead, with what may differ
                         at every save (scales); after any difference, in formats too, it sends the full plan
    create_global_plan   the coordinator puts what it kept under the token in place of the missing plans; if all are
                         unchanged, it plans nothing; a token it does not know raises
    finish_plan          a rank takes what it kept under the token, or keeps the new plan

A rank forgets an entry when it sends the token and remembers it in finish_plan. So a save that fails anywhere leaves no
rank relying on what another one may have lost: the next one sends full plans.

A few entries are kept in the process, not in planners, which come and go with each save.
"""

import dataclasses
import threading
import uuid
from collections import OrderedDict
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import Metadata, SavePlan

from dcp_adapters.save.coordinator import Now, Record

KEPT = 4  # state dicts saved in turn: a model, an optimizer, ...


@dataclasses.dataclass(frozen=True)
class Unchanged:
    """Planner data of a rank that sends no plan."""

    token: str
    place: int
    now: Now


@dataclasses.dataclass(frozen=True)
class Local:
    """What a rank keeps: the plan it had sent, the one it got, and where the coordinator finds both."""

    token: str
    place: int
    sent: SavePlan
    final: SavePlan


@dataclasses.dataclass(frozen=True)
class Global:
    """What the coordinator keeps: the plans it was sent, and what describes those it made of them."""

    sent: list[SavePlan]
    metadata: Metadata
    manifest: Tensor


_lock = threading.Lock()  # the uploads of async saves overlap
_locals: OrderedDict[str, Local] = OrderedDict()
_globals: OrderedDict[str, Global] = OrderedDict()


def lookup_local(plan: SavePlan) -> Local | None:
    """Take out the entry whose plan is this one, formats included; scales may differ."""
    with _lock:
        for token, entry in _locals.items():
            if _same_plan(entry.sent, plan):
                return _locals.pop(token)
    return None


def remember_local(entry: Local) -> None:
    """Keep (or put back) an entry, among the newest."""
    with _lock:
        _locals[entry.token] = entry
        _trim(_locals, KEPT)


def lookup_global(token: str) -> Global | None:
    """What the coordinator kept under a token; it becomes the newest entry, as it does on the ranks."""
    with _lock:
        if token in _globals:
            _globals.move_to_end(token)
        return _globals.get(token)


def remember_global(entry: Global) -> str:
    """Keep it under a new token."""
    token = uuid.uuid4().hex
    with _lock:
        _globals[token] = entry
        _trim(_globals, 2 * KEPT)  # some are of saves that failed, and no rank remembers them
    return token


def restored(all_plans: list[SavePlan]) -> tuple[list[SavePlan], str | None]:
    """The full plans behind what ranks sent, and the token if all of them are unchanged.

    Raises:
        ValueError: a rank sent a token that this process did not give out, or gave to another rank.
    """
    deltas = [plan.planner_data for plan in all_plans]
    tokens = {delta.token for delta in deltas if isinstance(delta, Unchanged)}
    plans = [_restored(rank, plan, len(all_plans)) for rank, plan in enumerate(all_plans)]
    unchanged = len(tokens) == 1 and all(isinstance(delta, Unchanged) for delta in deltas)
    return plans, tokens.pop() if unchanged else None


def _restored(rank: int, plan: SavePlan, ranks: int) -> SavePlan:
    delta = plan.planner_data
    if not isinstance(delta, Unchanged):
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


def _same_plan(one: SavePlan, other: SavePlan) -> bool:
    mine: Record = one.planner_data
    theirs: Record = other.planner_data
    return (
        mine.checksums == theirs.checksums
        and mine.digest == theirs.digest
        and mine.kinds == theirs.kinds
        and mine.coded == theirs.coded
        and mine.recipes == theirs.recipes
        and one.items == other.items
        and mine.mappings == theirs.mappings
    )


def _trim(entries: OrderedDict[str, Any], most: int) -> None:
    while len(entries) > most:
        entries.popitem(last=False)
