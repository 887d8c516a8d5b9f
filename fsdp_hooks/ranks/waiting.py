"""Who is waited for: a rank that waits long for others, which may never come, says so once.

    entered         a thread begins to wait; most calls are over before it does anything
    NOTED seconds   it notes in the group's store that this rank is here
    TOLD seconds    who has come by now is noted soon: then it looks, and logs a warning that names the others

Nothing is exchanged by this but through the store, and nothing at all by calls that take less than NOTED seconds.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from fsdp_hooks.ranks.across_ranks import Ranks, global_ranks, rank_of, ranks_of

NOTED, TOLD = 1.0, 10.0
LOG = logging.getLogger("fsdp_hooks")
ALL_CALL = "all ranks of the group call it alike"
IN_GROUP = f"{ALL_CALL}; give the group of the ranks that call it"
ALONE_TOO = f"{ALL_CALL}; for whole weights on one rank pass no_dist=True, or group= the ranks that call it"


@contextmanager
def waited_for(group: Ranks, caller: str, way_out: str = ALONE_TOO) -> Iterator[None]:
    """Log who is missing if TOLD seconds have passed and not all ranks of the group have come to the end of the block.

    Args:
        group: the ranks; None: all.
        caller: what they call, the same on all of them.
        way_out: what else to do, in words.
    """
    if ranks_of(group) < 2:
        yield
        return
    over = threading.Event()
    # the calling thread may hang in a collective, and cannot tell of it itself
    watch = threading.Thread(target=_watch, args=(over, group, caller, way_out), daemon=True, name="waited_for")
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def _words(missing: list[int] | None) -> str:
    if not missing:
        return "other ranks"
    return f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"


def _watch(over: threading.Event, group: Ranks, caller: str, way_out: str) -> None:
    if over.wait(NOTED):
        return
    members, key = global_ranks(group), f"waited_for/{caller}/"
    own = members[rank_of(group)]
    store = None
    with suppress(Exception):  # some groups have no store that can be asked
        process_group = dist.group.WORLD if group is None else group
        store = process_group.get_group_store()  # type: ignore[union-attr]
        store.set(f"{key}{own}", "here")
    # so that those who came at the last moment have noted it
    if not over.wait(TOLD + NOTED / 2):
        missing: list[int] | None = None
        with suppress(Exception):
            missing = None if store is None else [rank for rank in members if not store.check([f"{key}{rank}"])]
        if missing is None or missing:
            LOG.warning(
                "%s: rank %d waits since %.0f s for %s to call it: %s", caller, own, TOLD, _words(missing), way_out
            )
        over.wait()
    with suppress(Exception):
        if store is not None:
            store.delete_key(f"{key}{own}")
