"""Does a tensor mean what it should? Checksums cannot tell: all bytes may be as they were saved, of different steps.

    deep          a history leads to the scale and the payload beside it         (float8_delayed.py)
                  a master requantizes to the parts beside it, or is fresh       (requantizing.py)
                  one kept as a remainder is joined with these parts before      (states/remainders.py)
                  roots of means of squares are not negative
    own_scales    and every scale is the one that its values ask for             (own_scales.py)

Under "deep" scales that no value asks for are mentioned, but are no fault: calibration, exact conversions and imports
leave such scales. Everything here is judged some rows at a time, so a caller decides how much is in memory.

masters.py tells from names which master belongs to which tensor.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dcp_adapters.records.entry import Entry
from dcp_adapters.records.masters import is_remainder
from qtensor.formats.float8_delayed import Float8DelayedScaling, history_fault
from qtensor.numerics.own_scales import OwnScales, elements_of
from qtensor.numerics.requantizing import MasterCheck
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import row_multiple, specs_of
from qtensor.states.remainders import join, join_dense, refuse_recipe

Level = Literal["bytes", "deep", "own_scales"]
LEVELS = ("bytes", "deep", "own_scales")
SLAB = 2**22  # elements that are looked at together
BEHIND = (
    "they are of different steps, or the weight was written behind the optimizer, whose first step after a load takes "
    "that back"
)
WRITTEN, FRESH = 1, 2  # the two ways in which a tensor fits a master (qtensor/numerics/requantizing.py)
BOTH = WRITTEN | FRESH


@dataclass(frozen=True)
class Problem:
    """What is wrong with a tensor. fault: whether that makes it wrong under the level asked for; entry: its name."""

    entry: str
    message: str
    fault: bool = True


def check_level(what: str, level: str) -> None:
    """Raise ValueError for a level that does not exist."""
    if level not in LEVELS:
        raise ValueError(f"{what}={level!r} is not one of {', '.join(map(repr, LEVELS))}")


class TensorCheck:
    """The judgement of one quantized tensor; `see` gets whole blocks of it, some rows at a time.

    Args:
        entry: the tensor.
        level: what is asked for.
        whole: whether all of the tensor is seen.
        rows: whether rows are seen whole.
        masters: the names of the masters beside it, mostly one or none.
    """

    def __init__(
        self, entry: Entry, level: Level, masters: Sequence[str], *, whole: bool = True, rows: bool = True
    ) -> None:
        assert entry.recipe is not None
        self.entry, self.recipe, self.level, self.whole = entry, entry.recipe, level, whole
        self.own = OwnScales(self.recipe, wide=whole, rows=rows)
        why = refuse_recipe(self.recipe) if any(map(is_remainder, masters)) else None
        # master -> why there can be none
        self.refused = {} if why is None else {name: why for name in masters if is_remainder(name)}
        self.masters = {
            name: MasterCheck(self.recipe, whole=whole, rows=rows) for name in masters if name not in self.refused
        }
        self._largest: Tensor | None = None
        self._last: Mapping[str, Tensor] = {}

    def see(self, parts: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> None:
        """Look at some rows of the parts, and of each master."""
        for name, check in self.masters.items():
            check.see(parts, _joined(name, masters[name], parts, self.recipe))
        # Tensor-wide parts are the same in each piece, so the last one has all that problems() needs.
        self._last = parts
        if isinstance(self.recipe, Float8DelayedScaling) and parts["payload"].numel():
            largest = elements_of(parts, self.recipe).abs().nan_to_num_(0.0).amax().cpu()
            self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        self.own.see(parts)

    def problems(self) -> Iterator[Problem]:
        """Say what is wrong, now that all has been seen; for masters see `master_problems`."""
        if isinstance(self.recipe, Float8DelayedScaling) and self._last:
            fault = history_fault(self._last, self.recipe, self._largest, whole=self.whole)
            if fault is not None:
                what = f"{fault}: payload, scale and history are of different steps"
                yield Problem(self.entry.key("amax_history"), what)
        self.own.judge_tensor_wide()
        if self.own.others:
            message = (
                f"{self.own.others} of {self.own.scales} scales are not those that their values ask for under "
                f"{self.recipe}: calibrated, converted exactly or imported, or payload and scale are of different steps"
            )
            yield Problem(self.entry.key("scale"), message, fault=self.level == "own_scales")

    def master_problems(self) -> dict[str, Problem | None]:
        """Say for each master what is wrong beside it; None if nothing is."""
        found: dict[str, Problem | None] = {
            name: Problem(name, f"{self.entry.name} can have no remainder: {why}") for name, why in self.refused.items()
        }
        for name, check in self.masters.items():
            wrong = f"{check.differing} of {check.bytes} bytes are others"
            if not check.differing:
                wrong = "its scale is that of another amax"
            message = f"it is not what {name} requantizes to ({wrong}): {BEHIND}"
            found[name] = None if check.parts_belong() else Problem(self.entry.name, message)
        return found

    def fits(self) -> dict[str, int]:
        """Return for each master how what was seen fits it, WRITTEN | FRESH; to be asked after `master_problems`."""
        found = {name: WRITTEN * check.written | FRESH * check.fresh for name, check in self.masters.items()}
        return found | dict.fromkeys(self.refused, 0)


class DenseCheck:
    """The comparison of a dense tensor of low precision with the masters beside it."""

    def __init__(self, entry: Entry, masters: Sequence[str]) -> None:
        self.entry, self.differing = entry, dict.fromkeys(masters, 0)

    def see(self, values: Tensor, masters: Mapping[str, Tensor]) -> None:
        """Look at the same rows of the tensor and of each master."""
        for name in self.differing:
            rounded = _joined(name, masters[name], values, None).to(values.dtype)
            # Not bytes: NaNs of different bits are the same value, and so are 0 and -0 here.
            self.differing[name] += int(((rounded != values) & ~(rounded.isnan() & values.isnan())).sum())

    def master_problems(self) -> dict[str, Problem | None]:
        """Say for each master what is wrong beside it; None if nothing is."""
        found: dict[str, Problem | None] = {}
        for name, count in self.differing.items():
            message = f"it is not what {name} rounds to ({count} values are others): {BEHIND}"
            found[name] = Problem(self.entry.name, message) if count else None
        return found

    def fits(self) -> dict[str, int]:
        """Return for each master BOTH, or 0: what is rounded fits in one way only."""
        return {name: 0 if count else BOTH for name, count in self.differing.items()}


def _joined(name: str, master: Tensor, beside: Mapping[str, Tensor] | Tensor, recipe: Recipe | None) -> Tensor:
    """Return some rows of a master in fp32: those of a remainder are joined with the parts, or numbers, beside them."""
    if not is_remainder(name) or not master.numel():
        return master
    # 16 bits, in whatever they are stored (see states.kinds.WORD)
    rows = master.reshape(-1, master.shape[-1] if master.ndim else 1).view(torch.int16)
    if recipe is None:
        assert isinstance(beside, Tensor)
        # of float16 there are no remainders: what comes out is not what they round to
        return join_dense(beside.detach().reshape(rows.shape), rows).view(master.shape)
    assert isinstance(beside, Mapping)
    return join(beside, rows, recipe).view(master.shape)


def negative_root(entry: Entry, rows: Iterable[Mapping[str, Tensor]]) -> Problem | None:
    """Say what is wrong with a root of a mean of squares: negative elements, which no step leaves."""
    count = 0
    for parts in rows:
        values = parts[""] if entry.recipe is None else elements_of(parts, entry.recipe)
        count += int((values < 0).sum())
    if not count:
        return None
    return Problem(entry.name, f"{count} of its elements are negative, and it is a root: its bytes were changed")


def find_unfit(found: Iterable[Mapping[str, Problem | None]]) -> list[Problem]:
    """Find the problems of masters, from what all tensors beside them say: one that fits is enough."""
    wrong: dict[str, Problem] = {}
    fitting = set()
    for problems in found:
        for master, problem in problems.items():
            if problem is None:
                fitting.add(master)
            else:
                wrong.setdefault(master, problem)
    return [problem for master, problem in wrong.items() if master not in fitting]


def slabs(shape: Sequence[int], recipe: Recipe | None) -> Iterator[slice]:
    """Yield pieces along dim 0 of a tensor of this shape that have whole blocks and some millions of elements."""
    if len(shape) < 2:
        yield slice(None)
        return
    # Square blocks need all of their rows together; stacks of experts are cut between experts, which have whole blocks.
    group = 1 if recipe is None or len(shape) > 2 else row_multiple(recipe)
    step = max(SLAB // max(math.prod(shape[1:]), 1) // group, 1) * group
    yield from (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def cut(parts: Mapping[str, Tensor], recipe: Recipe, piece: slice) -> dict[str, Tensor]:
    """Cut a piece along dim 0 out of a tensor's parts; tensor-wide ones stay whole."""
    return {spec.name: parts[spec.name][piece] if spec.per_row else parts[spec.name] for spec in specs_of(recipe)}
