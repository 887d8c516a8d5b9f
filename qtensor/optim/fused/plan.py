"""Which rows the table has, and which launches go through them: kept from step to step, as long as tasks are the same.

A row is a task in one pass; rows of one launch follow each other. Passes, in the order of their launches:

    now       of `Taken.begin`: steps that store no parts, or that find an amax
    behind    of `Taken.finish`, once ranks have agreed: steps that write parts
    later     of `Taken.finish`, behind those: parts of what found its amax in "now", under what was agreed on
"""

import operator
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from qtensor.optim.fused.decision import Output
from qtensor.optim.fused.table import Addresses
from qtensor.optim.fused.tasks import Kind, Task

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
        tasks: the number of each row's task, which is its slot, too.
        launches: in their order.
    """

    device: torch.device
    rows: bytes
    tasks: list[int]
    launches: list[Launch]


class Plans:
    """The plans of the last step."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []
        self._plans: list[Plan] = []

    def of(self, tasks: list[Task]) -> list[Plan]:
        """Return a plan for each device: those of before if each task is the very same."""
        if len(tasks) != len(self._tasks) or not all(map(operator.is_, tasks, self._tasks)):
            numbers: dict[torch.device, list[int]] = {}
            for number, task in enumerate(tasks):
                numbers.setdefault(task.kind.device, []).append(number)
            self._plans = [planned(tasks, own, device) for device, own in numbers.items()]
            self._tasks = tasks
        return self._plans


def planned(tasks: Sequence[Task], numbers: Sequence[int], device: torch.device) -> Plan:
    """Return the plan of one device.

    Args:
        tasks: of a step.
        numbers: of those on the device.
        device: theirs.
    """
    found: dict[tuple[Pass, Kind | Output], list[tuple[Addresses, int, int]]] = {}
    for number in numbers:
        for at, what, addresses, programs in _passes(tasks[number]):
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


def _passes(task: Task) -> Iterator[tuple[Pass, Kind | Output, Addresses, int]]:
    yield "behind" if task.behind else "now", task.kind, task.addresses, task.programs
    if (later := task.later) is not None:
        yield "later", later.output, later.addresses, later.programs
