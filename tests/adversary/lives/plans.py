"""Which lives there are: a plan from a seed, and the shortest list of steps that still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import TypeVar

from tests.adversary.lives import models
from tests.adversary.lives.life import DEFAULTS, OPTIMIZERS, SINGLE_WRITES, Plan, Step

Life = TypeVar("Life")

OFTEN = {
    "train": 8,
    "evaluate": 2,
    "step": 8,
    "zero": 1,
    "freeze": 2,
    "add_group": 1,
    "tune": 1,
    "duplicate": 2,
    "convert_dtype": 1,
    "in_place": 6,
    "load_state_dict": 3,
    "gathered": 2,
    "replace_parameter": 1,
    "resume": 4,
    "convert": 2,
    "export": 2,
    "stream": 2,
    "delta": 2,
    "digests": 1,
    "since_base": 3,
    "audited": 2,
    "calibrated": 1,
}


def planned(seed: int) -> Plan:
    """The life of a seed, in one process."""
    random = Random(seed)
    layers = models.several(random)
    names = list(OFTEN)
    chosen = random.choices(names, [OFTEN[name] for name in names], k=random.randint(4, 16))
    masters = random.random() < 0.75
    optimizer = random.choice(list(OPTIMIZERS) if masters else SINGLE_WRITES)
    return Plan(
        seed=random.getrandbits(40),
        layers=layers,
        steps=tuple(Step(name, random.getrandbits(40)) for name in chosen),
        defaults=random.choice(DEFAULTS),
        optimizer=optimizer,
        masters=masters,
        # torch's Adagrad cannot step groups that were added later
        grouped=random.choice((0, 0, 1)) if len(layers) > 1 and optimizer != "adagrad" else 0,
    )


def shortened(life: Life, fails: Callable[[Life], bool], less: Callable[[Life], Iterator[Life]], *, most: int) -> Life:
    """A life with fewer steps and layers that fails, too; `less` gives those to try."""
    tried, again = 0, True
    while again:
        again = False
        for shorter in less(life):
            tried += 1
            if tried > most:
                return life
            if fails(shorter):
                life, again = shorter, True
                break
    return life


def smaller(plan: Plan) -> Iterator[Plan]:
    """Plans with less in them: with fewer steps, large cuts first, then with fewer layers and plainer options."""
    steps = plan.steps
    for size in sorted({len(steps) // 2, len(steps) // 4, 1}, reverse=True):
        for start in range(0, len(steps), size) if size else ():
            yield replace(plan, steps=steps[:start] + steps[start + size :])
    for number in range(len(plan.layers) if len(plan.layers) > 1 else 0):
        yield replace(plan, layers=plan.layers[:number] + plan.layers[number + 1 :], grouped=0)
    if plan.defaults != "float32":
        yield replace(plan, defaults="float32")
