"""What an attack is, and a run of several: seeds, shares of the time, findings that can be repeated."""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from tests import adversary


class Found(AssertionError):
    """A scenario ended in a way that must not be: lost, hanging, wrong without an error, or an error without help."""


@dataclass(frozen=True)
class Attack:
    """`scenario(seed)` runs the scenario of that seed and returns the word under which it is counted.

    The same seed gives the same scenario, on any machine and whatever ran before. `held` is open around all scenarios
    of a run: a pool of ranks, a directory. `share` is the attack's part of the time, beside the others' shares.
    """

    name: str
    scenario: Callable[[int], str]
    held: Callable[[], AbstractContextManager[object]] = nullcontext
    share: float = 1.0


@dataclass(frozen=True)
class Finding:
    attack: str
    seed: int
    what: str  # the error, and where it was raised

    @property
    def replay(self) -> str:
        return f"python -m tests.adversary {self.attack} --replay {self.seed}"


@dataclass
class Tally:
    """What one attack did so far."""

    attack: str
    ends: dict[str, int] = field(default_factory=dict)  # how scenarios ended, by the attack's own words
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def scenarios(self) -> int:
        return sum(self.ends.values())

    def end(self, how: str) -> None:
        self.ends[how] = self.ends.get(how, 0) + 1


def attacks() -> dict[str, Attack]:
    """The attacks in this directory, by name."""
    found = {}
    for module in pkgutil.iter_modules(adversary.__path__):
        if module.name == "__main__" or module.name.startswith("test_"):
            continue
        attack = getattr(importlib.import_module(f"{adversary.__name__}.{module.name}"), "ATTACK", None)
        if attack is not None:
            found[attack.name] = attack
    return found


def seed_of(base: int, attack: str, number: int) -> int:
    """The seed of an attack's scenario `number` in a run that began with `base`: 53 bits, the same everywhere."""
    digest = hashlib.blake2b(f"{base}/{attack}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11


def run(attack: Attack, base: int, seconds: float, *, most: int | None = None) -> Iterator[Tally]:
    """Scenarios until `seconds` are over or `most` have run; yields the tally after each. A finding does not end it."""
    tally = Tally(attack.name)
    began = time.monotonic()
    with attack.held():
        number = 0
        while number != most and time.monotonic() - began < seconds:
            seed = seed_of(base, attack.name, number)
            one(attack, seed, tally)
            tally.seconds = time.monotonic() - began
            number += 1
            yield tally


def one(attack: Attack, seed: int, tally: Tally) -> None:
    """One scenario into the tally; whatever it raises is a finding, an error of the attack itself, too."""
    try:
        tally.end(attack.scenario(seed))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # DCP's CheckpointException is no Exception
        tally.end("FOUND")
        tally.findings.append(Finding(attack.name, seed, traceback.format_exc()))
