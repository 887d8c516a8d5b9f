"""What a question to a GPU is: a module that is given a Scale, yields Rows, and says what is aimed at.

    SECONDS: int                               its time box
    AIMS: tuple[Aim, ...]                      what figures should be
    rows(scale: Scale) -> Iterator[Row]        one contender after the other: what was measured last is kept

A question sets up and measures each row in a `tried` of its own, so that one that fails takes no other along.
"""

import gc
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

Figures = dict[str, float]  # the names are titles of columns, with their units


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is, and where it runs."""

    device: str = "cuda"
    backend: str = "cpu:gloo,cuda:nccl"  # of the process group
    compiler: str = "inductor"
    side: int = 8192  # rows and columns of the matrix of `kernels`
    rounds: int = 15
    hidden: int = 4096  # of Llama-3-8B, as the rest
    inner: int = 14336
    heads: int = 32
    groups: int = 8  # of keys and values
    layers: int = 4
    sequences: int = 2
    tokens: int = 4096  # of a sequence
    vocabulary: int = 32000
    many: tuple[int, int] = (256, 256)  # small weights of `optimizer`: how many, and their rows and columns
    samples: int = 16  # sequences of `calibration`
    processes: int = 12  # of `gpu_tests`, at most

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """[out, in] of the linears of a layer: q, k, v, o, gate, up, down."""
        keys = self.hidden // self.heads * self.groups
        attention = [(self.hidden, self.hidden), (keys, self.hidden), (keys, self.hidden), (self.hidden, self.hidden)]
        return [*attention, (self.inner, self.hidden), (self.inner, self.hidden), (self.hidden, self.inner)]

    def wait(self) -> None:
        """Until the device has done all that was asked of it."""
        if self.device == "cuda":
            torch.cuda.synchronize()


FULL = Scale()
TINY = Scale(
    device="cpu",
    backend="gloo",
    compiler="eager",
    side=128,
    rounds=1,
    hidden=128,
    inner=256,
    heads=4,
    groups=2,
    layers=1,
    sequences=1,
    tokens=32,
    vocabulary=64,
    many=(3, 32),
    samples=2,
    processes=1,
)


@dataclass(frozen=True)
class Row:
    """What one contender showed: figures, or why there are none."""

    what: str
    figures: Figures = field(default_factory=dict)
    error: str = ""  # the first line of what was raised
    skipped: str = ""  # why it cannot be asked here, which is no failure

    def told(self) -> str:
        """In one line."""
        shown = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        return f"{self.what}: {self.error or self.skipped or shown}"


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What a figure should be; with `over`, the figure divided by that of another row."""

    row: str
    figure: str
    least: float | None = None
    most: float | None = None
    over: str = ""

    @property
    def words(self) -> str:
        """What is looked at."""
        return f"{self.row}: {self.figure}{f' / that of {self.over}' if self.over else ''}"

    @property
    def wanted(self) -> str:
        """What it should be."""
        return f"at most {self.most:g}" if self.least is None else f"at least {self.least:g}"

    def value(self, rows: Iterable[Row]) -> float | None:
        """The figure; None where it was not measured."""
        known = {row.what: row.figures.get(self.figure) for row in rows}
        mine, other = known.get(self.row), known.get(self.over) if self.over else 1.0
        return mine / other if mine is not None and other else None

    def met_by(self, value: float) -> bool:
        """Whether a figure is as it should be."""
        return value <= self.most if self.most is not None else self.least is not None and value >= self.least


def tried(what: str, measure: Callable[[], Figures]) -> Row:
    """A row of what was measured, or of what was raised; the traceback is printed."""
    try:
        return Row(what, {name: round(value, 4) for name, value in measure().items()})
    except Exception as error:  # noqa: BLE001 - whatever it is, other rows have answers
        traceback.print_exc()
        return Row(what, error=first_line(error))
    finally:
        gc.collect()  # what the row held, in cycles, too
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def first_line(error: BaseException) -> str:
    """What an error says, in one line of a table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def as_row(record: dict[str, Any]) -> Row:
    """A row as JSON has it."""
    return Row(**record)
