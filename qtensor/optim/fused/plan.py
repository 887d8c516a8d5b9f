"""Which rows the table has, and which launches go through them: kept from step to step, as long as shards are the same.

A row is a shard in one pass; rows of one launch follow each other. Passes, in the order of their launches:

    now       steps that store no parts, or that find an amax
    behind    steps that write parts, once ranks have agreed
    later     parts of those whose amax was found, under what was agreed on
"""

import operator
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

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


@dataclass(frozen=True)
class Plan:
    """The rows of a device's table and their launches.

    Attributes:
        device: of the table.
        rows: int64 of the host, a row behind the other, but for what each step fills in.
        shards: the number of each row's shard, which is its slot, too.
        launches: in their order.
    """

    device: torch.device
    rows: bytes
    shards: list[int]
    launches: list[Launch]


class Plans:
    """The plans of the last step."""

    def __init__(self) -> None:
        self._shards: list[Shard] = []
        self._plans: list[Plan] = []

    def of(self, shards: list[Shard]) -> list[Plan]:
        """Return a plan for each device: those of before if each shard is the very same."""
        if len(shards) != len(self._shards) or not all(map(operator.is_, shards, self._shards)):
            numbers: dict[torch.device, list[int]] = {}
            for number, shard in enumerate(shards):
                numbers.setdefault(shard.kind.device, []).append(number)
            self._plans = [planned(shards, own, device) for device, own in numbers.items()]
            self._shards = shards
        return self._plans


def planned(shards: Sequence[Shard], numbers: Sequence[int], device: torch.device) -> Plan:
    """Return the plan of one device.

    Args:
        shards: of a step.
        numbers: of those on the device.
        device: theirs.
    """
    found: dict[tuple[Pass, Kind | Output], list[tuple[Addresses, int, int]]] = {}
    for number in numbers:
        for at, what, addresses, programs in _passes(shards[number]):
            if programs:
                found.setdefault((at, what), []).append((addresses, programs, number))
    rows = array("q")
    owners: list[int] = []
    launches = []
    for (at, what), own in found.items():
        launches.append(Launch(at, what, len(owners), tuple(programs for _, programs, _ in own)))
        begin = 0
        for addresses, programs, number in own:
            rows.extend(addresses.row(begin, number))
            owners.append(number)
            begin += programs
    return Plan(device, rows.tobytes(), owners, launches)


def _passes(shard: Shard) -> Iterator[tuple[Pass, Kind | Output, Addresses, int]]:
    at: Pass = "behind" if shard.parts and shard.later is None else "now"
    yield at, shard.kind, shard.addresses, shard.programs
    if (later := shard.later) is not None:
        yield "later", later.output, later.addresses, later.programs
