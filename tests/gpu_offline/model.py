"""How long a launch takes on an H200 (sm_90), by what was counted in its code: its bytes, and its busiest unit.

    memory   bytes that it moves / BANDWIDTH
    units    instructions that the busiest unit executes / (its lanes * SMS * CLOCK * REACHED)
    time     (memory^SHARPNESS + units^SHARPNESS)^(1 / SHARPNESS): the longer one, and more where both are alike

Which unit executes what: one adds and multiplies floats; one compares, selects and limits them, and does logic, shifts
and conversions; what looks up (reciprocals, integers to floats) has few lanes, and so has what goes to memory. LANES
are results a clock and multiprocessor of capability 9.0, from the table of arithmetic instructions in NVIDIA's CUDA
programming guide. Integer products count twice in the first, which gives half of them a clock.

BANDWIDTH was measured, of a copy. REACHED and SHARPNESS were chosen so that errors are least over the launches that one
H200 has timed (KNOWN). Not in the model: the start of a launch, latency, banks of shared memory, how writes are spread
over memory. A transpose of bytes, say, reached 0.88 where the model has 0.99.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

CAPABILITY = 90
BANDWIDTH = 3.984e12  # bytes a second that a copy reads and writes
SMS = 132
CLOCK = 1.98e9
REACHED = 0.83  # of its lanes, what a unit was seen to be busy with
SHARPNESS = 4
LANES = {"alu": 64, "fma": 128, "special": 16, "memory": 32, "issued": 128}
KNOWN = Path(__file__).with_name("h200.json")  # what was timed, with the counts of the code that was

FLOATS = ("FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2")
PRODUCTS = ("IMAD", "MOV")  # the compiler moves registers by either
SPECIAL = ("MUFU", "F2I", "I2F", "F2F")
MEMORY = ("LDG", "STG", "LDS", "STS", "LDL", "STL", "LDC", "RED", "ATOM", "SHFL")
# Only issued: branches, barriers, and what all threads of a warp share (U...).
CONTROL = ("BRA", "EXIT", "BSSY", "BSYNC", "BAR", "CALL", "RET", "S2R", "CS2R", "DEPBAR", "WARPSYNC", "YIELD", "U")


@dataclass(frozen=True)
class Units:
    """Instructions of a thread by what executes them; an integer product is two of fma."""

    alu: int = 0
    fma: int = 0
    special: int = 0
    memory: int = 0
    issued: int = 0  # all of them

    def __add__(self, other: Units) -> Units:
        return Units(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __mul__(self, times: int) -> Units:
        return Units(*(getattr(self, each.name) * times for each in fields(self)))

    def clocks(self) -> float:
        """Of a multiprocessor, for one thread, while its busiest unit works at full speed."""
        return max(getattr(self, name) / lanes for name, lanes in LANES.items())


def units_of(code: Iterable[str]) -> Units:
    """Of operations with their modifiers, as they stand in the program."""
    found = dict.fromkeys(LANES, 0)
    for operation in code:
        name = operation.partition(".")[0]
        found["issued"] += 1
        if name in FLOATS:
            found["fma"] += 1
        elif name in PRODUCTS:
            found["fma"] += 2
        elif name in SPECIAL:
            found["special"] += 1
        elif name.startswith(MEMORY):
            found["memory"] += 1
        elif not name.startswith(CONTROL):
            found["alu"] += 1
    return Units(**found)


def seconds(moved: int, threads: int = 0, units: Units = Units()) -> float:
    """A launch of so many threads that moves these bytes."""
    memory = moved / BANDWIDTH
    busy = threads * units.clocks() / (SMS * CLOCK * REACHED)
    return float((memory**SHARPNESS + busy**SHARPNESS) ** (1 / SHARPNESS))


@dataclass(frozen=True)
class Timed:
    """A call that the H200 has timed: the share of a copy's speed, and what the model says of the code that it was."""

    name: str  # recipe and direction
    measured: float
    predicted: float  # before it was timed, with integers at full rate
    modelled: float

    @property
    def error(self) -> float:
        """Of the model, as a share of what was measured."""
        return self.modelled / self.measured - 1


def timed() -> list[Timed]:
    """All calls of KNOWN."""
    return [Timed(name, of["measured"], of["predicted"], _modelled(of)) for name, of in known()["calls"].items()]


def known() -> dict[str, Any]:
    """What was timed, when, and with which versions; launches are a list of moved bytes, threads and units."""
    found: dict[str, Any] = json.loads(KNOWN.read_text())
    return found


def _modelled(call: dict[str, Any]) -> float:
    took = sum(seconds(each["moved"], each["threads"], Units(**each["units"])) for each in call["launches"])
    return float(call["needed"] / BANDWIDTH / took)
