"""Calibrations by simulated ranks, interrupted and resumed on other numbers of ranks; to the bytes of one process.

A rank may die, fail while it reads its data, in a forward, in a callback, or have other options than the others. All
ranks raise, then; the model works as before where no rank died; and a resumed run comes to what one process comes to.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.adversary.attack import Found
from tests.adversary.ranks.cases import death, directory, refused, simulated, words
from tests.layerwise import small_runs
from tests.layerwise.small_runs import CASES, batches, found, model_of, own, run

if TYPE_CHECKING:
    from layerwise import Event

TROUBLE = ("none", "death", "death", "data", "event", "event", "forward", "options", "layers")
CHEAP = [name for name in CASES if not name.startswith(("gptq", "awq", "local"))]


@dataclass(frozen=True)
class _Run:
    """A calibration: the case of `small_runs`, how many batches there are, and the trouble of one rank.

    who: the rank. at: when.
    """

    name: str
    count: int
    shard: bool
    options: dict[str, Any]
    trouble: str = "none"
    who: int = 0
    at: int = 0

    def body(self, rank: int) -> str:
        """Calibrate on a rank, and look at what came of it; its error, or ""."""
        case, trouble = CASES[self.name], self.trouble if rank == self.who else "none"
        model, data, more = model_of(case, shard=self.shard), own(batches(self.count)), dict(self.options)
        if trouble == "data":
            data = _failing(data, self.at % 3)
        elif trouble == "event":
            more["on_event"] = _Counted(self.at)
        elif trouble == "forward":
            model.layers[self.at % 3].fails = _Counted(self.at // 3)
        elif trouble == "options":
            more["save_every"] = 7
        elif trouble == "layers":
            more["exclude"] = ("*o_proj",)
        try:
            result = run(model, case, data, progress=False, **more)
        except (Exception, CheckpointException) as error:
            model.layers[self.at % 3].fails = None
            small_runs.logits_of(model)
            return words(error)
        model.layers[self.at % 3].fails = None
        where = f"{self.name} on rank {rank} of {dist.get_world_size()}"
        _compare(found(result, model).same(), _expected(self.name, self.count), where)
        return ""

    def on(self, size: int, random: Random) -> str:
        """How it ended on so many ranks."""
        fault = death(random, size, random.choice([20, 120])) if self.trouble == "death" else None
        with simulated(size, random, self.body, fault) as outcomes:
            if any(one.died for one in outcomes):
                return "death"
            if (raised := next((one.error for one in outcomes if one.error), None)) is not None:
                raise raised
            errors = [one.value for one in outcomes]
        failed = refused(errors, f"a calibration ({self.name}) with {self.trouble}", alike=False)
        if failed and self.trouble in ("none", "death"):
            raise Found(f"a calibration ({self.name}) failed without a reason: {errors}")
        return "refused" if failed else "calibrated"


def scenario(random: Random) -> str:
    """A run, and where it failed another one that goes on."""
    name = random.choice(CHEAP if random.random() < 0.8 else sorted(CASES))
    size = random.choice([2, 2, 3, 4])
    shard, kept, trouble = random.random() < 0.4, random.random() < 0.6, random.choice(TROUBLE)
    who, at, count = random.randrange(size), random.randint(0, 14), random.randint(1, 4)
    _expected(name, count)  # by this thread: ranks take turns where they meet
    with directory() as path:
        options = {"checkpoint_dir": path / "kept"} if kept else {}
        ended = _Run(name, count, shard, options, trouble, who, at).on(size, random)
        if ended == "calibrated" or not kept:
            return ended
        again = random.choice([1, 2, 3])
        if again == 1:
            _compare(_alone(name, count, options), _expected(name, count), f"{name}, resumed alone")
        else:
            _Run(name, count, not shard, options).on(again, random)
        return f"{ended}, resumed"


@cache
def _expected(name: str, count: int) -> Any:
    """What one process comes to."""
    return _alone(name, count, {})


def _alone(name: str, count: int, options: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_of(CASES[name], shard=False)
        return found(run(model, CASES[name], batches(count), progress=False, **options), model).same()


def _compare(own: Any, expected: Any, what: str) -> None:
    if own != expected:
        fields = [field for field in vars(expected) if getattr(own, field) != getattr(expected, field)]
        raise Found(f"{what}: other {', '.join(fields)} than one process has")


class _Counted:
    """Fails at its call of a number."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, _: Event | None = None) -> None:
        if self.left == 0:
            raise FloatingPointError("on one rank")
        self.left -= 1


def _failing(data: list[Any], at: int) -> Iterator[Any]:
    yield from data[:at]
    raise OSError("the data are gone")
