"""Random lives of a model, in step with a reference that shares no code with the library.

scenarios.py   the life of a seed, in one process or on ranks; of one that fails, the shortest that still does
plans.py       layers, optimizer, defaults of torch, steps
models.py      the layers, and values
numerics.py    the formats in numpy
twin.py        the reference: weights, masters, plain optimizers
life.py        both side by side, and what is compared after each step
on_ranks.py    lives of sharded models
training.py, writes.py, checkpoints.py, deltas.py, outgoing.py    the steps
"""

from __future__ import annotations

from tests.adversary.attack import Attack
from tests.adversary.lives.scenarios import scenario

ATTACK = Attack("lives", scenario)
