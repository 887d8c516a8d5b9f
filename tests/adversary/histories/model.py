"""What may be seen of a directory that saves write and loads read: a register, by when each began and ended.

A load may see a save that began before the load ended, unless another save that succeeded lies wholly between that save
and the load. A save that was killed or raised may have taken effect, or not. `None`: no checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.adversary.histories.stage import Actor


@dataclass(frozen=True)
class Write:
    """A save: when it began, when it ended (None: not yet), and whether it surely took effect."""

    value: Any
    begun: int
    ended: int | None
    sure: bool
    clears: bool = False  # it removes what was there before it writes


def write_of(actor: Actor) -> Write:
    return Write(actor.value, actor.begun, actor.ended, actor.well, actor.kind == "clearing saver")


def may_be_seen(before: Any, writes: Iterable[Write], begun: int, ended: int) -> set[Any]:
    """By a load that ran from `begun` to `ended`; `before`: what was there at first."""
    writes = list(writes)
    candidates = [Write(before, -2, -1, sure=True), *(write for write in writes if write.begun <= ended)]
    seen = {
        one.value
        for one in candidates
        if not any(
            other.sure
            and other.ended is not None
            and one.ended is not None
            and other.begun > one.ended
            and other.ended < begun
            for other in writes
        )
    }
    if any(write.clears and write.begun <= ended and not _settled(write, writes, begun) for write in writes):
        seen.add(None)
    return seen


def _settled(clearing: Write, writes: Sequence[Write], begun: int) -> bool:
    """Whether a later or the same save has surely filled the directory again, before a load began."""
    return any(
        write.sure and write.ended is not None and write.ended < begun and write.begun >= clearing.begun
        for write in writes
    )


def may_fail(writes: Iterable[Write], removers: Iterable[tuple[int, int | None]], begun: int, ended: int) -> bool:
    """Whether a load may find a file missing: what it began to read was replaced, and then cleaned away.

    removers: begin and end of whoever removes what is replaced, saves included.
    """
    writes = list(writes)
    replaced = [
        write.begun for write in writes if write.begun <= ended and (write.ended is None or write.ended >= begun)
    ]
    gone = [first for first, last in removers if first <= ended and (last is None or last >= begun)]
    if any(write.clears for write in writes if write.begun in gone):
        return True
    return bool(replaced) and any(first > min(replaced) for first in gone)
