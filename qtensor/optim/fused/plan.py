"""Which rows the table has, and which launches go through them: pure.

A row is a shard in one pass; rows of one launch follow each other. Passes, in the order of their launches:

    now       steps that store no parts, or that find an amax
    behind    steps that write parts, once ranks have agreed
    later     parts of those whose amax was found, under what was agreed on
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from qtensor.optim.fused.decision import Output
from qtensor.optim.fused.shards import Kind, Shard
from qtensor.optim.fused.table import Addresses

Pass = Literal["now", "behind", "later"]


@dataclass(frozen=True)
class Launch:
    """One launch: `programs` of each row, of which `first` is the first one."""

    at: Pass
    what: Kind | Output
    first: int
    programs: tuple[int, ...]


def planned(
    shards: Sequence[tuple[Shard, Sequence[int]]],
) -> tuple[list[list[int]], list[Launch]]:
    """Return the rows of a table and the launches.

    Args:
        shards: each with the words of its numbers; on one device.
    """
    found: dict[tuple[Pass, Kind | Output], list[tuple[Addresses, int, Sequence[int]]]] = {}
    for shard, words in shards:
        for at, what, addresses, programs in _passes(shard):
            if programs:
                found.setdefault((at, what), []).append((addresses, programs, words))
    rows: list[list[int]] = []
    launches = []
    for (at, what), own in found.items():
        launches.append(Launch(at, what, len(rows), tuple(programs for _, programs, _ in own)))
        begin = 0
        for addresses, programs, words in own:
            rows.append(addresses.row(begin, words))
            begin += programs
    return rows, launches


def _passes(shard: Shard) -> Iterator[tuple[Pass, Kind | Output, Addresses, int]]:
    at: Pass = "behind" if shard.parts and shard.later is None else "now"
    yield at, shard.kind, shard.addresses, shard.programs
    if (later := shard.later) is not None:
        yield "later", later.output, later.addresses, later.programs
